"""One training iteration: microbatches, gradient reduction, validation, router statistics, update.

`run_microbatches` connects model, data and pipeline schedule, for evaluation too. Under pipeline parallelism only the
last stage computes losses, so `reduce_loss` broadcasts them. No rank may return before a collective that other ranks
enter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.mup import mup_lr_mult
from moe_trainer.data.loader import Batch
from moe_trainer.errors import as_user_error
from moe_trainer.metrics.iteration import StepResult
from moe_trainer.metrics.timers import Timers
from moe_trainer.model.sequence_borders import SequenceBorders, shard_of
from moe_trainer.model.transformer import Transformer
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.optim.optimizer import StepOutcome
from moe_trainer.parallel import collectives
from moe_trainer.pipeline.microbatches import MicrobatchCache
from moe_trainer.pipeline.schedule import ScheduleInputs
from moe_trainer.training.dumps import StepDumps
from moe_trainer.training.rerun import (
    StepEvaluation,
    describe_stop,
    inject_error,
    rejection_rules,
    rewind,
    snapshot_iteration_start,
    validate_result,
)
from moe_trainer.training.routing_replay import RoutingReplay
from moe_trainer.training.run import BaseRun, TrainRun, TrainState


class StepObserver(Protocol):
    """Callbacks invoked during one iteration. CUDA graphs are not replayed while an observer is attached."""

    def attach(self) -> None:
        """Start observing; called before the first forward pass."""

    def on_retry(self) -> None:
        """Discard what was observed; called when the iteration is evaluated again."""

    def before_update(self) -> None:
        """Observe reduced, scaled and unclipped gradients. Called on every rank."""


def train_step(
    run: TrainRun, state: TrainState, num_microbatches: int, observer: StepObserver | None = None
) -> StepResult:
    """Run forward and backward over all microbatches, reduce, validate and update.

    An iteration whose tokens overflow the experts' buffers is discarded and repeated with larger buffers before
    validation.

    Raises:
        ResultRejectedError: if the result is not accepted and the run must stop.

    Communication: gradient reductions of `grads`, two numbers per loss, token counts of the routers.
    """
    training = run.args.training
    if run.replay is not None:
        run.replay.begin_iteration(state.iteration + 1)
    dumps = StepDumps(run, state.iteration + 1)
    if observer is not None:
        observer.attach()
    snapshot_iteration_start(run)
    evaluator = _Evaluator(run, state, num_microbatches, dumps, observer)
    result, skipped = validate_result(run, state, evaluator.evaluate(), evaluator.rerun)
    if training.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    dumps.write(result.tokens)
    if observer is not None:
        observer.before_update()
    if skipped is not None:
        run.participants.discard()
        losses = {"lm loss": result.loss} if math.isfinite(result.loss) else {}
        return StepResult(losses, skipped=skipped, num_repeats=evaluator.num_repeats)
    # Statistics are reduced before the update: their small collectives must not queue after the parameter gathers, and
    # a non-finite loss must not reach the weights.
    metrics = run.participants.end_step(result.sums_of_participants, num_microbatches)
    losses = {"lm loss": result.loss, **metrics.losses}
    if training.check_for_nan_in_loss_and_grad:
        check_losses_finite(run, state, losses)
    with run.timers("optimizer"):
        update = _update(run, state.scheduled_samples, result.norm, metrics.row_factors)
    if training.empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    dumps.write_params()
    return StepResult(
        losses, update.updated, update.grad_norm, update.num_zeros, num_repeats=evaluator.num_repeats, **metrics.details
    )


class _Evaluator:
    """Evaluates one iteration as often as needed. `num_repeats` counts evaluations that overflowed."""

    def __init__(
        self, run: TrainRun, state: TrainState, num_microbatches: int, dumps: StepDumps, observer: StepObserver | None
    ):
        self._run, self._state, self._num_microbatches = run, state, num_microbatches
        self._dumps, self._observer = dumps, observer
        self.num_repeats = 0

    def evaluate(self, eager: bool = False, repeated: bool = False) -> StepEvaluation:
        """Evaluate the iteration, again with larger buffers if they overflow. Parameters: forward_backward_reduce."""
        run, state, num_microbatches = self._run, self._state, self._num_microbatches
        # intermediate results inside a graph cannot be read
        eager = eager or self._dumps.records or self._observer is not None
        evaluation = forward_backward_reduce(run, state, num_microbatches, eager, repeated)
        if must_repeat := evaluation.overflowed:
            self.num_repeats += 1
            self._restart()
            run.drop_graphs()
            evaluation = forward_backward_reduce(run, state, num_microbatches, eager, repeated, counts_on_host=True)
        if must_repeat or evaluation.has_grown_budgets:
            agree_on_buffers(run, f"iteration {state.iteration + 1}", must_repeat)
        return evaluation

    def rerun(self, eager: bool) -> StepEvaluation:
        """Evaluate the iteration from its start once more."""
        self._restart()
        return self.evaluate(eager, repeated=True)

    def _restart(self) -> None:
        rewind(self._run)
        self._dumps.on_retry()
        if self._observer is not None:
            self._observer.on_retry()


def _update(run: TrainRun, scheduled_samples: int, norm: float, row_factors: Mapping[Parameter, Tensor]) -> StepOutcome:
    """Make the update that follows those of `scheduled_samples`."""
    rates, optimizer = run.learning_rate, run.args.optimizer
    return run.optimizer.step(
        lr=rates.lr(scheduled_samples),
        decoupled_lr=rates.decoupled_lr(scheduled_samples),
        scaled_lr=rates.lr(scheduled_samples, mup_lr_mult(optimizer.optimizer, optimizer.mup_width_mult)),
        weight_decay=run.weight_decay.weight_decay(scheduled_samples),
        norm=norm,
        row_factors=row_factors,
    )


def frozen_step(run: BaseRun, state: TrainState, num_microbatches: int) -> StepResult:
    """Compute the losses of an iteration of --freeze-all-layers with forward passes only."""
    if run.replay is not None:
        run.replay.begin_iteration(state.iteration + 1)
    with run.timers("forward-backward"), torch.no_grad():
        sums = run_microbatches(run, run.train_batches, num_microbatches, forward_only=True, replay=run.replay)
    loss_sum, tokens = reduce_loss(run, sums)
    agree_on_buffers(run, f"iteration {state.iteration + 1}")
    return StepResult({"lm loss": loss_sum / max(tokens, 1.0)})


def forward_backward_reduce(
    run: TrainRun,
    state: TrainState,
    num_microbatches: int,
    eager: bool = False,
    repeated: bool = False,
    counts_on_host: bool = False,
) -> StepEvaluation:
    """Evaluate the iteration: forward, backward and the reduced gradients with their norm. Weights are unchanged.

    `eager`: do not use CUDA graphs; intermediate results are read, so they must be complete. `repeated`: this is not
    the first evaluation of the iteration. `counts_on_host`: experts read their token counts and allocate enough space,
    without CUDA graphs; otherwise a buffer may be too small.
    """
    run.optimizer.zero_grad()
    run.participants.begin_step(state.iteration)
    eager = eager or counts_on_host
    for chunk in run.chunks:
        chunk.graphs.begin_iteration(eager=eager)
    # the mean over dp_cp divides by cp too, although the ranks of cp share a microbatch
    grad_scale = run.optimizer.loss_scale * (1 if run.per_token else run.ps.cp.size / num_microbatches)
    with run.buffers.scope(counts_on_host=eager):  # recorded tokens must be complete
        sums = train_microbatches(run, num_microbatches, grad_scale, eager)
    for chunk in run.chunks:
        chunk.graphs.end_iteration()
    sums = inject_error(run, state, sums, repeated)
    participants = run.participants
    last_stage = participants.last_stage_sums()
    total, small_buffers = _reduce_sums(run, sums, last_stage.values()), run.buffers.count_small_buffers()
    others = participants.reduced_sums()
    (num_overflowed, num_growing, num_grown), (loss_sum, tokens), *numbers = _copy_to_host(
        small_buffers, *total.split([2, *map(len, last_stage.values())]), *others.values()
    )
    sums_of_participants: dict[int, list[float]] = {}
    for index, values in zip((*last_stage, *others), numbers, strict=True):
        sums_of_participants.setdefault(index, []).extend(values)
    if num_growing:
        run.drop_graphs()
    has_grown_budgets = num_grown > 0
    if num_overflowed:
        return StepEvaluation(sums, math.nan, tokens, math.nan, overflowed=True)
    if run.per_token:
        # gradients of balancing losses, times the tokens of their microbatches, have no scale without a trained token
        run.grads.scale(1.0 / tokens if tokens else 0.0)
    loss = loss_sum / max(tokens, 1.0)
    with run.timers("optimizer"):
        norm = run.optimizer.grad_norm(
            signal_nonfinite=state.history.judge_loss(loss, rejection_rules(run.args)) is not None
        )
    return StepEvaluation(sums, loss, tokens, norm, sums_of_participants, has_grown_budgets=has_grown_budgets)


def agree_on_buffers(run: BaseRun, where: str, was_repeated: bool = False) -> None:
    """Let the ranks agree on buffers that were too small in `where`, an iteration or an evaluation. Collective."""
    if run.buffers.agree(where, was_repeated):
        run.drop_graphs()


def train_microbatches(run: TrainRun, num_microbatches: int, grad_scale: float, eager: bool) -> list[Tensor]:
    """Run the next training microbatches and reduce the gradients, as one CUDA graph if enabled and not `eager`.

    Returns:
        As run_microbatches.
    """
    source, optimizer, grads = run.train_batches, run.optimizer, run.grads

    def compute(run: TrainRun, batches: Iterator[Batch], grad_scale: float | Tensor, captured: bool) -> list[Tensor]:
        optimizer.start_deferred_gather(always=captured)
        with run.timers("forward-backward"):
            sums = run_microbatches(run, batches, num_microbatches, grad_scale, replay=run.replay)
        with run.timers("all-grads-sync"):
            grads.finish()
        finalize_grads(grads, run.ps, run.timers)
        if captured:
            optimizer.wait_params()  # of modules that did not run: a graph ends with all communication finished
        return sums

    if run.iteration_graph is None or not run.iteration_graph.begin_iteration(eager=eager):
        return compute(run, source, grad_scale, captured=False)

    def mark_finished(finished: Any) -> None:
        optimizer.mark_params_gathered()
        grads.mark_finished(finished)

    with run.timers("batch-generator"), as_user_error("data"):
        batches = [_to_captured(run, next(source)) for _ in range(num_microbatches)]
    untimed = replace(run, timers=Timers(0, trace=run.ps.trace))  # a timer synchronizes with the device
    scale = torch.full((), grad_scale, dtype=torch.float32, device=run.runtime.device)
    with run.timers("forward-backward"):
        return run.iteration_graph.run(
            num_microbatches,
            (scale, *batches),
            lambda inputs: compute(untimed, iter(inputs[1:]), inputs[0], captured=True),
            grads.get_finished,
            mark_finished,
        )


def _to_captured(run: BaseRun, batch: Batch) -> Batch:
    """Return a batch that a captured iteration reads: on the device, with the borders of documents and sequences."""
    device, packed = run.runtime.device, batch.packed
    batch = batch.to(device, with_documents=True)
    if not isinstance(packed, PackedSequences):
        return batch
    return replace(batch, packed=packed.on_device(device, run.chunks[0].max_packed_sequences))


def run_microbatches(
    run: BaseRun,
    batches: Iterator[Batch],
    num_microbatches: int,
    grad_scale: float | Tensor = 1.0,
    forward_only: bool = False,
    replay: RoutingReplay | None = None,
) -> list[Tensor]:
    """Run the next microbatches through this rank's part of the model in the order of the pipeline schedule.

    With `replay` routers take the experts that it gives.

    Returns:
        Per microbatch [sum of token losses, number of tokens] of this cp rank, fp32; empty except on the last stage.
    """
    chunks, trace = run.chunks, run.ps.trace

    def read() -> Batch:
        with run.timers("batch-generator"), as_user_error("data"):
            return next(batches).to(run.runtime.device)

    get_batch = MicrobatchCache(read, len(chunks))

    def forward_step(index: int, microbatch: int, x_SBH: Tensor | None) -> tuple[Tensor, Tensor | None]:
        trace.microbatch, batch, chunk = microbatch + 1, get_batch(microbatch), chunks[index]
        if replay is not None:
            replay.begin_microbatch(chunk, microbatch, batch)
        output = chunk(
            batch.tokens_BS,
            batch.position_ids_BS,
            batch.labels_BS,
            batch.loss_mask_BS,
            borders=SequenceBorders(None, batch.document_ids_BS, batch.packed, batch.lengths),
            grad_scale=grad_scale,
            x_SBH=x_SBH,
        )
        return masked_loss(chunk, output, batch, run.per_token) if chunk.layout.has_loss else (output, None)

    def input_spec(index: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        batch = get_batch.peek(microbatch)
        micro_batch_size, seq_length = batch.tokens_BS.shape
        return chunks[index].input_spec(micro_batch_size, seq_length, batch.packed)

    inputs: ScheduleInputs[Tensor] = ScheduleInputs(
        forward_step,
        num_microbatches,
        spec=input_spec,
        grad_scale=grad_scale,
        accumulate=run.accumulate,
        timer=run.timers,
        mark=run.timers.ranges,
        forward_only=forward_only,
    )
    with run.participants.passes(num_microbatches):
        results = run.schedule.run(inputs)
    if replay is not None:
        replay.clear()
    trace.microbatch = None
    return results


def masked_loss(chunk: Transformer, loss_BS: Tensor, batch: Batch, per_token: bool) -> tuple[Tensor, Tensor]:
    """Reduce the token losses [B, S/cp] of a microbatch on this cp rank.

    Returns:
        This rank's share of the loss to differentiate (the mean over all tokens of the microbatch, or their sum with
        per-token loss), and [sum of token losses, number of tokens] of this rank, fp32.
    """
    mask_BS = shard_of(chunk.sequence, batch.packed).local(batch.loss_mask_BS, 1)
    loss_sum = (loss_BS * mask_BS).sum()
    loss = loss_sum if per_token else loss_sum / batch.loss_mask_BS.sum().clamp(min=1.0)
    return loss, torch.stack([loss_sum.detach(), mask_BS.sum()])


def reduce_loss(run: BaseRun, sums: list[Tensor]) -> tuple[float, float]:
    """Return the sum of token losses and the number of tokens over all microbatches and ranks.

    Communication: two fp64 numbers, all-reduced over ps.dp_cp and broadcast from the last pipeline stage.
    """
    loss_sum, tokens = _reduce_sums(run, sums).tolist()
    return loss_sum, tokens


def _copy_to_host(*tensors: Tensor) -> list[list[float]]:
    """Copy several device vectors of one dtype to the host with a single synchronization."""
    return [part.tolist() for part in torch.cat(tensors).cpu().split([len(tensor) for tensor in tensors])]


def _reduce_sums(run: BaseRun, sums: list[Tensor], further: Iterable[Tensor] = ()) -> Tensor:
    """Return the two numbers of reduce_loss, fp64 on the device, followed by `further` ones reduced in the same way."""
    ps = run.ps
    total = (
        torch.stack(sums).double().sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=run.runtime.device)
    )
    if further := [*further]:
        total = torch.cat([total, *further])
    if ps.is_last_stage:
        total = collectives.all_reduce(total, ps.dp_cp)
    return collectives.broadcast(total, ps.pp, src=ps.pp.size - 1)


def check_losses_finite(run: TrainRun, state: TrainState, losses: dict[str, float]) -> None:
    """Raise FloatingPointError for a non-finite loss (unless --no-check-for-nan-in-loss-and-grad)."""
    bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
    if bad:
        raise FloatingPointError(
            f"iteration {state.iteration + 1}: {', '.join(f'{name} is {value}' for name, value in bad.items())}; "
            f"{describe_stop(run, state)}. --no-check-for-nan-in-loss-and-grad disables this check"
        )
