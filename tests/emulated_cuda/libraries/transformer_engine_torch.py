"""TransformerEngine's extension for torch.

The functions, arguments and enumerations that its sources declare (transformer_engine_torch.json, by
record_transformer_engine.py), computed by torch where the project comes to them.

A name that is not declared has no attribute here; one that is declared and not computed raises an error when called.
"""

import enum
import functools
import inspect
import json
from pathlib import Path

import te_quantizers
import torch
from pybind import Declarations, make_signature

_recorded = json.loads(Path(__file__).with_suffix(".json").read_text())
_functions = _recorded["functions"]
_declared = Declarations()
for _name, _values in _recorded["enumerations"].items():
    globals()[_name] = _declared.classes[_name] = enum.IntEnum(
        _name, {value: number for number, value in enumerate(_values)}
    )

__all__ = [*_functions, *_recorded["enumerations"], *_recorded["classes"]]  # noqa: PLE0604 - names that the sources declare


class FP8TensorMeta:
    def __init__(self):
        self.scale = self.scale_inv = self.amax_history = None


@functools.cache
def _signature(name: str) -> inspect.Signature | None:
    """Of a declared function; None where it is a lambda without names."""
    arguments = _functions[name]
    if not arguments or " " not in arguments[0]:
        return None if arguments is None else make_signature(arguments)
    types, named = zip(*(argument.split(" ", 1) for argument in arguments))
    return make_signature(
        types,
        (),
        [f'"{name}"{default and "=" + default}' for name, _, default in (one.partition("=") for one in named)],
    )


def __getattr__(name: str):
    if name in _functions:
        compute = _COMPUTED.get(name)

        def call(*args, **kwargs):
            signature = _signature(name)
            if signature is not None:
                bound = _declared.bind(name, signature, args, kwargs)
                args, kwargs = bound.args, bound.kwargs
            if compute is None:
                raise NotImplementedError(f"transformer_engine_torch.{name} is not emulated")
            return compute(*args, **kwargs)

        call.__name__ = name
    elif name in _recorded["classes"]:
        call = type(name, (), {})
    else:
        raise AttributeError(f"transformer_engine_torch has no {name}")
    globals()[name] = call
    return call


_TYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}
_COMPUTED = {}


def _computed(function):
    _COMPUTED[function.__name__.lstrip("_")] = function
    return function


def _dtype(tag: enum.IntEnum) -> torch.dtype:
    return _TYPES[tag.name]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _on_device(*tensors) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.is_cuda:
            raise RuntimeError(f"a CPU tensor {tuple(tensor.shape)} among arguments of a kernel")


def _operands(A, transa, B, transb):
    """Both as matrices, and the GEMM's shape: A is contracted along its last dimension where it is transposed, B where it is not."""
    assert (type(A) in (torch.Tensor, torch.nn.Parameter)) == (type(B) in (torch.Tensor, torch.nn.Parameter)), (
        type(A),
        type(B),
    )
    matrices = []
    for x, last in ((A, transa), (B, not transb)):
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            _on_device(x)
            assert x.is_contiguous() and A.dtype == B.dtype, (
                f"an operand {tuple(x.shape)} with strides {x.stride()}, {A.dtype} and {B.dtype}"
            )
            matrices.append(_flat(x).float())
        else:
            matrices.append(te_quantizers.numbers(x, last))
    return matrices


def _put(y, out, accumulate):
    if out is None:
        return y
    assert out.numel() == y.numel(), (tuple(out.shape), tuple(y.shape))
    return out.copy_(out + y.view_as(out) if accumulate else y.view_as(out))


@_computed
def _generic_gemm(
    A,
    transa,
    B,
    transb,
    D,
    quantizer,
    output_dtype,
    bias,
    bias_type,
    gelu,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    split_accumulator,
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap=False,
    alpha=1.0,
    beta=None,
):
    assert not gelu and comm_overlap is None and alpha == 1.0 and beta in (None, 0.0, 1.0)
    a, b = _operands(A, transa, B, transb)
    out_type, shape = A.dtype if output_dtype is None else _dtype(output_dtype), te_quantizers.shape(B)
    y = (b.t() if transb else b) @ (a.t() if transa else a)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(bias.dtype)
    elif bias is not None:
        y = y + bias.float()
    y = y if transb else y.view(*shape[:-1], y.shape[-1])
    y = _put(y.to(out_type), D, accumulate)
    return y if quantizer is None else quantizer(y), bias_grad, None, None


@_computed
def _te_general_grouped_gemm(
    A,
    transa,
    B,
    transb,
    D,
    D_type,
    m_splits,
    bias,
    bias_type,
    single_output,
    pre_gelu_out,
    grad,
    workspace,
    workspace_size,
    accumulate,
    split_accumulator,
    math_sm_count,
):
    outs = D if not single_output else D[0].split([int(rows) for rows in m_splits])
    for a, b, out, one in zip(A, B, outs, bias, strict=True):
        if not te_quantizers.shape(b).numel():
            if transb and not accumulate:
                out.zero_()
            continue
        a, b = _operands(a, transa, b, transb)
        y = (b.t() if transb else b) @ (a.t() if transa else a)
        if one.numel() and grad:
            one.copy_(b.sum(0))
        elif one.numel():
            y = y + one.float()
        _put(y.to(out.dtype), out, accumulate)
    return bias


def _gamma(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


def _rounded(y, ln_out, quantizer, otype):
    y = y.to(_dtype(otype))
    if quantizer is not None:
        return quantizer(y) if ln_out is None else quantizer.update_quantized(y, ln_out)
    return y if ln_out is None else ln_out.copy_(y)


@_computed
def _rmsnorm_fwd(x, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    _on_device(x, weight)
    r = x.float().pow(2).mean(-1).add(eps).rsqrt()
    return _rounded(x.float() * r[..., None] * _gamma(weight, zero_centered_gamma), ln_out, quantizer, otype), None, r


@_computed
def _rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    _on_device(dz, x, rsigma, gamma)
    assert dz.dtype == x.dtype and x.is_contiguous() and dz.is_contiguous()
    d, h = dz.float() * _gamma(gamma, zero_centered_gamma), x.float() * rsigma[..., None]
    dx = (d - h * (d * h).mean(-1, keepdim=True)) * rsigma[..., None]
    return dx.to(x.dtype), _flat(dz.float() * h).sum(0).to(gamma.dtype)


@_computed
def _layernorm_fwd(x, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    _on_device(x, weight, bias)
    mean, r = x.float().mean(-1), x.float().var(-1, unbiased=False).add(eps).rsqrt()
    y = (x.float() - mean[..., None]) * r[..., None] * _gamma(weight, zero_centered_gamma) + bias.float()
    return _rounded(y, ln_out, quantizer, otype), mean, r


@_computed
def _layernorm_bwd(dz, x, mean, rsigma, gamma, sm_margin, zero_centered_gamma):
    _on_device(dz, x, mean, rsigma, gamma)
    h, d = (x.float() - mean[..., None]) * rsigma[..., None], dz.float() * _gamma(gamma, zero_centered_gamma)
    dx = (d - d.mean(-1, keepdim=True) - h * (d * h).mean(-1, keepdim=True)) * rsigma[..., None]
    return dx.to(x.dtype), _flat(dz.float() * h).sum(0).to(gamma.dtype), _flat(dz.float()).sum(0).to(gamma.dtype)


def _softmax(x, scale, mask=None):
    scores = x.float() * scale
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -10000.0), -1).to(x.dtype)


def _softmax_backward(grad, y, scale):
    g, y = grad.float(), y.float()
    return ((g - (g * y).sum(-1, keepdim=True)) * y * scale).to(grad.dtype)


def _later(x):
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(1 + keys - queries)


@_computed
def _quantize(tensor, quantizer, output=None, noop=None):
    assert noop is None
    return te_quantizers.quantize(tensor, quantizer, output)


@_computed
def _dequantize(input, otype):
    return te_quantizers.dequantize(input, _dtype(otype))


@_computed
def _fused_amax_and_scale_update_after_reduction(amax, histories, scales, algorithm, dtype, margin):
    for tensor in (amax, *histories, *scales):
        assert tensor.is_cuda and tensor.dtype == torch.float32
    te_quantizers.update_scales(amax, histories, scales, algorithm, _dtype(dtype), margin)


@_computed
def _fp8_transpose(input, dtype, out=None):
    turned = te_quantizers.turned(input)
    return turned if out is None else out.copy_(turned)


@_computed
def _split_quantize(tensor, split_sections, quantizers, *_, **__):
    return [
        _quantize(part.contiguous(), quantizer)
        for part, quantizer in zip(tensor.split(split_sections), quantizers, strict=True)
    ]


@_computed
def _swiglu(input, quantizer):
    _on_device(input)
    gate, up = input.float().chunk(2, -1)
    y = (torch.nn.functional.silu(gate) * up).to(input.dtype)
    return y if quantizer is None else quantizer(y)


@_computed
def _dswiglu(grad, fwd_input, quantizer):
    _on_device(grad, fwd_input)
    assert grad.dtype == fwd_input.dtype and quantizer is None
    (gate, up), d = fwd_input.float().chunk(2, -1), grad.float()
    s = torch.sigmoid(gate)
    return torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1).to(grad.dtype)


@_computed
def _splits_to_offsets(first_dims, logical_last_dim):
    assert first_dims.is_cuda and first_dims.dtype == torch.int64
    return torch.nn.functional.pad(first_dims.cumsum(0), (1, 0)) * logical_last_dim


@_computed
def _group_quantize(tensor, quantizer, num_tensors, first_dims, *_):
    return te_quantizers.quantize_group(tensor, quantizer, num_tensors, first_dims)


def _parts(grouped, last):
    """Matrices of a grouped tensor: the numbers that a GEMM reads that contracts the last or the first dimension."""
    rows = te_quantizers.read_on_device(grouped.first_dims)
    shape = grouped.logical_shape
    assert sum(rows) <= shape[0], (rows, shape)
    if grouped.quantizer is None:
        whole = grouped.rowwise_data.view(shape).float()
    else:
        whole = te_quantizers.numbers_of_group(grouped, last)
    return whole[: sum(rows)].split(rows)


def _grouped_gemm(
    A, transa, B, transb, D, bias, bias_scale, alpha, beta, setup, workspace, split_accumulator, sm_count
):
    """Rows of the counts only, which the device reads: what follows them in the output stays as it is."""
    assert bias is None and bias_scale is None and all(x.is_cuda for x in (alpha, beta, setup, workspace))
    accumulate = bool(te_quantizers.read_on_device(beta)[0])
    b_parts = _parts(B, not transb)
    if isinstance(A, list):
        a_parts = [te_quantizers.numbers(a, transa) if hasattr(a, "_fp8_dtype") else a.float() for a in A]
        rows = te_quantizers.read_on_device(D.first_dims)
        outs = D.rowwise_data.view(D.logical_shape)[: sum(rows)].split(rows)
    else:
        a_parts, outs = _parts(A, transa), D
    for a, b, out in zip(a_parts, b_parts, outs, strict=True):
        y = (b.t() if transb else b) @ (a.t() if transa else a)
        _put(y.to(out.dtype), out, accumulate)
    return D


@_computed
def _bgrad_quantize(input, quantizer):
    return _flat(input).float().sum(0).to(input.dtype), _quantize(input, quantizer)


_COMPUTED |= {
    "scaled_softmax_forward": _softmax,
    "scaled_masked_softmax_forward": lambda x, mask, scale: _softmax(x, scale, mask.bool()),
    "scaled_upper_triang_masked_softmax_forward": lambda x, scale: _softmax(x, scale, _later(x)),
    "scaled_aligned_causal_masked_softmax_forward": lambda x, scale: _softmax(x, scale, _later(x)),
    **{
        f"scaled_{kind}softmax_backward": _softmax_backward
        for kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    },
    "get_cudnn_version": lambda: 91400,
    "get_cublasLt_version": lambda: 130200,
    "get_num_cublas_streams": lambda: 4,
    "get_grouped_gemm_setup_workspace_size": lambda num_tensors: 256 * num_tensors,
    "te_general_grouped_gemm_for_discrete_in": _grouped_gemm,
    "te_general_grouped_gemm_for_discrete_out": _grouped_gemm,
    "is_non_tn_fp8_gemm_supported": lambda *_: torch.cuda.get_device_capability() >= (10, 0),
    "get_fused_attn_backend": lambda *_, **__: NVTE_Fused_Attn_Backend.NVTE_No_Backend,  # noqa: F821 - declared by the sources
}
