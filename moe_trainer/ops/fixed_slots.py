"""Token permutation whose sizes do not depend on the routing, so that the host reads nothing.

Every destination has a slot of equally many rows. A slot holds the routed tokens for its experts in expert order and
then unused rows; tokens that do not fit are left out and set a flag. `compact_slots` orders received slots by expert,
one expert after the other from the first row on. Both can pad each expert's rows to a multiple, for quantized GEMMs.
Unused and padding rows are zeros, and so are their gradients. The numbers are those of ops/permute.py, bit for bit.

Shape letters: T tokens, E experts, S slots, e experts of a slot, P rows of a slot, N rows of all slots (= S * P), C
rows of the buffer, H hidden.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.permute import PermuteMap, permute, permute_probs, unpermute


@dataclass(frozen=True)
class SlotMap:
    """Where the rows of all slots come from.

    Attributes:
        routes: map of T + 1 tokens, of which the last one is that of rows without a token.
        counts_Se: rows of each expert in the slots, with padding, int64.
        overflow: int32 [1], nonzero if tokens are left out.
    """

    routes: PermuteMap
    counts_Se: Tensor
    overflow: Tensor


def padded_size(size: int, num_experts: int, multiple: int) -> int:
    """Return the rows that hold `size` tokens of the experts if each expert's rows are padded to a multiple."""
    return -(-(size + num_experts * (multiple - 1)) // multiple) * multiple


def _round_up(counts: Tensor, multiple: int) -> Tensor:
    return counts if multiple == 1 else (counts + (multiple - 1)) // multiple * multiple


def make_slot_map(
    routing_TE: Tensor, num_slots: int, slot_size: int, multiple: int = 1, order_E: Tensor | None = None
) -> SlotMap:
    """Assign routed tokens to slots, of which each has the same number of consecutive experts.

    Args:
        slot_size: P, a multiple of `multiple`, to which each expert's rows are padded.
        order_E: a token's rows are summed in ascending order of it, int64 in [0, E); None is the order of the experts.
    """
    (num_tokens, num_experts), num_rows, device = routing_TE.shape, num_slots * slot_size, routing_TE.device
    by_expert = routing_TE.t().contiguous()
    counts_E = by_expert.sum(1)
    counts_Se = counts_E.view(num_slots, -1)
    extent_Se = _round_up(counts_Se, multiple)
    start_Se = extent_Se.cumsum(1) - extent_Se
    fits_Se = torch.minimum(counts_Se, (slot_size - start_Se).clamp_(min=0))
    row_SP = torch.arange(slot_size, device=device).expand(num_slots, -1).contiguous()
    expert_SP = torch.searchsorted(extent_Se.cumsum(1), row_SP, right=True).clamp_(max=counts_Se.shape[1] - 1)
    in_expert_SP = row_SP - start_Se.gather(1, expert_SP)
    is_used_N = (in_expert_SP < fits_Se.gather(1, expert_SP)).flatten()
    first_Se = (counts_E.cumsum(0) - counts_E).view(num_slots, -1)  # of an expert, of all routed tokens in expert order
    source_N = (first_Se.gather(1, expert_SP) + in_expert_SP).clamp_(max=num_rows - 1).flatten()
    expert_N, token_N = (x[source_N] for x in torch.nonzero_static(by_expert, size=num_rows, fill_value=0).unbind(1))
    cell_N = torch.where(is_used_N, token_N * num_experts + expert_N, num_tokens * num_experts)
    token_N = torch.where(is_used_N, token_N, num_tokens)
    if order_E is None:
        sorted_N, row_N = token_N.to(torch.int32).sort(stable=True)
    else:
        row_N = (token_N * num_experts + order_E[expert_N]).sort(stable=True)[1]
        sorted_N = token_N.to(torch.int32)[row_N]
    bounds = torch.arange(num_tokens + 2, dtype=torch.int32, device=device)
    used_Se = _round_up(fits_Se, multiple)
    routes = PermuteMap(
        token_R=token_N,
        cell_R=cell_N,
        row_R=row_N,
        offsets_T=torch.searchsorted(sorted_N, bounds),
        counts_E=used_Se.flatten(),
        num_tokens=num_tokens + 1,
    )
    return SlotMap(routes, used_Se, (fits_Se != counts_Se).any().to(torch.int32).view(1))


def fill_slots(x_TH: Tensor, probs_TE: Tensor, slots: SlotMap) -> tuple[Tensor, Tensor]:
    """Copy tokens and probabilities to their slots, with zeros in unused rows. Differentiable.

    Shapes: x_TH [T, H], probs_TE [T, E] -> x_NH, probs_N.
    """
    x_TH, probs_TE = (F.pad(table, (0, 0, 0, 1)) for table in (x_TH, probs_TE))
    return permute(x_TH, slots.routes), permute_probs(probs_TE, slots.routes)


def sum_slots(y_NH: Tensor, slots: SlotMap) -> Tensor:
    """Sum each token's rows and return y_TH, whatever unused rows hold. Differentiable."""
    return unpermute(y_NH, slots.routes)[:-1]


@dataclass(frozen=True)
class BufferOrder:
    """Where rows of slots and of the buffer are in the other.

    Attributes:
        slot_row_C, is_used_C: the row of the slots that each row of the buffer holds, and whether there is one.
        buffer_row_N: the row of the buffer of each used row of the slots.
        counts_e: rows of each expert in the buffer, with padding, int64.
    """

    slot_row_C: Tensor
    is_used_C: Tensor
    buffer_row_N: Tensor
    counts_e: Tensor


def compact_slots(counts_Se: Tensor, slot_size: int, multiple: int = 1) -> BufferOrder:
    """Order the rows of slots [S][e] by expert [e][S] without gaps, each expert's padded to a multiple.

    Args:
        counts_Se: int64, rows of each expert in each slot, at most slot_size per slot.
    """
    (num_slots, num_experts), device = counts_Se.shape, counts_Se.device
    num_rows = num_slots * slot_size
    before_Se = counts_Se.cumsum(1) - counts_Se
    counts_e = _round_up(counts_Se.sum(0), multiple)
    first_e = counts_e.cumsum(0) - counts_e
    start_Se = first_e + (counts_Se.cumsum(0) - counts_Se)  # of each block, in the buffer
    row_C = torch.arange(padded_size(num_rows, num_experts, multiple), device=device)
    # blocks [e][S] start in ascending order; of several that start at one row, all but the last are empty
    block_C = torch.searchsorted(start_Se.t().flatten(), row_C, right=True) - 1
    in_block_C = row_C - start_Se.t().flatten()[block_C]
    is_used_C = in_block_C < counts_Se.t().flatten()[block_C]
    slot_start_Se = torch.arange(num_slots, device=device)[:, None] * slot_size + before_Se
    slot_row_C = (slot_start_Se.t().flatten()[block_C] + in_block_C).clamp_(max=num_rows - 1)
    row_SP = torch.arange(slot_size, device=device).expand(num_slots, -1).contiguous()
    expert_SP = torch.searchsorted(counts_Se.cumsum(1), row_SP, right=True).clamp_(max=num_experts - 1)
    buffer_row_SP = row_SP + (start_Se - before_Se).gather(1, expert_SP)
    return BufferOrder(slot_row_C, is_used_C, buffer_row_SP.clamp_(max=len(row_C) - 1).flatten(), counts_e)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index, is_used, back_index, is_back_used, *tensors):
        ctx.back = back_index, is_back_used
        return tuple(_gather(x, index, is_used) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, None, *(_gather(grad, *ctx.back) for grad in grads)


def _gather(x: Tensor, index: Tensor, is_used: Tensor | None) -> Tensor:
    rows = x.index_select(0, index)
    return rows if is_used is None else rows.masked_fill_(~is_used.view(-1, *[1] * (x.dim() - 1)), 0)


def slots_to_buffer(order: BufferOrder, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy rows of slots [N, ...] to the buffer [C, ...]. Differentiable; gradients of unused rows are undefined."""
    return _Gather.apply(order.slot_row_C, order.is_used_C, order.buffer_row_N, None, *tensors)


def buffer_to_slots(order: BufferOrder, y_CH: Tensor) -> Tensor:
    """Copy rows of the buffer back to the slots. Differentiable; unused rows of the slots are undefined."""
    return _Gather.apply(order.buffer_row_N, None, order.slot_row_C, order.is_used_C, y_CH)[0]
