"""Helpers of the Triton kernels: block sizes and compute dtype.

Kernels compute in fp32 (fp64 for fp64 tensors) and round once, when they store. Row offsets are int64: tokens times
width can exceed 2^31. Block sizes follow static rules, not an autotuner, so the first step needs no search and two runs
do the same arithmetic.
"""

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def wide(dtype: tl.dtype) -> tl.dtype:
    """Return the dtype a kernel computes in for tensors of this dtype."""
    return tl.float64 if dtype == tl.float64 else tl.float32


def block_size(size: int, largest: int, smallest: int = 16) -> int:
    """Return the power of two that covers `size`, within limits."""
    return max(smallest, min(largest, 1 << (max(1, size) - 1).bit_length()))


def num_warps_for(numel: int) -> int:
    """Return the number of warps for a tile of `numel` elements: about 16 to 32 elements per thread."""
    return 4 if numel <= 4096 else 8 if numel <= 8192 else 16


def contiguous_rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return x as a matrix [*, width] with contiguous rows; a view if possible."""
    x = x.reshape(-1, width)
    return x if x.stride(1) == 1 or width == 1 else x.contiguous()


@triton.jit
def sum_partials_kernel(partial, out, num_partial, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the rows of partial [num_partial, size] for BLOCK columns, in an order that is independent of the launch."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], partial.dtype.element_ty)
    for first in range(0, num_partial, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_partial)[:, None] & (column < size)[None, :]
        total += tl.sum(tl.load(partial + row[:, None] * size + column[None, :], mask=inside, other=0.0), 0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < size)


def sum_partials(partial: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sum partial [programs, *] over the programs into `out`, which is contiguous, and return `out`."""
    size = out.numel()
    sum_partials_kernel[(triton.cdiv(size, 32),)](partial, out, partial.shape[0], size, ROWS=32, BLOCK=32)
    return out


@triton.constexpr_function
def _integer(dtype):
    """Return the integers of a float's width."""
    return tl.int64 if dtype == tl.float64 else tl.int32


@triton.constexpr_function
def _largest(dtype):
    """Return the largest of them."""
    return (1 << (dtype.primitive_bitwidth - 1)) - 1


@triton.jit
def _ranks(keys):
    """Integers in the order of torch.topk: zeros are equal, and NaN is the largest; all above the smallest integer.

    An arg-max of floats finds no NaN, because comparisons with NaN are false, and cannot tell an expert of key -inf
    from one that is chosen already.
    """
    LARGEST: tl.constexpr = _largest(keys.dtype)
    bits = keys.to(_integer(keys.dtype), bitcast=True)
    ranks = tl.where(bits < 0, bits ^ LARGEST, bits)
    ranks = tl.where(keys == 0.0, 0, ranks)
    return tl.where(keys != keys, LARGEST, ranks)


@triton.jit
def choose_largest(keys, allowed, expert, K: tl.constexpr):
    """The K largest of each row's allowed keys, of which there are K, by K rounds of arg-max. Returns a bool tile."""
    LOWEST: tl.constexpr = -_largest(keys.dtype) - 1
    ranks = tl.where(allowed, _ranks(keys), LOWEST)
    chosen = ranks != ranks
    for _ in tl.static_range(K):
        best = tl.argmax(tl.where(chosen, LOWEST, ranks), 1)
        chosen = chosen | (expert[None, :] == best[:, None])
    return chosen
