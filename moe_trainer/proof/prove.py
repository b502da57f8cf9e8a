"""One case: the same training on many ranks and on one process, from the same named weights and the same global batches.

The one process runs the plain program: no parallel flag, no distributed optimizer, no overlap, no recompute. Where Megatron-LM's
definition of a quantity depends on the topology, the reference follows the definition, nothing else:

* capacity is counted per sequence shard (tp x cp ranks each see their own tokens): emulate.py drops tokens shard by shard;
* multi-token prediction is normalised by the tokens of each context rank: emulate.py weighs its losses so;
* the running counts of the global auxiliary loss go over the data ranks of one microbatch number: the reference is then the same
  number of plain data-parallel ranks instead of one process.

Rounding must not decide: near ties of the router (or Adam's division by nearly nothing) turn the last digit into another expert. A
reference whose weights are disturbed by a few parts in ten million has to come out nearly the same, else the batches are drawn anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from arguments import Arguments, parse_args
from arguments.precision import PrecisionArgs
from moe_trainer.initialize import make_groups
from moe_trainer.place import Place
from moe_trainer.proof.compare import Difference, closeness, compare
from moe_trainer.proof.emulate import Topology, emulate
from moe_trainer.proof.observe import Outcome, train
from moe_trainer.proof.pool import Pool, RanksFailed
from moe_trainer.proof.shrink import STEPS, Case
from moe_trainer.run import Run

DISTURBANCE = 3e-7
"""Relative size of the disturbance: a few units in the last place of fp32."""
STEADY = 1e-3
"""How far a disturbed reference's gradient may be from the reference's, relative to its norm."""
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

    try:
        seed, one = steady_reference(pool, case, seed)
    except RanksFailed as error:
        return verdict([], f"the reference itself failed\n{error}")
    try:
        many = pool.run(_many, case.world_size, case, seed)
    except RanksFailed as error:
        return verdict([], str(error))
    differences = compare(one, many)
    return verdict(differences, near="" if differences else closeness(one, many))


def steady_reference(pool: Pool, case: Case, seed: int) -> tuple[int, Outcome]:
    """The reference, on the first batches of SEEDS on which it does not hang on the last digit; and their seed.

    Raises: RanksFailed when the reference cannot be computed.
    """
    ranks = reference_ranks(case)
    for number in range(seed, seed + SEEDS):
        one = pool.run(_one, ranks, case, number, 0.0)
        if _is_steady(one, pool.run(_one, ranks, case, number, DISTURBANCE)):
            return number, one
    raise RanksFailed({0: f"no batches of seeds {seed} to {seed + SEEDS - 1} on which rounding does not choose the experts"})


def reference_ranks(case: Case) -> int:
    """Ranks of the reference: one, or with the global auxiliary loss the data ranks of the case."""
    words = case.reference
    at = words.index("--moe-router-load-balancing-type") + 1 if "--moe-router-load-balancing-type" in words else len(words)
    kinds = [word for word in words[at:at + 5] if word.endswith("aux_loss")]
    return case.mapping.dp if "global_aux_loss" in kinds else 1


def _is_steady(one: Outcome, disturbed: Outcome) -> bool:
    if one.dropped != disturbed.dropped:
        return False
    if any(abs(a - b) > 1e-5 * abs(a) for a, b in zip(one.grad_norms, disturbed.grad_norms)):
        return False
    return all((disturbed.grads[name] - grad).norm() <= STEADY * grad.norm() + 1e-9 for name, grad in one.grads.items())


def _one(rank: int, world_size: int, case: Case, seed: int, disturbance: float) -> Outcome:
    """The reference, in a rank of the pool."""
    args = _parse(case.reference, world_size, False)
    topology = Topology(tp=case.mapping.tp, cp=case.mapping.cp)

    def prepare(run: Run) -> None:
        emulate(run, topology)
        if disturbance:
            _disturb(run, disturbance)

    return _train(args, rank, world_size, seed, prepare)


def _many(rank: int, world_size: int, case: Case, seed: int) -> Outcome:
    """The case itself, in a rank of the pool."""
    return _train(_parse(case.argv, world_size, case.force_fp32), rank, world_size, seed, None)


def _parse(argv: tuple[str, ...], world_size: int, force_fp32: bool) -> Arguments:
    args = parse_args(list(argv), world_size)
    return replace(args, precision=PrecisionArgs(transformer_impl=args.precision.transformer_impl)) if force_fp32 else args


def _train(args: Arguments, rank: int, world_size: int, seed: int, prepare: Callable[[Run], None] | None) -> Outcome:
    place = Place(rank, world_size, rank, None, None, "proof")
    ps = make_groups(args, place, timedelta(seconds=120))
    return train(args, rank, ps, STEPS, seed, prepare)


def _disturb(run: Run, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for chunk in run.chunks:
        for param in chunk.parameters():
            noise = torch.rand(param.shape, generator=generator) * 2 - 1
            param.data.mul_(1 + size * noise)
