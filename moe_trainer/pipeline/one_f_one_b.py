"""1F1B: one forward, one backward in turn. Pure; with one rank it is forward and backward of each microbatch.

A rank runs as many forwards ahead as there are stages behind it, then alternates, then finishes the backwards. So it never
holds the activations of more than (stages behind it) + 1 microbatches.

Source: PipeDream-Flush as Megatron-LM runs it (Narayanan et al. 2021, arXiv:2104.04473).
"""

from moe_trainer.pipeline.plan import BACKWARD, FORWARD, Action, Order


def order(rank: int, num_ranks: int, num_microbatches: int) -> Order:
    """The actions of one rank."""
    forwards = [Action(FORWARD, 0, index) for index in range(num_microbatches)]
    backwards = [Action(BACKWARD, 0, index) for index in range(num_microbatches)]
    return alternate(forwards, backwards, num_ranks - rank - 1)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Order:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forwards))
    found = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        found += [forward, backward]
    return (*found, *backwards[len(forwards) - warmup:])
