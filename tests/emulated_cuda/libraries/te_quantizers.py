"""TransformerEngine's quantizers in torch: what they make of a matrix, and the numbers that a GEMM reads from it.

Rowwise data is for GEMMs that contract the last dimension, columnwise data for those that contract the first one. Scales are found as the
library's kernels find them, and stand in its shapes, padding included; scales that were to be swizzled for the GEMM are not, since only this
file reads them.

Shape letters: M rows, K columns.
"""

import ctypes
import functools
import importlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def turned(data: Tensor) -> Tensor:
    """Last dimension first, as the library lays columnwise data out."""
    return flat(data).t().contiguous().view(data.shape[-1], *data.shape[:-1])


def _kind(dtype) -> torch.dtype:
    return {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}[dtype.name]


def _cast(scaled: Tensor, kind: torch.dtype) -> Tensor:
    return scaled.clamp(-LARGEST[kind], LARGEST[kind]).to(kind).view(torch.uint8)


def _amax(x_MK: Tensor, rows: int, cols: int) -> Tensor:
    """Of every block; those at the ends may be smaller."""
    height, width = -(-x_MK.shape[0] // rows), -(-x_MK.shape[1] // cols)
    padded = F.pad(x_MK.abs(), (0, width * cols - x_MK.shape[1], 0, height * rows - x_MK.shape[0]))
    return padded.view(height, rows, width, cols).amax((1, 3))


def _spread(scales: Tensor, rows: int, cols: int, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)[:, : shape[1]]


def _padded(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    return F.pad(scales, (0, shape[1] - scales.shape[1], 0, shape[0] - scales.shape[0]))


def _scale(amax: Tensor, quantizer) -> Tensor:
    """fmax / amax, rounded down to a power of two where the recipe does so; 1 for zeros and for what is not finite."""
    amax = amax.clamp(min=quantizer.amax_epsilon)
    scale = (LARGEST[_kind(quantizer.dtype)] / amax).clamp(max=torch.finfo(torch.float32).max)
    if quantizer.force_pow_2_scales:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale)[1] - 1)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, 1.0)


def _tensor(x: Tensor, quantizer) -> dict:
    """One scale: given, with the maximum so far noted for later (delayed), or found (current)."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if hasattr(quantizer, "scale"):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale = quantizer.scale.reshape(())
    else:
        assert not quantizer.with_amax_reduction, "maxima over ranks are not emulated"
        scale = _scale(amax, quantizer)
    data = _cast(x * scale, _kind(quantizer.dtype))
    # GEMMs of devices from 10.0 read either order of the same bytes
    wants = quantizer.columnwise_usage and torch.cuda.get_device_capability() < (10, 0)
    return {
        "data": data if quantizer.rowwise_usage or not wants else None,
        "data_transpose": turned(data) if wants else None,
        "fp8_scale_inv": (1 / scale).reshape(1),
    }


def update_scales(
    amax: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, kind: torch.dtype, margin: float
) -> None:
    """End a step of delayed scaling.

    amax: one after the other, the maxima of the step (0: take the history's). histories: [L, operands] of each module,
    where the first row is that of the step and the others go from the oldest to the latest. scales:
    fmax / amax / 2^margin.
    """
    assert algorithm in ("max", "most_recent"), algorithm
    assert len(histories) == len(scales) and amax.numel() == sum(scale.numel() for scale in scales)
    for last, history, scale in zip(amax.split([scale.numel() for scale in scales]), histories, scales, strict=True):
        last = torch.where(last != 0, last, history[0])
        rolled = torch.cat([history[1:], last.unsqueeze(0)])
        of = torch.where(last != 0, rolled.amax(0), 0.0) if algorithm == "max" else last
        history.copy_(torch.where(last != 0, torch.cat([torch.zeros_like(rolled[:1]), rolled[1:]]), history))
        found = (LARGEST[kind] / 2.0**margin / of).clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(torch.isfinite(of) & (of > 0), found, scale))


def _blocks(x: Tensor, quantizer) -> dict:
    """Blocks of 128 x 128, or of 128 along the dimension that is contracted."""
    made, kind = {}, _kind(quantizer.dtype)
    for name, wanted, x_MK in (
        ("rowwise", quantizer.rowwise_usage, flat(x)),
        ("columnwise", quantizer.columnwise_usage, flat(x).t()),
    ):
        rows = 128 if quantizer.block_scaling_dim == 2 else 1
        if not wanted:
            made |= {f"{name}_data": None, f"{name}_scale_inv": None}
            continue
        scale = _scale(_amax(x_MK, rows, 128), quantizer)
        data = _cast(x_MK * _spread(scale, rows, 128, x_MK.shape), kind).contiguous()
        inverse = 1 / scale if rows == 128 else (1 / scale).t()
        made[f"{name}_data"] = data.view(x.shape if name == "rowwise" else (x.shape[-1], *x.shape[:-1]))
        made[f"{name}_scale_inv"] = _padded(
            inverse, quantizer.get_scale_shape(x.shape, name == "columnwise")
        ).contiguous()
    return made


def _mx(x: Tensor, quantizer) -> dict:
    """Blocks of 32 along the dimension that is contracted; scales are powers of two, rounded up, by their exponent."""
    x_MK, made, kind = flat(x), {}, _kind(quantizer.dtype)
    assert x_MK.shape[0] % 32 == 0 and x_MK.shape[1] % 32 == 0, f"MXFP8 takes multiples of 32, not {tuple(x.shape)}"
    for name, wanted, block in (
        ("rowwise", quantizer.rowwise_usage, (1, 32)),
        ("columnwise", quantizer.columnwise_usage, (32, 1)),
    ):
        if not wanted:
            made |= {f"{name}_data": None, f"{name}_scale_inv": None}
            continue
        mantissa, exponent = torch.frexp(_amax(x_MK, *block) / LARGEST[kind])
        exponent = torch.where(mantissa == 0, -127, (exponent - (mantissa == 0.5).int()).clamp(-127, 127))
        data = _cast(x_MK * _spread(torch.ldexp(torch.ones_like(mantissa), -exponent), *block, x_MK.shape), kind)
        made[f"{name}_data"] = data.view(x.shape)
        made[f"{name}_scale_inv"] = _padded(
            (exponent + 127).to(torch.uint8), quantizer.get_scale_shape(x.shape, name == "columnwise")
        )
    return made | {"with_gemm_swizzled_scales": quantizer.optimize_for_gemm}


def _nv(x: Tensor, quantizer) -> dict:
    """Blocks of 16, or 16 x 16: an E4M3 number each, below the maximum of the whole. Columnwise data is transformed first where asked."""
    assert not (quantizer.with_amax_reduction or quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6)
    made, rows = {}, 16 if quantizer.with_2d_quantization else 1
    for name, wanted, x_MK in (
        ("rowwise", quantizer.rowwise_usage, flat(x)),
        ("columnwise", quantizer.columnwise_usage, flat(x).t().contiguous()),
    ):
        if not wanted:
            made |= {f"{name}_data": None, f"{name}_scale_inv": None, f"amax_{name}": None}
            continue
        assert x_MK.shape[1] % 16 == 0, f"NVFP4 takes multiples of 16, not {tuple(x.shape)}"
        if quantizer.with_rht and name == "columnwise":
            assert quantizer.with_post_rht_amax and rows == 1
            x_MK = (x_MK.view(-1, 16) @ quantizer.rht_matrix.float()).view(x_MK.shape)
        full = x_MK.abs().amax() if x_MK.numel() else x.new_zeros(())
        encode = torch.where(full > 0, (448.0 * 6.0 / full).clamp(max=torch.finfo(torch.float32).max), 1.0)
        stored = (_amax(x_MK, rows, 16) / 6.0 * encode).clamp(max=448.0).to(torch.float8_e4m3fn)
        scale = (encode / stored.float()).clamp(max=torch.finfo(torch.float32).max)
        codes = _codes(x_MK * _spread(scale, rows, 16, x_MK.shape), quantizer.stochastic_rounding)
        data = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
        shape = x.shape if name == "rowwise" else (x.shape[-1], *x.shape[:-1])
        made[f"{name}_data"] = data.view(*shape[:-1], shape[-1] // 2)
        inverse = stored.view(torch.uint8).repeat_interleave(rows, 0)[: x_MK.shape[0]]
        made[f"{name}_scale_inv"] = _padded(inverse, quantizer.get_scale_shape(x.shape, name == "columnwise"))
        made[f"amax_{name}"] = full.reshape(1)
    return made | {"with_gemm_swizzled_scales": False}


def _codes(scaled: Tensor, stochastic: bool) -> Tensor:
    """E2M1 of every number, as uint8: to the nearest, ties to an even code, or at random to either neighbour."""
    grid = torch.tensor(E2M1, device=scaled.device)
    size = scaled.abs().clamp(max=6.0)
    low = torch.bucketize(size, grid, right=True).sub(1).clamp(0, 6)
    part = (size - grid[low]) / (grid[low + 1] - grid[low])
    up = part > torch.rand_like(part) if stochastic else (part > 0.5) | (part == 0.5) & (low % 2 == 1)
    return ((low + up) | (torch.signbit(scaled).long() << 3)).to(torch.uint8)


_TENSORS = "transformer_engine.pytorch.tensor"
KINDS = {
    "Float8Quantizer": (_tensor, "Float8Tensor"),
    "Float8CurrentScalingQuantizer": (_tensor, "Float8Tensor"),
    "Float8BlockQuantizer": (_blocks, "Float8BlockwiseQTensor"),
    "MXFP8Quantizer": (_mx, "MXFP8Tensor"),
    "NVFP4Quantizer": (_nv, "NVFP4Tensor"),
}
KEPT = {
    "data": "_data",
    "data_transpose": "_transpose",
    "fp8_scale_inv": "_scale_inv",
    "with_gemm_swizzled_scales": "_with_gemm_swizzled_scales",
}
"""Attributes of what is made, by the argument of its constructor; others are '_' and the argument."""


@functools.cache
def _classes(name: str) -> tuple[type, type]:
    package = importlib.import_module(_TENSORS)
    return getattr(package, name), getattr(package, f"{name}Storage")


def quantize(x: Tensor, quantizer, output=None):
    """A new tensor of the library, or `output` with what it holds filled in."""
    assert x.is_contiguous() and x.is_cuda
    compute, name = KINDS[type(quantizer).__name__]
    made = compute(x.detach().float(), quantizer)
    if output is not None:
        for argument, value in made.items():
            attribute = KEPT.get(argument, f"_{argument}")
            held = getattr(output, attribute)
            # what the quantizer does not want goes, what is missing comes
            setattr(output, attribute, held.copy_(value) if isinstance(held, Tensor) and value is not None else value)
        if name == "Float8Tensor":
            output._transpose_invalid = output._transpose is None
        return output
    made |= {"quantizer": quantizer, "fp4_dtype" if name == "NVFP4Tensor" else "fp8_dtype": quantizer.dtype}
    if name == "Float8BlockwiseQTensor":
        made["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    full, storage = _classes(name)
    if quantizer.internal:
        return storage(**made, fake_dtype=x.dtype)
    return full(**made, shape=x.shape, dtype=x.dtype, requires_grad=False, device=x.device)


def read_on_device(numbers: Tensor) -> list:
    """What a kernel reads from the device's memory, as host numbers; no wait."""
    kernel = torch.empty(numbers.shape, dtype=numbers.dtype)
    ctypes.memmove(kernel.data_ptr(), numbers.data_ptr(), numbers.numel() * numbers.element_size())
    return kernel.tolist()


def quantize_group(x: Tensor, quantizer, num_tensors: int, first_dims: Tensor):
    """A grouped tensor of MXFP8: blocks of the whole, since all counts are multiples of a block."""
    assert type(quantizer).__name__ == "MXFP8Quantizer", "other grouped casts are not emulated"
    assert all(rows % 32 == 0 for rows in read_on_device(first_dims)), "counts that are no multiples of 32"
    made = _mx(x.detach().float(), quantizer)

    def flattened(name):
        return None if made[name] is None else made[name].reshape(-1)

    storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.grouped_tensor_storage")
    return storage.GroupedTensorStorage(
        shape=tuple(x.shape),
        dtype=x.dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        data=flattened("rowwise_data"),
        columnwise_data=flattened("columnwise_data"),
        scale_inv=flattened("rowwise_scale_inv"),
        columnwise_scale_inv=flattened("columnwise_scale_inv"),
        first_dims=first_dims,
        with_gemm_swizzled_scales=True,
    )


def numbers_of_group(grouped, rowwise: bool) -> Tensor:
    """As `numbers`, of all matrices of a group."""
    shape, quantizer = torch.Size(grouped.logical_shape), grouped.quantizer
    data, scale = (
        (grouped.rowwise_data, grouped.scale_inv)
        if rowwise
        else (grouped.columnwise_data, grouped.columnwise_scale_inv)
    )
    assert data is not None, "a GEMM reads data of a group that was not made"
    name = "rowwise" if rowwise else "columnwise"
    held = {
        f"_{name}_data": data.view(shape),
        f"_{name}_scale_inv": scale.view(quantizer.get_scale_shape(shape, not rowwise)),
    }
    return numbers(type("MXFP8TensorStorage", (), held | {"_fp8_dtype": quantizer.dtype})(), rowwise)


def numbers(x, rowwise: bool) -> Tensor:
    """What a GEMM that contracts the last (rowwise) or the first dimension reads, fp32, [M, K] in either case."""
    name = type(x).__name__.removesuffix("Storage")
    if name == "Float8Tensor":
        if rowwise or x._transpose is None or x._transpose_invalid:
            assert rowwise or torch.cuda.get_device_capability() >= (10, 0), (
                "a GEMM of 8 bits before 10.0 reads its operands turned"
            )
            return _read(flat(x._data), x._fp8_dtype) * x._scale_inv
        return _read(x._transpose.reshape(x._transpose.shape[0], -1), x._fp8_dtype).t() * x._scale_inv
    which = "rowwise" if rowwise else "columnwise"
    data, inverse = getattr(x, f"_{which}_data"), getattr(x, f"_{which}_scale_inv")
    assert data is not None, f"a GEMM reads {which} data, which was not made"
    if name == "MXFP8Tensor":
        block = (1, 32) if rowwise else (32, 1)
        data = _read(flat(data), x._fp8_dtype)
        scales = torch.ldexp(torch.ones((), device=data.device), inverse.int() - 127)
        return data * _spread(
            scales[: -(-data.shape[0] // block[0]), : -(-data.shape[1] // block[1])], *block, data.shape
        )
    data = flat(data) if rowwise else data.reshape(data.shape[0], -1)
    if name == "NVFP4Tensor":
        grid = torch.tensor([*E2M1, *(-value for value in E2M1)], device=data.device)
        data = grid[torch.stack([data & 15, data >> 4], -1).flatten(1).long()]
        scales = inverse.view(torch.float8_e4m3fn).float() * (getattr(x, f"_amax_{which}") / (448.0 * 6.0))
        rows, cols = 1, 16
    else:
        data, cols = _read(data, x._fp8_dtype), 128
        scales, rows = (inverse, 128) if x._is_2D_scaled else (inverse.t(), 1)
    data = data * _spread(scales[:, : math.ceil(data.shape[1] / cols)], rows, cols, data.shape)
    return data if rowwise else data.t()


def _read(data: Tensor, dtype) -> Tensor:
    return data.contiguous().view(_kind(dtype)).float()


def shape(x) -> torch.Size:
    """Of the tensor it replaces."""
    return torch.Size(x.size())


def dequantize(x, dtype: torch.dtype) -> Tensor:
    """The numbers of the data that is there."""
    held = {"Float8Tensor": "_data"}.get(type(x).__name__.removesuffix("Storage"), "_rowwise_data")
    return numbers(x, getattr(x, held) is not None).reshape(shape(x)).to(dtype)
