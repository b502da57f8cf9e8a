"""The picture of a search: speed against memory of all mappings that fit."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trainer.drawing.report_page import Figure
from moe_trainer.drawing.speed_memory import Candidate, speed_memory
from moe_trainer.estimate.hardware import GIB
from moe_trainer.estimate.parallel_configs import ParallelConfig
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.plan_pictures import plan_figures
from moe_trainer.estimate.search import RankedConfig, SearchResult


def search_figures(outcome: SearchResult) -> Iterator[Figure]:
    """Yield the pictures of a search: all mappings that fit, then the plan of the best one. None if nothing fits."""
    if not outcome.found:
        return
    caption = "Numbers are rows of the table. No mapping that fits is both faster and smaller than one on the front."
    yield Figure("Speed against memory", search_picture(outcome), caption)
    for figure in plan_figures(outcome.found[0].plan):
        yield Figure(f"{figure.heading} of the first mapping", figure.svg, figure.caption)


def search_picture(outcome: SearchResult) -> str:
    """Draw the mappings that fit, the user's own, and the published one."""
    best = [
        _ranked_candidate(each, f"{number}: {_sizes(each.mapping)}", "best")
        for number, each in enumerate(outcome.found, start=1)
    ]
    shown = {each.argv for each in outcome.found}
    others = [_ranked_candidate(each, "", "other") for each in outcome.fitting if each.argv not in shown]
    named = []
    if outcome.own is not None:
        named.append(_candidate(outcome.own, "your own", "your own mapping", "own"))
    if outcome.published is not None:
        run, plan = outcome.published
        named.append(_candidate(plan, "published", f"published: {run.name}", "published"))
    plan = outcome.found[0].plan
    return speed_memory(
        "Speed against memory of mappings",
        f"Mappings of {plan.world_size:,} x {plan.hardware.name} that fit",
        [*named, *best, *others],
        plan.hardware.usable_bytes / GIB,
        ("GiB of the fullest rank", "tokens/s/GPU, predicted"),
        {"best": "in the table", "other": "fits too", "own": "your own mapping", "published": "published mapping"},
    )


def _ranked_candidate(each: RankedConfig, label: str, kind: str) -> Candidate:
    return _candidate(each.plan, label, f"{label or _sizes(each.mapping)}; limited by: {each.bottleneck}", kind)


def _candidate(plan: Plan, label: str, name: str, kind: str) -> Candidate:
    memory, speed = plan.peak.total / GIB, plan.tokens_per_second
    return Candidate(memory, speed, label, f"{name}; {speed:,.0f} tokens/s/GPU, {memory:.1f} GiB", kind)


def _sizes(mapping: ParallelConfig) -> str:
    """Return the sizes above 1."""
    names = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")
    sizes = [f"{name.upper()}{getattr(mapping, name)}" for name in names if getattr(mapping, name) > 1]
    return " ".join(sizes) or "data parallel only"
