"""Plans next to what was measured: recipes with exact flags, of which half are fitted, and runs of functional tests.

`python scripts/plan.py calibrate` prints the tables, with --write into scripts/bench_results/planner.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from arguments import parse_args
from moe_trainer.estimate.calibrate import find_biases, plan_published_run
from moe_trainer.estimate.golden_runs import GOLDEN_RUNS, GoldenRun
from moe_trainer.estimate.hardware import GIB, find_hardware
from moe_trainer.estimate.holdout_runs import HOLDOUT_RUNS
from moe_trainer.estimate.plan import Plan, make_plan
from moe_trainer.estimate.published_runs import PUBLISHED_RUNS, PublishedRun
from moe_trainer.estimate.recipe_runs import RECIPE_RUNS
from moe_trainer.estimate.uncertainty import Residual, error_bar, published_residuals, residual

CORRECTING_RUNS = (*PUBLISHED_RUNS, *HOLDOUT_RUNS, *tuple(run for run in RECIPE_RUNS if run.is_fitted))
"""Runs that corrections and error bars are fitted to."""


@dataclass(frozen=True)
class PlannedValue:
    """A predicted and a measured value of one run, and the error bar of the prediction.

    `is_fitted`: whether corrections and error bars were fitted to it.
    """

    name: str
    predicted: float
    measured: float
    bar: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the error bar holds the truth, in logarithms as bars are fitted."""
        return abs(math.log(self.predicted / self.measured)) <= self.bar


@dataclass(frozen=True)
class GoldenComparison:
    """Seconds of an iteration, and GiB of the last pipeline stage."""

    time: PlannedValue
    memory: PlannedValue


def compare_recipes() -> list[PlannedValue]:
    """Plan the recipes; values are TFLOP/s per GPU."""
    found = []
    for run in RECIPE_RUNS:
        plan = plan_published_run(run)
        found.append(PlannedValue(run.name, plan.tflops, run.tflops, error_bar(plan).relative, run.is_fitted))
    return found


def plan_golden_run(run: GoldenRun) -> Plan:
    return make_plan(parse_args(run.argv(), run.gpus), run.gpus, find_hardware(run.hardware))


def fitted_residuals(plans: Mapping[PublishedRun, Plan]) -> list[Residual]:
    """Return the errors that error bars are fitted to: of these runs, and of the fitted functional tests."""
    found = published_residuals(find_biases(plans), plans)
    for run in GOLDEN_RUNS:
        if run.is_fitted:
            plan = plan_golden_run(run)
            found.append(residual(plan, "functional tests", math.log(plan.time.step / run.seconds)))
    return found


def compare_golden_runs() -> list[GoldenComparison]:
    """Plan the functional tests."""
    found = []
    for run in GOLDEN_RUNS:
        plan = plan_golden_run(run)
        name = f"{run.name}, {run.gpus}x{run.hardware.upper()}"
        time = PlannedValue(name, plan.time.step, run.seconds, error_bar(plan).relative, run.is_fitted)
        found.append(GoldenComparison(time, PlannedValue(name, plan.memory[-1].total / GIB, run.gib, 0.0)))
    return found


def accuracy_lines() -> Iterator[str]:
    """Yield the Markdown tables of recipes and functional tests."""
    recipes, golden = compare_recipes(), compare_golden_runs()
    yield from (
        "## Recipes of summer 2026",
        "",
        "Medians that Megatron-LM publishes with the complete command lines of its recipes "
        "(moe_trainer/estimate/recipe_runs.py). Corrections and error bars are fitted to some; the others test them.",
        "",
        "| run | published | predicted | error | bar | inside | fitted |",
        "|---|---|---|---|---|---|---|",
    )
    for row in recipes:
        yield (
            f"| {row.name} | {row.measured:.1f} | {row.predicted:.1f} | {100 * row.error:+.1f} % "
            f"| {100 * row.bar:.0f} % | {_word(row.is_inside)} | {_word(row.is_fitted)} |"
        )
    yield ""
    yield f"Not fitted: {_summary([row for row in recipes if not row.is_fitted])}. All: {_summary(recipes)}."
    yield from (
        "",
        "## Functional tests",
        "",
        "Seconds of an iteration and GiB at the peak of the last rank (moe_trainer/estimate/golden_runs.py). "
        "Small models with real routing on eight GPUs. Bars are fitted to the times of some, nothing to "
        "their memory.",
        "",
        "| case | seconds | predicted | error | bar | inside | fitted | GiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    for each in golden:
        time, memory = each.time, each.memory
        yield (
            f"| {time.name} | {time.measured:.3f} | {time.predicted:.3f} | {100 * time.error:+.0f} % "
            f"| {100 * time.bar:.0f} % | {_word(time.is_inside)} | {_word(time.is_fitted)} "
            f"| {memory.measured:.1f} | {memory.predicted:.1f} "
            f"| {100 * memory.error:+.0f} % |"
        )
    yield ""
    times = [each.time for each in golden if not each.time.is_fitted]
    yield f"Times, not fitted: {_summary(times)}. Memory: {_errors([each.memory for each in golden])}."
    yield ""


def _errors(rows: Sequence[PlannedValue]) -> str:
    errors = [100 * abs(row.error) for row in rows]
    return f"mean error {mean(errors):.1f} %, median {median(errors):.1f} %"


def _summary(rows: Sequence[PlannedValue]) -> str:
    return f"{_errors(rows)}, {sum(row.is_inside for row in rows)} of {len(rows)} inside their bars"


def _word(is_so: bool) -> str:
    return "yes" if is_so else "no"
