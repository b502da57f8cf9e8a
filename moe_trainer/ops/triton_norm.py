"""RMSNorm, one Triton kernel each way.

A program holds full rows; short ones (heads of 64 to 128 features, --qk-layernorm) several at a time. In backward a
fixed number of programs walks over the rows and sums the weight gradient in registers; a second kernel adds the sums.
No atomics: results are reproducible on one device.

Shapes: T rows, H features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.triton_blocks import block_size, contiguous_rows, num_warps_for, sum_partials

TILE = 4096  # elements of a tile that several short rows share
MAX_FEATURES = 1 << 16  # features of a row, which one program holds


@triton.jit
def _gain(weight, column, size, ZERO_CENTERED: tl.constexpr, WIDE: tl.constexpr):
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(WIDE)
    if ZERO_CENTERED:
        gain += 1.0
    return gain


@triton.jit
def forward_kernel(
    x, weight, y, rstd, num_rows, size, x_stride, eps, CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS full rows; saves the reciprocal root mean square of each. CENTERED: the gain is 1 + weight."""
    WIDE: tl.constexpr = rstd.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(WIDE)
    scale = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
    tl.store(rstd + row, scale, mask=row < num_rows)
    value = value * scale[:, None]
    if weight is not None:
        value = value * _gain(weight, column, size, CENTERED, WIDE)[None, :]
    tl.store(y + row[:, None] * size + column[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad,
    x,
    weight,
    rstd,
    grad_x,
    partial,
    num_rows,
    size,
    grad_stride,
    x_stride,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every num_programs-th group of ROWS rows; writes this program's share of the weight's gradient."""
    WIDE: tl.constexpr = rstd.dtype.element_ty
    column = tl.arange(0, BLOCK)
    share = tl.zeros([BLOCK], WIDE)
    gain = tl.zeros([BLOCK], WIDE) + 1.0
    if weight is not None:
        gain = _gain(weight, column, size, CENTERED, WIDE)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < size)[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        scale = tl.load(rstd + row, mask=row < num_rows, other=0.0)[:, None]
        value = value * scale
        share += tl.sum(g * value, 0)
        g = g * gain[None, :]
        result = (g - value * (tl.sum(g * value, 1) / size)[:, None]) * scale
        tl.store(grad_x + row[:, None] * size + column[None, :], result.to(grad_x.dtype.element_ty), mask=inside)
    if weight is not None:
        tl.store(partial + tl.program_id(0) * size + column, share, mask=column < size)


def _tile(size: int) -> tuple[int, int, int]:
    """Rows of a program, columns of its tile, warps."""
    if size > MAX_FEATURES:
        raise ValueError(f"the Triton RMSNorm takes rows of up to {MAX_FEATURES} features, these have {size}")
    block = block_size(size, MAX_FEATURES)
    rows = max(1, TILE // block)
    return rows, block, num_warps_for(rows * block)


def _programs(device: torch.device, groups: int) -> int:
    """Programs of the backward: a few for every multiprocessor, so that their loads hide each other's latency."""
    fit = 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return min(groups, fit)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):
        x_TH = contiguous_rows(x, x.shape[-1])
        num_rows, size = x_TH.shape
        wide_dtype = torch.promote_types(x.dtype, torch.float32)
        y_TH = torch.empty(num_rows, size, dtype=x.dtype if weight is None else weight.dtype, device=x.device)
        rstd_T = torch.empty(num_rows, dtype=wide_dtype, device=x.device)
        if num_rows:
            rows, block, warps = _tile(size)
            options = {"CENTERED": zero_centered, "ROWS": rows, "BLOCK": block, "num_warps": warps}
            forward_kernel[(triton.cdiv(num_rows, rows),)](
                x_TH, weight, y_TH, rstd_T, num_rows, size, x_TH.stride(0), eps, **options
            )
        ctx.save_for_backward(x_TH, weight, rstd_T)
        ctx.zero_centered = zero_centered
        return y_TH.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x_TH, weight, rstd_T = ctx.saved_tensors
        num_rows, size = x_TH.shape
        g_TH = contiguous_rows(grad, size)
        grad_x = torch.empty(num_rows, size, dtype=x_TH.dtype, device=x_TH.device)
        rows, block, warps = _tile(size)
        programs = _programs(x_TH.device, triton.cdiv(num_rows, rows))
        partial = torch.empty(programs, size, dtype=rstd_T.dtype, device=x_TH.device)
        if num_rows:
            options = {"CENTERED": ctx.zero_centered, "ROWS": rows, "BLOCK": block, "num_warps": warps}
            strides = g_TH.stride(0), x_TH.stride(0)
            backward_kernel[(programs,)](
                g_TH, x_TH, weight, rstd_T, grad_x, partial, num_rows, size, *strides, **options
            )
        grad_weight = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = sum_partials(partial, torch.empty_like(weight))
        return grad_x.view(grad.shape), grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Scale each row to unit root mean square, then by the weight; as ops/pointwise.py: rms_norm.

    Shapes: x [..., H]; weight [H] or None. Returns: like x, in the dtype of the weight. Raises: ValueError for H above
    65,536.
    """
    return _RMSNorm.apply(x, weight, eps, zero_centered)
