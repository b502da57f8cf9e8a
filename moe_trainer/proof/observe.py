"""Training a small model for some steps under any layout, in this process, and what came out under global names.

Nothing here imitates the trainer: the model, the schedule, the reductions and the optimizer are those of `train.train_step`; only the
batches are drawn here (from a seed, the same global batch for every layout, cut over data-parallel ranks as the loader does it).
Rank 0 holds whole tensors afterwards. What rank 0 cannot see - a copy on another rank that went its own way - is caught by
fingerprints: every rank reduces each of its tensors to a few numbers, and copies of one piece must agree on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments import Arguments
from moe_trainer.data.loader import Batch
from moe_trainer.initialize import Runtime
from moe_trainer.model.weights import export_named_weights, gather_named, gradient_of
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import info_of, unique_params
from moe_trainer.parallel.shards import whole
from moe_trainer.parallel.state import ParallelState
from moe_trainer.place import Place
from moe_trainer.proof.forward import Coordinates, Watch, watch_rank
from moe_trainer.proof.text import batches, tokenizer
from moe_trainer.run import Run, TrainState, build_run
from moe_trainer.training.judgement import remembering
from moe_trainer.training.step import run_microbatches, shared_sums, train_step


@dataclass(frozen=True)
class Piece:
    """Which part of a named tensor a rank holds: piece `index` of `count` along `dim`, of stretches in these proportions."""

    name: str
    dim: int | None
    index: int
    count: int
    parts: tuple[int, ...]
    fingerprints: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What some steps of training gave. Tensors and pieces on rank 0 only.

    Of every step: `losses` as the log names them, `per_layer` (loss name -> one value a layer), `grad_norms`, `dropped` tokens.
    `grads`: all gradients of the first step, reduced and not yet clipped; `weights`: parameters and expert bias after the last step.
    `evaluation`: the loss of further batches after the last step, as a validation computes it. `forward`: by rank, what its layers put out in the first step (see forward.py). `pieces`: by rank, what it holds; their fingerprints are those of the gradient of the first step and of the weight after the last. `shaken`: of a reference, how far a disturbance moves each weight in the end (see prove.py).
    """

    losses: list[dict[str, float]]
    grad_norms: list[float]
    dropped: list[int]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    per_layer: list[dict[str, list[float]]] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)
    evaluation: float | None = None
    forward: list[dict[Coordinates, dict[str, Tensor]]] = field(default_factory=list)
    shaken: dict[str, float] = field(default_factory=dict)


def make_run(args: Arguments, rank: int, ps: ParallelState, steps: int, skip: int = 0, seed: int = 0, device: str = "cpu") -> Run:
    """Build a run whose batches need no files; `skip` leaves out those of the first steps. Collective."""
    place = Place(rank, ps.world.size, rank, None, None, "proof")
    # a device of this rank is numbered, as of initialize.py
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    run = build_run(args, Runtime(place, where, ps), tokenizer(args))
    return remembering(replace(run, train_batches=iter(_batches(run, skip, steps, seed))))


def _batches(run: Run, first: int, steps: int, seed: int) -> list[Batch]:
    found = batches(run.args, run.runtime.ps, first, steps, seed)
    return [batch.pin_memory() for batch in found] if run.runtime.device.type == "cuda" else found


def train(
    args: Arguments, rank: int, ps: ParallelState, steps: int = 3, seed: int = 0, prepare: Callable[[Run], Watch | None] | None = None,
    device: str = "cpu",
) -> Outcome:
    """Train from the named initialisation. Collective over the world; seed chooses the batches, prepare sees the run first and
    may watch its first forward passes (see forward.py; else this rank's are watched)."""
    run, state, results = make_run(args, rank, ps, steps, seed=seed, device=device), TrainState(), []
    watch = (prepare(run) if prepare is not None else None) or watch_rank(run)
    grads: dict[str, Tensor] = {}
    prints: dict[str, list] = {}
    microbatches = args.training.global_batch_size // (args.training.micro_batch_size * ps.dp.size)
    step = run.optimizer.step

    def record_and_step(**rates):
        if state.iteration == 0:
            run.grads.gather()
            grads.update((name, grad.clone().cpu()) for name, grad in gather_named(run.chunks, ps, gradient_of))
            prints.update(_fingerprints(run, gradient_of))
        return step(**rates)

    run.optimizer.step = record_and_step
    for _ in range(steps):
        results.append(train_step(run, state, microbatches))
        state.iteration += 1
        watch.on = False
    run.optimizer.wait_params()
    evaluation = _evaluate(run, _batches(run, steps, 1, seed))
    weights = {name: tensor.clone().cpu() for name, tensor in export_named_weights(run.chunks, ps)}
    for name, value in _fingerprints(run, whole).items():
        prints[name] = [*prints.get(name, []), value[0]]
    return Outcome(
        losses=[result.losses for result in results],
        grad_norms=[result.grad_norm for result in results],
        dropped=[result.dropped_tokens for result in results],
        grads=grads,
        weights=weights,
        per_layer=[result.per_layer for result in results],
        pieces=collectives.all_gather_object(list(_pieces(run, prints)), ps.world),
        evaluation=evaluation,
        forward=collectives.all_gather_object(dict(watch.sums), ps.world),
    )


def _evaluate(run: Run, further: list[Batch]) -> float:
    """The mean loss of some batches without gradients. Collective."""
    for chunk in run.chunks:
        chunk.train(False)
    with torch.no_grad():
        sums = run_microbatches(run, iter(further), len(further), run.args.training.micro_batch_size, forward_only=True)
    loss_sum, tokens = shared_sums(run, sums)
    return loss_sum / max(tokens, 1.0)


def _named(run: Run) -> Iterable[tuple[Parameter, int, str]]:
    """Every (parameter, position in the stack, name) of this rank."""
    for chunk in run.chunks:
        for param in unique_params(chunk.parameters()):
            for position, name in enumerate(info_of(param).names):
                yield param, position, name


def _fingerprints(run: Run, value: Callable[[Parameter], Tensor]) -> dict[str, list]:
    """Norm, sum and a sum with unequal weights of every named tensor of this rank, fp64."""
    found = {}
    for param, position, name in _named(run):
        tensor = value(param).detach().double()
        flat = (tensor[position] if info_of(param).stacked else tensor).flatten()
        ramp = torch.cos(torch.arange(len(flat), dtype=torch.float64, device=flat.device))
        found[name] = [(flat.norm().item(), flat.sum().item(), (flat * ramp).sum().item())]
    return found


def _pieces(run: Run, prints: dict[str, list]) -> Iterable[Piece]:
    for param, _, name in _named(run):
        info = info_of(param)
        whole = info.shard_count == 1 or info.sharded_dim is None
        parts = info.part_sizes or (1,) * info.parts
        cut = (None, 0, 1, (1,)) if whole else (info.sharded_dim, info.shard_rank, info.shard_count, parts)
        yield Piece(name, *cut, tuple(prints[name]))
