"""Which benchmark tasks are run, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
        uses_chat_template: prompts are written as conversations.
    """

    tasks: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: Mapping[str, int] | int | None = None
    limit: int | None = None
    bootstrap_iters: int = 1000
    runs_code: bool = False
    uses_chat_template: bool = False

    def get_num_fewshot(self, task: str) -> int | None:
        """Return the examples before each question of a task, None for what the task says."""
        return self.num_fewshot.get(task) if isinstance(self.num_fewshot, Mapping) else self.num_fewshot


def split_names(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a list such as ["a,b", "c"], each once."""
    names = (name.strip() for word in words for name in word.split(","))
    return tuple(dict.fromkeys(name for name in names if name))
