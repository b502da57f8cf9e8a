"""Trace of a short training of a small model under any mapping, under mapping-independent names.

Nothing here imitates the trainer: model, schedule, reductions and optimizer are those of train_step. Only the batches
are synthetic: from a seed, the same global batch for every mapping, distributed over data-parallel ranks as the loader
does. Rank 0 holds full tensors afterwards. A copy on another rank that diverges is detected by fingerprints: every rank
reduces each of its tensors to a few numbers, and copies of one shard must agree on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments import Arguments
from moe_trainer.data.loader import Batch
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.model.weights import export_named_weights, gather_named_tensors, get_main_grad
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info, unique_params
from moe_trainer.parallel.shards import full_tensor
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.initialize import Runtime
from moe_trainer.training.rerun import with_rewindable_batches
from moe_trainer.training.run import TrainRun, TrainState, with_batches
from moe_trainer.training.setup import build_train_run
from moe_trainer.training.step import reduce_loss, run_microbatches, train_step
from moe_trainer.verification.activation_sums import ActivationSums, Coordinates, record_rank_sums
from moe_trainer.verification.synthetic_data import PackLayout, draw_batches, make_null_tokenizer


@dataclass(frozen=True)
class TracedShard:
    """Shard of a named tensor on a rank: part `index` of `count` along `dim`.

    Attributes:
        sections: proportions of the sections along `dim` that are sharded separately.
        fingerprints: of the gradient of the first step and of the weight after the last.
    """

    name: str
    dim: int | None
    index: int
    count: int
    sections: tuple[int, ...]
    fingerprints: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class TrainingTrace:
    """Results of some steps of training. Tensors and shards are on rank 0 only.

    Attributes:
        losses: by step, as the log names them.
        grad_norms: by step.
        dropped: tokens dropped, by step.
        grads: all gradients of the first step, reduced and not clipped.
        weights: parameters and expert bias after the last step.
        per_layer: by step, loss name -> one value per layer.
        shards: by rank, what it holds.
        evaluation: loss of further batches after the last step, as a validation computes it.
        forward: by rank, sums of its layers' outputs in the first step (activation_sums.py).
        perturbed_change: of a reference, how far a perturbation moves each weight (parity.py).
    """

    losses: list[Mapping[str, float]]
    grad_norms: list[float]
    dropped: list[int]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    per_layer: list[Mapping[str, list[float]]] = field(default_factory=list)
    shards: list[list[TracedShard]] = field(default_factory=list)
    evaluation: float | None = None
    forward: list[dict[Coordinates, dict[str, Tensor]]] = field(default_factory=list)
    perturbed_change: dict[str, float] = field(default_factory=dict)


def make_run(
    args: Arguments,
    rank: int,
    ps: ParallelState,
    steps: int,
    skip: int = 0,
    seed: int = 0,
    device: str = "cpu",
    layout: PackLayout | None = None,
    batches: Iterable[Batch] | None = None,
) -> TrainRun:
    """Build the context of a run on synthetic batches, without those of the first `skip` steps. Collective.

    `layout`: see draw_batches. `batches`: of all steps, in their place.
    """
    launch_env = LaunchEnv(rank, ps.world.size, rank, None, None, "verification")
    # with an index, as training/initialize.py sets it
    torch_device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    run = build_train_run(args, Runtime(launch_env, torch_device, ps), make_null_tokenizer(args))
    if batches is None:
        batches = chain(*_batches(run, skip, steps, seed, layout))
    return with_rewindable_batches(with_batches(run, iter(batches)))


def _batches(run: TrainRun, first: int, steps: int, seed: int, layout: PackLayout | None = None) -> list[list[Batch]]:
    drawn = draw_batches(run.args, run.runtime.ps, first, steps, seed, layout)
    return [[batch.pin_memory() for batch in step] for step in drawn] if run.runtime.device.type == "cuda" else drawn


def train(
    args: Arguments,
    rank: int,
    ps: ParallelState,
    steps: int = 3,
    seed: int = 0,
    prepare: Callable[[TrainRun], ActivationSums | None] | None = None,
    device: str = "cpu",
    layout: PackLayout | None = None,
) -> TrainingTrace:
    """Train from the mapping-independent initialization, on batches of `seed`. Collective over the world.

    `prepare` is called with the context first. It may return the recorder of activation sums; otherwise this rank's
    outputs are summed. `layout`: see draw_batches.
    """
    run = make_run(args, rank, ps, steps, seed=seed, device=device, layout=layout)
    counts = [len(batches) for batches in draw_batches(args, ps, 0, steps, seed, layout)]
    state, results = TrainState(), []
    activation_sums = (prepare(run) if prepare is not None else None) or record_rank_sums(run)
    grads: dict[str, Tensor] = {}
    fingerprints: dict[str, list] = {}
    step = run.optimizer.step

    def record_and_step(**rates):
        if state.iteration == 0:
            run.grads.gather()
            named = gather_named_tensors(run.chunks, ps, get_main_grad)
            grads.update((name, grad.clone().cpu()) for name, grad in named)
            fingerprints.update(_fingerprints(run, get_main_grad))
        return step(**rates)

    vars(run.optimizer).update(step=record_and_step)
    for microbatches in counts:
        results.append(train_step(run, state, microbatches))
        state.iteration += 1
        activation_sums.tracer.stop()
    run.optimizer.wait_params()
    evaluation = _evaluate(run, _batches(run, steps, 1, seed, layout)[0])
    weights = {name: tensor.clone().cpu() for name, tensor in export_named_weights(run.chunks, ps)}
    for name, value in _fingerprints(run, full_tensor).items():
        fingerprints[name] = [*fingerprints.get(name, []), value[0]]
    return TrainingTrace(
        losses=[result.losses for result in results],
        grad_norms=[math.nan if result.grad_norm is None else result.grad_norm for result in results],
        dropped=[result.dropped_tokens for result in results],
        grads=grads,
        weights=weights,
        per_layer=[result.per_layer for result in results],
        shards=collectives.all_gather_object(list(_list_shards(run, fingerprints)), ps.world),
        evaluation=evaluation,
        forward=collectives.all_gather_object(dict(activation_sums.sums), ps.world),
    )


def _evaluate(run: TrainRun, batches: list[Batch]) -> float:
    """Return the mean loss of some batches, without gradients. Collective."""
    for chunk in run.chunks:
        chunk.train(False)
    with torch.no_grad():
        sums = run_microbatches(run, iter(batches), len(batches), forward_only=True)
    loss_sum, tokens = reduce_loss(run, sums)
    return loss_sum / max(tokens, 1.0)


def _iter_named_params(run: TrainRun) -> Iterable[tuple[Parameter, int, str]]:
    """Yield every (parameter, index in the stack, name) of this rank."""
    for chunk in run.chunks:
        for param in unique_params(chunk.parameters()):
            for index, name in enumerate(get_param_info(param).names):
                yield param, index, name


def _fingerprints(run: TrainRun, value: Callable[[Parameter], Tensor]) -> dict[str, list]:
    """Return norm, sum and a weighted sum of every named tensor of this rank, in fp64."""
    fingerprints = {}
    for param, index, name in _iter_named_params(run):
        tensor = value(param).detach().double()
        flat = (tensor[index] if get_param_info(param).stacked else tensor).flatten()
        ramp = torch.cos(torch.arange(len(flat), dtype=torch.float64, device=flat.device))
        fingerprints[name] = [(flat.norm().item(), flat.sum().item(), (flat * ramp).sum().item())]
    return fingerprints


def _list_shards(run: TrainRun, fingerprints: dict[str, list]) -> Iterable[TracedShard]:
    for param, _, name in _iter_named_params(run):
        info = get_param_info(param)
        is_full = info.shard_count == 1 or info.sharded_dim is None
        sections = info.part_sizes or (1,) * info.parts
        shard = (None, 0, 1, (1,)) if is_full else (info.sharded_dim, info.shard_rank, info.shard_count, sections)
        yield TracedShard(name, *shard, tuple(fingerprints[name]))
