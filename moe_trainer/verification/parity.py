"""Parity check of one case: the same training on many ranks and on one process, with equal weights and global batches.

The one process runs the plain program: no parallel flag, no distributed optimizer, no overlap, no recompute. Where
Megatron-LM defines a quantity by the mapping, the reference follows the definition:

* expert capacity and dropped tokens per sequence shard, and the mean of multi-token prediction per context rank:
  emulate_topology.py;
* choices of all data ranks so far in the global auxiliary loss: emulate_balancing.py;
* scales and blocks of fp8 formats: emulate_formats.py.

Packed sequences (--use-varlen-dataset) share a microbatch as on the ranks. One process does not pad them, unless a
quantity is defined by the mapping: that counts the padding of the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import chain, repeat

import torch
from torch import Tensor

from arguments import Arguments, parse_args
from arguments.mechanisms.shardings import WRAPPED_FLAGS
from arguments.precision import PrecisionArgs
from moe_trainer.data.packing import PackFormat
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.training.initialize import make_groups
from moe_trainer.training.run import TrainRun
from moe_trainer.verification.activation_sums import ActivationSums, record_rank_sums, record_reference_sums
from moe_trainer.verification.compare_runs import compare, describe_agreement
from moe_trainer.verification.comparison import ComparisonRow
from moe_trainer.verification.emulate_balancing import Shares, emulate_global_balance
from moe_trainer.verification.emulate_formats import emulate_formats
from moe_trainer.verification.emulate_topology import emulate_topology
from moe_trainer.verification.low_precision import needs_fp64
from moe_trainer.verification.rank_pool import RankPool, RankPoolError
from moe_trainer.verification.sequence_sharding import SequenceSharding
from moe_trainer.verification.shrink import STEPS, ParityCase
from moe_trainer.verification.synthetic_data import PackLayout, plan_packs
from moe_trainer.verification.training_trace import TrainingTrace, train

# Rounding must not decide: a near tie of a router or an indexer turns a last digit into another expert, another
# dropped token or another key. References with perturbed weights must choose the same experts and keys and give nearly
# the same results, otherwise other batches are drawn. Two perturbations can fall on the same side of a tie, so a case
# that differs is checked with six more: it only counts on batches where all of them agree. The perturbations also show
# what rounding may do to a weight in three steps: Adam divides by the gradient, so one that nearly cancels is moved by
# its last digits (an embedding row that is used once, for example).
PERTURBATIONS = ((3e-6, 1), (-3e-6, 1))
"""Relative size and seed of a perturbation: about ten units in the last place of fp32, in both directions."""
EXTRA_PERTURBATIONS = ((1e-6, 1), (-1e-6, 1), (3e-6, 2), (-3e-6, 2), (1e-6, 3), (-1e-6, 3))
"""Further perturbations of a reference from which a case differs."""
FP64_PERTURBATION_SCALE = 1e-7
"""Factor on the size of a perturbation in fp64."""
MAX_LOSS_DRIFT, MAX_GRAD_NORM_DRIFT = 5e-6, 1.5e-5
"""Largest relative change that a perturbation may cause: several times what is common. Beyond it rounding grows too."""
MAX_SEEDS = 8
"""Seeds of batches that are tried for one case."""
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class ParityResult:
    """Result of a case: differences in execution order, the failure of some ranks, or neither if they are equal.

    Attributes:
        agreement: what was compared and how closely it agrees, in a line.
        seed: of the batches.
    """

    case: ParityCase
    differences: list[ComparisonRow]
    failure: str = ""
    agreement: str = ""
    seed: int = 0
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether the ranks and the one process agree."""
        return not self.differences and not self.failure


def check_parity(pool: RankPool, case: ParityCase, seed: int = 0) -> ParityResult:
    """Run a case on its ranks and on one process, and compare them. `seed` is the first seed of batches to try."""
    start = time.monotonic()

    def make_result(differences: list[ComparisonRow], failure: str = "", agreement: str = "") -> ParityResult:
        return ParityResult(case, differences, failure, agreement, seed, time.monotonic() - start)

    stop_seed = seed + MAX_SEEDS
    while True:
        try:
            seed, reference = find_stable_reference(pool, case, range(seed, stop_seed))
        except RankPoolError as error:
            return make_result([], f"the reference run failed\n{error}")
        if any(f"--{dest.replace('_', '-')}" in case.argv for dest in WRAPPED_FLAGS):
            pool.refresh()
        try:
            actual = pool.run(train_case, case.world_size, case, seed)
        except RankPoolError as error:
            return make_result([], str(error))
        differences = compare(reference, actual)
        if not differences or _run_references(pool, case, seed, EXTRA_PERTURBATIONS) is not None:
            return make_result(differences, agreement="" if differences else describe_agreement(reference, actual))
        seed += 1


def find_stable_reference(pool: RankPool, case: ParityCase, seeds: range) -> tuple[int, TrainingTrace]:
    """Return the first seed whose batches do not depend on rounding, and the reference on them.

    Raises:
        RankPoolError: if the reference fails, or depends on rounding for all seeds.
    """
    for seed in seeds:
        reference = _run_references(pool, case, seed, PERTURBATIONS)
        if reference is not None:
            return seed, reference
    first, last = seeds.stop - MAX_SEEDS, seeds.stop - 1
    raise RankPoolError({0: f"for all batches of seeds {first} to {last} rounding decides the experts or keys"})


def _run_references(
    pool: RankPool, case: ParityCase, seed: int, perturbations: tuple[tuple[float, int], ...]
) -> TrainingTrace | None:
    """Return the reference, or None if a perturbed one differs from it."""
    plain, *perturbed = pool.run_each(
        train_reference, [(case, seed, *perturbation) for perturbation in ((0.0, 0), *perturbations)]
    )
    if not all(_is_stable(plain, other) for other in perturbed):
        return None
    reference = plain[0]
    changes = {
        name: max((trace.weights[name] - weight).abs().max().item() for trace, _ in perturbed)
        for name, weight in reference.weights.items()
    }
    return replace(reference, perturbed_change=changes)


def _is_stable(plain: tuple[TrainingTrace, list[Tensor]], perturbed: tuple[TrainingTrace, list[Tensor]]) -> bool:
    """Whether a perturbed reference makes the same choices and has nearly the same losses and gradient norms."""
    (reference, choices), (trace, other_choices) = plain, perturbed
    if not all(torch.equal(a, b) for a, b in zip(choices, other_choices)):
        return False
    losses = [pair for a, b in zip(reference.losses, trace.losses) for pair in zip(a.values(), b.values())]
    if reference.evaluation is not None and trace.evaluation is not None:
        losses.append((reference.evaluation, trace.evaluation))
    norms = zip(reference.grad_norms, trace.grad_norms)
    return all(abs(a - b) <= MAX_LOSS_DRIFT * abs(a) for a, b in losses) and all(
        abs(a - b) <= MAX_GRAD_NORM_DRIFT * abs(a) for a, b in norms
    )


def train_reference(
    rank: int, world_size: int, case: ParityCase, seed: int, perturbation: float = 0.0, direction: int = 0
) -> tuple[TrainingTrace, list[Tensor]]:
    """Train the reference of a case in this process, from perturbed weights.

    Returns:
        The trace; what was chosen: routing maps and the keys of sparse attention.
    """
    args, mapping = _parse(case.reference, world_size, False), case.mapping
    routing: list[dict] = []
    keys: list[Tensor] = []
    is_sequence_parallel, layout = "--sequence-parallel" in case.argv, _pack_layout(case)

    has_groups = layout is not None and bool(layout.format.cp_sizes)

    def prepare(run: TrainRun) -> ActivationSums:
        sharding = SequenceSharding(mapping.tp, 1 if has_groups else mapping.cp)
        sizes = chain.from_iterable(chain.from_iterable(_iter_shares(args, mapping.dp, layout, seed)))
        emulate_topology(run, sharding, sizes if has_groups else None)
        emulate_global_balance(run, _iter_shares(args, mapping.dp, layout, seed))
        emulate_formats(run, mapping, is_sequence_parallel)
        _perturb(run, perturbation, direction)
        for chunk in run.chunks:
            for layer in chunk.moe_layers():
                layer.router.recorder = routing
            for attention in chunk.sparse_attentions():
                attention.recorder = keys
        if layout is not None and (has_groups or not layout.sets_padding):
            return ActivationSums()  # the ranks have other tokens
        of_rank = SequenceSharding(mapping.tp if is_sequence_parallel else 1, mapping.cp)
        sequences = parse_args(list(case.argv), case.world_size).training.micro_batch_size
        return record_reference_sums(run, of_rank, mapping.dp, 1 if layout is not None else sequences)

    trace = _train(args, rank, world_size, seed, prepare, layout=layout)
    return trace, [*(record["map"] for record in routing), *keys]


def _iter_shares(args: Arguments, dp: int, layout: PackLayout | None, seed: int) -> Iterator[Shares]:
    """Yield by step which microbatches the ranks of a mapping run at once."""
    if layout is None:
        training = args.training
        return repeat([[1] * dp] * (training.global_batch_size // (training.micro_batch_size * dp)))
    return ([[pack.num_ranks for pack in packs] for packs in plan.packs] for plan in plan_packs(args, layout, seed))


def train_case(rank: int, world_size: int, case: ParityCase, seed: int, device: str = "cpu") -> TrainingTrace:
    """Train the case as one of its ranks. Collective."""
    args = _parse(case.argv, world_size, case.force_fp32)
    return _train(args, rank, world_size, seed, record_rank_sums, device, _pack_layout(case))


def _pack_layout(case: ParityCase) -> PackLayout | None:
    """Return which sequences are packed together by the ranks of a case; None without packing."""
    args = parse_args(list(case.argv), case.world_size)
    fmt = PackFormat.from_args(args)
    if fmt is None:
        return None
    group_size = args.parallel.microbatch_group_size_per_vp_stage if case.mapping.vpp > 1 else None
    return PackLayout(fmt, case.mapping.dp, group_size or 1, sets_padding=bool(case.defined_by_mapping))


def _parse(argv: tuple[str, ...], world_size: int, force_fp32: bool) -> Arguments:
    args = parse_args(list(argv), world_size)
    precision = replace(args.precision, bf16=False) if force_fp32 else args.precision
    if needs_fp64({**vars(precision), **vars(args.moe)}):
        precision = Fp64Precision.from_args(precision)
    return replace(args, precision=precision)


@dataclass(frozen=True)
class Fp64Precision(PrecisionArgs):
    """Model in fp64 where it is not quantized. A last digit of fp32 would change the rounding of operands."""

    @staticmethod
    def from_args(precision: PrecisionArgs) -> Fp64Precision:
        return Fp64Precision(**{field.name: getattr(precision, field.name) for field in fields(PrecisionArgs)})

    @property
    def params_dtype_name(self) -> str:
        return "fp64"


def _train(
    args: Arguments,
    rank: int,
    world_size: int,
    seed: int,
    prepare: Callable[[TrainRun], ActivationSums],
    device: str = "cpu",
    layout: PackLayout | None = None,
) -> TrainingTrace:
    ps = make_groups(args, LaunchEnv(rank, world_size, rank, None, None, "verification"), _TIMEOUT)
    return train(args, rank, ps, STEPS, seed, prepare, device, layout)


def _perturb(run: TrainRun, size: float, direction: int) -> None:
    if not size:
        return
    generator = torch.Generator().manual_seed(direction)
    size *= 1.0 if run.chunks[0].params_dtype == torch.float32 else FP64_PERTURBATION_SCALE
    for chunk in run.chunks:
        for param in chunk.parameters():
            noise = torch.rand(param.shape, generator=generator) * 2 - 1
            param.data.mul_(1 + size * noise)
