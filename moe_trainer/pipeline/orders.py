"""Pipeline schedules as pure orders: which action every rank runs when.

`pipeline/schedule.py` executes the orders; `estimate/` predicts memory and time from them.

* 1F1B: PipeDream-Flush as Megatron-LM runs it (Narayanan et al. 2021, arXiv:2104.04473).
* Interleaved 1F1B: several chunks per rank, same source, with Megatron-LM's order and warm-up.
* Zero bubble: schedule ZB-H1 (Qi et al. 2023, arXiv:2401.10241), also applied to the interleaved order.

docs/design/pipeline.md says why torch.distributed.pipelining is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from arguments.mechanisms.schedule_kinds.declaration import ScheduleDeclaration
from arguments.mechanisms.schedules import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, get_schedule
from arguments.parallel import ParallelArgs
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, WEIGHT, Action, Order, Pair, step_actions


@dataclass(frozen=True)
class ScheduleKind:
    """What determines the orders of a pipeline.

    Attributes:
        num_chunks: chunks of the model on a rank.
        group_size: consecutive microbatches per virtual stage; None for the number of ranks.
        pairs: run forwards and backwards in pairs (--overlap-moe-expert-parallel-comm).
        head_lag: microbatches by which the output layer's weight gradient is deferred, in the last chunk; 0 defers all,
            None none.
    """

    schedule: ScheduleDeclaration = ONE_F_ONE_B
    num_chunks: int = 1
    group_size: int | None = None
    pairs: bool = False
    head_lag: int | None = None

    @classmethod
    def of_flags(cls, parallel: ParallelArgs, num_chunks: int) -> ScheduleKind:
        """Return the kind that the flags select for ranks with so many chunks."""
        return cls(
            get_schedule(parallel, num_chunks),
            num_chunks,
            parallel.microbatch_group_size_per_vp_stage,
            parallel.overlap_moe_expert_parallel_comm,
            parallel.wgrad_deferral_limit if parallel.has_deferred_head_wgrad else None,
        )

    @property
    def has_wgrad_actions(self) -> bool:
        """Whether W actions compute deferred weight gradients; otherwise the end of the backward does."""
        return self.schedule.splits_backward or self.head_lag is not None

    def orders(self, num_ranks: int, num_microbatches: int) -> list[Order]:
        """Return the actions of every rank."""
        make_order = ORDERS[self.schedule.key]
        orders = [make_order(self, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
        if self.head_lag is not None:
            orders[-1] = split_backward(orders[-1], self.head_lag or None, self.num_chunks - 1)
        return orders


def one_f_one_b_order(kind: ScheduleKind, rank: int, num_ranks: int, num_microbatches: int) -> Order:
    """Return one rank's 1F1B order.

    The warm-up has as many forwards as there are later stages, so a rank holds the activations of at most
    (later stages + 1) microbatches.
    """
    forwards = [Action(FORWARD, 0, index) for index in range(num_microbatches)]
    backwards = [Action(BACKWARD, 0, index) for index in range(num_microbatches)]
    return _alternate(forwards, backwards, num_ranks - rank - 1, kind.pairs)


def interleaved_order(kind: ScheduleKind, rank: int, num_ranks: int, num_microbatches: int) -> Order:
    """Return one rank's interleaved 1F1B order.

    A group of microbatches (--microbatch-group-size-per-virtual-pipeline-stage; the last one may be smaller) runs
    through the rank's first chunk, then through its second, and so on, before the next group starts. Backwards take the
    same groups with the chunks reversed. The bubble shrinks by the number of chunks, for as many times the messages.
    """
    num_chunks, group_size = kind.num_chunks, kind.group_size or num_ranks
    table = [
        (chunk, microbatch)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]
    forwards = [Action(FORWARD, chunk, microbatch) for chunk, microbatch in table]
    backwards = [Action(BACKWARD, num_chunks - 1 - chunk, microbatch) for chunk, microbatch in table]
    return _alternate(forwards, backwards, 2 * (num_ranks - rank - 1) + (num_chunks - 1) * group_size, kind.pairs)


def zero_bubble_order(kind: ScheduleKind, rank: int, num_ranks: int, num_microbatches: int) -> Order:
    """Return one rank's order of ZB-H1: that of 1F1B or of the virtual stages, with separate weight gradients."""
    make_order = one_f_one_b_order if kind.num_chunks == 1 else interleaved_order
    return split_backward(make_order(kind, rank, num_ranks, num_microbatches), rank)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int, pairs: bool) -> Order:
    """Return `warmup` forwards, then forwards and backwards in alternation, then the remaining backwards.

    With `pairs` a forward and a backward form one step. The warm-up is one forward longer then: on the last stage a
    backward would otherwise need the forward of its own pair.
    """
    warmup = min(warmup + pairs, len(forwards))
    order: list[Action | Pair] = [*forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [Pair(forward, backward)] if pairs else [forward, backward]
    return (*order, *backwards[len(forwards) - warmup :])


def split_backward(order: Order, lag: int | None, chunk: int | None = None) -> Order:
    """Insert a W action (weight gradients) after every backward, `lag` backwards late; the remaining ones come last.

    Only the gradient of a chunk's input delays the previous stage. Backward therefore leaves out the weight gradients
    (parallel/weight_grads.py), and W computes them where the rank would otherwise be idle. With `lag` equal to the
    rank, the last rank defers longest and no rank holds more microbatches than the first rank does under 1F1B. The
    bubble shrinks from (pp - 1)(F + B + W) to (pp - 1)(F + B - W). Without `lag` all W actions come last; with `chunk`
    only the backwards of that chunk are split.
    """
    split: list[Action | Pair] = []
    deferred: list[Action] = []
    for step in order:
        split.append(step)
        for action in step_actions(step):
            if action.kind == BACKWARD and chunk in (None, action.chunk):
                deferred.append(action._replace(kind=WEIGHT))
                if lag is not None and len(deferred) > lag:
                    split.append(deferred.pop(0))
    return (*split, *deferred)


ORDERS: Mapping[str, Callable[[ScheduleKind, int, int, int], Order]] = MappingProxyType(
    {
        ONE_F_ONE_B.key: one_f_one_b_order,
        INTERLEAVED.key: interleaved_order,
        ZERO_BUBBLE.key: zero_bubble_order,
    }
)
"""Order of a rank by key of the schedule: from the kind, the rank, the number of ranks and that of microbatches."""
