"""Pipeline schedules: one declaration each, of everything that other code asks of them.

A schedule is selected by --pipeline-schedule, which is read here only; `get_schedule` returns the declaration of the
one that runs. Its order is in moe_trainer/pipeline/orders.py under the same key. A declaration, in schedule_kinds/,
states for every `ScheduleCapability` that it acts, that the flags that demand it are rejected and why, or that they
have no effect and why.
"""

from types import MappingProxyType
from typing import Any

from arguments.mechanisms.schedule_kinds.declaration import PIPELINE_SCHEDULE, ScheduleDeclaration
from arguments.mechanisms.schedule_kinds.interleaved import INTERLEAVED
from arguments.mechanisms.schedule_kinds.one_f_one_b import ONE_F_ONE_B
from arguments.mechanisms.schedule_kinds.zero_bubble import ZERO_BUBBLE

SCHEDULES: tuple[ScheduleDeclaration, ...] = (
    ONE_F_ONE_B,
    INTERLEAVED,
    ZERO_BUBBLE,
)
BY_KEY = MappingProxyType({each.key: each for each in SCHEDULES})
"""Schedules by the value of the flag."""
NAMES = tuple(BY_KEY)


def default_schedule(num_chunks: int) -> ScheduleDeclaration:
    """Return the schedule of ranks with so many chunks (virtual stages) if no flag asks for one."""
    return next(each for each in SCHEDULES if each.runs(num_chunks))


def asked_schedule(parallel: Any) -> ScheduleDeclaration | None:
    """Return the schedule that the flag asks for, also where there is nothing to schedule.

    Args:
        parallel: has the fields of ParallelArgs.
    """
    return BY_KEY.get(getattr(parallel, PIPELINE_SCHEDULE))


def get_schedule(parallel: Any, num_chunks: int = 1) -> ScheduleDeclaration:
    """Return the schedule that runs: one stage has nothing to wait for, so that the flag has no effect there.

    Args:
        parallel: as of `asked_schedule`.
        num_chunks: chunks of a rank, on which the default depends.
    """
    asked = asked_schedule(parallel) if parallel.pipeline_model_parallel_size > 1 else None
    return asked or default_schedule(num_chunks)
