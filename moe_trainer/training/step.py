"""One training iteration: microbatches, gradient reduction, router bookkeeping, update.

`train_step` is the text of an iteration; `run_microbatches` brings model, data and pipeline schedule together and serves
evaluation, too. Under pipeline parallelism only the last stage sees losses; what follows is decided by all stages alike, so
`shared_sums` and the metrics tell every rank. Nobody may leave before a collective that others enter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from moe_trainer.data.loader import Batch
from moe_trainer.errors import user_input
from moe_trainer.layers.precision import begin_iteration, casting_once, update_scales
from moe_trainer.layers.qk_clip import clipped_rows, forget_logits, largest_of_all, logit_peaks
from moe_trainer.layers.sparse_attention import forget_indexer_loss, indexer_metric, indexer_sums
from moe_trainer.model.mtp import forget_mtp_metrics, mtp_metrics, mtp_sums
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.balancing import collect_moe_metrics, start_iteration, update_biases
from moe_trainer.moe.budget import budgets_of, counts_on_device, growing, overflowed
from moe_trainer.moe.health import collect_loads
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.parallel import collectives
from moe_trainer.pipeline.feed import MicrobatchFeed
from moe_trainer.pipeline.schedule import Work
from moe_trainer.report.timers import Timers
from moe_trainer.run import Run, TrainState
from moe_trainer.shape.mup import rate_mult
from moe_trainer.training.dumps import StepDumps
from moe_trainer.training.judgement import Attempt, forget_books, injected, judge, remember, rewind, rules_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one iteration produced; `losses` by the name the log line gives them. loads: of collect_loads, if they are counted.
    skipped: why the update was not made, although it could have been. max_attention_logit: over all layers and ranks, if it is asked for."""

    losses: dict[str, float]
    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    dropped_tokens: int
    per_layer: dict[str, list[float]]
    loads: Tensor | None = None
    skipped: str | None = None
    max_attention_logit: float | None = None


class StepWitness(Protocol):
    """Somebody who looks at one iteration while it runs; graphs are not replayed meanwhile."""

    def attach(self) -> None:
        """The forward passes begin."""

    def again(self) -> None:
        """They begin again: what was seen does not count."""

    def before_update(self) -> None:
        """The gradients are reduced, scaled and not yet clipped. Called on every rank."""


def train_step(run: Run, state: TrainState, num_microbatches: int, witness: StepWitness | None = None) -> StepResult:
    """Forward and backward over all microbatches, reduce, judge, update, keep the router's books.

    An iteration in which rows found no room in experts' buffers is forgotten and repeated with room for all of them, before it is judged.

    Communication: the gradient reductions of `grads`, two numbers per loss, the router's counts.
    Raises: ResultRejected when the result is not accepted and the run is to stop.
    """
    args, ps = run.args, run.ps
    if args.optimizer.freeze_all_layers:
        return frozen_step(run, num_microbatches)
    dumps = StepDumps(run, state.iteration + 1)
    if witness is not None:
        witness.attach()
    looked_at = dumps.records or witness is not None  # what a graph holds cannot be
    remember(run)

    def begin_again() -> None:
        rewind(run)
        dumps.again()
        if witness is not None:
            witness.again()

    def without_loss(eager: bool = False, repeated: bool = False) -> Attempt:
        found = attempt(run, state, num_microbatches, looked_at, eager, repeated)
        if found.overflowed:
            begin_again()
            with growing(run.chunks) as grown:
                found = attempt(run, state, num_microbatches, looked_at, eager, repeated, counts_on_host=True)
            tell_overflow(run, state, grown)
        return found

    def again(eager: bool) -> Attempt:
        begin_again()
        return without_loss(eager, repeated=True)

    verdict = judge(run, state, without_loss(), again)
    result = verdict.attempt
    dumps.write(result.tokens)
    if witness is not None:
        witness.before_update()
    if verdict.skipped is not None:
        forget_books(run)
        losses = {"lm loss": result.loss} if math.isfinite(result.loss) else {}
        return StepResult(losses, False, None, None, 0, {}, skipped=verdict.skipped)
    update_scales(run.chunks, ps)
    # The books are read before the update: their small collectives must not queue behind the parameter gathers, and a
    # loss that is not finite must not reach the weights.
    update_biases(run.chunks, ps, frozen=args.model.dsa_indexer_warmup)
    num_layers = args.model.num_layers + (args.model.mtp_num_layers or 0)
    loads = None
    if args.moe.num_experts and args.moe.moe_per_layer_logging:
        loads = collect_loads(run.chunks, ps, args.moe.num_experts, num_layers, run.runtime.device)
    moe = collect_moe_metrics(run.chunks, ps, num_microbatches, args.moe, num_layers, run.runtime.device)
    losses = {"lm loss": result.loss, **moe.losses, **mtp_metrics(result.mtp), **indexer_metric(result.indexer)}
    forget_mtp_metrics(run.chunks)
    forget_indexer_loss(run.chunks)
    if args.training.check_for_nan_in_loss_and_grad:
        refuse_nan(state.iteration + 1, losses)
    peaks = logit_peaks(run.chunks, ps, run.runtime.device)
    clip = args.model.qk_clip
    with run.timers("optimizer"):
        outcome = run.optimizer.step(
            lr=run.learning_rate.lr(state.scheduled_samples),
            decoupled_lr=run.learning_rate.decoupled_lr(state.scheduled_samples),
            scaled_lr=run.learning_rate.lr(state.scheduled_samples, rate_mult(args.optimizer.optimizer, args.optimizer.mup_width_mult)),
            weight_decay=run.weight_decay.weight_decay(state.scheduled_samples),
            norm=result.norm,
            rows=clipped_rows(peaks, ps, args.model.qk_clip_threshold, args.model.qk_clip_alpha) if clip else {},
        )
    max_logit = largest_of_all(peaks, ps, run.runtime.device) if args.output.log_max_attention_logit else None
    dumps.write_params()
    return StepResult(losses, outcome.updated, outcome.grad_norm, outcome.num_zeros, moe.dropped_tokens, moe.per_layer, loads,
                      max_attention_logit=max_logit)


def frozen_step(run: Run, num_microbatches: int) -> StepResult:
    """The losses of an iteration of --freeze-all-layers: forward over its microbatches, nothing else."""
    with run.timers("forward-backward"), torch.no_grad():
        sums = run_microbatches(run, run.train_batches, num_microbatches, run.args.training.micro_batch_size, forward_only=True)
    loss_sum, tokens = shared_sums(run, sums)
    return StepResult({"lm loss": loss_sum / max(tokens, 1.0)}, False, None, None, 0, {})


def attempt(run: Run, state: TrainState, num_microbatches: int, record: bool, eager: bool = False, repeated: bool = False,
            counts_on_host: bool = False) -> Attempt:
    """Evaluate the iteration: forward and backward over its microbatches, and the reduced gradients with their norm. Weights stay.

    record: somebody writes down what is computed. eager: without graphs. repeated: it is not the first time. counts_on_host: experts ask
    for the counts of their rows and make room for all of them; else a buffer may turn out to have been too small.
    """
    args, ps = run.args, run.ps
    run.optimizer.zero_grad()
    start_iteration(run.chunks)
    forget_logits(run.chunks)
    begin_iteration(run.chunks, state.iteration)
    for chunk in run.chunks:
        chunk.graphs.begin_iteration(eager=record or eager)
    # what the mean over dp_cp divides by too much, since the ranks of cp share a microbatch
    grad_scale = run.optimizer.loss_scale * (1 if run.per_token else ps.cp.size / num_microbatches)
    unasked = run.may_lose_rows and not (counts_on_host or record or eager)  # rows that are recorded must all be there
    with run.timers("forward-backward"), counts_on_device(run.chunks, unasked):
        sums = train_microbatches(run, num_microbatches, grad_scale, record=record or eager)
    with run.timers("all-grads-sync"):
        run.grads.finish()
    finalize_grads(run.grads, ps, run.timers)
    sums = injected(run, state, sums, repeated)
    (loss_sum, tokens, *mtp), (lost,), indexer = _read(
        _shared(run, sums, mtp_sums(run.chunks)), _lost_rows(run), indexer_sums(run.chunks, ps, args.model, run.runtime.device))
    if lost:
        return Attempt(sums, math.nan, tokens, math.nan, overflowed=True)
    if run.per_token:
        run.grads.scale(1.0 / max(tokens, 1.0))
    loss = loss_sum / max(tokens, 1.0)
    with run.timers("optimizer"):
        norm = run.optimizer.grad_norm(alarm=state.history.judge_loss(loss, rules_of(args)) is not None)
    return Attempt(sums, loss, tokens, norm, tuple(mtp), tuple(indexer))


def train_microbatches(run: Run, num_microbatches: int, grad_scale: float, record: bool) -> list[Tensor]:
    """Run the next training microbatches, as one CUDA graph where that is asked for. record: routers write down what they do.

    Returns: as run_microbatches.
    """
    size = run.args.training.micro_batch_size
    if run.whole is None or not run.whole.begins(eager=record):
        return run_microbatches(run, run.train_batches, num_microbatches, size, grad_scale)
    run.optimizer.wait_params()
    with run.timers("batch-generator"), user_input("data"):
        batches = [next(run.train_batches).to(run.runtime.device) for _ in range(num_microbatches)]
    quiet = replace(run, timers=Timers(0, trace=run.ps.trace))  # a stopwatch waits for the device
    scale = torch.full((), grad_scale, dtype=torch.float32, device=run.runtime.device)
    return run.whole.run(
        num_microbatches, (scale, *batches), lambda given: run_microbatches(quiet, iter(given[1:]), num_microbatches, size, given[0]),
        state=run.grads.missing, restore=run.grads.set_missing)


def run_microbatches(run: Run, batches: Iterator[Batch], num_microbatches: int, micro_batch_size: int,
                     grad_scale: float | Tensor = 1.0, forward_only: bool = False) -> list[Tensor]:
    """Run the next microbatches through this rank's part of the model, as the schedule says.

    Returns: of every microbatch [sum of token losses, number of tokens] of this cp rank, fp32; [] but on the last stage.
    """
    chunks, trace = run.chunks, run.ps.trace

    def read() -> Batch:
        with run.timers("batch-generator"), user_input("data"):
            return next(batches).to(run.runtime.device)

    feed = MicrobatchFeed(read, len(chunks))

    def forward_step(index: int, microbatch: int, x_SBH: Tensor | None) -> tuple[Tensor, Tensor | None]:
        trace.microbatch, batch, chunk = microbatch + 1, feed(microbatch), chunks[index]
        output = chunk(batch.tokens_BS, batch.position_ids_BS, batch.labels_BS, batch.loss_mask_BS, grad_scale=grad_scale,
                       x_SBH=x_SBH, document_ids_BS=batch.document_ids_BS)
        return masked_loss(chunk, output, batch, run.per_token) if chunk.layout.has_loss else (output, None)

    work = Work(
        forward_step, num_microbatches,
        specs=[chunk.input_spec(micro_batch_size, run.args.data.seq_length) for chunk in chunks],
        grad_scale=grad_scale, accumulate=nullcontext if run.grads is None else run.grads.accumulate, timer=run.timers, forward_only=forward_only,
    )
    with casting_once(chunks):
        results = run.schedule.run(work)
    trace.microbatch = None
    return results


def masked_loss(chunk: Transformer, loss_BS: Tensor, batch: Batch, per_token: bool) -> tuple[Tensor, Tensor]:
    """Reduce the token losses of a microbatch; loss_BS [B, S/cp] are those of this cp rank.

    Returns: this rank's share of the loss to differentiate (mean over all the microbatch's tokens, or their sum with
    per-token loss), and [sum of token losses, number of tokens] of this rank, fp32.
    """
    mask_BS = chunk.sequence.local(batch.loss_mask_BS, 1)
    loss_sum = (loss_BS * mask_BS).sum()
    loss = loss_sum if per_token else loss_sum / batch.loss_mask_BS.sum().clamp(min=1.0)
    return loss, torch.stack([loss_sum.detach(), mask_BS.sum()])


def shared_sums(run: Run, sums: list[Tensor]) -> tuple[float, float]:
    """Sum of token losses and number of tokens over all microbatches and ranks, known to every rank.

    Communication: two fp64 numbers, all-reduced over ps.dp_cp and broadcast from the last pipeline stage.
    """
    loss_sum, tokens = _shared(run, sums).tolist()
    return loss_sum, tokens


def _read(*tensors: Tensor) -> list[list[float]]:
    """Numbers of several vectors of one type on the device, in one wait."""
    return [part.tolist() for part in torch.cat(tensors).cpu().split([len(tensor) for tensor in tensors])]


def _shared(run: Run, sums: list[Tensor], further: Tensor | None = None) -> Tensor:
    """The two numbers of shared_sums, fp64 on the device, and further ones behind them that are to be shared in the same way."""
    ps = run.ps
    total = torch.stack(sums).double().sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=run.runtime.device)
    if further is not None:
        total = torch.cat([total, further])
    if ps.is_last_stage:
        total = collectives.all_reduce(total, ps.dp_cp)
    return collectives.broadcast(total, ps.pp, src=ps.pp.size - 1)


def _lost_rows(run: Run) -> Tensor:
    """In how many layers of all ranks rows found no room, fp64 [1] on the device. Communication: this number over the world, if it can be."""
    found = overflowed(run.chunks, run.runtime.device)
    return collectives.all_reduce(found, run.ps.world) if run.may_lose_rows else found


def tell_overflow(run: Run, state: TrainState, grown: list[tuple[str, float, float]]) -> None:
    """Say that an iteration was repeated because rows found no room, and which budget would have been enough. grown: of `growing`.
    Collective."""
    mine = [(after, before, name, run.ps.world.rank) for name, before, after in grown]
    told = collectives.all_gather_object((mine, max((budget.factor for budget in budgets_of(run.chunks)), default=0.0)), run.ps.world)
    if run.ps.world.rank == 0:
        after, before, name, rank = max((each for mine, _ in told for each in mine), default=(0.0, 0.0, "no layer", 0))
        logger.warning(
            "iteration %d: experts received more rows than their budgets have room for; nothing of it has taken effect, and it was repeated with "
            "larger ones: the factor of %s on rank %d grew from %g to %g. --moe-expert-rank-capacity-factor %g would have been enough",
            state.iteration + 1, name, rank, before, after, max(factor for _, factor in told))


def refuse_nan(iteration: int, losses: dict[str, float]) -> None:
    """Stop on a loss that is not finite (on by default, --no-check-for-nan-in-loss-and-grad); see Optimizer.step for gradients."""
    bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
    if bad:
        raise FloatingPointError(
            f"iteration {iteration}: {', '.join(f'{name} is {value}' for name, value in bad.items())}; the last checkpoint "
            "is untouched. --no-check-for-nan-in-loss-and-grad goes on regardless"
        )
