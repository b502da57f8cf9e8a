"""Local token permutation in Triton kernels: a map from counts instead of sorts, tokens and probabilities in one pass.

The torch version (ops/permute.py) uses nonzero, which waits for the device, and sorts. Here every block of tokens
counts its pairs per expert, a second kernel counts the pairs in earlier blocks, and a third writes where every pair
goes. If the caller bounds the number of pairs (T * k), nothing waits for the device. Entries after the last expert's,
where `num_rows` is a bound, are zeros with probability 0. Order and sums as in ops/permute.py, in fp32, without
atomics. The map is int32.

Shapes: T tokens, E experts, R routed tokens, H hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.permute import Permutation, PermuteMap
from moe_trainer.ops.triton_blocks import block_size, num_warps_for, wide

TILE = 8192  # cells of the routing map that a program counts
CELLS = 1 << 31  # of the full map, whose numbers are int32
SPARE = tl.constexpr(1024)  # rows that a program clears at once


@triton.jit
def count_kernel(
    routing, counts, num_tokens, num_experts, stride_t, stride_e, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Pairs of a block of tokens, by expert."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    taken = tl.load(routing + token[:, None] * stride_t + expert[None, :] * stride_e, mask=inside, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0) * num_experts + expert, tl.sum(taken, 0), mask=expert < num_experts)


@triton.jit
def earlier_kernel(counts, earlier, totals, num_blocks, num_experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Of the counts of EXPERTS experts by block: their sums over earlier blocks, and over all."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (block < num_blocks)[:, None] & (expert < num_experts)[None, :]
        at = block[:, None] * num_experts + expert[None, :]
        own = tl.load(counts + at, mask=inside, other=0)
        tl.store(earlier + at, before[None, :] + tl.cumsum(own, 0) - own, mask=inside)
        before += tl.sum(own, 0)
    tl.store(totals + expert, before.to(tl.int64), mask=expert < num_experts)


@triton.jit
def place_kernel(
    routing,
    earlier,
    totals,
    offsets,
    token_of,
    cell_of,
    row_of,
    fits,
    num_tokens,
    num_experts,
    num_rows,
    stride_t,
    stride_e,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write where every pair of a block of tokens goes, and this program's share of the rows that nothing takes."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    taken = tl.load(routing + token[:, None] * stride_t + expert[None, :] * stride_e, mask=inside, other=0).to(tl.int32)
    before = tl.load(earlier + tl.program_id(0) * num_experts + expert, mask=expert < num_experts, other=0)
    total = tl.load(totals + expert, mask=expert < num_experts, other=0).to(tl.int32)
    row = (before + tl.cumsum(total, 0) - total)[None, :] + tl.cumsum(taken, 0) - taken
    per_token = tl.sum(taken, 1)
    start = tl.sum(before, 0) + tl.cumsum(per_token, 0) - per_token
    pair = start[:, None] + tl.cumsum(taken, 1) - taken
    kept = inside & (taken > 0) & (row < num_rows) & (pair < num_rows)
    tl.store(token_of + row, (token[:, None] + tl.zeros_like(row)).to(tl.int32), mask=kept)
    tl.store(cell_of + row, (token[:, None] * num_experts + expert[None, :]).to(tl.int32), mask=kept)
    tl.store(row_of + pair, row, mask=kept)
    tl.store(offsets + token, start, mask=token < num_tokens)
    pairs = tl.sum(total, 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(offsets + num_tokens, pairs)
        tl.store(fits, (pairs <= num_rows).to(tl.uint8))
    for first in range(pairs + tl.program_id(0) * SPARE, num_rows, tl.num_programs(0) * SPARE):
        spare = first + tl.arange(0, SPARE)
        tl.store(token_of + spare, tl.full([SPARE], -1, tl.int32), mask=spare < num_rows)
        tl.store(cell_of + spare, tl.full([SPARE], -1, tl.int32), mask=spare < num_rows)
        tl.store(row_of + spare, tl.full([SPARE], 0, tl.int32), mask=spare < num_rows)


@triton.jit
def gather_kernel(x, token_of, probs, cell_of, out, probs_out, width, stride, BLOCK: tl.constexpr):
    """One row, one block of columns: the token's, or zeros; the first block brings the probability."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_of + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride + column, mask=(column < width) & (token >= 0), other=0.0)
    tl.store(out + row * width + column, value, mask=column < width)
    if probs is not None:  # noqa: SIM102 - a constant condition by itself removes the branch at compile time
        if tl.program_id(1) == 0:
            cell = tl.load(cell_of + row)
            tl.store(probs_out + row, tl.load(probs + cell, mask=cell >= 0, other=0.0))


@triton.jit
def sum_kernel(
    y,
    row_of,
    offsets,
    cell_of,
    grad,
    out,
    grad_out,
    width,
    stride,
    num_experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One token, one block of columns: the sum of its rows, in ascending expert order.

    The first block brings the numbers of its rows back into their cells of the [T, E] map.
    """
    WIDE: tl.constexpr = wide(y.dtype.element_ty)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    start, stop = tl.load(offsets + token), tl.load(offsets + token + 1)
    for pair in range(start, stop):
        row = tl.load(row_of + pair).to(tl.int64)
        total += tl.load(y + row * stride + column, mask=column < width, other=0.0).to(WIDE)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
    if grad is not None:  # noqa: SIM102 - a constant condition by itself removes the branch at compile time
        if tl.program_id(1) == 0:
            expert = tl.arange(0, EXPERTS)
            numbers = tl.zeros([EXPERTS], grad.dtype.element_ty)
            for pair in range(start, stop):
                row = tl.load(row_of + pair)
                numbers = tl.where(expert == tl.load(cell_of + row) - token * num_experts, tl.load(grad + row), numbers)
            tl.store(grad_out + token * num_experts + expert, numbers, mask=expert < num_experts)


def make_permute_map(routing_TE: Tensor, num_rows: int | None = None) -> PermuteMap:
    """Build the map of a routing decision.

    Shapes: routing_TE bool [T, E], E up to 8,192.
    num_rows: rows of the map, at least as many as there are pairs; None reads the number from the device, which waits
    for it. A row too many has token and cell -1, and the torch functions of ops/permute.py do not know such rows. On
    CUDA a num_rows that is too small stops the device (torch._assert_async). Raises: ValueError for more experts.
    """
    num_tokens, num_experts = routing_TE.shape
    if num_experts > TILE or num_tokens * num_experts >= CELLS:
        raise ValueError(
            f"the Triton permutation supports up to {TILE} experts and {CELLS} tokens x experts, got {num_tokens} "
            f"tokens and {num_experts} experts"
        )
    device = routing_TE.device
    routing_TE = routing_TE.view(torch.uint8) if routing_TE.dtype == torch.bool else routing_TE
    experts = block_size(num_experts, TILE)
    tokens = max(1, min(128, TILE // experts))
    blocks = max(1, triton.cdiv(num_tokens, tokens))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tile = {"TOKENS": tokens, "EXPERTS": experts, "num_warps": num_warps_for(tokens * experts)}
    counts, earlier = empty(blocks, num_experts), empty(blocks, num_experts)
    counts_E = empty(num_experts, dtype=torch.int64)
    count_kernel[(blocks,)](routing_TE, counts, num_tokens, num_experts, *routing_TE.stride(), **tile)
    earlier_kernel[(triton.cdiv(num_experts, 16),)](
        counts, earlier, counts_E, blocks, num_experts, BLOCKS=64, EXPERTS=16
    )
    rows = int(counts_E.sum()) if num_rows is None else num_rows
    token_R, cell_R, row_R, offsets_T = (empty(size) for size in (rows, rows, rows, num_tokens + 1))
    fits = empty(1, dtype=torch.uint8)
    written, sizes = (offsets_T, token_R, cell_R, row_R, fits), (num_tokens, num_experts, rows)
    place_kernel[(blocks,)](routing_TE, earlier, counts_E, *written, *sizes, *routing_TE.stride(), **tile)
    if num_rows is not None:
        torch._assert_async(fits, "make_permute_map: more rows than num_rows")
    return PermuteMap(
        token_R=token_R, cell_R=cell_R, row_R=row_R, offsets_T=offsets_T, counts_E=counts_E, num_tokens=num_tokens
    )


def _gather(x_TH: Tensor, routes: PermuteMap, probs_TE: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    num_rows, width = routes.token_R.shape[0], x_TH.shape[1]
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    out = x_TH.new_empty(num_rows, width)
    probs_R = None if probs_TE is None else probs_TE.new_empty(num_rows)
    if num_rows:
        block = block_size(width, 2048)
        probs = None if probs_TE is None else probs_TE.contiguous()
        gather_kernel[(num_rows, triton.cdiv(width, block))](
            x_TH, routes.token_R, probs, routes.cell_R, out, probs_R, width, x_TH.stride(0), BLOCK=block
        )
    return out, probs_R


def _gather_sum(y_RH: Tensor, routes: PermuteMap, grad_R: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """grad_R: numbers of rows that go into a [T, E] map."""
    width, num_experts = y_RH.shape[1], routes.counts_E.shape[0]
    y_RH = y_RH if y_RH.stride(1) == 1 else y_RH.contiguous()
    out = y_RH.new_empty(routes.num_tokens, width)
    grad_TE = None if grad_R is None else grad_R.new_empty(routes.num_tokens, num_experts)
    if routes.num_tokens:
        block = block_size(width, 2048)
        sum_kernel[(routes.num_tokens, triton.cdiv(width, block))](
            y_RH,
            routes.row_R,
            routes.offsets_T,
            routes.cell_R,
            None if grad_R is None else grad_R.contiguous(),
            out,
            grad_TE,
            width,
            y_RH.stride(0),
            num_experts,
            BLOCK=block,
            EXPERTS=block_size(num_experts, TILE),
        )
    return out, grad_TE


class _PermuteWithProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, probs_TE, routes):
        ctx.routes = routes
        return _gather(x_TH, routes, probs_TE)

    @staticmethod
    def backward(ctx, grad_RH, grad_R):
        return *_gather_sum(grad_RH, ctx.routes, grad_R if ctx.needs_input_grad[1] else None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH, routes):
        ctx.routes = routes
        return _gather_sum(y_RH, routes)[0]

    @staticmethod
    def backward(ctx, grad_TH):
        return _gather(grad_TH, ctx.routes)[0], None


def permute_with_probs(x_TH: Tensor, probs_TE: Tensor, routes: PermuteMap) -> tuple[Tensor, Tensor]:
    """Copy tokens and their probabilities into expert order.

    Returns: x_RH, probs_R in the dtype of probs_TE; both differentiable.
    """
    return _PermuteWithProbs.apply(x_TH, probs_TE, routes)


def unpermute(y_RH: Tensor, routes: PermuteMap) -> Tensor:
    """Sum each token's rows. Returns y_TH; tokens without rows get zeros."""
    return _Unpermute.apply(y_RH, routes)


class TritonPermutation(Permutation):
    """Permutation by the kernels of this file."""

    takes_order = False

    def permute(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, num_rows: int | None = None
    ) -> tuple[Tensor, Tensor, PermuteMap]:
        """As Permutation.permute.

        The number of rows reaches the host here if it is not given: the dispatchers want the counts there anyway.
        """
        routes = make_permute_map(routing_TE, num_rows=num_rows)
        return *permute_with_probs(x_TH, probs_TE, routes), routes

    def unpermute(self, y_RH: Tensor, routes: PermuteMap) -> Tensor:
        """As Permutation.unpermute."""
        return unpermute(y_RH, routes)
