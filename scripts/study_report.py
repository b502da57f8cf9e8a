"""The report of scripts/study_finermoe.py: tables, intervals over seeds and pictures of the results of its runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_trainer.comparison.intervals import Interval, difference, interval
from moe_trainer.drawing.line_chart import LineChart
from moe_trainer.drawing.load_map import Panel, load_map
from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.drawing.report_page import Figure, write_report
from moe_trainer.drawing.svg import BLUE, GREEN, INK, ORANGE
from moe_trainer.io import atomic_write
from scripts.provenance import provenance_line

MAX_SEEDS = 10
COLORS = MappingProxyType({"dense": INK, "copies": ORANGE, "granular": GREEN, "finermoe": BLUE})
_TOKENS = "million tokens after upcycling"

Results = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Arm:
    """One kind of model: short name, title, parameters, parameters that a token uses, training FLOPs of a token."""

    name: str
    title: str
    parameters: int
    active: int
    flops: float


def of_arm(results: Results, arm: str) -> list[dict[str, Any]]:
    """Return the results of a kind of model, by seed."""
    return sorted((result for result in results if result["arm"] == arm), key=lambda result: result["seed"])


def loss_difference(results: Results, arm: str, other: str, point: int = -1) -> Interval:
    """Return how much higher the validation loss of `arm` is than that of `other`, seed by seed.

    Runs of one seed start from one dense model and read one order of documents, so what these change cancels.

    Args:
        results: of all runs.
        arm: a kind of model.
        other: another one.
        point: which evaluation; by default the last.
    """
    losses = [[run["curve"][point][1] for run in of_arm(results, name)] for name in (arm, other)]
    return difference(*losses, paired=True)


def routing_summary(tokens_per_expert: Sequence[Sequence[int]]) -> tuple[float, float, int]:
    """Return the mean entropy of layers (1 is balanced), the largest load over its mean, and the dead experts."""
    entropies, largest = [], 0.0
    for loads in tokens_per_expert:
        shares = [load / sum(loads) for load in loads]
        entropies.append(-sum(share * math.log(share) for share in shares if share) / math.log(len(loads)))
        largest = max(largest, max(shares) * len(loads))
    return statistics.mean(entropies), largest, sum(load == 0 for loads in tokens_per_expert for load in loads)


def conclusion(results: Results, arm: Arm, other: Arm) -> tuple[str, ...]:
    """Return a row with the difference of two kinds of models and what it means."""
    found = loss_difference(results, arm.name, other.name)
    meaning = (
        f"{arm.title} is {'worse' if found.mean > 0 else 'better'}" if found.excludes_zero else "not distinguished"
    )
    return f"{arm.title} - {other.title}", f"{found.mean:+.4f}", f"{found.half:.4f}", meaning


def main_table(arms: Sequence[Arm], results: Results) -> list[str]:
    """Return the table of all kinds of models."""
    has_task = all(result["accuracy"] for result in results if result["arm"] != "start")
    columns = ["model", "parameters", "active", "FLOPs per token", "tokens/s", "loss at start", "loss", "bits per byte"]
    # The validation text is the same in all runs. Its bytes are counted for the dense model.
    counted = of_arm(results, arms[0].name)[0]
    bits = counted["tokens"] / counted["bytes"] / math.log(2.0)
    rows = []
    for arm in arms:
        runs = of_arm(results, arm.name)
        cells = [
            arm.title,
            f"{arm.parameters / 1e6:.2f} M",
            f"{arm.active / 1e6:.2f} M",
            f"{arm.flops / arms[0].flops:.2f} x dense",
            f"{statistics.median(run['tokens_per_s'] for run in runs):,.0f}",
            *(interval([run[name] for run in runs]) for name in ("loss_at_start", "loss")),
            interval([run["loss"] * bits for run in runs]),
        ]
        if has_task:
            cells.append(interval([run["accuracy"]["acc_norm"][0] for run in runs]))
        rows.append(cells)
    return markdown_table([*columns, *(["next line"] if has_task else [])], rows)


def routing_table(arms: Sequence[Arm], results: Results) -> list[str]:
    """Return the table of the routing of all kinds of models with experts."""
    rows = []
    for arm in arms:
        runs = of_arm(results, arm.name)
        if "tokens_per_expert" in runs[0]:
            entropies, largest, dead = zip(*(routing_summary(run["tokens_per_expert"]) for run in runs), strict=True)
            without = f"{', '.join(map(str, dead))} of {sum(map(len, runs[0]['tokens_per_expert']))}"
            rows.append((arm.title, f"{statistics.mean(entropies):.3f}", f"{max(largest):.2f}", without))
    return markdown_table(("model", "entropy", "fullest expert", "experts without a token"), rows)


def runs_table(arms: Sequence[Arm], results: Results) -> list[str]:
    """Return the table of the losses of every run."""
    rows = []
    for start in of_arm(results, "start"):
        runs = [run for arm in arms for run in of_arm(results, arm.name) if run["seed"] == start["seed"]]
        rows.append((start["seed"], *(f"{run['loss']:.4f}" for run in (start, *runs))))
    return markdown_table(("seed", "dense before", *(arm.title for arm in arms)), rows)


def report_lines(arms: Sequence[Arm], results: Results, dense_tokens: int, tokens: int) -> list[str]:
    """Return the report as Markdown."""
    seeds = len(of_arm(results, arms[0].name))
    hours = sum(result["seconds"] for result in results) / 3600
    validation_tokens = of_arm(results, arms[0].name)[0]["tokens"]
    return [
        "# FineRMoE, copies, pieces and a dense model at equal tokens",
        "",
        f"{provenance_line(software='torch ' + version('torch'))}. Method: scripts/study_finermoe.py, "
        f"{hours:.2f} core hours.",
        "",
        f"A dense model is trained on {dense_tokens:,} tokens of the sources of Python's library, once for each of "
        f"{seeds} seeds. From each, four models are trained on with {tokens:,} tokens: the dense model itself, and its "
        "upcycled forms. All have the same data in the same order, batch, optimizer and learning rates. The loss is "
        f"that of {validation_tokens:,} tokens of documents that no model was trained on, in nats per token. "
        f"`+-` is the 95 % interval over the {seeds} seeds by Student's t distribution.",
        "",
        *main_table(arms, results),
        "",
        "## Differences",
        "",
        "Of the final losses, seed by seed; negative: the first has the lower loss.",
        "",
        *markdown_table(
            ("pair", "difference", "+-", "result"),
            [conclusion(results, two, one) for one, two in combinations(arms, 2)],
        ),
        "",
        "Each interval stands alone: of six, one that excludes zero by chance is not rare (up to 26 %).",
        "",
        "![Validation loss](loss.svg)",
        "",
        "![Difference to the dense model](difference.svg)",
        "",
        "## Routing",
        "",
        "Over the last tenth of the logged iterations. Entropy is that of a layer's loads over its maximum, the mean "
        "of layers and seeds. The fullest expert is that of any layer, relative to an even share.",
        "",
        *routing_table(arms, results),
        "",
        "![Load of experts](routing.svg)",
        "",
        "## Every run",
        "",
        *runs_table(arms, results),
        "",
        *limits(arms, seeds, tokens),
    ]


def limits(arms: Sequence[Arm], seeds: int, tokens: int) -> list[str]:
    """Return what the study can and cannot show."""
    actives = ", ".join(f"{arm.title} {arm.active / 1e6:.2f} M" for arm in arms)
    return [
        "## What this shows, and what it cannot",
        "",
        "It can show that all ways of upcycling train, where they start, that routing stays alive, and large "
        "differences at this size.",
        "",
        f"- **Equal tokens are not equal cost.** Parameters that a token uses: {actives}. A model with more of them "
        "is expected to have the lower loss. A difference between two kinds is one of the whole recipe.",
        f"- **Size.** A few million parameters and {tokens:,} tokens after upcycling, where the paper's dense models "
        "have 0.5 to 7 billion. An order at this size need not hold at another.",
        f"- **Seeds.** {seeds} seeds vary the initialization, the order of documents and the draws of upcycling, not "
        "the choice of documents.",
        "- **Tuning.** One learning rate, balancing coefficient and shape for each kind, none of them tuned. The best "
        "rate of each kind can differ.",
        "- **Text.** Python sources only. The tokenizer has seen the validation text.",
        "- **Next line** is a task of multiple choice from the validation text (four choices, so 0.25 by chance; "
        "accuracy normalized by bytes). So few questions distinguish only large differences.",
        "- **Speed** is that of one thread of this machine next to other runs, in fp32. It says nothing about a GPU.",
        "",
    ]


def loss_picture(arms: Sequence[Arm], results: Results) -> str:
    """Draw the validation loss of every seed (thin) and the mean of the seeds."""
    curves = {
        arm.name: [[(tokens / 1e6, loss) for tokens, loss in run["curve"]] for run in of_arm(results, arm.name)]
        for arm in arms
    }
    losses = [loss for runs in curves.values() for points in runs for _, loss in points]
    last = curves[arms[0].name][0][-1][0]
    heading = "Validation loss: means of the seeds, and single seeds (thin)"
    chart = LineChart("Validation loss", heading, (0.0, last), losses, (_TOKENS, "nats per token"))
    for arm in arms:
        for points in curves[arm.name]:
            chart.line(points, COLORS[arm.name], width=1, opacity=0.35)
        means = [(at[0][0], statistics.mean(loss for _, loss in at)) for at in zip(*curves[arm.name])]
        chart.line(means, COLORS[arm.name], f"{arm.title}: {means[-1][1]:.4f}", width=2.5)
    chart.legend((COLORS[arm.name], arm.title) for arm in arms)
    return chart.svg()


def difference_picture(arms: Sequence[Arm], results: Results) -> str:
    """Draw the difference of the losses to the dense model's with its interval, at every evaluation."""
    dense, *others = arms
    tokens = [point[0] / 1e6 for point in of_arm(results, dense.name)[0]["curve"]]
    found = {
        arm.name: [loss_difference(results, arm.name, dense.name, point) for point in range(len(tokens))]
        for arm in others
    }
    ends = [
        each.mean + sign * each.half for intervals in found.values() for each in intervals for sign in (-1.0, 0.0, 1.0)
    ]
    heading = "Validation loss minus the dense model's: means and 95 % intervals over the seeds"
    names = _TOKENS, "nats per token; below 0 is better"
    chart = LineChart("Difference to the dense model", heading, (0.0, tokens[-1]), [0.0, *ends], names)
    chart.line([(0.0, 0.0), (tokens[-1], 0.0)], INK, width=1.5)
    # Side by side, so that intervals of one evaluation do not cover each other; the ends stay inside the axes.
    gap, last = tokens[-1] * 0.011, len(tokens) - 1
    for number, arm in enumerate(others):
        shifts = [0 if at == 0 else 1 - len(others) if at == last else -1 for at in range(len(tokens))]
        places = [at + gap * (number + shift) for at, shift in zip(tokens, shifts, strict=True)]
        color, intervals = COLORS[arm.name], found[arm.name]
        chart.line([(place, each.mean) for place, each in zip(places, intervals, strict=True)], color, width=1.5)
        for place, each, count in zip(places, intervals, tokens, strict=True):
            chart.line([(place, each.mean - each.half), (place, each.mean + each.half)], color)
            tip = f"{arm.title}, {count:.2f} million tokens: {each}"
            chart.picture.circle(*chart.at(place, each.mean), 4, color, tip)
    chart.legend((COLORS[arm.name], f"{arm.title}: {found[arm.name][-1]}") for arm in others)
    return chart.svg()


def routing_picture(arms: Sequence[Arm], results: Results) -> str:
    """Draw the load of every expert in the runs of the first seed."""
    runs = [(arm.title, of_arm(results, arm.name)[0].get("tokens_per_expert")) for arm in arms]
    panels = [Panel(title, loads) for title, loads in runs if loads]
    heading = "Tokens of experts, over the mean of their layer, first seed"
    return load_map("Load of experts", heading, range(len(panels[0].loads)), panels)


def write_study_report(folder: Path, arms: Sequence[Arm], results: Results, dense_tokens: int, tokens: int) -> None:
    """Write report.md, report.html, the pictures and results.json into the folder of a study."""
    figures = [
        Figure("Validation loss", loss_picture(arms, results)),
        Figure("Difference to the dense model", difference_picture(arms, results)),
        Figure("Routing", routing_picture(arms, results)),
    ]
    lines = report_lines(arms, results, dense_tokens, tokens)
    for name, figure in zip(("loss", "difference", "routing"), figures, strict=True):
        with atomic_write(folder / f"{name}.svg") as file:
            file.write(figure.svg)
    with atomic_write(folder / "report.md") as file:
        file.write("\n".join(lines))
    with atomic_write(folder / "results.json") as file:
        json.dump(results, file, indent=1)
    text = [line for line in lines if not line.startswith("![")]
    title, command = lines[0].removeprefix("# "), "python scripts/study_finermoe.py OUT"
    write_report(folder / "report.html", title, command, figures, text)
