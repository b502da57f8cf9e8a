"""Grouped GEMMs with group sizes on the device: nothing waits for the host.

Tokens of an expert need not be a multiple of anything. The launch covers the most tiles R tokens of e experts can need,
R / tile + e; a program finds its tile from a cumulative sum over the offsets, and exits if there is none. The input
gradient is the forward with exchanged strides. In the weight gradient a program owns a tile of one expert's gradient
and walks over its tokens: no atomics, and an expert without tokens gets zeros. Sums are fp32, and may be added to an
fp32 main gradient (ops/main_grad.py) without a rounding.

Shapes: R tokens sorted by expert, e experts, N output width, K input width; offsets_e int32, the end of each expert's
tokens. Tokens from offsets_e[-1] on are not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.grouped_gemm import GroupedGemms
from moe_trainer.ops.main_grad import MainGradSum

GROUP = tl.constexpr(8)
"""Tiles of rows that go through all columns together, so that their weights are found in the L2 cache."""


@triton.jit
def find_tile_rows(offsets, tile, num_experts, TILE_ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert that a tile of rows belongs to, the tile's first row and the row after the expert's last."""
    index = tl.arange(0, EXPERTS)
    end = tl.load(offsets + index, mask=index < num_experts, other=0)
    start = tl.load(offsets + index - 1, mask=(index > 0) & (index < num_experts), other=0)
    tiles = tl.where(index < num_experts, (end - start + TILE_ROWS - 1) // TILE_ROWS, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (index < num_experts)).to(tl.int32), 0)
    mine = index == expert
    first = tl.sum(tl.where(mine, start + (tile - (last - tiles)) * TILE_ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def rows_kernel(
    x,
    w,
    y,
    offsets,
    num_experts,
    columns,
    depth,
    num_row_tiles,
    stride_x,
    stride_we,
    stride_wk,
    stride_wn,
    stride_y,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """y[rows of e] = x[rows of e] @ w[e], for a w[e] of [depth, columns] with any strides: one tile of y."""
    num_column_tiles = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * num_column_tiles)
    in_group = tl.program_id(0) % (GROUP * num_column_tiles)
    height = tl.minimum(num_row_tiles - group * GROUP, GROUP)
    tile = group * GROUP + in_group % height
    expert, first, end = find_tile_rows(offsets, tile, num_experts, ROWS, EXPERTS)
    if expert < num_experts:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = in_group // height * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        x_at = x + row[:, None] * stride_x + k[None, :]
        w_at = w + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk + column[None, :].to(tl.int64) * stride_wn
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for done in range(0, depth, DEPTH):
            left = tl.load(x_at, mask=(row < end)[:, None] & (k < depth - done)[None, :], other=0.0)
            right = tl.load(w_at, mask=(k < depth - done)[:, None] & (column < columns)[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            x_at += DEPTH
            w_at += DEPTH * stride_wk
        inside = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(y + row[:, None] * stride_y + column[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def weight_kernel(
    grad,
    x,
    grad_w,
    offsets,
    out_width,
    in_width,
    stride_g,
    stride_x,
    alpha,
    beta,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """One tile of grad_w[e] = beta * grad_w[e] + alpha * grad[rows of e]^T @ x[rows of e]; beta None: 0."""
    expert = tl.program_id(1)
    in_tiles = tl.cdiv(in_width, IN)
    n = tl.program_id(0) // in_tiles * OUT + tl.arange(0, OUT)
    k = tl.program_id(0) % in_tiles * IN + tl.arange(0, IN)
    end = tl.load(offsets + expert)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros([OUT, IN], tl.float32)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at_grad, at_x = grad + row[None, :] * stride_g + n[:, None], x + row[:, None] * stride_x + k[None, :]
        left = tl.load(at_grad, mask=(row < end)[None, :] & (n < out_width)[:, None], other=0.0)
        right = tl.load(at_x, mask=(row < end)[:, None] & (k < in_width)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = grad_w + expert.to(tl.int64) * out_width * in_width + n[:, None].to(tl.int64) * in_width + k[None, :]
    inside = (n < out_width)[:, None] & (k < in_width)[None, :]
    total = total * alpha
    if beta is not None:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32) * beta
    tl.store(at, total.to(grad_w.dtype.element_ty), mask=inside)


def _tiles(dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return rows and columns of a tile, depth of a step, warps and stages; fp32 operands are twice as large."""
    return (64, 64, 32, 4, 2) if dtype == torch.float32 else (128, 128, 64, 8, 3)


def _precision() -> str:
    """Return the precision of fp32 GEMMs, as torch's own: exact, or TF32 if allowed."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _rows_times_weights(x: Tensor, w: Tensor, offsets_e: Tensor) -> Tensor:
    """Return x @ w[e] per expert; w [e, depth, columns] may have any strides."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (num_experts, depth, columns) = x.shape[0], w.shape
    y = x.new_empty(num_rows, columns)
    if num_rows and columns:
        rows, cols, step, warps, stages = _tiles(x.dtype)
        num_row_tiles = num_rows // rows + num_experts
        rows_kernel[(num_row_tiles * triton.cdiv(columns, cols),)](
            *(x, w, y, offsets_e),
            *(num_experts, columns, depth, num_row_tiles, x.stride(0), *w.stride(), y.stride(0)),
            PRECISION=_precision(),
            ROWS=rows,
            COLUMNS=cols,
            DEPTH=step,
            EXPERTS=triton.next_power_of_2(num_experts),
            num_warps=warps,
            num_stages=stages,
        )
    return y


def grouped_forward(x_RK: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """Return x @ w^T per expert, y_RN, in one launch."""
    return _rows_times_weights(x_RK, w_eNK.transpose(1, 2), offsets_e)


def grouped_input_grad(grad_RN: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """Return grad @ w per expert, grad_RK, in one launch."""
    return _rows_times_weights(grad_RN, w_eNK, offsets_e)


def add_weight_grad(grad_RN: Tensor, x_RK: Tensor, offsets_e: Tensor, total: MainGradSum) -> None:
    """Add grad^T @ x per expert to the contiguous total_eNK in one launch; nothing for an expert without tokens."""
    grad_RN, x_RK = (each if each.stride(1) == 1 else each.contiguous() for each in (grad_RN, x_RK))
    num_experts, out_width, in_width = total.total.shape
    if total.total.numel():
        out, inner, rows, warps, stages = _tiles(x_RK.dtype)
        weight_kernel[(triton.cdiv(out_width, out) * triton.cdiv(in_width, inner), num_experts)](
            *(grad_RN, x_RK, total.total, offsets_e),
            *(out_width, in_width, grad_RN.stride(0), x_RK.stride(0), total.alpha, total.beta or None),
            PRECISION=_precision(),
            ROWS=rows,
            OUT=out,
            IN=inner,
            num_warps=warps,
            num_stages=stages,
        )


def grouped_weight_grad(grad_RN: Tensor, x_RK: Tensor, offsets_e: Tensor) -> Tensor:
    """Return grad^T @ x per expert, grad_eNK, in one launch; zero for an expert without tokens."""
    grad_eNK = x_RK.new_empty(len(offsets_e), grad_RN.shape[1], x_RK.shape[1])
    add_weight_grad(grad_RN, x_RK, offsets_e, MainGradSum(grad_eNK, beta=0.0, alpha=1.0))
    return grad_eNK


GROUPED_GEMMS = GroupedGemms(grouped_forward, grouped_input_grad, grouped_weight_grad)
