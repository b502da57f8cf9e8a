"""The report of a comparison: Markdown tables, and the curves of the losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from moe_trainer.comparison.intervals import difference, interval
from moe_trainer.comparison.runs import Run, RunGroup, common_end, environment_that_differs, settings_that_differ
from moe_trainer.drawing.line_chart import LineChart
from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.drawing.report_page import Figure
from moe_trainer.drawing.svg import CATEGORIES, GRAY, INK

COMPARISON_TITLE = "Comparison of runs"
_COLORS = (*CATEGORIES, INK, GRAY)
_POINTS = 120
_TALL = 3.0  # times the highest loss of the lowest run: the y axis ends there
_PAUSE = 20  # times the usual distance between two points


def comparison_lines(groups: Sequence[RunGroup]) -> list[str]:
    """Return the report as lines of Markdown."""
    members = [
        (
            group.name,
            ", ".join(run.name for run in group.runs),
            ", ".join("-" if seed is None else str(seed) for seed in group.seeds),
            ", ".join(dict.fromkeys(run.page["state"] for run in group.runs)),
        )
        for group in groups
    ]
    differing = [(f"`{name}`", values) for name, values in settings_that_differ(groups)]
    settings = [
        (name, *("-" if value is None else f"`{value}`" for value in values))
        for name, values in [*differing, *environment_that_differs(groups)]
    ]
    lines = [f"# {COMPARISON_TITLE}", "", "## Runs", "", *markdown_table(("group", "runs", "seeds", "state"), members)]
    lines += ["", "## Settings that differ", ""]
    lines += markdown_table(("setting", *(group.name for group in groups)), settings) if settings else ["None."]
    tokens, seconds = common_end(groups, "tokens"), common_end(groups, "wall_s")
    lines += ["", "## Losses", "", *_loss_notes(groups, tokens, seconds)]
    lines += _figure_rows(groups, _loss_figures(tokens, seconds, validation_sets(groups)), compares=True)
    lines += ["", "## Speed, memory and routing", "", *_figure_rows(groups, _other_figures(), compares=False)]
    findings = [
        f"- {run.name}: {each['text']}"
        for group in groups
        for run in group.runs
        for each in run.page.get("findings", ())
        if each["severity"] != "ok"
    ]
    return [*lines, "", "## Findings", "", *(findings or ["None."]), ""]


def _loss_notes(groups: Sequence[RunGroup], tokens: float | None, seconds: float | None) -> list[str]:
    parts = []
    if tokens is not None:
        parts.append(f"Equal tokens: {tokens:,.0f}, which all runs have seen.")
    if seconds is not None:
        parts.append(f"Equal time: {seconds:,.0f} s since the start.")
    parts.append("Training losses are means of the last twentieth before that point.")
    if any(len(group.runs) > 1 for group in groups):
        parts.append(
            "Intervals hold the mean of the seeds with 95 % (Student's t distribution); differences of groups with the "
            "same seeds are taken seed by seed, others are Welch's."
        )
    return [" ".join(parts), ""]


Figures = list[tuple[str, Callable[[Run], float | None]]]


def _loss_figures(tokens: float | None, seconds: float | None, sets: Sequence[str]) -> Figures:
    figures: Figures = []
    if tokens is not None:
        figures.append(("training loss at equal tokens", lambda run: run.loss_at("tokens", tokens)))
    if seconds is not None:
        figures.append(("training loss at equal time", lambda run: run.loss_at("wall_s", seconds)))
    figures += [(f"newest {name} loss", partial(Run.newest_validation, name=name)) for name in sets]
    return figures


def _other_figures() -> Figures:
    return [
        ("tokens/s", lambda run: run.throughput),
        ("goodput", lambda run: run.page["progress"].get("goodput")),
        ("peak memory in GiB", lambda run: run.memory_gib),
        ("max/mean expert load of the worst layer", lambda run: run.routing("load_max_over_mean", max)),
        ("normalized load entropy of the worst layer", lambda run: run.routing("load_entropy", min)),
        ("dead experts of the worst layer", lambda run: run.routing("dead_experts", max)),
    ]


def _figure_rows(groups: Sequence[RunGroup], figures: Figures, compares: bool) -> list[str]:
    """Return a table of figures, a row each; `compares`: with the differences from the first group."""
    first, *others = groups
    names = [f"{group.name} - {first.name}" for group in others] if compares else []
    rows, has_star = [], False
    for title, get in figures:
        found = [group.values(get) for group in groups]
        if not any(found):
            continue
        cells = [str(interval(values)) if values else "-" for values in found]
        for group, values in zip(others, found[1:]) if compares else ():
            if not values or not found[0]:
                cells.append("-")
                continue
            is_paired = group.seeds == first.seeds and len(values) == len(found[0]) == len(group.runs) > 1
            gap = difference(values, found[0], is_paired)
            cells.append(f"{gap}" + (" *" if gap.excludes_zero else ""))
            has_star |= gap.excludes_zero
        rows.append((title, *cells))
    lines = markdown_table(("figure", *(group.name for group in groups), *names), rows)
    return [*lines, "", "`*`: the interval excludes zero."] if has_star else lines


def comparison_figures(groups: Sequence[RunGroup]) -> list[Figure]:
    """Return the curves of the training losses, over tokens and time, and of each validation set, over iterations."""
    figures = []
    ends = [run.axis("wall_s")[-1] for group in groups for run in group.runs if len(run.axis("wall_s"))]
    time_name, time_unit = _time_unit(max(ends, default=0.0))
    for axis, name, factor in (("tokens", "million tokens", 1e6), ("wall_s", time_name, time_unit)):
        curves = [_curve(group, axis, factor) for group in groups] if common_end(groups, axis) is not None else []
        if any(curves):
            figures.append(_draw_losses(groups, curves, "Training loss", name))
    for each in validation_sets(groups):
        curves = [_validation_curve(group, each) for group in groups]
        if any(len(curve) > 1 for curve in curves):
            figures.append(_draw_losses(groups, curves, f"{each.capitalize()} loss", "iterations"))
    return figures


def validation_sets(groups: Sequence[RunGroup]) -> list[str]:
    """Return the names of the validation sets of all runs."""
    return list(dict.fromkeys(name for group in groups for run in group.runs for name in run.validations))


def _time_unit(seconds: float) -> tuple[str, float]:
    """Return the name of a unit of time for an axis, and its seconds."""
    return next((each for each in (("hours", 3600.0), ("minutes", 60.0)) if seconds >= 2 * each[1]), ("seconds", 1.0))


Curve = list[tuple[float, list[float]]]
"""Places on an axis, and the losses of all seeds there."""


def _curve(group: RunGroup, axis: str, factor: float) -> Curve:
    end = min(run.axis(axis)[-1] for run in group.runs)
    # of records, not evenly spaced: between the records of a short run the loss would be drawn as steps
    places = [at for at in group.runs[0].axis(axis) if at <= end]
    places = places[:: -max(1, math.ceil(len(places) / _POINTS))][::-1]
    found = [(at / factor, group.values(partial(Run.loss_at, axis=axis, end=at))) for at in places]
    return [(at, values) for at, values in found if len(values) == len(group.runs)]


def _validation_curve(group: RunGroup, name: str) -> Curve:
    curves = [{at: loss for at, loss in run.validations.get(name, ()) if loss is not None} for run in group.runs]
    shared = sorted(set(curves[0]).intersection(*curves))
    return [(at, [curve[at] for curve in curves]) for at in shared]


def _without_pauses(points: list[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the parts of a line between pauses: between two starts of a run there is no loss."""
    gaps = [after[0] - before[0] for before, after in pairwise(points)]
    longest = _PAUSE * statistics.median(gaps) if gaps else 0.0
    breaks = [at for at, gap in enumerate(gaps, 1) if gap > longest]
    yield from (points[begin:end] for begin, end in pairwise([0, *breaks, len(points)]))


def _draw_losses(groups: Sequence[RunGroup], curves: Sequence[Curve], title: str, name: str) -> Figure:
    known = [(group, points) for group, points in zip(groups, curves) if points]
    colors = [_COLORS[number % len(_COLORS)] for number in range(len(known))]
    # without the steep beginning; a run that diverged would make all others one line
    of_groups = [[value for _, values in points[len(points) // 20 :] for value in values] for _, points in known]
    limit = _TALL * max(min(map(max, of_groups)), 0.0)
    is_cut = max(map(max, of_groups)) > limit
    shown = [min(value, limit) for values in of_groups for value in values]
    last = max(points[-1][0] for _, points in known)
    heading = f"{title} over {name}"
    chart = LineChart(title, heading, (0.0, last), shown, (name, "nats per token"))
    for color, (group, points) in zip(colors, known, strict=True):
        if len(group.runs) > 1:
            chart.area([(x, min(values)) for x, values in points], [(x, max(values)) for x, values in points], color)
        means = [(x, statistics.mean(values)) for x, values in points]
        for part in _without_pauses(means):
            chart.line(part, color, f"{group.name}: {means[-1][1]:.4f}")
    chart.legend((color, group.name) for color, (group, _) in zip(colors, known, strict=True))
    has_seeds = any(len(group.runs) > 1 for group, _ in known)
    notes = ["Lines: means of the seeds; areas: from the lowest to the highest seed."] if has_seeds else []
    notes += [f"Losses above {limit:.4g} are drawn along the upper edge."] if is_cut else []
    return Figure(heading, chart.svg(), " ".join(notes))
