"""Interleaved 1F1B (virtual stages): every rank holds several chunks and passes through them group by group. Pure.

Microbatches run in groups (--microbatch-group-size-per-virtual-pipeline-stage, default: the pipeline size): a group goes
through the rank's first chunk, then through its second, and so on, before the next group begins. Backward passes take the same
groups with the chunks reversed. The bubble shrinks by the number of chunks, for as many times the messages.

Source: Narayanan et al. 2021 (arXiv:2104.04473), with the order and the warm-up of Megatron-LM.
"""

from moe_trainer.shape.one_f_one_b import alternate
from moe_trainer.shape.timetable import BACKWARD, FORWARD, Action, Order


def order(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int, pairs: bool = False) -> Order:
    """The actions of one rank. pairs: see one_f_one_b.alternate."""
    table = _table(num_chunks, num_microbatches, group_size)
    forwards = [Action(FORWARD, chunk, microbatch) for chunk, microbatch in table]
    backwards = [Action(BACKWARD, num_chunks - 1 - chunk, microbatch) for chunk, microbatch in table]
    return alternate(forwards, backwards, 2 * (num_ranks - rank - 1) + (num_chunks - 1) * group_size, pairs)


def _table(num_chunks: int, num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of forward passes; the last group may be smaller."""
    return [
        (chunk, microbatch)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]
