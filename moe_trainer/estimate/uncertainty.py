"""Error bars of predicted times, which grow with the distance from what the time model was calibrated on.

The bar of a plan is a sum: a base, and a term for every feature of the plan (`FEATURES`) that made published runs hard
to predict. Base and terms are fitted to the absolute errors |log(predicted / measured)| of published runs (accuracy.py
lists them) by quantile regression, so that LEVEL of them lie inside; runs of one model, machine, format and software
count as one, and each is corrected (corrections.py) by what runs of other series say. `cross_validate` refits without a
model's runs and counts how many of these lie inside. Features that no published run has (`UNTESTED_FEATURES`) cost
UNTESTED each, every doubling of a size beyond the published ones PER_DOUBLING, and every step between a mapping and the
nearest one that was tried (tried_mappings.py) PER_STEP. These three numbers are estimates without data.

With a hardware file that `plan.py calibrate --from` wrote, its runs replace the published ones.

Two plans of one command line share most of their error: they differ only by features that one of them has alone
(`comparison_bar`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, cast

from arguments.layer_pattern import uses_window, variants_of
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.dispatchers import SELECTABLE, DispatcherDeclaration, get_dispatcher
from arguments.mechanisms.formats import FLAGS
from arguments.mechanisms.schedule_kinds.declaration import ScheduleDeclaration
from arguments.mechanisms.schedules import SCHEDULES, get_schedule
from arguments.mechanisms.shardings import get_sharding
from moe_trainer.estimate.corrections import (
    Bias,
    exchanges_slowly,
    fit_factors,
    has_narrower_experts,
    launches_overlapped_attention,
)
from moe_trainer.estimate.interconnect import Interconnect
from moe_trainer.estimate.layer_time import LayerTime
from moe_trainer.estimate.memory import ChunkBytes
from moe_trainer.estimate.tried_mappings import steps_from_tried

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import CalibrationRun, Hardware
    from moe_trainer.estimate.plan import Plan
    from moe_trainer.estimate.published_runs import PublishedRun

LEVEL = 0.85
"""Fitted quantile.

Of models that were left out of the fit, 90 % of the runs then lie inside their bars.
"""
UNTESTED, PER_DOUBLING, PER_STEP = 0.15, 0.05, 0.02
MAX_STEPS = 6.0
"""Steps from the tried mappings after which the error bar grows no more."""
UNTRIED_MAPPING = "a mapping that no published run on such a machine used"
PUBLISHED_PARAMETERS = (16e9, 683e9)
PUBLISHED_GPUS = (8, 1024)
FITTED_HARDWARE, PUBLISHED_HARDWARE = ("h100", "gb200", "gb300"), ("h100", "gb200", "gb300", "b200", "b300")
ONE_RUN = 0.15
"""Base of a hardware file with a single run, which the fit meets exactly."""


def host_share(plan: Plan) -> float:
    """Return the share of an MoE layer's forward (else a layer's) in which the host launches kernels.

    At 1 the run is launch-bound.
    """
    args = plan.args
    times = LayerTime(args, Interconnect(plan.hardware), ChunkBytes(args, plan.vocab_rows))
    is_moe = any(times.sizes.pattern)
    return times.host_seconds(is_moe) / times.passes(is_moe)[0].compute


Features = Mapping[str, Callable[["Plan"], bool]]


def _unmeasured_dispatchers() -> Features:
    return {f"the {each.key} dispatcher": partial(_exchanges_by, each) for each in SELECTABLE if not each.is_measured}


def _exchanges_by(dispatcher: DispatcherDeclaration, plan: Plan) -> bool:
    return get_dispatcher(plan.args.moe) is dispatcher and plan.args.parallel.expert_model_parallel_size > 1


def _exchanges_farther() -> Features:
    """Return the dispatchers whose published runs exchanged tokens among fewer NVLink domains, or in smaller ones."""
    domains = {
        f"{each.name} among more than {each.measured_domains} NVLink domains": partial(_crosses_domains, each)
        for each in SELECTABLE
        if each.measured_domains is not None
    }
    gpus = {
        f"{each.name} where NVLink joins more than {each.measured_gpus}": partial(_joins_more, each)
        for each in SELECTABLE
        if each.measured_gpus is not None
    }
    return domains | gpus


def _crosses_domains(dispatcher: DispatcherDeclaration, plan: Plan) -> bool:
    span = plan.args.parallel.expert_model_parallel_size * plan.args.parallel.etp_size
    measured = (dispatcher.measured_domains or 0) * plan.hardware.domain
    return get_dispatcher(plan.args.moe) is dispatcher and span > measured


def _joins_more(dispatcher: DispatcherDeclaration, plan: Plan) -> bool:
    return get_dispatcher(plan.args.moe) is dispatcher and plan.hardware.domain > (dispatcher.measured_gpus or 0)


FEATURES: Features = MappingProxyType(
    {
        "NCCL's all-to-all among more than 64 experts": lambda plan: exchanges_slowly(plan.args),
        "launch-bound (eager)": lambda plan: not plan.hardware.synchronous and host_share(plan) > 0.95,
        "overlapped exchange of layers that the host launches": lambda plan: launches_overlapped_attention(plan.args),
        "attention with a window": lambda plan: any(
            uses_window(plan.args.model, number + 1) for number in range(plan.args.model.num_layers)
        ),
        "context parallelism": lambda plan: plan.args.parallel.context_parallel_size > 1,
        "few tokens a device and iteration": lambda plan: (
            plan.batch_size * plan.args.data.seq_length < 4096 * plan.world_size
        ),
        "TP above 2": lambda plan: plan.args.parallel.tensor_model_parallel_size > 2,
        "experts sharded over TP": lambda plan: plan.args.parallel.etp_size > 1 and bool(plan.args.moe.num_experts),
        "hardware without a fitted run": lambda plan: (
            plan.hardware.name not in FITTED_HARDWARE and plan.hardware.name in PUBLISHED_HARDWARE
        ),
        "deterministic kernels": lambda plan: plan.args.training.deterministic_mode,
        "overlapped exchange on GB200 or later": lambda plan: (
            plan.hardware.is_blackwell and plan.args.parallel.overlap_moe_expert_parallel_comm
        ),
    }
)
"""Features of published runs that were hard to predict."""


def _has_gemms(width: str, plan: Plan) -> bool:
    return plan.width == width


def _unmeasured_widths() -> Features:
    return {f"{each.name} GEMMs": partial(_has_gemms, each.name) for each in FLAGS if not each.is_measured}


def _has_schedule(schedule: ScheduleDeclaration, plan: Plan) -> bool:
    return get_schedule(plan.args.parallel) is schedule


def _unmeasured_schedules() -> Features:
    return {f"the {each.key} schedule": partial(_has_schedule, each) for each in SCHEDULES if not each.is_measured}


_FARTHER: Features = MappingProxyType(_exchanges_farther())

UNTESTED_FEATURES: Features = MappingProxyType(
    {
        "context parallelism below 16K tokens": lambda plan: (
            plan.args.parallel.context_parallel_size > 1 and plan.args.data.seq_length < 16384
        ),
        "hardware without a published run": lambda plan: (
            plan.hardware.name not in PUBLISHED_HARDWARE and not plan.hardware.calibration
        ),
        **_unmeasured_widths(),
        "narrower experts in 8 bits than any fitted run has": (
            lambda plan: has_narrower_experts(plan.args, plan.hardware)
        ),
        "neither bf16 nor fp8": lambda plan: not plan.args.precision.bf16,
        **_unmeasured_dispatchers(),
        **_FARTHER,
        "fully sharded data parallelism": lambda plan: not get_sharding(plan.args.parallel).is_measured,
        **_unmeasured_schedules(),
        "attention without a fused kernel": lambda plan: get_attention_backend(plan.args.model).stores_scores,
        "full recompute": lambda plan: plan.args.training.recompute_granularity == "full",
        "activations offloaded to the host": lambda plan: bool(plan.args.training.offloaded_modules),
        "optimizer state on the host": lambda plan: bool(plan.args.optimizer.optimizer_cpu_offload),
        "sparse attention": lambda plan: any(each.has_indexer for each in variants_of(plan.args.model)),
        "linear attention": lambda plan: any(each.in_some_layers for each in variants_of(plan.args.model)),
        "latent experts": lambda plan: bool(plan.args.moe.moe_latent_size),
        "no experts": lambda plan: not plan.args.moe.num_experts,
        "a CPU": lambda plan: plan.hardware.synchronous,
        "more than 16 pipeline stages": lambda plan: plan.args.parallel.pipeline_model_parallel_size > 16,
    }
)
"""Features that no published run has."""


OF_MAPPINGS = (
    "NCCL's all-to-all among more than 64 experts",
    "overlapped exchange of layers that the host launches",
    "context parallelism below 16K tokens",
    "overlapped exchange on GB200 or later",
    "narrower experts in 8 bits than any fitted run has",
    *_FARTHER,
    "full recompute",
    "more than 16 pipeline stages",
)
"""Features that a search chooses; they depend on flags and hardware only."""


@dataclass(frozen=True)
class ErrorTerms:
    base: float
    terms: Mapping[str, float]


@dataclass(frozen=True)
class Residual:
    """A measured run: |log(predicted / measured)|, its features, the group it is left out with, and its weight."""

    group: str
    error: float
    features: frozenset[str]
    weight: float = 1.0


@dataclass(frozen=True)
class ErrorBar:
    """`relative` error of the time in both directions, and what makes it larger than the base, the largest first."""

    relative: float
    reasons: tuple[tuple[str, float], ...]

    @property
    def percent(self) -> str:
        return f"{100 * self.relative:.0f} %"


FITTED = ErrorTerms(
    0.150,
    MappingProxyType(
        {
            "NCCL's all-to-all among more than 64 experts": 0.206,
            "launch-bound (eager)": 0.346,
            "overlapped exchange of layers that the host launches": 0.025,
            "attention with a window": 0.0,
            "context parallelism": 0.0,
            "few tokens a device and iteration": 0.0,
            "TP above 2": 0.0,
            "experts sharded over TP": 0.0,
            "hardware without a fitted run": 0.048,
            "deterministic kernels": 0.212,
            "overlapped exchange on GB200 or later": 0.0,
        }
    ),
)
"""Fitted to the published runs; `scripts/plan.py calibrate` repeats the fit and a test compares."""
COMPARISON = 0.05
"""Base of a comparison.

LEVEL of the pairs of published runs of one model, machine, format and set of features are ordered this well, eager
runs aside.
"""


def features(plan: Plan) -> frozenset[str]:
    """Return every feature that a plan has, published or not."""
    return frozenset(name for table in (FEATURES, UNTESTED_FEATURES) for name, holds in table.items() if holds(plan))


def quantile(values: Sequence[float], weights: Sequence[float] | None = None, level: float = LEVEL) -> float:
    """Return the smallest value that `level` of these values and one more do not exceed, or the largest."""
    ordered = sorted(zip(values, weights or [1.0] * len(values)))
    total = sum(weight for _, weight in ordered)
    needed, seen = level * total * (len(ordered) + 1) / len(ordered), 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= needed - 1e-9 * total:
            return value
    return ordered[-1][0]


def fit(residuals: Sequence[Residual], sweeps: int = 100) -> ErrorTerms:
    """Fit base and terms so that LEVEL of the errors are below their sums (coordinate descent, non-negative terms)."""
    names = [name for name in FEATURES if any(name in each.features for each in residuals)]
    terms = dict.fromkeys(names, 0.0)
    plain = [each for each in residuals if not each.features] or residuals
    base = quantile([each.error for each in plain], [each.weight for each in plain])
    weights = [each.weight for each in residuals]
    for _ in range(sweeps):
        before = (base, dict(terms))
        for name in names:
            own = [each for each in residuals if name in each.features]
            others = [
                each.error - base - sum(terms[other] for other in names if other != name and other in each.features)
                for each in own
            ]
            terms[name] = max(0.0, quantile(others, [each.weight for each in own]))
        above = [each.error - sum(terms[name] for name in names if name in each.features) for each in residuals]
        base = max(0.0, quantile(above, weights))
        if before == (base, terms):
            break
    return ErrorTerms(base, MappingProxyType(terms))


def published_residuals(biases: Mapping[PublishedRun, Bias], plans: Mapping[PublishedRun, Plan]) -> list[Residual]:
    """Return the errors of published runs, each corrected by what the runs of other series say.

    The models are the groups for `cross_validate`.
    """
    counts = Counter(run.series for run in biases)
    factors = {series: fit_factors([bias for run, bias in biases.items() if run.series != series]) for series in counts}
    found = []
    for run, bias in biases.items():
        left_out = sum(factors[run.series][name] * value for name, value in bias.strengths.items())
        found.append(residual(plans[run], run.family, left_out - bias.needed, run.weight / counts[run.series]))
    return found


def residual(plan: Plan, group: str, error: float, weight: float = 1.0) -> Residual:
    """Return what the parts of the bar that are not fitted (sizes, untested features) leave of the error of a run.

    `error`: logarithm of predicted over measured time.
    """
    found = frozenset(name for name in features(plan) if name in FEATURES)
    others = sum(UNTESTED for name in features(plan) if name not in FEATURES) + sum(_size_errors(plan).values())
    return Residual(group, max(0.0, abs(error) - others), found, weight)


def total_error(terms: ErrorTerms, found: Iterable[str]) -> float:
    """Return the bar of a run with these features; features without a term are untested."""
    return terms.base + sum(_term(terms, name) for name in found)


def _term(terms: ErrorTerms, name: str) -> float:
    return terms.terms.get(name, UNTESTED)


def config_error(args: Arguments, hardware: Hardware) -> float:
    """Return what the features that a mapping chooses (OF_MAPPINGS) add to the bar of a plan."""
    tables = {**FEATURES, **UNTESTED_FEATURES}
    plan = cast("Plan", SimpleNamespace(args=args, hardware=hardware))  # these features read nothing else
    return sum(_term(FITTED, name) for name in OF_MAPPINGS if tables[name](plan))


def cross_validate(residuals: Sequence[Residual]) -> list[tuple[Residual, float]]:
    """Return every run with the bar that a fit to the runs of other groups gives it."""
    found = []
    for group in dict.fromkeys(each.group for each in residuals):
        terms = fit([each for each in residuals if each.group != group])
        found += [(each, total_error(terms, each.features)) for each in residuals if each.group == group]
    return found


def _doublings_error(value: float, least: float, most: float) -> float:
    return PER_DOUBLING * max(0.0, math.log2(value / most), math.log2(least / value))


def error_bar(plan: Plan) -> ErrorBar:
    """Return how far the time of a plan may be off, and why."""
    if plan.hardware.calibration:
        return _calibrated_bar(plan, plan.hardware.calibration)
    parts = {name: _term(FITTED, name) for name in features(plan)}
    return _sum_terms(FITTED.base, parts | _size_errors(plan))


def _size_errors(plan: Plan) -> dict[str, float]:
    """Return what sizes beyond the published ones and the distance from tried mappings add to the bar."""
    parts = {}
    size, (least, most) = plan.counts.total + plan.counts.mtp, PUBLISHED_PARAMETERS
    text = f"{size / 1e9:.3g} billion parameters, {least / 1e9:.0f} to {most / 1e9:.0f} are published"
    parts[text] = _doublings_error(size, least, most)
    text = f"{plan.world_size} devices, {PUBLISHED_GPUS[0]} to {PUBLISHED_GPUS[1]} are published"
    parts[text] = _doublings_error(plan.world_size, *PUBLISHED_GPUS)
    parts[UNTRIED_MAPPING] = untried_error(plan.args, plan.hardware)
    return parts


def untried_error(args: Arguments, hardware: Hardware) -> float:
    """Return what the distance of a mapping from tried ones adds to the bar of a plan."""
    return PER_STEP * min(MAX_STEPS, steps_from_tried(args, hardware))


def _sum_terms(base: float, parts: Mapping[str, float]) -> ErrorBar:
    large = [(name, value) for name, value in parts.items() if value > 0.005]
    kept = sorted(large, key=lambda part: (-part[1], part[0]))
    return ErrorBar(base + sum(value for _, value in kept), tuple(kept))


def get_mapping_sizes(plan: Plan) -> dict[str, int]:
    """Return the sizes of a mapping that change how it communicates."""
    parallel = plan.args.parallel
    return {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
    }


def _calibrated_bar(plan: Plan, runs: Sequence[CalibrationRun]) -> ErrorBar:
    """Return the bar from the user's own runs: their errors when left out, and what none of them has."""
    errors = [abs(math.log(run.left_out / run.seconds)) for run in runs if run.left_out]
    base = max(0.02, quantile(errors)) if errors else ONE_RUN
    known = frozenset(name for run in runs for name in run.features)
    nowhere = f"in none of the runs of {plan.hardware.name}"
    parts = {f"{name}: {nowhere}": UNTESTED for name in features(plan) - known}
    for name, size in get_mapping_sizes(plan).items():
        tried = {dict(run.sizes).get(name, 1) for run in runs}
        if size > 1 and max(tried) == 1:
            parts[f"{name} {size}: {nowhere}"] = UNTESTED
        elif size not in tried:
            parts[f"{name} {size}, runs had {', '.join(map(str, sorted(tried)))}"] = PER_DOUBLING
    parameters, ranks = [run.parameters for run in runs], [run.world_size for run in runs]
    size, least, most = plan.counts.total + plan.counts.mtp, min(parameters), max(parameters)
    text = f"{size / 1e9:.3g} billion parameters, runs had {least / 1e9:.3g} to {most / 1e9:.3g}"
    parts[text] = _doublings_error(size, least, most)
    text = f"{plan.world_size} ranks, runs had {min(ranks)} to {max(ranks)}"
    parts[text] = _doublings_error(plan.world_size, min(ranks), max(ranks))
    return _sum_terms(base, parts)


def comparison_bar(first: Plan, second: Plan, bars: tuple[ErrorBar, ErrorBar] | None = None) -> float:
    """Return how far the ratio of two predicted times of one model may be off; common errors cancel.

    Args:
        bars: error bars of both, where they are known.
    """
    base = COMPARISON + (COMPARISON if first.width != second.width else 0.0)
    mine, theirs = (dict(bar.reasons) for bar in bars or (error_bar(first), error_bar(second)))
    return base + sum(abs(mine.get(name, 0.0) - theirs.get(name, 0.0)) for name in mine.keys() | theirs.keys())
