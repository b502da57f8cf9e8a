"""Which tasks are run, and access to the harness that runs them, an optional library."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moe_trainer.backends import import_problem
from moe_trainer.errors import UserError
from moe_trainer.evaluation.routing import RoutingCounter

# The libraries read all but the last when they are imported. The last: a process that trains must not fork.
_ENVIRONMENT = (
    ("HF_HUB_OFFLINE", "1"),
    ("HF_DATASETS_OFFLINE", "1"),
    ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
    ("DISABLE_MULTIPROC", "1"),
)


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks are run, and how.

    Attributes:
        tasks: names of tasks and groups.
        include_path: folder with task files of the user.
        num_fewshot: examples before each question, for all tasks or by task; None for what the task says.
        limit: number of questions of each task; None for all.
        bootstrap_iters: resamplings for standard errors without a closed form; 0 for no standard errors.
        runs_code: tasks may run code that the model writes.
    """

    tasks: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: Mapping[str, int] | int | None = None
    limit: int | None = None
    bootstrap_iters: int = 1000
    runs_code: bool = False

    def get_num_fewshot(self, task: str) -> int | None:
        """Return the examples before each question of a task, None for what the task says."""
        return self.num_fewshot.get(task) if isinstance(self.num_fewshot, Mapping) else self.num_fewshot


def split_names(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a list such as ["a,b", "c"], each once."""
    names = (name.strip() for word in words for name in word.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


class TaskRunner(Protocol):
    """Tasks that were loaded; see lm_eval_model.py."""

    def run(self, model: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class TaskEvaluation:
    """Tasks, and the model that they are run on.

    Attributes:
        model: TrainedModel of lm_eval_model.py.
        counter: of tokens per expert; None where they are not counted.
    """

    runner: TaskRunner
    model: Any
    counter: RoutingCounter | None = None


def open_harness() -> Any:
    """Import lm_eval_model.py. Tasks are read from this machine unless the environment sets HF_HUB_OFFLINE=0.

    Raises:
        UserError: if lm-eval is not installed.
    """
    for name, value in _ENVIRONMENT:
        os.environ.setdefault(name, value)
    if (problem := import_problem("lm_eval")) is not None:
        raise UserError(f"tasks need EleutherAI's harness, but {problem} (pip install lm-eval)")
    return importlib.import_module("moe_trainer.evaluation.lm_eval_model")
