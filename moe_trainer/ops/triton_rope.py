"""Rotary position embedding as one Triton kernel: both layouts of the pairs, a part of the features, any strides.

A program takes one position of one sequence and some of its heads, so the tables are read once for all of them.
Features outside the rotated part are copied. Backward is the rotation by the negative angle.

Shapes: S positions, B sequences, N heads, D features, R = 2 * half rotated ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.rope import Rotation
from moe_trainer.ops.triton_blocks import block_size, wide

TILE = 4096  # elements of a program's heads


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    y,
    batch,
    heads,
    width,
    half,
    offset,
    stride_s,
    stride_b,
    stride_n,
    sign,
    INTERLEAVED: tl.constexpr,
    PARTIAL: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One position of one sequence, HEADS heads."""
    WIDE: tl.constexpr = wide(x.dtype.element_ty)
    place = tl.program_id(0).to(tl.int64)
    position = place // batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    start = x + position * stride_s + (place % batch) * stride_b + head[:, None] * stride_n
    to = y + (place * heads + head[:, None]) * width
    pair = tl.arange(0, HALF)
    angle_cos = tl.load(cos + position * half + pair, mask=pair < half, other=0.0).to(WIDE)[None, :]
    angle_sin = tl.load(sin + position * half + pair, mask=pair < half, other=0.0).to(WIDE)[None, :] * sign
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    if INTERLEAVED:
        first = (offset + 2 * pair)[None, :]
        second = first + 1
    else:
        first = (offset + pair)[None, :]
        second = first + half
    one = tl.load(start + first, mask=inside, other=0.0).to(WIDE)
    other = tl.load(start + second, mask=inside, other=0.0).to(WIDE)
    tl.store(to + first, (one * angle_cos - other * angle_sin).to(y.dtype.element_ty), mask=inside)
    tl.store(to + second, (other * angle_cos + one * angle_sin).to(y.dtype.element_ty), mask=inside)
    if PARTIAL:
        feature = tl.arange(0, WIDTH)
        rest = (feature < offset) | ((feature >= offset + 2 * half) & (feature < width))
        kept = (head < heads)[:, None] & rest[None, :]
        tl.store(to + feature[None, :], tl.load(start + feature[None, :], mask=kept), mask=kept)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offset: int, sign: int) -> Tensor:
    length, batch, heads, width = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    half = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        covered = block_size(width, 1 << 16)
        per_program = block_size(heads, max(1, TILE // covered), 1)
        rotate_kernel[(length * batch, triton.cdiv(heads, per_program))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            y,
            *(batch, heads, width, half, offset),
            *x.stride()[:3],
            sign,
            INTERLEAVED=interleaved,
            PARTIAL=2 * half < width,
            HEADS=per_program,
            HALF=block_size(half, 1 << 16, 1),
            WIDTH=covered,
        )
    return y


def apply_rope(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offset: int = 0) -> Tensor:
    """Rotate R features of every head, from `offset` on; as ops/rope.py: apply_rope.

    Shapes: x [S, B, N, D]; cos, sin [S, R/2], offset + R <= D. Returns: like x, contiguous.
    """
    return Rotation.apply(_rotate, x_SBND, cos, sin, interleaved, offset)
