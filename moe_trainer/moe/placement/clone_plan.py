"""Plan of which hot experts are cloned where, made alike on every rank from the global counts, on the device.

Per MoE layer and microbatch: a rank that receives more tokens than the average spills the surplus, taken from its
busiest experts; a rank below the average has spare capacity up to it, and slots for the weights of clones. Spilled
tokens and spare capacity, largest first, are laid on two lines of tokens, and a rank hosts the expert with which its
piece of the line overlaps most, as many tokens of it as are left. This is repeated: while rounds remain, only ranks
that this fills or that take all that is left of an expert host one, since others may fit better in the next round. An
expert is cloned more than once only if no single rank can take its surplus.

An expert's tokens are numbered over the source ranks in order, and on a source by token. The expert's own rank takes
the first ones, every clone a range of the others. So every rank knows which of its tokens go where, without another
message, and nothing is read by the host.

Source: ECHO, arXiv 2603.07685, 4.3.7. Its bin packing assigns one piece after the other, which takes a kernel launch or
more per piece; rounds take as many launches for any number of ranks. With the token counts of
tests/moe/test_clone_plan.py the largest load ends within a few percent of that of bin packing.

Shape letters: E experts, P expert-parallel ranks, S slots of a rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FITTING_ROUNDS = 3  # in which a rank hosts only what fits; more change the loads by less than a percent


class ClonePlan(NamedTuple):
    """The clone in every slot; int64 [P, S] on the device of the counts.

    Attributes:
        expert: its expert; in a slot without a clone the first expert of the rank.
        num_tokens: tokens of the expert that it computes; 0 without a clone. Slots of a rank are sorted by expert,
            those without a clone last.
        first: the first of these tokens.
    """

    expert: Tensor
    num_tokens: Tensor
    first: Tensor


def plan_clones(counts_E: Tensor, num_ranks: int, slots: int) -> ClonePlan:
    """Plan the clones of one dispatch; every rank gets the same plan from the same counts.

    Args:
        counts_E: int64, tokens of every expert over all ranks. Rank r owns experts [r * E / P, (r + 1) * E / P).
        num_ranks: expert-parallel size P.
        slots: clones that every rank can host.

    Raises:
        ValueError: if the number of ranks does not divide the number of experts.
    """
    if num_ranks < 1 or len(counts_E) % num_ranks:
        raise ValueError(f"{len(counts_E)} experts cannot be divided evenly over {num_ranks} ranks")
    spilled_E, spare_P = _spill(counts_E.view(num_ranks, -1))
    free_P = torch.full_like(spare_P, slots)
    hosted = counts_E.new_zeros(num_ranks, len(counts_E))  # tokens of an expert on a rank
    for left in range(FITTING_ROUNDS + slots, 0, -1):
        assigned_PE = _assign(spilled_E, torch.where(free_P > 0, spare_P, 0), only_fitting=left > slots)
        is_new = (assigned_PE > 0) & (hosted == 0)
        free_P = free_P - is_new.sum(1)
        hosted += assigned_PE
        spilled_E, spare_P = spilled_E - assigned_PE.sum(0), spare_P - assigned_PE.sum(1)
    return _fill_slots(hosted, counts_E, slots)


def _spill(counts_Pe: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that each expert should lose, and how many every rank is below the average.

    A rank's surplus comes from its busiest experts, so that few are cloned.
    """
    loads_P = counts_Pe.sum(1)
    average = (counts_Pe.sum() + len(counts_Pe) - 1) // len(counts_Pe)
    busiest, order = counts_Pe.sort(dim=1, descending=True, stable=True)
    surplus_P1 = (loads_P - average).clamp_(min=0).unsqueeze(1)
    from_busiest = torch.minimum((surplus_P1 - (busiest.cumsum(1) - busiest)).clamp_(min=0), busiest)
    return torch.zeros_like(counts_Pe).scatter_(1, order, from_busiest).flatten(), (average - loads_P).clamp_(min=0)


def _assign(spilled_E: Tensor, spare_P: Tensor, only_fitting: bool) -> Tensor:
    """Assign at most one expert to every rank with spare capacity; return the tokens, [P, E]."""
    tokens_E, expert_E = spilled_E.sort(descending=True, stable=True)
    spare, rank_P = spare_P.sort(descending=True, stable=True)
    end_E, end_P = tokens_E.cumsum(0), spare.cumsum(0).unsqueeze(1)
    overlap_PE = torch.minimum(end_P, end_E) - torch.maximum(end_P - spare.unsqueeze(1), end_E - tokens_E)
    overlap_P, index_P = overlap_PE.max(1)
    wanted = torch.where(overlap_P > 0, spare, 0)
    is_earlier_PP = (index_P.unsqueeze(1) == index_P).tril(-1)  # ranks before this one that host the same expert
    left_P = (tokens_E[index_P] - (is_earlier_PP * wanted).sum(1)).clamp_(min=0)
    taken_P = torch.minimum(wanted, left_P)
    if only_fitting:
        taken_P = torch.where(taken_P == torch.minimum(spare, tokens_E[0]), taken_P, 0)
    assigned_PE = spilled_E.new_zeros(len(spare_P), len(spilled_E))
    return assigned_PE.index_put_((rank_P, expert_E[index_P]), taken_P)


def _fill_slots(hosted_PE: Tensor, counts_E: Tensor, slots: int) -> ClonePlan:
    """Number the slots of every rank by expert, and the tokens of an expert's clones by rank, from its last one."""
    num_ranks, num_experts = hosted_PE.shape
    index_E = torch.arange(num_experts, device=counts_E.device)
    expert_PS = torch.where(hosted_PE > 0, index_E, num_experts).sort(dim=1)[0][:, :slots]
    if slots > num_experts:
        expert_PS = torch.nn.functional.pad(expert_PS, (0, slots - num_experts), value=num_experts)
    is_used = expert_PS < num_experts
    own_P1 = torch.arange(0, num_experts, num_experts // num_ranks, device=counts_E.device).unsqueeze(1)
    expert_PS = torch.where(is_used, expert_PS, own_P1)
    tokens_PS = hosted_PE.gather(1, expert_PS) * is_used
    first_PS = counts_E[expert_PS] - hosted_PE.cumsum(0).gather(1, expert_PS)
    return ClonePlan(expert_PS, tokens_PS, first_PS)
