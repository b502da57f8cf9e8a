"""Names of --tasks that stand for several tasks, and tables of their results as in the papers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.errors import UserError
from moe_trainer.evaluation.finermoe import FINERMOE
from moe_trainer.evaluation.task_group import GroupTask, TaskGroup

GROUPS: tuple[TaskGroup, ...] = (
    FINERMOE,  # arXiv 2603.13364
)


def expand_tasks(
    names: Sequence[str], num_fewshot: int | None
) -> tuple[tuple[str, ...], Mapping[str, int] | int | None]:
    """Replace names of groups by their tasks; returns the names and the examples, `num_fewshot` for all if given."""
    groups = {group.name: group.tasks for group in GROUPS if group.name in names}
    if not groups:
        return tuple(names), num_fewshot
    of_groups = {name: [each.task for each in tasks] for name, tasks in groups.items()}
    expanded = tuple(dict.fromkeys(task for name in names for task in of_groups.get(name, [name])))
    if num_fewshot is not None:
        return expanded, num_fewshot
    tasks = (each for tasks in groups.values() for each in tasks)
    return expanded, {each.task: each.num_fewshot for each in tasks if each.num_fewshot is not None}


def results_table(files: Sequence[Path]) -> str:
    """Return the Markdown table of results files, one line each: the tasks of a group in percent and their mean.

    If the files have tasks of no group, the table has the tasks of all files instead, each with its first metric.

    Raises:
        UserError: if a file is not one that evaluate.py --output wrote.
    """
    results = [(path, _read(path)) for path in files]
    names = {name for _, found in results for name in found}
    columns = next((list(group.tasks) for group in GROUPS if names & {each.task for each in group.tasks}), [])
    if not columns:
        ordered = dict.fromkeys(name for _, found in results for name in found)
        columns = [GroupTask(name, name, None, ()) for name in ordered]
    with_mean = all(_is_share(each, found) for _, found in results for each in columns)
    rows = []
    for path, found in results:
        values = [_value(each, found) for each in columns]
        row = ["-" if value is None else f"{value * 100:.2f}" if with_mean else f"{value:.4f}" for value in values]
        known = [value for value in values if value is not None]
        if with_mean:
            # a mean over fewer tasks cannot be compared
            row.append(f"{sum(known) / len(known) * 100:.2f}" if known and len(known) == len(columns) else "-")
        rows.append([path.stem, *row])
    head = ["model", *(each.title for each in columns), *(["AVG"] if with_mean else [])]
    return "\n".join(markdown_table(head, rows))


def _is_share(task: GroupTask, found: Mapping[str, Any]) -> bool:
    """Return whether the column is a share (an accuracy), or missing."""
    if task.metrics:
        return True
    name = next((name for name, _ in _metrics(found.get(task.task, {}))), "acc")
    return name.startswith(("acc", "exact_match", "pass"))


def _value(task: GroupTask, found: Mapping[str, Any]) -> float | None:
    metrics = dict(_metrics(found.get(task.task, {})))
    for wanted in task.metrics:
        for name, value in metrics.items():
            if name == wanted or name.partition(",")[0] == wanted:
                return value
    return None if task.metrics else next(iter(metrics.values()), None)


def _metrics(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if "," in name and "_stderr" not in name and isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["results"]
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise TypeError("results is not a table of tasks")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"--table {path}: not a file that evaluate.py --output wrote ({error})") from None
    return found
