"""Grouped GEMMs of E4M3 operands with scales of blocks of 128, whose group sizes are on the device.

For devices whose libraries have no such grouped GEMM (Hopper): DeepSeek-V3's recipe (arXiv 2412.19437, section 3.3.2).
Tensor cores multiply 128 numbers of the contracted dimension, whose sums fp32 accumulators add times both scales.

The launch is that of ops/triton_grouped_gemm.py. Tokens of an expert are a multiple of 128 where they are contracted,
so that no block covers two experts. An expert without tokens gets a weight gradient of zeros. Tokens from offsets_e[-1]
on are neither read nor written.

Shapes: C tokens sorted by expert, e experts, N output width, K input width, B blocks; offsets_e int32, the end of each
expert's tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.triton_grouped_gemm import GROUP, find_tile_rows
from moe_trainer.quantization.scaled_grouped import ExpertKernels
from moe_trainer.quantization.triton_quantize import quantize_both

BLOCK = tl.constexpr(128)


@triton.jit
def block_rows_kernel(
    x,
    w,
    y,
    x_scales,
    w_scales,
    offsets,
    num_experts,
    columns,
    depth,
    num_row_tiles,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """y[rows of e] = x[rows of e] @ w[e]^T, for x [C, depth] and w [e, columns, depth]: one tile of y."""
    num_column_tiles, num_blocks = tl.cdiv(columns, BLOCK), tl.cdiv(depth, BLOCK)
    group = tl.program_id(0) // (GROUP * num_column_tiles)
    in_group = tl.program_id(0) % (GROUP * num_column_tiles)
    height = tl.minimum(num_row_tiles - group * GROUP, GROUP)
    expert, first, end = find_tile_rows(offsets, group * GROUP + in_group % height, num_experts, ROWS, EXPERTS)
    if expert < num_experts:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        tile = in_group // height
        column, k = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
        x_at = x + row[:, None] * depth + k[None, :]
        w_at = w + (expert.to(tl.int64) * columns + column[None, :]) * depth + k[:, None]
        x_scale_at = x_scales + row * num_blocks
        w_scale_at = w_scales + (expert.to(tl.int64) * num_column_tiles + tile) * num_blocks
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for block in range(num_blocks):
            known = k < depth - block * BLOCK
            left = tl.load(x_at, mask=(row < end)[:, None] & known[None, :], other=0.0)
            right = tl.load(w_at, mask=known[:, None] & (column < columns)[None, :], other=0.0)
            scale = tl.load(x_scale_at + block, mask=row < end, other=0.0) * tl.load(w_scale_at + block)
            total += tl.dot(left, right) * scale[:, None]
            x_at += BLOCK
            w_at += BLOCK
        inside = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(y + row[:, None] * columns + column[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def block_weight_kernel(
    grad,
    x,
    grad_w,
    grad_scales,
    x_scales,
    offsets,
    out_width,
    in_width,
    num_tokens,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """grad_w[e] = grad[:, tokens of e] @ x[:, tokens of e]^T, for [N, C] and [K, C]: one tile of one expert's."""
    expert = tl.program_id(1)
    in_tiles, num_blocks = tl.cdiv(in_width, IN), tl.cdiv(num_tokens, BLOCK)
    n = (tl.program_id(0) // in_tiles * OUT + tl.arange(0, OUT)).to(tl.int64)
    k = (tl.program_id(0) % in_tiles * IN + tl.arange(0, IN)).to(tl.int64)
    end = tl.load(offsets + expert)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros([OUT, IN], tl.float32)
    token, first = tl.arange(0, BLOCK), start // BLOCK
    at_grad = grad + n[:, None] * num_tokens + token[None, :] + first * BLOCK
    at_x = x + k[None, :] * num_tokens + token[:, None] + first * BLOCK
    at_grad_scale, at_x_scale = grad_scales + n * num_blocks, x_scales + k * num_blocks
    for block in range(first, end // BLOCK):
        left = tl.load(at_grad, mask=(n < out_width)[:, None], other=0.0)
        right = tl.load(at_x, mask=(k < in_width)[None, :], other=0.0)
        of_grad = tl.load(at_grad_scale + block, mask=n < out_width, other=0.0)
        of_x = tl.load(at_x_scale + block, mask=k < in_width, other=0.0)
        total += tl.dot(left, right) * of_grad[:, None] * of_x[None, :]
        at_grad += BLOCK
        at_x += BLOCK
    at = grad_w + (expert.to(tl.int64) * out_width + n[:, None]) * in_width + k[None, :]
    tl.store(at, total.to(grad_w.dtype.element_ty), mask=(n < out_width)[:, None] & (k < in_width)[None, :])


def block_grouped_mm(
    x_CK: Tensor, x_scales: Tensor, w_eNK: Tensor, w_scales: Tensor, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return x @ w^T per expert, y_CN in `dtype`.

    Args:
        x_CK, x_scales: E4M3; fp32 [C, B], one per 1 x 128 block.
        w_eNK, w_scales: E4M3; fp32 [e, ceil(N / 128), B], one per 128 x 128 block.
    """
    (num_rows, depth), (num_experts, columns, _) = x_CK.shape, w_eNK.shape
    y_CN = torch.empty(num_rows, columns, dtype=dtype, device=x_CK.device)
    if num_rows and columns:
        num_row_tiles = num_rows // BLOCK.value + num_experts
        block_rows_kernel[(num_row_tiles * triton.cdiv(columns, BLOCK.value),)](
            *(x_CK.contiguous(), w_eNK.contiguous(), y_CN, x_scales.contiguous(), w_scales.contiguous(), offsets_e),
            *(num_experts, columns, depth, num_row_tiles),
            ROWS=BLOCK.value,
            EXPERTS=triton.next_power_of_2(num_experts),
            num_warps=8,
            num_stages=3,
        )
    return y_CN


def block_grouped_weight_grad(
    grad_NC: Tensor, grad_scales: Tensor, x_KC: Tensor, x_scales: Tensor, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return grad @ x^T per expert, grad_eNK in `dtype`; zero for an expert without tokens.

    Args:
        grad_NC, grad_scales, x_KC, x_scales: E4M3; fp32 [N, B] and [K, B], one per 1 x 128 block along the tokens.
    """
    num_experts, (out_width, num_tokens), in_width = len(offsets_e), grad_NC.shape, x_KC.shape[0]
    grad_w = torch.empty(num_experts, out_width, in_width, dtype=dtype, device=x_KC.device)
    if grad_w.numel():
        tile = BLOCK.value
        block_weight_kernel[(triton.cdiv(out_width, tile) * triton.cdiv(in_width, tile), num_experts)](
            *(grad_NC.contiguous(), x_KC.contiguous(), grad_w),
            *(grad_scales.contiguous(), x_scales.contiguous(), offsets_e, out_width, in_width, num_tokens),
            OUT=tile,
            IN=tile,
            num_warps=8,
            num_stages=3,
        )
    return grad_w


EXPERT_KERNELS = ExpertKernels(block_grouped_mm, block_grouped_weight_grad, quantize_both)
