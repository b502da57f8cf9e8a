"""Operators that only a CUDA build of torch has, or that are one kernel there and many on the CPU."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from emulation import DEVICE, Device
from torch import Tensor
from torch.nn.functional import ScalingType

aten, host_alias = torch.ops.aten, torch.ops.emulated_cuda.host_alias


def shapes_only() -> bool:
    return bool(DEVICE().lib.ec_is_shapes_only())


def _repeat_heads(x_BHSD: Tensor, heads: int) -> Tensor:
    return (
        x_BHSD if x_BHSD.shape[1] == heads else x_BHSD.repeat_interleave(heads // x_BHSD.shape[1], 1, output_size=heads)
    )


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {query.dtype}")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise RuntimeError(
            f"FlashAttention does not take head dimensions {query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]}"
        )
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError("FlashAttention needs a contiguous last dimension")
    heads = query.shape[1]
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, _repeat_heads(key, heads), _repeat_heads(value, heads), dropout_p, is_causal, scale=scale
    )
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    return out, logsumexp, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def flash_attention_backward(
    grad,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
):
    heads, groups = query.shape[1], key.shape[1]
    d_query, d_key, d_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        query,
        _repeat_heads(key, heads),
        _repeat_heads(value, heads),
        out,
        logsumexp,
        dropout_p,
        is_causal,
        scale=scale,
    )
    return d_query, d_key.unflatten(1, (groups, -1)).sum(2), d_value.unflatten(1, (groups, -1)).sum(2)


def cudnn_attention(
    query,
    key,
    value,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    out, logsumexp, *rest = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    return out, logsumexp.unsqueeze(-1), *rest


def cudnn_attention_backward(
    grad, query, key, value, out, logsumexp, seed, offset, attn_bias, *sizes_dropout_causal, scale=None
):
    inputs = grad, query, key, value, out, logsumexp.squeeze(-1)
    return flash_attention_backward(*inputs, *sizes_dropout_causal, seed, offset, scale=scale)


def _by_sequence(compute, queries, keys, cum_q, cum_k):
    """Return the results of every sequence, each computed on its own as [1, N, S, D], one after another.

    queries, keys: tensors [T, N, D] of the queries' and the keys' tokens.
    """
    ends, stops = host_alias(cum_q).tolist(), host_alias(cum_k).tolist()
    results = []
    for number in range(len(ends) - 1):
        places = slice(*ends[number : number + 2]), slice(*stops[number : number + 2])
        if ends[number + 1] > ends[number]:
            parts = [x[places[0]] for x in queries] + [x[places[1]] for x in keys]
            results.append(compute(*(x.transpose(0, 1).unsqueeze(0) for x in parts), places[0]))
    return [torch.cat([x.squeeze(0).transpose(0, 1) for x in each]) for each in zip(*results)]


def _scores(query, key, scale, is_causal, left):
    """Return the scores of a sequence: of all keys, or of earlier ones, of which a window leaves `left`."""
    scores = query.float() @ _repeat_heads(key, query.shape[1]).float().mT * scale
    if not is_causal and left is None:
        return scores
    _refuse(query.shape[2] != key.shape[2], "of variable lengths, the causal rule is for as many keys as queries")
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions
    return scores.masked_fill((distance < 0) | (not is_causal and distance > left), -math.inf)


def varlen_flash_attention(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **unused,
):
    _refuse(query.dtype not in (torch.bfloat16, torch.float16), f"FlashAttention takes no {query.dtype}")
    _refuse(query.shape[-1] % 8 or not query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256, "head dimensions")
    _refuse(window_size_left is not None and window_size_right != 0, "of windows, causal ones are here")
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    if shapes_only():
        sums = torch.empty(query.shape[1], query.shape[0], device=query.device)
        return torch.empty_like(query), sums, nothing, nothing, nothing

    def attend(q, k, v, _rows):
        scores = _scores(q, k, scale, is_causal, window_size_left)
        sums = scores.logsumexp(-1, keepdim=True)
        out = (scores - sums).exp() @ _repeat_heads(v, q.shape[1]).float()
        return out.to(q.dtype), sums

    out, sums = _by_sequence(attend, (query,), (key, value), cum_seq_q, cum_seq_k)
    return out, sums.squeeze(-1).t().contiguous(), nothing, nothing, nothing


def varlen_flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    if shapes_only():
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def backward(g, q, o, k, v, rows):
        heads, groups = q.shape[1], k.shape[1]
        weights = (_scores(q, k, scale, is_causal, window_size_left) - logsumexp[None, :, rows, None]).exp()
        g32 = g.float()
        grad_v = weights.mT @ g32
        grad_weights = g32 @ _repeat_heads(v, heads).float().mT - (g32 * o.float()).sum(-1, keepdim=True)
        grad_scores = weights * grad_weights * scale
        grad_q, grad_k = grad_scores @ _repeat_heads(k, heads).float(), grad_scores.mT @ q.float()
        grad_k, grad_v = (x.unflatten(1, (groups, -1)).sum(2) for x in (grad_k, grad_v))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    return tuple(_by_sequence(backward, (grad_out, query, out), (key, value), cum_seq_q, cum_seq_k))


def mm_dtype(a, b, out_dtype):
    _refuse(
        a.dtype != b.dtype or out_dtype not in (a.dtype, torch.float32), f"mm: {a.dtype} and {b.dtype} into {out_dtype}"
    )
    return a.to(out_dtype) @ b.to(out_dtype)


def addmm_dtype(c, a, b, out_dtype, *, beta=1, alpha=1):
    _refuse(
        a.dtype != b.dtype or out_dtype not in (a.dtype, torch.float32),
        f"addmm: {a.dtype} and {b.dtype} into {out_dtype}",
    )
    return torch.addmm(c.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)


def addmm_into(c, a, b, out_dtype, *, beta=1, alpha=1, out):
    _refuse(
        out.dtype != out_dtype or c.dtype != out_dtype or a.dtype != b.dtype,
        "addmm: one dtype of both matrices, one of both sums",
    )
    _refuse(out_dtype not in (a.dtype, torch.float32), f"addmm: {out_dtype} is not the dtype of the matrices, nor fp32")
    return torch.addmm(c, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha, out=out)


def softmax(log: bool):
    def forward(x, dim, half_to_float):
        _refuse(
            half_to_float and x.dtype != torch.float16,
            f"softmax: fp32 out of {x.dtype}, which CUDA's kernel gives of fp16 alone",
        )
        y = x.float()
        y = y - y.amax(dim, keepdim=True)
        total = y.exp().sum(dim, keepdim=True)
        y = y - total.log() if log else y.exp() / total
        return y if half_to_float else y.to(x.dtype)

    return forward


def softmax_backward(log: bool):
    def backward(grad, y, dim, input_dtype):
        _refuse(
            grad.dtype != input_dtype and (grad.dtype, input_dtype) != (torch.float32, torch.float16),
            f"softmax: a gradient in {input_dtype} of one in {grad.dtype}",
        )
        g, y32 = grad.float(), y.float()
        x = g - y32.exp() * g.sum(dim, keepdim=True) if log else (g - (g * y32).sum(dim, keepdim=True)) * y32
        return x.to(input_dtype)

    return backward


def rms_norm(x, normalized_shape, weight, eps):
    if weight is not None and weight.dtype != x.dtype:
        raise RuntimeError(f"the fused norm takes one dtype, not {x.dtype} rows and a {weight.dtype} weight")
    wide = x.double() if x.dtype == torch.float64 else x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    y = wide * rstd
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype), rstd


def rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    wide, g = x.to(rstd.dtype), grad.to(rstd.dtype)
    scaled = g if weight is None else g * weight.to(rstd.dtype)
    normed = wide * rstd
    grad_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_weight = None
    if output_mask[1]:
        grad_weight = (g * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), torch.empty(0, device=x.device) if grad_weight is None else grad_weight


def _windows(x, weight, padding, groups):
    _refuse(
        x.dim() != 3 or groups != x.shape[1] or weight.shape[:2] != (groups, 1),
        "of convolutions, those of each channel by itself are here",
    )
    return F.pad(x, (padding[0], padding[0])).unfold(2, weight.shape[2], 1)


def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    y = (_windows(x, weight, padding, groups) * weight.transpose(0, 1).unsqueeze(2)).sum(-1)
    return y if bias is None else y + bias.unsqueeze(1)


def convolution_backward(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    grad_weight = (_windows(x, weight, padding, groups) * grad.unsqueeze(-1)).sum((0, 2)).unsqueeze(1)
    width = weight.shape[2]
    grad_x = F.pad(grad, (width - 1, width - 1)).unfold(2, width, 1) * weight.flip(2).transpose(0, 1).unsqueeze(2)
    grad_bias = grad.sum((0, 2)) if output_mask[2] else None
    return grad_x.sum(-1)[..., padding[0] : padding[0] + x.shape[2]], grad_weight, grad_bias


BLOCKS = {
    kind.value: size
    for kind, size in {
        ScalingType.RowWise: (1, None),
        ScalingType.BlockWise1x16: (1, 16),
        ScalingType.BlockWise1x32: (1, 32),
        ScalingType.BlockWise1x128: (1, 128),
        ScalingType.BlockWise128x128: (128, 128),
    }.items()
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise RuntimeError(what)


def _untiled(flat: Tensor, rows: int, cols: int) -> Tensor:
    """Scales out of tiles of 128 rows by 4 columns, of which row 32 q + l and column k stand at 16 l + 4 q + k."""
    filled = -(-rows // 128), -(-cols // 4)
    _refuse(
        flat.numel() != filled[0] * filled[1] * 512 or not flat.is_contiguous(),
        f"scales in tiles: {flat.shape} for {rows} x {cols}",
    )
    return (
        flat.float()
        .view(*filled, 32, 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(filled[0] * 128, filled[1] * 4)[:rows, :cols]
    )


def _numbers(values: Tensor, scales: list[Tensor], kinds: list[int]) -> Tensor:
    """An operand [R, K] of a scaled GEMM, by its definition."""
    if values.dtype == torch.float4_e2m1fn_x2:
        codes = values.view(torch.uint8)
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        numbers = torch.tensor([*E2M1, *(-value for value in E2M1)], device=values.device)[codes]
    else:
        numbers = values.float()
    height, width = numbers.shape
    for scale, kind in zip(scales, kinds, strict=True):
        if kind == ScalingType.TensorWise.value:
            _refuse(scale.numel() != 1 or scale.dtype != torch.float32, "a scale of a tensor is one fp32 number")
            numbers = numbers * scale.reshape(())
            continue
        rows, block = BLOCKS[kind]
        cols = block or width
        if block in (16, 32):
            dtype = torch.float8_e8m0fnu if cols == 32 else torch.float8_e4m3fn
            _refuse(scale.dtype != dtype, f"scales of 1 x {cols} are {dtype}, not {scale.dtype}")
            grid = _untiled(scale.flatten(), height, width // cols)
        elif rows == 1:
            grid = scale.reshape(height, -(-width // cols))
            _refuse(
                scale.dtype != torch.float32 or cols == 128 and width > 128 and scale.stride() != (1, height),
                "scales of rows: fp32, by columns",
            )
        else:
            blocks = -(-width // 128)
            _refuse(
                scale.shape != (-(-blocks // 4) * 4, -(-height // 128)) or scale.stride(0) != 1,
                f"scales of 128 x 128 blocks: {scale.shape}",
            )
            grid = scale.t()[:, :blocks]
        numbers = numbers * grid.repeat_interleave(rows, 0)[:height].repeat_interleave(cols, 1)[:, :width]
    return numbers


def scaled_mm(
    a,
    b,
    scale_a,
    recipe_a,
    swizzle_a,
    scale_b,
    recipe_b,
    swizzle_b,
    bias,
    out_dtype,
    contraction_dim=(),
    use_fast_accum=False,
):
    _refuse(not a.is_contiguous() or not b.t().is_contiguous(), "scaled_mm takes a row-major and a column-major matrix")
    _refuse(
        bool(a.shape[1] % 16 or b.shape[1] % 16),
        f"scaled_mm takes sizes that 16 divides, not {tuple(a.shape)} and {tuple(b.shape)}",
    )
    y = _numbers(a, scale_a, recipe_a) @ _numbers(b.t(), scale_b, recipe_b).t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


def weight_grads_of_groups(a, b, scale_a, scale_b, recipe, offs, out_dtype):
    """The sums over the columns of each group, a [N, C] @ b [K, C]^T, whose tiles of scales follow those of the group before."""
    _refuse(recipe[0] != ScalingType.BlockWise1x32.value, "groups of columns need blocks of 1 x 32")
    _refuse(
        not a.is_contiguous() or not b.is_contiguous(), "scaled_grouped_mm takes a row-major and a column-major matrix"
    )
    _refuse(bool(a.shape[1] % 16 or len(b) % 16), f"sizes that 16 divides, not {tuple(a.shape)} and {tuple(b.shape)}")
    if shapes_only():
        return a.new_empty(len(offs), len(a), len(b), dtype=out_dtype)
    stops = host_alias(offs).tolist()
    found = []
    for start, stop in zip([0, *stops], stops):
        _refuse(bool((stop - start) % 128), "scales of a group are tiles of 128 columns")
        operands = []
        for matrix, scale in ((a, scale_a[0].flatten()), (b, scale_b[0].flatten())):
            height = -(-len(matrix) // 128) * 128
            scales = scale[start // 32 * height : stop // 32 * height]
            operands.append(
                _numbers(matrix[:, start:stop], [scales], recipe) if stop > start else matrix[:, :0].float()
            )
        found.append(operands[0] @ operands[1].t())
    return torch.stack(found).to(out_dtype)


def scaled_grouped_mm(
    a,
    b,
    scale_a,
    recipe_a,
    swizzle_a,
    scale_b,
    recipe_b,
    swizzle_b,
    offs=None,
    bias=None,
    out_dtype=None,
    contraction_dim=(),
    use_fast_accum=False,
):
    _refuse(offs is None or offs.dtype != torch.int32 or not offs.is_cuda, "offsets of groups: int32, on the device")
    if b.dim() == 2:
        return weight_grads_of_groups(a, b.t(), scale_a, scale_b, recipe_a, offs, out_dtype)
    if shapes_only():
        return a.new_empty(a.shape[0], b.shape[-1], dtype=out_dtype)
    stops = host_alias(offs).tolist()
    tiled = recipe_a[0] == ScalingType.BlockWise1x32.value
    pieces, start, first = [], 0, 0
    for expert, stop in enumerate(stops):
        rows = stop - start
        if tiled:
            held = -(-rows // 128) * 128
            blocks = scale_a[0].flatten()
            wide = -(-a.shape[1] // 128) * 4
            of_rows = blocks[first * wide : (first + held) * wide]
            first += held
        else:
            of_rows = scale_a[0][start:stop]
        left = _numbers(a[start:stop], [of_rows], recipe_a)
        pieces.append(left @ _numbers(b[expert].t(), [scale_b[0][expert]], recipe_b).t())
        start = stop
    y = torch.cat(pieces).to(out_dtype)
    return F.pad(y, (0, 0, 0, a.shape[0] - len(y)), value=torch.nan)  # rows after the last group are not computed


KERNELS = {
    "_scaled_mm_v2": scaled_mm,
    "_scaled_grouped_mm_v2": scaled_grouped_mm,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_attention,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
    "_flash_attention_forward": varlen_flash_attention,
    "_flash_attention_backward": varlen_flash_attention_backward,
    "mm.dtype": mm_dtype,
    "addmm.dtype": addmm_dtype,
    "addmm.dtype_out": addmm_into,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_softmax": softmax(False),
    "_log_softmax": softmax(True),
    "_softmax_backward_data": softmax_backward(False),
    "_log_softmax_backward_data": softmax_backward(True),
}


def _attention(
    general: Callable, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """A build of torch without CUDA does not look for CUDA's kernels by itself: flash, cuDNN, then plain GEMMs."""
    fits = (
        query.dtype in (torch.bfloat16, torch.float16)
        and not query.shape[-1] % 8
        and query.shape[-1] == value.shape[-1] <= 256
        and attn_mask is None
    )
    if query.is_cuda and fits and torch.backends.cuda.flash_sdp_enabled():
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if query.is_cuda and fits and torch.backends.cuda.cudnn_sdp_enabled():
        inputs = query, key, value, None, query.requires_grad
        return aten._scaled_dot_product_cudnn_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
    _refuse(query.is_cuda and not torch.backends.cuda.math_sdp_enabled(), "No available kernel. Aborting execution.")
    return general(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def described(name: str, inputs: Iterable[object], outputs: object) -> str:
    """As device.cpp describes an operator."""
    found = [("r", x) for x in inputs] + [("o", x) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]
    tensors = (
        f"|{role},{str(x.dtype)[6:]},{'x'.join(map(str, x.shape))},{distinct_bytes(x)}"
        for role, x in found
        if isinstance(x, Tensor)
    )
    return name + "".join(tensors)


def distinct_bytes(x: Tensor) -> int:
    return x.itemsize * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)


def one_kernel(name: str, compute: Callable, device: Device) -> Callable:
    """Count what `compute` launches as one kernel."""
    parameters = inspect.signature(compute).parameters
    causal = list(parameters).index("is_causal") if "is_causal" in parameters else None

    @functools.wraps(compute)
    def run(*args, **kwargs):
        size = sum(x.numel() * x.itemsize for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        device.lib.ec_kernel_begin(name.encode(), size)
        try:
            result = compute(*args, **kwargs)
        finally:
            device.lib.ec_kernel_end()
        if device.recorder is not None:
            masked = causal is not None and (kwargs.get("is_causal") or args[causal : causal + 1] == (True,))
            left = kwargs.get("window_size_left")
            mask = " causal" if masked else "" if left is None else f" window={left}"
            device.recorder(described(name.partition(".")[0] + mask, (*args, *kwargs.values()), result))
        return result

    return run


def register(device: Device) -> None:
    """Register the kernels; each counts as one launch."""
    library = torch.library.Library("aten", "IMPL")
    for name, compute in KERNELS.items():
        library.impl(name, one_kernel(f"aten::{name}", compute, device), "CUDA")
    device.libraries.append(library)  # a library takes its kernels with it
    F.scaled_dot_product_attention = functools.partial(_attention, F.scaled_dot_product_attention)
