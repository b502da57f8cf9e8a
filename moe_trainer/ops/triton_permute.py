"""Local reordering of tokens in Triton kernels: the map from counts instead of sorts, rows and probabilities in one pass.

The torch version (ops/permute.py) finds the pairs with nonzero, which waits for the device, and sorts them. Here every block of
tokens counts its pairs per expert; sums over the blocks (torch) say where each block's rows of each expert begin; a second pass writes
where every pair goes. Nothing waits for the device when the caller can bound the number of rows: top-k routing gives T * k of them.

Rows beyond the last expert's, where `num_rows` is only a bound, are zeros, have probability 0 and take part in no sum.

Order and sums as in ops/permute.py: rows by expert, then by token; a token's rows are added in ascending expert order, in fp32. No
atomics anywhere.

Shapes: T tokens, E experts, R rows, H hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.permute import Permutation, PermuteMap
from moe_trainer.ops.triton_blocks import block_of, wide

TILE = 8192  # cells of the routing map that a program counts


@triton.jit
def count_kernel(routing, counts, per_token, num_tokens, num_experts, stride_t, stride_e, TOKENS: tl.constexpr,
                 EXPERTS: tl.constexpr):
    """Pairs of a block of tokens: by expert, and by token."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    taken = tl.load(routing + token[:, None] * stride_t + expert[None, :] * stride_e, mask=inside, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0).to(tl.int64) * num_experts + expert, tl.sum(taken, 0).to(tl.int64), mask=expert < num_experts)
    tl.store(per_token + token, tl.sum(taken, 1).to(tl.int64), mask=token < num_tokens)


@triton.jit
def place_kernel(routing, starts, offsets, token_of, cell_of, row_of, num_tokens, num_experts, num_rows, stride_t, stride_e,
                 TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Write where every pair of a block of tokens goes. starts: the first row of this block's pairs of each expert."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    taken = tl.load(routing + token[:, None] * stride_t + expert[None, :] * stride_e, mask=inside, other=0).to(tl.int32)
    first = tl.load(starts + tl.program_id(0).to(tl.int64) * num_experts + expert, mask=expert < num_experts, other=0)
    row = first[None, :] + tl.cumsum(taken, 0) - taken
    pair = tl.load(offsets + token, mask=token < num_tokens, other=0)[:, None] + tl.cumsum(taken, 1) - taken
    fits = inside & (taken > 0) & (row < num_rows) & (pair < num_rows)
    tl.store(token_of + row, token[:, None] + tl.zeros_like(row), mask=fits)
    tl.store(cell_of + row, token[:, None] * num_experts + expert[None, :], mask=fits)
    tl.store(row_of + pair, row, mask=fits)


@triton.jit
def gather_kernel(x, token_of, probs, cell_of, out, probs_out, width, stride, WITH_PROBS: tl.constexpr, BLOCK: tl.constexpr):
    """One row, one block of columns: the token's, or zeros; the first block brings the probability."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_of + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride + column, mask=(column < width) & (token >= 0), other=0.0)
    tl.store(out + row * width + column, value, mask=column < width)
    if WITH_PROBS:
        if tl.program_id(1) == 0:
            cell = tl.load(cell_of + row)
            tl.store(probs_out + row, tl.load(probs + cell, mask=cell >= 0, other=0.0))


@triton.jit
def sum_kernel(y, row_of, offsets, out, width, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One token, one block of columns: the sum of its rows, in ascending expert order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    for pair in range(tl.load(offsets + token), tl.load(offsets + token + 1)):
        row = tl.load(row_of + pair)
        total += tl.load(y + row * stride + column, mask=column < width, other=0.0).to(WIDE)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def spread_kernel(grad, cell_of, out, num_rows, BLOCK: tl.constexpr):
    """Every row's number into its cell of the [T, E] map."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.load(cell_of + row, mask=row < num_rows, other=-1)
    tl.store(out + cell, tl.load(grad + row, mask=row < num_rows, other=0.0), mask=cell >= 0)


def make_permute_map(routing_TE: Tensor, num_rows: int | None = None) -> PermuteMap:
    """Build the map of a routing decision.

    Shapes: routing_TE bool [T, E], E up to 8,192.
    num_rows: rows of the map, at least as many as there are pairs; None reads the number from the device, which waits for it.
    A row too many has token and cell -1, and the torch functions of ops/permute.py do not know such rows.
    On CUDA a num_rows that is too small stops the device (torch._assert_async). Raises: ValueError for more experts.
    """
    num_tokens, num_experts = routing_TE.shape
    if num_experts > TILE:
        raise ValueError(f"the Triton permutation takes up to {TILE} experts, here are {num_experts}")
    device = routing_TE.device
    routing_TE = routing_TE.view(torch.uint8) if routing_TE.dtype == torch.bool else routing_TE
    experts = block_of(num_experts, TILE)
    tokens = max(1, min(128, TILE // experts))
    grid = (triton.cdiv(num_tokens, tokens),)
    block_counts = torch.zeros(grid[0], num_experts, dtype=torch.int64, device=device)
    offsets_T = torch.zeros(num_tokens + 1, dtype=torch.int64, device=device)
    if num_tokens:
        count_kernel[grid](routing_TE, block_counts, offsets_T[1:], num_tokens, num_experts, *routing_TE.stride(), TOKENS=tokens,
                           EXPERTS=experts)
    offsets_T.cumsum_(0)
    counts_E = block_counts.sum(0)
    ends_E = counts_E.cumsum(0)
    if num_rows is None:
        num_rows = int(ends_E[-1])
    else:
        torch._assert_async(ends_E[-1] <= num_rows, "make_permute_map: more rows than num_rows")
    starts = block_counts.cumsum(0) - block_counts + (ends_E - counts_E)
    token_R = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    cell_R, row_R = torch.full_like(token_R, -1), torch.zeros_like(token_R)
    if num_tokens and num_rows:
        place_kernel[grid](routing_TE, starts, offsets_T, token_R, cell_R, row_R, num_tokens, num_experts, num_rows,
                           *routing_TE.stride(), TOKENS=tokens, EXPERTS=experts)
    return PermuteMap(token_R=token_R, cell_R=cell_R, row_R=row_R, offsets_T=offsets_T, counts_E=counts_E, num_tokens=num_tokens)


def _gather(x_TH: Tensor, routes: PermuteMap, probs_TE: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    num_rows, width = routes.token_R.shape[0], x_TH.shape[1]
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    out = x_TH.new_empty(num_rows, width)
    probs_R = None if probs_TE is None else probs_TE.new_empty(num_rows)
    if num_rows:
        block = block_of(width, 2048)
        probs = out if probs_TE is None else probs_TE.contiguous()
        gather_kernel[(num_rows, triton.cdiv(width, block))](
            x_TH, routes.token_R, probs, routes.cell_R, out, out if probs_R is None else probs_R, width, x_TH.stride(0),
            WITH_PROBS=probs_TE is not None, BLOCK=block)
    return out, probs_R


def _gather_sum(y_RH: Tensor, routes: PermuteMap) -> Tensor:
    width = y_RH.shape[1]
    y_RH = y_RH if y_RH.stride(1) == 1 else y_RH.contiguous()
    out = y_RH.new_empty(routes.num_tokens, width)
    if routes.num_tokens:
        block = block_of(width, 2048)
        sum_kernel[(routes.num_tokens, triton.cdiv(width, block))](
            y_RH, routes.row_R, routes.offsets_T, out, width, y_RH.stride(0), WIDE=wide(y_RH.dtype), BLOCK=block)
    return out


class _PermuteWithProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, probs_TE, routes):
        ctx.routes, ctx.shape = routes, probs_TE.shape
        return _gather(x_TH, routes, probs_TE)

    @staticmethod
    def backward(ctx, grad_RH, grad_R):
        grad_x = _gather_sum(grad_RH, ctx.routes) if ctx.needs_input_grad[0] else None
        grad_probs = None
        if ctx.needs_input_grad[1]:
            grad_probs = grad_R.new_zeros(ctx.shape)
            if grad_R.shape[0]:
                spread_kernel[(triton.cdiv(grad_R.shape[0], 1024),)](
                    grad_R.contiguous(), ctx.routes.cell_R, grad_probs, grad_R.shape[0], BLOCK=1024)
        return grad_x, grad_probs, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH, routes):
        ctx.routes = routes
        return _gather_sum(y_RH, routes)

    @staticmethod
    def backward(ctx, grad_TH):
        return _gather(grad_TH, ctx.routes)[0], None


def permute_with_probs(x_TH: Tensor, probs_TE: Tensor, routes: PermuteMap) -> tuple[Tensor, Tensor]:
    """Copy tokens and their probabilities into expert order. Returns: x_RH, probs_R in the dtype of probs_TE; both differentiable."""
    return _PermuteWithProbs.apply(x_TH, probs_TE, routes)


def unpermute(y_RH: Tensor, routes: PermuteMap) -> Tensor:
    """Sum each token's rows. Returns y_TH; tokens without rows get zeros."""
    return _Unpermute.apply(y_RH, routes)


class TritonPermutation(Permutation):
    """Permutation by the kernels of this file."""

    takes_order = False

    def permute(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, num_rows: int | None = None) -> tuple[Tensor, Tensor, PermuteMap]:
        """As Permutation.permute. The number of rows reaches the host here if it is not given: the dispatchers want the counts there anyway."""
        routes = make_permute_map(routing_TE, num_rows=num_rows)
        return *permute_with_probs(x_TH, probs_TE, routes), routes

    def unpermute(self, y_RH: Tensor, routes: PermuteMap) -> Tensor:
        """As Permutation.unpermute."""
        return unpermute(y_RH, routes)
