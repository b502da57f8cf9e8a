"""The ten tasks of FineRMoE's evaluation, and tables as in the paper.

Source: arXiv 2603.13364v1 for the tasks. Examples before a question: as is usual for these tasks (of the Qwen2.5 models
that FineRMoE continues, and of the harness); they are not known to be the paper's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.errors import UserError

GROUP = "finermoe"


@dataclass(frozen=True)
class PaperTask:
    """A column of the table: the harness's task or group, examples before a question, and the metrics to look for."""

    title: str
    task: str
    num_fewshot: int | None
    metrics: tuple[str, ...]


FINERMOE_TASKS = (
    PaperTask("MMLU", "mmlu", 5, ("acc",)),
    PaperTask("BBH", "bbh_cot_fewshot", 3, ("exact_match,get-answer", "exact_match")),
    PaperTask("HellaSwag", "hellaswag", 10, ("acc_norm",)),
    PaperTask("Winogrande", "winogrande", 5, ("acc",)),
    PaperTask("ARC-C", "arc_challenge", 25, ("acc_norm",)),
    PaperTask("ARC-E", "arc_easy", 25, ("acc_norm",)),
    PaperTask("AGIEval", "agieval_en", None, ("acc", "acc_norm")),
    PaperTask("MBPP", "mbpp", 3, ("pass_at_1", "pass@1")),
    PaperTask("GSM8K", "gsm8k", 4, ("exact_match,strict-match", "exact_match")),
    PaperTask("GPQA", "gpqa_main_n_shot", 5, ("acc_norm", "acc")),
)


def expand_tasks(
    names: Sequence[str], num_fewshot: int | None
) -> tuple[tuple[str, ...], Mapping[str, int] | int | None]:
    """Replace the group's name by its tasks; returns the names and the examples, `num_fewshot` for all if given."""
    if GROUP not in names:
        return tuple(names), num_fewshot
    own = [each.task for each in FINERMOE_TASKS]
    expanded = tuple(dict.fromkeys(task for name in names for task in (own if name == GROUP else [name])))
    if num_fewshot is not None:
        return expanded, num_fewshot
    return expanded, {each.task: each.num_fewshot for each in FINERMOE_TASKS if each.num_fewshot is not None}


def paper_table(files: Sequence[Path]) -> str:
    """Return the Markdown table of results files, one line each: the ten tasks in percent and their mean.

    If a file has none of the ten tasks, the table has the tasks of all files instead, each with its first metric.

    Raises:
        UserError: if a file is not one that evaluate.py --output wrote.
    """
    results = [(path, _read(path)) for path in files]
    columns = list(FINERMOE_TASKS)
    if not any(each.task in found for _, found in results for each in columns):
        names = dict.fromkeys(name for _, found in results for name in found)
        columns = [PaperTask(name, name, None, ()) for name in names]
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


def _is_share(task: PaperTask, found: Mapping[str, Any]) -> bool:
    """Return whether the column is a share (an accuracy), or missing."""
    if task in FINERMOE_TASKS:
        return True
    name = next((name for name, _ in _metrics(found.get(task.task, {}))), "acc")
    return name.startswith(("acc", "exact_match", "pass"))


def _value(task: PaperTask, found: Mapping[str, Any]) -> float | None:
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
