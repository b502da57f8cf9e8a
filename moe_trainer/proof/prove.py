"""One case: the same training on many ranks and on one process, from the same named weights and the same global batches.

The one process runs the plain program: no parallel flag, no distributed optimizer, no overlap, no recompute. Where Megatron-LM's
definition of a quantity depends on the topology, the reference follows the definition, nothing else:

* capacity is counted per sequence shard (tp x cp ranks each see their own tokens): emulate.py drops tokens shard by shard;
* multi-token prediction is normalised by the tokens of each context rank: emulate.py weighs its losses so;
* the running counts of the global auxiliary loss go over the data ranks of one microbatch number: emulate_balance.py runs as many
  forward passes before their backward passes, and computes the loss from its definition.

Rounding must not decide: a near tie of the router turns the last digit into another expert, or drops another token; one of an indexer
into another key. References whose weights are disturbed a little, up and down, have to choose the same experts and keys and come out
nearly the same, else other batches are drawn.
Two disturbances before a case, and six more when it parts, because two can fall on the same side of a tie: a case is said to part on
batches where all eight agree. And what a disturbance does to a weight in three steps tells what rounding may do to it: Adam divides by
the gradient, so one that all but cancels is moved by its last digits (an embedding row that is used once, say).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta

import torch
from torch import Tensor

from arguments import Arguments, parse_args
from arguments.precision import PrecisionArgs
from moe_trainer.initialize import make_groups
from moe_trainer.place import Place
from moe_trainer.proof.compare import Difference, closeness, compare
from moe_trainer.proof.emulate import emulate
from moe_trainer.proof.emulate_balance import emulate_global_balance
from moe_trainer.proof.emulate_fp8 import emulate_fp8
from moe_trainer.proof.forward import Watch, watch_rank, watch_whole
from moe_trainer.proof.low_precision import is_wide
from moe_trainer.proof.observe import Outcome, train
from moe_trainer.proof.pool import Pool, RanksFailed
from moe_trainer.proof.shrink import STEPS, Case
from moe_trainer.proof.topology import Topology
from moe_trainer.run import Run

DISTURBANCES = ((3e-6, 1), (-3e-6, 1))
"""Relative size of a disturbance and seed of its direction: some ten units in the last place of fp32, both ways, so that a near tie
falls to either side."""
MORE_DISTURBANCES = ((1e-6, 1), (-1e-6, 1), (3e-6, 2), (-3e-6, 2), (1e-6, 3), (-1e-6, 3))
"""Those that a reference from which a case parts has to stand as well."""
FP64_DISTURBANCE = 1e-7
"""How much smaller a disturbance is in fp64."""
STEADY_LOSS, STEADY_NORM = 5e-6, 1.5e-5
"""How far a disturbed reference may be from the reference, relative: several times what most are. Beyond, rounding grows too."""
SEEDS = 8


@dataclass(frozen=True)
class Verdict:
    """What a case gave: nothing (equal), differences in order of execution, or the failure of some ranks."""

    case: Case
    differences: list[Difference]
    failure: str = ""
    closeness: str = ""
    seed: int = 0
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Do the ranks and the one process agree?"""
        return not self.differences and not self.failure


def prove(pool: Pool, case: Case, seed: int = 0) -> Verdict:
    """Run a case on its ranks and on one process, and compare. seed: the first one of the batches that is tried."""
    began = time.monotonic()

    def verdict(differences: list[Difference], failure: str = "", near: str = "") -> Verdict:
        return Verdict(case, differences, failure, near, seed, time.monotonic() - began)

    last = seed + SEEDS
    while True:
        try:
            seed, one = steady_reference(pool, case, range(seed, last))
        except RanksFailed as error:
            return verdict([], f"the reference itself failed\n{error}")
        if any(word.endswith(("-fsdp", "-fsdp2")) for word in case.argv):
            pool.refresh()
        try:
            many = pool.run(train_case, case.world_size, case, seed)
        except RanksFailed as error:
            return verdict([], str(error))
        differences = compare(one, many)
        if not differences or _references(pool, case, seed, MORE_DISTURBANCES) is not None:
            return verdict(differences, near="" if differences else closeness(one, many))
        seed += 1


def steady_reference(pool: Pool, case: Case, seeds: range) -> tuple[int, Outcome]:
    """The reference, on the first batches on which it does not hang on the last digit; and their seed.

    Raises: RanksFailed when the reference cannot be computed, or hangs on the last digit on the batches of all seeds.
    """
    for seed in seeds:
        one = _references(pool, case, seed, DISTURBANCES)
        if one is not None:
            return seed, one
    raise RanksFailed({0: f"no batches of seeds {seeds.stop - SEEDS} to {seeds.stop - 1} on which rounding does not choose the experts or keys"})


def _references(pool: Pool, case: Case, seed: int, disturbances: tuple[tuple[float, int], ...]) -> Outcome | None:
    """The reference; None if a disturbed one parts from it."""
    found = pool.run_each(train_reference, [(case, seed, *disturbance) for disturbance in ((0.0, 0), *disturbances)])
    if not all(_is_steady(found[0], disturbed) for disturbed in found[1:]):
        return None
    one, others = found[0][0], [outcome for outcome, _ in found[1:]]
    return replace(one, shaken={
        name: max((other.weights[name] - weight).abs().max().item() for other in others) for name, weight in one.weights.items()})


def _is_steady(plain: tuple[Outcome, list[Tensor]], other: tuple[Outcome, list[Tensor]]) -> bool:
    (one, maps), (disturbed, other_maps) = plain, other
    if not all(torch.equal(a, b) for a, b in zip(maps, other_maps)):
        return False
    losses = [(a, b) for mine, theirs in zip(one.losses, disturbed.losses) for a, b in zip(mine.values(), theirs.values())]
    losses.append((one.evaluation, disturbed.evaluation))
    return all(abs(a - b) <= STEADY_LOSS * abs(a) for a, b in losses) and all(
        abs(a - b) <= STEADY_NORM * abs(a) for a, b in zip(one.grad_norms, disturbed.grad_norms))


def train_reference(rank: int, world_size: int, case: Case, seed: int, size: float = 0.0, direction: int = 0) -> tuple[Outcome, list[Tensor]]:
    """Train the reference of a case in this process, from weights that are disturbed by `size`.

    Returns: also what it chose, routing maps and the keys of sparse attention.
    """
    args = _parse(case.reference, world_size, False)
    records: list[dict] = []
    keys: list[Tensor] = []

    def prepare(run: Run) -> Watch:
        emulate(run, Topology(case.mapping.tp, case.mapping.cp))
        emulate_global_balance(run, case.mapping.dp)
        emulate_fp8(run, case.mapping, "--sequence-parallel" in case.argv)
        _disturb(run, size, direction)
        for chunk in run.chunks:
            for layer in chunk.moe_layers():
                layer.router.recorder = records
            for attention in chunk.sparse_attentions():
                attention.recorder = keys
        rows_cut = case.mapping.tp if "--sequence-parallel" in case.argv else 1
        return watch_whole(run, Topology(rows_cut, case.mapping.cp), case.mapping.dp)

    outcome = _train(args, rank, world_size, seed, prepare)
    return outcome, [*(record["map"] for record in records), *keys]


def train_case(rank: int, world_size: int, case: Case, seed: int, device: str = "cpu") -> Outcome:
    """Train the case itself as one of its ranks. Collective."""
    return _train(_parse(case.argv, world_size, case.force_fp32), rank, world_size, seed, watch_rank, device)


def _parse(argv: tuple[str, ...], world_size: int, force_fp32: bool) -> Arguments:
    args = parse_args(list(argv), world_size)
    precision = replace(args.precision, bf16=False) if force_fp32 else args.precision
    return replace(args, precision=WidePrecision.of(precision) if is_wide({**vars(precision), **vars(args.moe)}) else precision)


@dataclass(frozen=True)
class WidePrecision(PrecisionArgs):
    """A model in fp64 where it is not quantised: a last digit of fp32 would turn roundings to 8 bits."""

    @staticmethod
    def of(precision: PrecisionArgs) -> WidePrecision:
        """The same flags for a model in fp64."""
        return WidePrecision(**{each.name: getattr(precision, each.name) for each in fields(PrecisionArgs)})

    @property
    def params_dtype_name(self) -> str:
        return "fp64"


def _train(args: Arguments, rank: int, world_size: int, seed: int, prepare: Callable[[Run], Watch], device: str = "cpu") -> Outcome:
    place = Place(rank, world_size, rank, None, None, "proof")
    ps = make_groups(args, place, timedelta(seconds=120))
    return train(args, rank, ps, STEPS, seed, prepare, device)


def _disturb(run: Run, size: float, direction: int) -> None:
    if not size:
        return
    generator = torch.Generator().manual_seed(direction)
    size *= 1.0 if run.chunks[0].params_dtype == torch.float32 else FP64_DISTURBANCE
    for chunk in run.chunks:
        for param in chunk.parameters():
            noise = torch.rand(param.shape, generator=generator) * 2 - 1
            param.data.mul_(1 + size * noise)
