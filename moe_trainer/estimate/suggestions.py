"""Find changes of flags that make a command line fit, cheapest first.

Single changes are planned through the real rules: more recompute, other sizes of the mapping, a smaller micro-batch,
fewer virtual stages, a smaller optimizer, offloading. If no single change fits, or only a slow one, pairs of different
kinds are planned too, the most promising first. If no pair fits either, changes are added one by one, each time the one
that saves most for its cost; and at last the number of devices is raised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.mechanisms.dispatchers import ALLTOALL, get_dispatcher
from arguments.mechanisms.shardings import get_sharding
from arguments.stage_layout import chunk_layouts
from arguments.tokens import drop_flags
from moe_trainer.estimate.hardware import GIB
from moe_trainer.estimate.parallel_configs import (
    FULL_RECOMPUTE,
    LAYOUT,
    MAX_PIPELINE_STAGES,
    MAX_TENSOR_PARALLEL,
    RECOMPUTE,
    layer_counts,
    layout_text,
    recompute_flags,
    recompute_sets,
)
from moe_trainer.estimate.plan import Plan, try_plan

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

SLOW = 0.05
"""Cost of a single change above which pairs are tried too."""
MAX_PAIRS, ENOUGH_PAIRS, MAX_CHAIN_LENGTH = 120, 6, 6
"""Maximum of planned pairs, number of fitting pairs after which planning stops, and maximum of changes in a chain."""
LIKELY, POSSIBLE = 1.1, 1.3
"""Memory that a pair is expected to need, as a multiple of what there is.

Up to the first, pairs are planned fastest first; then up to the second, smallest first; above, not at all.
"""
MIN_COST = 0.05
"""Added to the cost of a change when savings are weighed against it, so that small free savings do not win."""
EQUAL_SPEED_TOLERANCE = 0.0005
"""Differences of speed that are shown as none."""
MIN_SHARD_TOKENS = 2048
"""Minimum positions of a sequence per rank with context parallelism."""
MIN_CONTEXT_TOKENS = 8192
"""Sequence length from which context parallelism is offered."""


@dataclass(frozen=True)
class Change:
    """One change of a command line.

    Attributes:
        kind: only one change of a kind is made.
        words: flags to add.
        dests: flags to remove.
        note: what else it changes.
        devices: factor of the number of devices.
    """

    kind: str
    words: tuple[str, ...]
    dests: frozenset[str] = frozenset()
    note: str = ""
    devices: int = 1


@dataclass(frozen=True)
class Fix:
    """Changes that make a plan fit. `slower`: relative increase of the time per token and device."""

    changes: tuple[Change, ...]
    plan: Plan
    slower: float

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for change in self.changes for word in change.words)

    @property
    def outcome(self) -> str:
        """The memory that is left, the change of speed, and what else the flags change, in one clause."""
        pace = f"{100 * abs(self.slower):.1f} % {'slower' if self.slower > 0 else 'faster'}"
        if abs(self.slower) < EQUAL_SPEED_TOLERANCE:
            pace = "as fast"
        notes = "".join(f"; {change.note}" for change in self.changes if change.note)
        return f"fits with {self.plan.margin / GIB:.1f} GiB left, {pace}{notes}"

    @property
    def text(self) -> str:
        return f"{' '.join(self.words)}: {self.outcome}"


@dataclass(frozen=True)
class _Line:
    """A command line with its plan."""

    argv: Sequence[str]
    plan: Plan

    def plan_with(self, chosen: Sequence[Change]) -> Plan | None:
        """Return the plan with these changes, None if the rules reject them."""
        dests = frozenset().union(*(change.dests for change in chosen))
        line = [*drop_flags(self.argv, dests), *(word for change in chosen for word in change.words)]
        num_ranks = self.plan.world_size * math.prod(change.devices for change in chosen)
        return try_plan(line, num_ranks, self.plan.hardware, self.plan.histogram)


def cheapest_fixes(
    argv: Sequence[str], plan: Plan, headroom: float = 1.0, searched: bool = True, most: int = 3
) -> list[Fix]:
    """Find changes that make a command line fit, the fastest first; single changes before pairs that are not faster.

    Args:
        headroom: load of a rank, as a multiple of an even share, that must fit too.
        searched: also change what a search for mappings chooses.
        most: maximum number of results.
    """
    found: list[Fix] = []
    legal: list[tuple[Change, Plan]] = []
    line = _Line(argv, plan)
    for change in changes(plan.args, plan.hardware, plan.world_size, searched):
        other = line.plan_with((change,))
        if other is None:
            continue
        legal.append((change, other))
        if other.fits(headroom):
            found.append(Fix((change,), other, _slowdown(other, plan)))
    if not found or min(fix.slower for fix in found) > SLOW:
        found += _pairs(line, legal, headroom)
    if not found and legal:
        found = _chain(line, [change for change, _ in legal], headroom)
    if not found and searched:
        larger = []
        for times in (2, 4, 8):
            planned = ((change, line.plan_with((change,))) for change in _more_devices(plan, times))
            larger += [(change, other) for change, other in planned if other is not None][:1]
        found = [Fix((change,), other, _slowdown(other, plan)) for change, other in larger if other.fits(headroom)]
        if not found:
            found = _pairs(line, [*legal, *larger], headroom)
    return _undominated(found)[:most]


def _undominated(found: Sequence[Fix]) -> list[Fix]:
    """Sort by speed; keep the fastest of each set of kinds and nothing that contains a fix and is slower."""
    kept: list[Fix] = []
    for fix in sorted(found, key=lambda fix: (round(fix.slower, 3), len(fix.changes), -fix.plan.margin)):
        kinds = {change.kind for change in fix.changes}
        if not any({change.kind for change in other.changes} <= kinds for other in kept):
            kept.append(fix)
    return kept


def _slowdown(plan: Plan, before: Plan) -> float:
    return before.tokens_per_second / plan.tokens_per_second - 1


def _more_devices(plan: Plan, times: int) -> Iterator[Change]:
    """Yield `times` the devices with the same global batch, and with as many times the batch, which they can share."""
    words, note = ("--world-size", str(plan.world_size * times)), f"{times} times the devices"
    yield Change("devices", words, frozenset(("world_size",)), note, times)
    batch = ("--global-batch-size", str(plan.args.training.global_batch_size * times))
    dests = frozenset(("world_size", "global_batch_size"))
    yield Change("devices", (*words, *batch), dests, f"{note}, and the batch", times)


def _pairs(line: _Line, legal: Sequence[tuple[Change, Plan]], headroom: float) -> list[Fix]:
    """Return fitting pairs of changes of different kinds, the most promising first."""
    plan = line.plan
    budget = plan.peak.total + plan.margin
    able = []
    for (first, one), (second, two) in itertools.combinations(legal, 2):
        if first.kind == second.kind:
            continue
        needs = one.peak.total * two.peak.total / plan.peak.total
        slower = (1 + _slowdown(one, plan)) * (1 + _slowdown(two, plan))
        if needs <= POSSIBLE * budget:
            likely = needs <= LIKELY * budget
            able.append((not likely, slower if likely else needs, first, second))
    found: list[Fix] = []
    for _, _, first, second in sorted(able, key=lambda each: each[:2])[:MAX_PAIRS]:
        other = line.plan_with((first, second))
        if other is not None and other.fits(headroom):
            found.append(Fix((first, second), other, _slowdown(other, plan)))
            if len(found) >= ENOUGH_PAIRS:
                break
    return found


def _chain(line: _Line, offered: Sequence[Change], headroom: float) -> list[Fix]:
    """Add the change that saves most memory for its cost, until the plan fits."""
    chosen: tuple[Change, ...] = ()
    now = plan = line.plan
    while len(chosen) < MAX_CHAIN_LENGTH:
        kinds = {change.kind for change in chosen}
        plans = [
            (change, other)
            for change in offered
            if change.kind not in kinds
            and (other := line.plan_with((*chosen, change))) is not None
            and other.peak.total < now.peak.total
        ]
        fitting = [
            Fix((*chosen, change), other, _slowdown(other, plan)) for change, other in plans if other.fits(headroom)
        ]
        if fitting or not plans:
            return fitting
        best, now = max(
            plans,
            key=lambda each: (
                math.log(now.peak.total / each[1].peak.total) / (MIN_COST + max(0.0, _slowdown(each[1], now)))
            ),
        )
        chosen = (*chosen, best)
    return []


def changes(args: Arguments, hardware: Hardware, gpus: int, searched: bool = True) -> Iterator[Change]:
    """Yield all single changes of a command line that may save memory."""
    if searched:
        yield from () if args.has_frozen_weights else _recompute(args)
        yield from _mapping(args, hardware, gpus)
    if not args.has_frozen_weights:  # else there is no optimizer, and no activation waits for a backward
        yield from _optimizer(args)
        yield from _offloading(args)


def _recompute(args: Arguments) -> Iterator[Change]:
    now = args.training.recomputed_modules
    if "full" in now:
        return
    for parts in recompute_sets(args):
        if parts != FULL_RECOMPUTE and set(parts) <= now:
            continue
        modules = sorted(now | set(parts)) if parts != FULL_RECOMPUTE else FULL_RECOMPUTE
        if "moe" in modules:
            modules = [module for module in modules if module not in ("moe_act", "shared_experts")]
        yield Change("recompute", recompute_flags(modules), RECOMPUTE)


def _mapping(args: Arguments, hardware: Hardware, gpus: int) -> Iterator[Change]:
    parallel, moe, length, layers = args.parallel, args.moe, args.data.seq_length, args.model.num_layers
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, cp, mbs = parallel.expert_model_parallel_size, parallel.context_parallel_size, args.training.micro_batch_size

    def resize(kind: str, dest: str, size: int, *more: str) -> Change:
        return Change(kind, (f"--{dest.replace('_', '-')}", str(size), *more), frozenset((dest,)))

    for size in sorted({mbs // 2, 1} - {0, mbs}, reverse=True):
        yield resize("micro-batch", "micro_batch_size", size)
    for times in (2, 4, 8):
        if times * ep <= min(gpus, moe.num_experts or 1):
            dispatcher = ALLTOALL.words if ep == 1 and get_dispatcher(moe).gathers else ()
            yield resize("EP", "expert_model_parallel_size", times * ep, *dispatcher)
        if times * tp <= min(hardware.domain, MAX_TENSOR_PARALLEL):
            is_folded = moe.num_experts and parallel.expert_tensor_parallel_size in (None, 1)
            etp = ("--expert-tensor-parallel-size", "1") if is_folded else ()
            yield resize("TP", "tensor_model_parallel_size", times * tp, "--sequence-parallel", *etp)
        is_fixed = not parallel.dynamic_context_parallel
        if is_fixed and length >= MIN_CONTEXT_TOKENS and length // (times * cp) >= MIN_SHARD_TOKENS:
            yield resize("CP", "context_parallel_size", times * cp)
    vpp = len(chunk_layouts(args.model, parallel)[0])
    for stages in (pp, 2 * pp, 4 * pp):
        for chunks in sorted({1, max(1, vpp // 2), vpp}):
            is_smaller = stages == pp and chunks >= vpp
            is_possible = 1 < stages <= min(MAX_PIPELINE_STAGES, layers) and stages * chunks <= layers + 1
            if is_possible and not is_smaller:
                layout = layout_text(layer_counts(layers, stages * chunks, 1.5), args.model.num_mtp_depths)
                yield Change(
                    "PP",
                    ("--pipeline-model-parallel-size", str(stages), "--pipeline-model-parallel-layout", layout),
                    LAYOUT,
                )


def _optimizer(args: Arguments) -> Iterator[Change]:
    optimizer = args.optimizer
    needs = () if get_sharding(args.parallel).shards_flat_state else ("--use-distributed-optimizer",)
    aware = (*needs, "--use-precision-aware-optimizer")
    if needs:
        yield Change("sharding", needs)  # changes no number, so it is offered next to what does
    if args.precision.bf16 and not optimizer.use_precision_aware_optimizer:
        narrow = (*aware, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
        yield Change("optimizer", narrow, note="moments are kept in bf16")
        yield Change(
            "optimizer", (*narrow, "--main-grads-dtype", "bf16"), note="moments and gradients are kept in bf16"
        )
    if not optimizer.optimizer_cpu_offload:
        yield Change("optimizer", (*aware, "--optimizer-cpu-offload"), note="the host updates the parameters")


def _offloading(args: Arguments) -> Iterator[Change]:
    if args.training.offloaded_modules or args.training.recomputed_modules & {"full", "moe"}:
        return
    for modules in (("expert_fc1",), ("expert_fc1", "attn_norm", "mlp_norm"), ("core_attn", "attn_proj", "expert_fc1")):
        yield Change("offload", ("--fine-grained-activation-offloading", "--offload-modules", *modules))
