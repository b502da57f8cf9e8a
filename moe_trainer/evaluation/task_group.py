"""Tasks that a paper reports together, under a name that --tasks takes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupTask:
    """A column of the table: the harness's task or group, examples before a question, and the metrics to look for."""

    title: str
    task: str
    num_fewshot: int | None
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class TaskGroup:
    """Tasks under a name; `what` describes them in the help text."""

    name: str
    what: str
    tasks: Sequence[GroupTask]
