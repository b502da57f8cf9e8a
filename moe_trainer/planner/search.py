"""The best mapping of a model on so many devices: all legal ones (mappings.py) estimated, the best of them planned, judged and ranked.

First pass, for every mapping: layer times and bytes come from the same models as a plan's (layer_time.py, memory.py), found once for all mappings
that share them; bubble and microbatches in flight by the closed formulas of their schedules. What clearly does not fit is dropped.
Second pass, from the fastest down: the real command line through the real rules, a full plan with its timetable; what is refused or
does not fit is dropped. Of one shape only the fastest choice of recompute and dispatcher that fits is shown.

Every result names what binds it; `reasons` says why the first is faster than the second, cause by cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from arguments import parse_args
from moe_trainer.planner.dry_run import judged
from moe_trainer.planner.layer_time import LayerTime, Pass
from moe_trainer.planner.links import Links
from moe_trainer.planner.mappings import (
    FORMAT_FLAGS,
    FORMATS,
    FULL,
    Mapping,
    exchanges,
    formats_of,
    layer_counts,
    layout_text,
    only,
    recompute_sets,
    shapes,
    without,
)
from moe_trainer.planner.memory import GIB, RESERVE, ChunkBytes
from moe_trainer.planner.params import Held, LayerParams
from moe_trainer.planner.plan import Plan, PlanError, make_plan
from moe_trainer.planner.published import BILLIONS, ROWS, Published
from moe_trainer.planner.step_time import HIDDEN, taken_share
from moe_trainer.planner.vocabulary import planned_vocab_rows
from moe_trainer.shape.layers import moe_layer_pattern, mtp_is_moe
from moe_trainer.shape.state_bytes import rank_state_bytes

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.planner.hardware import Hardware

HEADROOM = 1.2
"""Load of a rank, as a multiple of an even share, that must fit unless the caller says otherwise: routing is never even, and what the
allocator loses is counted nowhere."""
SLACK = 1.03
"""An estimate of memory may be so much above a device before it is dropped."""
TRIES = 6
"""Choices of recompute and dispatcher that are planned for one shape, until one fits."""
PLANNED = 60
"""Full plans at least, if there are as many; the estimate's order is not quite the plan's."""


@dataclass(frozen=True)
class Estimate:
    """A mapping at a glance: seconds of an iteration, bytes of the fullest rank."""

    mapping: Mapping
    layout: str | None
    seconds: float
    memory: float


@dataclass(frozen=True)
class Found:
    """A mapping that is legal and fits. argv: the flags to add; binds: what keeps it from being faster."""

    mapping: Mapping
    argv: tuple[str, ...]
    plan: Plan
    binds: str


@dataclass(frozen=True)
class Outcome:
    """What a search found, fastest first, and how many mappings it saw: legal by division, small enough, planned, refused by rules.
    own: the plan of the mapping that the user's line names, if it names a legal one; published: a run of this model on as many of these
    devices in this width with which a figure was published, and the plan of its mapping."""

    base: tuple[str, ...]
    found: tuple[Found, ...]
    seen: int
    small: int
    planned: int
    refused: int
    seconds: float
    own: Plan | None = None
    published: tuple[Published, Plan] | None = None


def search(argv: Sequence[str], gpus: int, hardware: Hardware, best: int = 10, headroom: float = HEADROOM) -> Outcome:
    """Find the best mappings of a command line; what it says of mappings itself is left out. headroom: load of a rank, as a multiple of an
    even share, that must still fit.

    Raises: ValueError (ArgumentError, PlanError) for flags that no mapping could mend.
    """
    begin = time.monotonic()
    base = without(argv)
    args = parse_args(base, None)
    rows, _ = planned_vocab_rows(args)
    if rows is None:
        raise PlanError("a search needs the size of the vocabulary: give --vocab-size or --padded-vocab-size")
    if not args.training.global_batch_size:
        raise PlanError("a search needs --global-batch-size: mappings are compared by the time of one iteration")
    estimator = Estimator(args, gpus, hardware, rows, headroom)
    estimates, seen = [], 0
    for estimate in estimator.all():
        seen += 1
        if estimate.memory <= SLACK * (hardware.memory_gib * GIB - RESERVE):
            estimates.append(estimate)
    estimates.sort(key=lambda each: each.seconds)
    found, planned, refused, tries = [], 0, 0, Counter()
    for estimate in estimates:
        shape = replace(estimate.mapping, recompute=(), backend="", overlap=False)
        if planned >= PLANNED and len(found) >= best:
            break
        if tries[shape] >= TRIES:
            continue
        tries[shape] += 1
        planned += 1
        line = [*base, *estimate.mapping.flags(estimate.layout)]
        try:
            plan = make_plan(judged(line, gpus), gpus, hardware)
        except ValueError:
            refused += 1
            continue
        if plan.margin >= 0 and (plan.headroom is None or plan.headroom >= headroom):
            found.append(Found(estimate.mapping, tuple(estimate.mapping.flags(estimate.layout)), plan, binding(plan)))
            tries[shape] = TRIES
    found.sort(key=lambda each: -each.plan.tokens_per_second)
    own = _own(argv, base, gpus, hardware)
    known = _published(found[0].plan, base) if found else None
    return Outcome(tuple(base), tuple(found[:best]), seen, len(estimates), planned, refused, time.monotonic() - begin, own, known)


def search_formats(argv: Sequence[str], formats: Sequence[str], gpus: int, hardware: Hardware, best: int = 10, headroom: float = HEADROOM) -> Outcome:
    """The same over several formats of the products (FORMATS), whatever the command line says of them.

    Raises: ValueError as `search`, and for a format that the device has no products in.
    """
    missing = [name for name in formats if name not in formats_of(hardware)]
    if missing:
        raise PlanError(f"{hardware.name} has no products in {', '.join(missing)}; it has {', '.join(formats_of(hardware))}")
    base = without(argv, FORMAT_FLAGS)
    outcomes = [(FORMATS[name], search([*base, *FORMATS[name]], gpus, hardware, best, headroom)) for name in formats]
    found = sorted((replace(each, argv=(*words, *each.argv)) for words, outcome in outcomes for each in outcome.found),
                   key=lambda each: -each.plan.tokens_per_second)
    each = [outcome for _, outcome in outcomes]
    known = next((outcome.published for outcome in each if outcome.found and found[0].plan is outcome.found[0].plan), None)
    seen, small, planned, refused, seconds = (sum(getattr(outcome, name) for outcome in each)
                                              for name in ("seen", "small", "planned", "refused", "seconds"))
    return Outcome(tuple(without(base)), tuple(found[:best]), seen, small, planned, refused, seconds, _own(argv, without(base), gpus, hardware), known)


def _published(plan: Plan, base: Sequence[str]) -> tuple[Published, Plan] | None:
    """The published run that differs in nothing but what is searched, if there is one."""
    billions = (plan.counts.total + plan.counts.mtp) / 1e9
    for row in ROWS:
        same = (row.hardware, row.gpus, row.width, row.seq) == (plan.hardware.name, plan.world_size, plan.width, plan.args.data.seq_length)
        if same and abs(billions / BILLIONS[row.model] - 1) < 0.01:
            try:
                return row, make_plan(judged([*base, *only(row.argv())], plan.world_size), plan.world_size, plan.hardware)
            except ValueError:
                continue
    return None


def _own(argv: Sequence[str], base: Sequence[str], gpus: int, hardware: Hardware) -> Plan | None:
    if list(argv) == list(base):
        return None
    try:
        return make_plan(judged(list(argv), gpus), gpus, hardware)
    except ValueError:
        return None


class Estimator:
    """Quick estimates of one command line's mappings. vocab_rows: of the padded vocabulary; load: at which memory is estimated."""

    def __init__(self, args: Arguments, gpus: int, hardware: Hardware, vocab_rows: int, load: float = 1.0):
        self.args, self.gpus, self.hardware, self.rows, self.load = args, gpus, hardware, vocab_rows, load
        self.links = Links(hardware)
        self.pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        self.kinds = Counter(self.pattern)
        self.experts_before = (0, *accumulate(map(int, self.pattern)))
        self.depths = args.model.mtp_num_layers or 0
        self._sizes: dict[tuple, tuple[ChunkBytes, dict[bool, float]]] = {}
        self._times: dict[tuple, tuple[dict[bool, tuple[Pass, Pass]], tuple[float, float], float]] = {}
        self._states: dict[tuple, tuple[float, float, float]] = {}

    def all(self) -> Iterator[Estimate]:
        """Every mapping."""
        for shape in shapes(self.args, self.gpus, self.hardware):
            if self._state(shape, shape.vpp)[0] > self.hardware.memory_gib * GIB - RESERVE:
                continue
            for backend, overlap in exchanges(self.args, self.hardware, shape.ep, shape.etp):
                if overlap and shape.pp > 1 and shape.vpp == 1:
                    continue
                for recompute in recompute_sets(self.args):
                    if not (overlap and (recompute == FULL or "moe" in recompute)):
                        yield self._estimate(replace(shape, recompute=recompute, backend=backend, overlap=overlap))

    def _estimate(self, mapping: Mapping) -> Estimate:
        kinds, head, extra = self._layer_times(mapping)
        counts = layer_counts(len(self.pattern), mapping.pp * mapping.vpp, extra)
        replicas = self.gpus // (mapping.tp * mapping.cp * mapping.pp)
        count = self.args.training.global_batch_size // (mapping.mbs * replicas)
        busy, first = self._busy(mapping, counts, kinds, head)
        chunk = sum(busy) / mapping.pp / mapping.vpp
        bubble = (mapping.pp - 1) * chunk + (0.0 if not mapping.overlap else first - busy[0])
        _, dense, expert = self._state(mapping, mapping.vpp)
        seconds = count * max(busy) + bubble + self._update(mapping, dense, expert)
        return Estimate(mapping, layout_text(counts, self.depths), seconds, self._memory(mapping, counts, count))

    def _layer_times(self, mapping: Mapping) -> tuple[dict[bool, tuple[Pass, Pass]], tuple[float, float], float]:
        key = (mapping.tp, mapping.cp, mapping.ep, mapping.etp, mapping.mbs, mapping.recompute, mapping.backend)
        if key not in self._times:
            args = replace(mapping, pp=1, vpp=1, overlap=False).applied(self.args, None)
            times = LayerTime(args, self.links, self._bytes(mapping)[0], self.hardware.constants)
            kinds = {kind: times.passes(kind) for kind in set(self.pattern)}
            forward, backward = times.head()
            extra = forward + backward
            if self.depths:
                one = kinds[mtp_is_moe(self.pattern)]
                extra += self.depths * (3 * times.joining() + one[0].total + one[1].total)
            usual = kinds[mtp_is_moe(self.pattern)]
            self._times[key] = kinds, (forward, backward), extra / (usual[0].total + usual[1].total)
        return self._times[key]

    def _busy(self, mapping: Mapping, counts: Sequence[int], kinds: dict[bool, tuple[Pass, Pass]], head: tuple[float, float]) -> tuple[list[float], float]:
        """Seconds of a microbatch by pipeline rank, and of the first rank without overlap."""
        taken = taken_share(self.args, self.hardware)

        def seconds(passes: tuple[Pass, Pass]) -> float:
            total = passes[0] + passes[1]
            if not mapping.overlap:
                return total.total
            hidden = min(HIDDEN * total.exchange, total.compute)
            return total.total - hidden + hidden * taken

        each = {kind: seconds(passes) for kind, passes in kinds.items()}
        busy, begin = [0.0] * mapping.pp, 0
        for stage, number in enumerate(counts):
            experts = self.experts_before[begin + number] - self.experts_before[begin]
            busy[stage % mapping.pp] += experts * each.get(True, 0.0) + (number - experts) * each.get(False, 0.0)
            begin += number
        busy[-1] += sum(head) + self.depths * each[mtp_is_moe(self.pattern)]
        plain = sum(self.kinds[kind] * (forward.total + backward.total) for kind, (forward, backward) in kinds.items()) / mapping.pp
        return busy, max(plain, busy[0])

    def _bytes(self, mapping: Mapping) -> tuple[ChunkBytes, dict[bool, float]]:
        key = (mapping.tp, mapping.cp, mapping.etp, mapping.ep, mapping.mbs, mapping.recompute)
        if key not in self._sizes:
            args = replace(mapping, pp=1, vpp=1, overlap=False).applied(self.args, None)
            sizes, crowded = ChunkBytes(args, self.rows), ChunkBytes(args, self.rows, self.load)
            layers = {kind: crowded.layer(kind) if mapping.recompute != FULL else float(sizes.rows * args.model.hidden_size * sizes.size)
                      for kind in set(self.pattern)}
            self._sizes[key] = sizes, layers
        return self._sizes[key]

    def _state(self, mapping: Mapping, vpp: int) -> tuple[float, float, float]:
        """(bytes of states of a middle rank, its dense parameters, its experts')."""
        key = (mapping.tp, mapping.cp, mapping.pp, mapping.ep, mapping.etp)
        if key not in self._states:
            layout = layout_text(layer_counts(len(self.pattern), mapping.pp, 1.0), self.depths)
            args = replace(mapping, vpp=1).applied(self.args, layout)
            params = LayerParams(args, self.rows)
            held = sum((params.layers[kind] for kind in self.pattern), Held(0, 0))
            tables = 2 * params.table() if mapping.pp == 1 else 0
            dense, expert = held.dense / mapping.pp + tables, held.expert / mapping.pp
            self._states[key] = rank_state_bytes(args, self.gpus, round(dense), round(expert), tables=tables).device, dense, expert
        return self._states[key]

    def _memory(self, mapping: Mapping, counts: Sequence[int], microbatches: int) -> float:
        sizes, layers = self._bytes(mapping)
        if mapping.vpp == 1:
            number = min(microbatches, mapping.pp)
        else:
            number = min(microbatches * mapping.vpp, 2 * (mapping.pp - 1) + (mapping.vpp - 1) * mapping.pp + 1)
        per_chunk = sum(self.kinds[kind] * size for kind, size in layers.items()) / len(counts)
        logits = sizes.tokens * self.rows // mapping.tp * sizes.size * (1 + self.depths) if mapping.pp == 1 else 0
        return self._state(mapping, mapping.vpp)[0] + number * per_chunk + logits

    def _update(self, mapping: Mapping, dense: float, expert: float) -> float:
        """Gradients, parameters and optimizer: what is not hidden, roughly."""
        parallel, found = self.args.parallel, self.hardware.constants.iteration
        if not (parallel.overlap_grad_reduce and parallel.overlap_param_gather):
            replicas = self.gpus // (mapping.tp * mapping.pp)
            found += self.links.ring(6 * dense, mapping.tp, replicas)
            found += self.links.ring(6 * expert, mapping.etp * mapping.ep, max(1, self.gpus // (mapping.etp * mapping.ep * mapping.pp)))
        return found


def binding(plan: Plan) -> str:
    """What keeps a plan from being faster: the memory that other choices would need, or its largest loss."""
    time_ = plan.time
    losses = {"expert exchange": time_.exchange, "tensor parallel": time_.tensor, "context parallel": time_.context, "pipeline bubble": time_.bubble,
              "pipeline messages": time_.pipeline, "gradients and parameters": time_.data, "optimizer": time_.optimizer}
    name, most = max(losses.items(), key=lambda item: item[1])
    text = f"memory ({plan.margin / GIB:.1f} GiB left)" if plan.margin < 0.1 * plan.hardware.memory_gib * GIB else ""
    again = "recompute" if plan.args.training.recompute_granularity else ""
    parts = [part for part in (text, again, f"{name} {100 * most / time_.step:.1f} %" if most > 0.02 * time_.step else "") if part]
    return ", ".join(parts) or "computation"


def reasons(first: Plan, second: Plan) -> list[str]:
    """Why the first is faster, cause by cause, the largest first."""
    names = (("compute", "computation"), ("exchange", "expert exchange"), ("tensor", "tensor-parallel communication"), ("context", "context-parallel communication"),
             ("pipeline", "pipeline messages"), ("data", "gradients and parameters"), ("bubble", "pipeline bubble"), ("optimizer", "optimizer"))
    changes = sorted(((getattr(second.time, name) - getattr(first.time, name), text) for name, text in names), key=lambda item: -abs(item[0]))
    return [f"{abs(change):.3f} s {'less' if change > 0 else 'more'} {text}" for change, text in changes if abs(change) > 0.002 * second.time.step]
