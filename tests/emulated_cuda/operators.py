"""Operators that only a CUDA build of torch has, or that are one kernel there and many on the CPU."""

import functools
from collections.abc import Callable

import torch
from emulation import Device
from torch import Tensor

aten = torch.ops.aten


def _repeat_heads(x_BHSD: Tensor, heads: int) -> Tensor:
    return x_BHSD if x_BHSD.shape[1] == heads else x_BHSD.repeat_interleave(heads // x_BHSD.shape[1], 1, output_size=heads)


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {query.dtype}")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise RuntimeError(f"FlashAttention does not take head dimensions {query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]}")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError("FlashAttention needs a contiguous last dimension")
    heads = query.shape[1]
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, _repeat_heads(key, heads), _repeat_heads(value, heads), dropout_p, is_causal, scale=scale)
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    return out, logsumexp, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def flash_attention_backward(grad, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None):
    heads, groups = query.shape[1], key.shape[1]
    d_query, d_key, d_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, _repeat_heads(key, heads), _repeat_heads(value, heads), out, logsumexp, dropout_p, is_causal, scale=scale)
    return d_query, d_key.unflatten(1, (groups, -1)).sum(2), d_value.unflatten(1, (groups, -1)).sum(2)


def mm_dtype(a, b, out_dtype):
    return a.to(out_dtype) @ b.to(out_dtype)


def addmm_dtype(c, a, b, out_dtype, *, beta=1, alpha=1):
    return torch.addmm(c.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)


def softmax(log: bool):
    def forward(x, dim, half_to_float):
        y = x.float()
        y = y - y.amax(dim, keepdim=True)
        total = y.exp().sum(dim, keepdim=True)
        y = y - total.log() if log else y.exp() / total
        return y if half_to_float else y.to(x.dtype)

    return forward


def softmax_backward(log: bool):
    def backward(grad, y, dim, input_dtype):
        g, y32 = grad.float(), y.float()
        x = g - y32.exp() * g.sum(dim, keepdim=True) if log else (g - (g * y32).sum(dim, keepdim=True)) * y32
        return x.to(input_dtype)

    return backward


KERNELS = {
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "mm.dtype": mm_dtype,
    "addmm.dtype": addmm_dtype,
    "_softmax": softmax(False),
    "_log_softmax": softmax(True),
    "_softmax_backward_data": softmax_backward(False),
    "_log_softmax_backward_data": softmax_backward(True),
}


def one_kernel(name: str, compute: Callable, device: Device) -> Callable:
    """Count what `compute` launches as one kernel."""

    @functools.wraps(compute)
    def run(*args, **kwargs):
        size = sum(x.numel() * x.itemsize for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        device.lib.ec_kernel_begin(name.encode(), size)
        try:
            return compute(*args, **kwargs)
        finally:
            device.lib.ec_kernel_end()

    return run


def register(device: Device) -> None:
    """Register the kernels; each counts as one launch."""
    library = torch.library.Library("aten", "IMPL")
    for name, compute in KERNELS.items():
        library.impl(name, one_kernel(f"aten::{name}", compute, device), "CUDA")
    device.libraries.append(library)  # a library takes its kernels with it
