"""Search the best parallel mapping of a model on a number of devices.

First pass, for all legal mappings (parallel_configs.py): layer times and bytes come from the models that plans use
(layer_time.py, memory.py), computed once for all mappings that share them; bubble and microbatches in flight come from
the closed formulas of their schedules. What clearly does not fit is dropped.

Second pass, from the fastest down: the real command line goes through the real rules and gets a full plan with a
simulated schedule; what is rejected or does not fit is dropped. Of one shape only the fastest choice of recompute and
dispatcher that fits is kept.

Times that the model cannot tell apart are ties, which the best supported mapping wins (`ranked`, uncertainty.py). Every
result names its bottleneck; `explain_speedup` compares two plans cause by cause.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from arguments import ArgumentError, parse_args
from arguments.layer_pattern import moe_layer_pattern, mtp_layer_pattern
from arguments.mechanisms.formats import SEARCHED_FORMATS
from arguments.parallel import ParallelArgs
from arguments.parse import as_plan, resolve_command_line
from arguments.tokens import drop_flags, select_flags
from moe_trainer.estimate.corrections import correction
from moe_trainer.estimate.hardware import GIB
from moe_trainer.estimate.interconnect import Interconnect
from moe_trainer.estimate.layer_time import LayerTime, PassTime
from moe_trainer.estimate.memory import ChunkBytes, without_recompute
from moe_trainer.estimate.parallel_configs import (
    FORMAT_FLAGS,
    FULL_RECOMPUTE,
    REPLACED,
    SEARCHED,
    ParallelConfig,
    dispatcher_choices,
    gemm_formats,
    layer_counts,
    layout_text,
    parallel_shapes,
    recompute_sets,
)
from moe_trainer.estimate.parameters import LayerParams, ParamsPerRank, planned_vocab_size
from moe_trainer.estimate.plan import Plan, PlanError, closest_reference_run, make_plan, try_plan, validated_args
from moe_trainer.estimate.published_runs import BILLION_PARAMS, PUBLISHED_RUNS, PublishedRun
from moe_trainer.estimate.state_bytes import rank_state_bytes
from moe_trainer.estimate.step_time import OVERLAPPED_EXCHANGE_SHARE, PARTS, exchange_slowdown
from moe_trainer.estimate.suggestions import Fix, cheapest_fixes
from moe_trainer.estimate.uncertainty import ErrorBar, comparison_bar, config_error, error_bar, untried_error

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

ALWAYS_TIED = 0.02
"""Difference of two predicted times, in logarithms, below which they always tie."""
EQUAL_BARS = 0.005
"""Error bars that differ by less support their times equally well."""
DEFAULT_HEADROOM = 1.2
"""Default load of a rank, as a multiple of an even share, that must fit.

Routing is never even, and what the allocator loses is not counted.
"""
MEMORY_SLACK = 1.03
"""Factor by which an estimate may exceed the memory of a device before it is dropped."""
MAX_TRIES_PER_SHAPE = 6
"""Choices of recompute and dispatcher that are planned for one shape, until one fits."""
MIN_PLANNED = 60
"""Minimum number of full plans; the order of the estimates is not quite that of the plans."""
MAX_PLANNED, MAX_REJECTED = 400, 600
"""Full plans and rejected mappings after which a search stops."""


@dataclass(frozen=True)
class Estimate:
    """Quick estimate of a mapping: seconds of an iteration, bytes of the fullest rank."""

    mapping: ParallelConfig
    layout: str
    seconds: float
    memory: float


@dataclass(frozen=True)
class RankedConfig:
    """A mapping that is legal and fits.

    Attributes:
        argv: flags to add to the command line.
        bottleneck: what keeps it from being faster.
        bar: error bar of its time.
    """

    mapping: ParallelConfig
    argv: tuple[str, ...]
    plan: Plan
    bottleneck: str
    bar: ErrorBar


@dataclass(frozen=True)
class SearchResult:
    """What a search found, best first.

    Attributes:
        seen: number of mappings that divide.
        small: how many of them are small enough.
        planned: how many got a full plan.
        rejected: how many the rules rejected.
        own: plan of the mapping of the user's command line, if it has a legal one.
        published: published run of this model, number of devices and format, and the plan of its mapping.
        rejections: most common reasons of the rules, with their counts.
        replaced: flags of the command line that the search chooses itself.
        closest: plan that needs least memory and its flags, if nothing fits.
        fixes: changes of flags that are not searched with which something fits, if nothing does.
        devices: smallest number of devices (doubled) on which weights and optimizer state fit.
        fitting: all that were planned in full and fit, the fastest estimate first.
    """

    base: tuple[str, ...]
    found: tuple[RankedConfig, ...]
    seen: int
    small: int
    planned: int
    rejected: int
    seconds: float
    own: Plan | None = None
    published: tuple[PublishedRun, Plan] | None = None
    rejections: tuple[tuple[str, int], ...] = ()
    replaced: tuple[str, ...] = ()
    closest: tuple[Plan, tuple[str, ...]] | None = None
    fixes: tuple[Fix, ...] = ()
    devices: int | None = None
    fitting: tuple[RankedConfig, ...] = ()


Progress = Callable[[str], None]


def base_arguments(argv: Sequence[str]) -> tuple[list[str], Arguments, frozenset[str]]:
    """Remove the flags that a search chooses itself.

    Returns:
        The remaining command line; its arguments with the plainest mapping: a micro-batch of 1 and, for a model with
            experts, the alltoall dispatcher, because other flags require values of these; the searched flags that its
            preset sets.

    Raises:
        ArgumentError: if no mapping makes the flags legal.
    """
    base = drop_flags(argv, SEARCHED)
    settings, _ = resolve_command_line(as_plan([*base, "--micro-batch-size", "1"]), None)
    preset = frozenset(dest for dest in REPLACED - {"micro_batch_size"} if settings.given(dest))
    plain = ["--micro-batch-size", "1"] + (["--moe-token-dispatcher-type", "alltoall"] if settings.num_experts else [])
    try:
        return base, parse_args(as_plan([*base, *plain]), None), preset
    except ArgumentError as rejected:
        try:
            mapped = parse_args(as_plan(argv), None)  # flags that need a mapping, and the line names one
        except ArgumentError:
            raise rejected from None
    unmapped = {
        field.name: field.default
        for field in fields(ParallelArgs)
        if field.name in SEARCHED and field.default is not MISSING
    }
    parallel = replace(mapped.parallel, **unmapped)
    return base, replace(mapped, parallel=parallel, training=without_recompute(mapped.training)), preset


def search(
    argv: Sequence[str],
    gpus: int,
    hardware: Hardware,
    best: int = 10,
    headroom: float = DEFAULT_HEADROOM,
    progress: Progress = lambda text: None,
) -> SearchResult:
    """Find the best mappings for a command line, whose own mapping flags are replaced.

    `headroom`: load of a rank, as a multiple of an even share, that must fit. `progress`: called from time to time with
    a line of progress.

    Raises:
        ValueError: (ArgumentError, PlanError) if no mapping makes the flags legal.
    """
    begin = time.monotonic()
    base, args, preset = base_arguments(argv)
    make_flags = partial(ParallelConfig.flags, has_experts=bool(args.moe.num_experts), preset=preset)
    rows, _ = planned_vocab_size(args)
    if rows is None:
        raise PlanError("a search needs the size of the vocabulary: give --vocab-size or --padded-vocab-size")
    if not args.training.global_batch_size:
        raise PlanError("a search needs --global-batch-size: mappings are compared by the time of one iteration")
    estimator = Estimator(args, gpus, hardware, rows, headroom)
    estimates = _estimate_all(estimator, progress)
    small = [estimate for estimate in estimates if estimate.memory <= MEMORY_SLACK * hardware.usable_bytes]
    found: list[RankedConfig] = []
    planned = rejected = 0
    tries: Counter[tuple[ParallelConfig, bool]] = Counter()
    reasons: Counter[str] = Counter()
    for estimate in estimator.planning_order(small):
        if planned >= MIN_PLANNED and len(found) >= 2 * best:
            break
        if planned - rejected >= MAX_PLANNED or rejected >= MAX_REJECTED:
            break
        is_uncertain = estimator.added_error(estimate.mapping) > 0
        shape = replace(estimate.mapping, recompute=(), backend="", overlap=False), is_uncertain
        if tries[shape] >= MAX_TRIES_PER_SHAPE:
            continue
        tries[shape] += 1
        planned += 1
        if planned % 10 == 0:
            progress(f"{len(estimates):,} mappings estimated; {planned} planned in full, {len(found)} fit")
        line = make_flags(estimate.mapping, estimate.layout)
        try:
            plan = make_plan(validated_args([*base, *line], gpus), gpus, hardware)
        except ValueError as error:
            rejected += 1
            violations = error.violations if isinstance(error, ArgumentError) else ()
            reasons.update({violation.message for violation in violations} or {str(error)})
            continue
        if plan.fits(headroom):
            found.append(RankedConfig(estimate.mapping, tuple(line), plan, find_bottleneck(plan), error_bar(plan)))
            tries[shape] = MAX_TRIES_PER_SHAPE
    outcome = SearchResult(
        tuple(base),
        tuple(ranked(found, best)),
        *(len(estimates), len(small), planned, rejected, time.monotonic() - begin),
        own=None if list(argv) == base else try_plan(argv, gpus, hardware),
        published=_plan_published(found[0].plan, base) if found else None,
        rejections=tuple(reasons.most_common(3)),
        replaced=tuple(select_flags(argv, REPLACED)),
        fitting=tuple(found),
    )
    if found:
        return outcome
    least = min(estimates, key=lambda estimate: estimate.memory, default=None)
    return _explain_no_fit(outcome, estimator, least, headroom, make_flags)


def _estimate_all(estimator: Estimator, progress: Progress) -> list[Estimate]:
    """Return the estimates of all mappings."""
    mappings = list(estimator.mappings())
    estimates = []
    for mapping in mappings:
        estimates.append(estimator.estimate(mapping))
        if len(estimates) % 500 == 0:
            progress(f"{len(estimates):,} of {len(mappings):,} mappings estimated")
    return estimates


def ranked(found: Sequence[RankedConfig], best: int) -> list[RankedConfig]:
    """Order candidates: the fastest first, but of those that tie with the fastest remaining one the best supported.

    Two candidates tie if their times differ by less than their comparison can tell (`comparison_bar`). The smaller
    error bar is better supported; of equal bars the simplest mapping comes first, then the one closest to a published
    run.
    """
    left = sorted(found, key=lambda each: each.plan.time.step)
    order: list[RankedConfig] = []
    while left and len(order) < best:
        tied = [each for each in left if _tie(left[0], each)]
        # drop what an equally well supported one clearly beats, even if it ties with the uncertain fastest
        tied = [
            each
            for each in tied
            if not any(
                other.plan.time.step < each.plan.time.step
                and other.bar.relative < each.bar.relative + EQUAL_BARS
                and not _tie(other, each)
                for other in (*tied, *order)
            )
        ]
        first = min(
            tied or left[:1],
            key=lambda each: (
                round(each.bar.relative, 2),
                each.mapping.num_features,
                round(closest_reference_run(each.plan).distance, 1),
                each.plan.time.step,
            ),
        )
        order.append(first)
        left.remove(first)
    return order


def ties(first: Plan, second: Plan, bars: tuple[ErrorBar, ErrorBar] | None = None) -> bool:
    """Return whether the predicted times of two plans differ by less than their comparison can tell."""
    difference = abs(math.log(second.time.step / first.time.step))
    return difference < ALWAYS_TIED or difference < comparison_bar(first, second, bars)


def _tie(first: RankedConfig, second: RankedConfig) -> bool:
    return ties(first.plan, second.plan, (first.bar, second.bar))


def _explain_no_fit(
    outcome: SearchResult,
    estimator: Estimator,
    least: Estimate | None,
    headroom: float,
    make_flags: Callable[[ParallelConfig, str], list[str]],
) -> SearchResult:
    """Add what would fit: changes of other flags on the smallest mapping, and a number of devices."""
    outcome = replace(outcome, devices=_smallest_num_devices(estimator))
    if least is None:
        smallest = min(estimator.mappings(small=False), key=estimator.state_bytes, default=None)
        if smallest is not None:
            least = estimator.estimate(replace(smallest, recompute=FULL_RECOMPUTE))
    if least is None:
        return outcome
    line = make_flags(least.mapping, least.layout)
    plan = try_plan([*outcome.base, *line], estimator.gpus, estimator.hardware)
    if plan is None:
        return outcome
    fixes = cheapest_fixes([*outcome.base, *line], plan, headroom=headroom, searched=False)
    return replace(outcome, closest=(plan, tuple(line)), fixes=tuple(fixes))


def _smallest_num_devices(estimator: Estimator) -> int | None:
    """Return the smallest number of devices, doubled from the current one, that holds weights and optimizer state."""
    available = estimator.hardware.usable_bytes
    for doubling in range(1, 6):
        gpus = estimator.gpus << doubling
        larger = Estimator(estimator.args, gpus, estimator.hardware, estimator.rows, estimator.load)
        if any(
            larger.estimate(replace(shape, recompute=FULL_RECOMPUTE)).memory <= available
            for shape in larger.mappings(small=True, shapes_only=True)
        ):
            return gpus
    return None


def search_formats(
    argv: Sequence[str],
    formats: Sequence[str],
    gpus: int,
    hardware: Hardware,
    best: int = 10,
    headroom: float = DEFAULT_HEADROOM,
    progress: Progress = lambda text: None,
) -> SearchResult:
    """Search over several GEMM formats (SEARCHED_FORMATS) instead of the one that the command line names.

    Raises:
        ValueError: as `search`, and for a format that the device lacks.
    """
    missing = [name for name in formats if name not in gemm_formats(hardware)]
    if missing:
        raise PlanError(
            f"{hardware.name} has no GEMMs in {', '.join(missing)}; it has {', '.join(gemm_formats(hardware))}"
        )
    base = drop_flags(argv, FORMAT_FLAGS)

    outcomes: list[SearchResult] = []
    found: list[RankedConfig] = []
    fitting: list[RankedConfig] = []
    rejections: Counter[str] = Counter()
    for name in formats:
        report = partial(_report_format, name, progress)
        outcomes.append(search([*base, *SEARCHED_FORMATS[name]], gpus, hardware, best, headroom, report))
        found += [replace(each, argv=(*SEARCHED_FORMATS[name], *each.argv)) for each in outcomes[-1].found]
        fitting += [replace(each, argv=(*SEARCHED_FORMATS[name], *each.argv)) for each in outcomes[-1].fitting]
        rejections.update(dict(outcomes[-1].rejections))
    published = (outcome.published for outcome in outcomes if outcome.published)
    totals = ("seen", "small", "planned", "rejected", "seconds")
    return replace(
        outcomes[-1],
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in totals},
        base=tuple(drop_flags(base, SEARCHED)),
        found=tuple(ranked(found, best)),
        fitting=tuple(fitting),
        own=None if list(argv) == drop_flags(base, SEARCHED) else try_plan(argv, gpus, hardware),
        published=max(published, key=lambda pair: pair[0].tflops, default=None),
        rejections=tuple(rejections.most_common(3)),
        replaced=tuple(select_flags(base, REPLACED)),
    )


def _report_format(name: str, progress: Progress, text: str) -> None:
    progress(f"{name}: {text}")


def _plan_published(plan: Plan, base: Sequence[str]) -> tuple[PublishedRun, Plan] | None:
    """Return the published run that differs only in what is searched, and its plan."""
    billions = (plan.counts.total + plan.counts.mtp) / 1e9
    setting = (plan.hardware.name, plan.world_size, plan.width, plan.args.data.seq_length)
    for run in PUBLISHED_RUNS:
        is_same = (run.hardware, run.gpus, run.width, run.seq) == setting
        if is_same and abs(billions / BILLION_PARAMS[run.model] - 1) < 0.01:
            mapped = try_plan([*base, *select_flags(run.argv(), SEARCHED)], plan.world_size, plan.hardware)
            if mapped is not None:
                return run, mapped
    return None


class Estimator:
    """Quick estimates of the mappings of one command line, with memory estimated at `load`."""

    def __init__(self, args: Arguments, gpus: int, hardware: Hardware, vocab_rows: int, load: float = 1.0):
        self.args, self.gpus, self.hardware, self.rows, self.load = args, gpus, hardware, vocab_rows, load
        self.links = Interconnect(hardware)
        self.pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        self.mtp_pattern = mtp_layer_pattern(self.pattern, args.model.hybrid_layer_pattern)
        self.kinds = Counter(self.pattern)
        self.experts_before = (0, *accumulate(map(int, self.pattern)))
        self.depths = args.model.num_mtp_depths
        self._bytes_by_key: dict[tuple, tuple[ChunkBytes, dict[bool, float]]] = {}
        self._times: dict[tuple, tuple[dict[bool, tuple[PassTime, PassTime]], tuple[float, float], float]] = {}
        self._states: dict[tuple, tuple[float, float, float]] = {}
        self._added_errors: dict[tuple, float] = {}
        self._untried_errors: dict[tuple, float] = {}
        self._corrections: dict[tuple, float] = {}

    def mappings(self, small: bool = True, shapes_only: bool = False) -> Iterator[ParallelConfig]:
        """Yield every mapping.

        Args:
            small: only those whose weights and optimizer state fit on a device.
            shapes_only: without choices of recompute and overlap, with the first dispatcher.
        """
        available = self.hardware.usable_bytes
        for shape in parallel_shapes(self.args, self.gpus, self.hardware):
            if small and self.state_bytes(shape) > available:
                continue
            if shapes_only or not small:
                yield shape
                continue
            for backend, overlap in dispatcher_choices(self.args, self.hardware, shape.ep, shape.etp):
                if overlap and shape.pp > 1 and shape.vpp == 1:
                    continue
                for recompute in recompute_sets(self.args):
                    if not (overlap and (recompute == FULL_RECOMPUTE or "moe" in recompute)):
                        yield replace(shape, recompute=recompute, backend=backend, overlap=overlap)

    def added_error(self, mapping: ParallelConfig) -> float:
        """Return what the choices of a mapping add to the error bar of the model on this hardware."""
        is_full = mapping.recompute == FULL_RECOMPUTE
        key = (mapping.cp, mapping.pp, mapping.ep, mapping.etp, mapping.backend, mapping.overlap, is_full)
        if key not in self._added_errors:
            self._added_errors[key] = config_error(mapping.applied(self.args, None), self.hardware)
        return self._added_errors[key]

    def untried_error(self, estimate: Estimate) -> float:
        """Return what the distance of its mapping from tried ones adds to the error bar."""
        mapping = estimate.mapping
        sizes = (mapping.tp, mapping.cp, mapping.pp, mapping.ep, mapping.etp)
        key = (*sizes, mapping.vpp > 1, mapping.backend, mapping.overlap)
        if key not in self._untried_errors:
            layout = estimate.layout if mapping.pp > 1 else None
            self._untried_errors[key] = untried_error(mapping.applied(self.args, layout), self.hardware)
        return self._untried_errors[key]

    def planning_order(self, estimates: Sequence[Estimate]) -> Iterator[Estimate]:
        """Alternate between the fastest estimates and those without features that add to the error bar.

        Of the latter those come first that are fast even if they are off by what their distance from tried mappings
        adds.
        """
        fast = sorted(estimates, key=lambda each: each.seconds)
        plain = [each for each in fast if not self.added_error(each.mapping)]
        sure = iter(sorted(plain, key=lambda each: each.seconds * math.exp(self.untried_error(each))))
        seen: set[ParallelConfig] = set()
        for each in fast:
            for one in (each, next(sure, None)):
                if one is not None and one.mapping not in seen:
                    seen.add(one.mapping)
                    yield one

    def state_bytes(self, mapping: ParallelConfig) -> float:
        """Return the bytes of weights, gradients and optimizer state of a middle rank."""
        return self._state(mapping)[0]

    def estimate(self, mapping: ParallelConfig) -> Estimate:
        kinds, head, extra = self._layer_times(mapping)
        counts = layer_counts(len(self.pattern), mapping.pp * mapping.vpp, extra)
        replicas = self.gpus // (mapping.tp * mapping.cp * mapping.pp)
        count = self.args.training.global_batch_size // (mapping.mbs * replicas)
        busy, first = self._busy_seconds(mapping, counts, kinds, head)
        chunk = sum(busy) / mapping.pp / mapping.vpp
        bubble = (mapping.pp - 1) * chunk + (first - busy[0] if mapping.overlap else 0.0)
        _, dense, expert = self._state(mapping)
        seconds = self._correction(mapping) * (count * max(busy) + bubble) + self._update(mapping, dense, expert)
        return Estimate(mapping, layout_text(counts, self.depths), seconds, self._memory(mapping, counts, count))

    def _correction(self, mapping: ParallelConfig) -> float:
        key = (mapping.pp > 1, mapping.ep > 1, mapping.etp, mapping.backend, mapping.overlap)
        if key not in self._corrections:
            self._corrections[key] = correction(mapping.applied(self.args, None), self.hardware)
        return self._corrections[key]

    def _layer_times(
        self, mapping: ParallelConfig
    ) -> tuple[dict[bool, tuple[PassTime, PassTime]], tuple[float, float], float]:
        key = (mapping.tp, mapping.cp, mapping.ep, mapping.etp, mapping.mbs, mapping.recompute, mapping.backend)
        if key not in self._times:
            args = replace(mapping, pp=1, vpp=1, overlap=False).applied(self.args, None)
            times = LayerTime(args, self.links, self._bytes(mapping)[0])
            kinds = {kind: times.passes(kind) for kind in {*self.pattern, *self.mtp_pattern}}
            forward, backward = times.head()
            ahead = sum(each.total for kind in self.mtp_pattern for each in kinds[kind])
            extra = forward + backward + self.depths * (3 * times.mtp_projection() + ahead)
            self._times[key] = kinds, (forward, backward), extra / (ahead / len(self.mtp_pattern))
        return self._times[key]

    def _busy_seconds(
        self,
        mapping: ParallelConfig,
        counts: Sequence[int],
        kinds: dict[bool, tuple[PassTime, PassTime]],
        head: tuple[float, float],
    ) -> tuple[list[float], float]:
        """Return the seconds of a microbatch by pipeline rank, and of the first rank without overlap."""
        taken = exchange_slowdown(self.args, self.hardware)

        def seconds(passes: tuple[PassTime, PassTime]) -> float:
            total = passes[0] + passes[1]
            if not mapping.overlap:
                return total.total
            hidden = min(OVERLAPPED_EXCHANGE_SHARE * total.exchange, total.compute)
            return total.total - hidden + hidden * taken

        each = {kind: seconds(passes) for kind, passes in kinds.items()}
        busy, begin = [0.0] * mapping.pp, 0
        for stage, number in enumerate(counts):
            experts = self.experts_before[begin + number] - self.experts_before[begin]
            busy[stage % mapping.pp] += experts * each.get(True, 0.0) + (number - experts) * each.get(False, 0.0)
            begin += number
        busy[-1] += sum(head) + self.depths * sum(each[kind] for kind in self.mtp_pattern)
        plain = sum(self.kinds[kind] * sum(each.total for each in passes) for kind, passes in kinds.items())
        return busy, max(plain / mapping.pp, busy[0])

    def _bytes(self, mapping: ParallelConfig) -> tuple[ChunkBytes, dict[bool, float]]:
        key = (mapping.tp, mapping.cp, mapping.etp, mapping.ep, mapping.mbs, mapping.recompute)
        if key not in self._bytes_by_key:
            args = replace(mapping, pp=1, vpp=1, overlap=False).applied(self.args, None)
            sizes, crowded = ChunkBytes(args, self.rows), ChunkBytes(args, self.rows, self.load)
            if mapping.recompute == FULL_RECOMPUTE:
                layers = dict.fromkeys(self.kinds, float(sizes.rows * args.model.hidden_size * sizes.size))
            else:
                layers = {kind: crowded.layer(kind) for kind in self.kinds}
            self._bytes_by_key[key] = sizes, layers
        return self._bytes_by_key[key]

    def _state(self, mapping: ParallelConfig) -> tuple[float, float, float]:
        """Return (bytes of state of a middle rank, its dense parameters, its expert parameters)."""
        key = (mapping.tp, mapping.cp, mapping.pp, mapping.ep, mapping.etp)
        if key not in self._states:
            layout = layout_text(layer_counts(len(self.pattern), mapping.pp, 1.0), self.depths)
            args = replace(mapping, vpp=1).applied(self.args, layout)
            params = LayerParams(args, self.rows)
            held = sum((params.layers[kind] for kind in self.pattern), ParamsPerRank(0, 0))
            tables = 2 * params.table() if mapping.pp == 1 else 0
            dense, expert = held.dense / mapping.pp + tables, held.expert / mapping.pp
            state = rank_state_bytes(args, self.gpus, round(dense), round(expert), tables=tables)
            self._states[key] = state.device, dense, expert
        return self._states[key]

    def _memory(self, mapping: ParallelConfig, counts: Sequence[int], microbatches: int) -> float:
        sizes, layers = self._bytes(mapping)
        if mapping.vpp == 1:
            number = min(microbatches, mapping.pp)
        else:
            number = min(microbatches * mapping.vpp, 2 * (mapping.pp - 1) + (mapping.vpp - 1) * mapping.pp + 1)
        per_chunk = sum(self.kinds[kind] * size for kind, size in layers.items()) / len(counts)
        logits = sizes.tokens * self.rows // mapping.tp * sizes.size * (1 + self.depths) if mapping.pp == 1 else 0
        return self._state(mapping)[0] + number * per_chunk + logits

    def _update(self, mapping: ParallelConfig, dense: float, expert: float) -> float:
        """Return roughly the seconds of gradient reduction, parameter gathering and update that are not overlapped."""
        parallel, found = self.args.parallel, self.hardware.constants.iteration
        if not (parallel.overlap_grad_reduce and parallel.overlap_param_gather):
            replicas = self.gpus // (mapping.tp * mapping.pp)
            stride = mapping.etp * mapping.ep
            found += self.links.ring(6 * dense, mapping.tp, replicas)
            found += self.links.ring(6 * expert, stride, max(1, self.gpus // (stride * mapping.pp)))
        return found


def find_bottleneck(plan: Plan) -> str:
    """Return what keeps a plan from being faster: the memory that other choices would need, or its largest loss."""
    losses = [(getattr(plan.time, name), text) for name, text in PARTS if name not in ("compute", "host")]
    largest, text = max(losses, key=lambda loss: loss[0])
    parts = []
    if plan.margin < 0.1 * plan.hardware.memory_gib * GIB:
        parts.append(f"memory, of which {plan.margin / GIB:.1f} GiB are free")
    if plan.args.training.recompute_granularity:
        parts.append("recompute")
    if largest > 0.02 * plan.time.step:
        parts.append(f"{text.removesuffix(', exposed')} {100 * largest / plan.time.step:.1f} %")
    return ", ".join(parts) or "computation"


def explain_speedup(first: Plan, second: Plan) -> list[str]:
    """Return why the first plan is faster, cause by cause, the largest first."""
    changes = []
    for name, text in PARTS:
        change = getattr(second.time, name) - getattr(first.time, name)
        if name != "host" and abs(change) > 0.002 * second.time.step:
            text = text.removesuffix(", exposed").replace(" parallel", "-parallel communication")
            changes.append((abs(change), f"{abs(change):.3f} s {'less' if change > 0 else 'more'} {text}"))
    return [text for _, text in sorted(changes, key=lambda item: -item[0])]
