"""Which order of work a run has: what `pipeline/schedule.py` carries out, and what planner/ reckons with. Pure."""

from __future__ import annotations

from moe_trainer.shape import interleaved, one_f_one_b
from moe_trainer.shape.timetable import Order
from moe_trainer.shape.zero_bubble import split_backward


def orders(kind: str, num_ranks: int, num_chunks: int, num_microbatches: int, *, group_size: int | None = None,
           pairs: bool = False, head_lag: int | None = None) -> list[Order]:
    """By rank, its actions. kind: "1f1b", "interleaved" or "zero-bubble".

    group_size: microbatches that a virtual stage runs in a row; None: the number of ranks. pairs: forwards and backwards run in
    pairs. head_lag: the weight gradient of the output layer, in the last chunk, waits for so many microbatches (0: for all).
    """
    if num_chunks == 1:
        found = [one_f_one_b.order(rank, num_ranks, num_microbatches, pairs) for rank in range(num_ranks)]
    else:
        found = [interleaved.order(rank, num_ranks, num_chunks, num_microbatches, group_size or num_ranks, pairs)
                 for rank in range(num_ranks)]
    if kind == "zero-bubble":
        return [split_backward(order, rank) for rank, order in enumerate(found)]
    if head_lag is not None:
        found[-1] = split_backward(found[-1], head_lag or None, num_chunks - 1)
    return found
