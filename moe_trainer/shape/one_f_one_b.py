"""1F1B: one forward, one backward in turn. Pure; with one rank it is forward and backward of each microbatch.

A rank runs as many forwards ahead as there are stages behind it, then alternates, then finishes the backwards. So it never
holds the activations of more than (stages behind it) + 1 microbatches.

Source: PipeDream-Flush as Megatron-LM runs it (Narayanan et al. 2021, arXiv:2104.04473).
"""

from moe_trainer.shape.timetable import BACKWARD, FORWARD, Action, Order, Pair


def order(rank: int, num_ranks: int, num_microbatches: int, pairs: bool = False) -> Order:
    """The actions of one rank. pairs: see alternate."""
    forwards = [Action(FORWARD, 0, index) for index in range(num_microbatches)]
    backwards = [Action(BACKWARD, 0, index) for index in range(num_microbatches)]
    return alternate(forwards, backwards, num_ranks - rank - 1, pairs)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int, pairs: bool) -> Order:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that remain.

    pairs: the two in turn run as one step; with one more forward in the warm-up, for on the last stage of the pipeline a backward
    would else need the forward of its own pair.
    """
    warmup = min(warmup + pairs, len(forwards))
    found: list[Action | Pair] = [*forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards):
        found += [Pair(forward, backward)] if pairs else [forward, backward]
    return (*found, *backwards[len(forwards) - warmup:])
