"""One training iteration: microbatches, gradient reduction, validation, router statistics, update.

`run_microbatches` connects model, data and pipeline schedule, for evaluation too. Under pipeline parallelism only the
last stage computes losses, so `reduce_loss` broadcasts them. No rank may return before a collective that other ranks
enter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from arguments.mup import mup_lr_mult
from moe_trainer.data.loader import Batch
from moe_trainer.errors import as_user_error
from moe_trainer.layers.qk_clip import global_max_logit, qk_clip_factors, reduce_max_logits, reset_max_logits
from moe_trainer.layers.sparse_attention import indexer_metric, reduce_indexer_loss, reset_indexer_loss
from moe_trainer.metrics.iteration import StepResult
from moe_trainer.metrics.timers import Timers
from moe_trainer.model.mtp import get_mtp_sums, mtp_metrics, reset_mtp_metrics, shard_of
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.balancing import collect_moe_metrics, start_iteration, update_biases
from moe_trainer.moe.expert_loads import collect_expert_loads
from moe_trainer.moe.receive_buffer import (
    count_growing_stashes,
    count_overflows,
    get_grown_budgets,
    get_receive_budgets,
    get_stashes,
    receive_scope,
)
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.parallel import collectives
from moe_trainer.pipeline.microbatches import MicrobatchCache
from moe_trainer.pipeline.schedule import ScheduleInputs
from moe_trainer.quantization.iteration import begin_iteration, cached_weight_casts, update_scales
from moe_trainer.training.context import TrainContext, TrainState
from moe_trainer.training.dumps import StepDumps
from moe_trainer.training.rerun import (
    StepEvaluation,
    describe_stop,
    inject_error,
    rejection_rules,
    reset_iteration_stats,
    rewind,
    snapshot_iteration_start,
    validate_result,
)
from moe_trainer.training.routing_replay import RoutingReplay

logger = logging.getLogger(__name__)


class StepObserver(Protocol):
    """Callbacks invoked during one iteration. CUDA graphs are not replayed while an observer is attached."""

    def attach(self) -> None:
        """Start observing; called before the first forward pass."""

    def on_retry(self) -> None:
        """Discard what was observed; called when the iteration is evaluated again."""

    def before_update(self) -> None:
        """Observe reduced, scaled and unclipped gradients. Called on every rank."""


def train_step(
    ctx: TrainContext, state: TrainState, num_microbatches: int, observer: StepObserver | None = None
) -> StepResult:
    """Run forward and backward over all microbatches, reduce, validate and update.

    An iteration whose tokens overflow the experts' buffers is discarded and repeated with larger buffers before
    validation.

    Raises:
        ResultRejectedError: if the result is not accepted and the run must stop.

    Communication: gradient reductions of `grads`, two numbers per loss, token counts of the routers.
    """
    args, ps = ctx.args, ctx.ps
    if ctx.replay is not None:
        ctx.replay.begin_iteration(state.iteration + 1)
    if args.optimizer.freeze_all_layers:
        losses_only = frozen_step(ctx, num_microbatches)
        agree_on_budgets(ctx, f"iteration {state.iteration + 1}")
        return losses_only
    assert ctx.optimizer is not None and ctx.learning_rate is not None and ctx.weight_decay is not None
    dumps = StepDumps(ctx, state.iteration + 1)
    if observer is not None:
        observer.attach()
    is_observed = dumps.records or observer is not None  # intermediate results inside a graph cannot be read
    snapshot_iteration_start(ctx)
    num_repeats = 0

    def restart() -> None:
        rewind(ctx)
        dumps.on_retry()
        if observer is not None:
            observer.on_retry()

    def evaluate(eager: bool = False, repeated: bool = False) -> StepEvaluation:
        nonlocal num_repeats
        eager = eager or is_observed
        evaluation = forward_backward_reduce(ctx, state, num_microbatches, eager, repeated)
        if must_repeat := evaluation.overflowed:
            num_repeats += 1
            restart()
            drop_graphs(ctx)
            evaluation = forward_backward_reduce(ctx, state, num_microbatches, eager, repeated, counts_on_host=True)
        if must_repeat or evaluation.has_grown_budgets:
            agree_on_budgets(ctx, f"iteration {state.iteration + 1}", must_repeat)
        return evaluation

    def rerun(eager: bool) -> StepEvaluation:
        restart()
        return evaluate(eager, repeated=True)

    result, skipped = validate_result(ctx, state, evaluate(), rerun)
    if args.training.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    dumps.write(result.tokens)
    if observer is not None:
        observer.before_update()
    if skipped is not None:
        reset_iteration_stats(ctx)
        losses = {"lm loss": result.loss} if math.isfinite(result.loss) else {}
        return StepResult(losses, skipped=skipped, num_repeats=num_repeats)
    update_scales(ctx.chunks, ps)
    # Statistics are reduced before the update: their small collectives must not queue after the parameter gathers, and
    # a non-finite loss must not reach the weights.
    update_biases(ctx.chunks, ps, frozen=args.model.dsa_indexer_warmup or args.model.lora_dim is not None)
    num_layers = args.model.num_layers + (args.model.mtp_num_layers or 0)
    loads = between_ranks = None
    if args.moe.num_experts and args.moe.moe_per_layer_logging:
        loads, between_ranks = collect_expert_loads(
            ctx.chunks, ps, args.moe.num_experts, num_layers, ctx.runtime.device
        )
    moe = collect_moe_metrics(ctx.chunks, ps, num_microbatches, args.moe, num_layers, ctx.runtime.device)
    losses = {"lm loss": result.loss, **moe.losses, **mtp_metrics(result.mtp), **indexer_metric(result.indexer)}
    reset_mtp_metrics(ctx.chunks)
    reset_indexer_loss(ctx.chunks)
    if args.training.check_for_nan_in_loss_and_grad:
        check_losses_finite(ctx, state, losses)
    peaks = reduce_max_logits(ctx.chunks, ps, ctx.runtime.device)
    samples, model, optimizer = state.scheduled_samples, args.model, args.optimizer
    with ctx.timers("optimizer"):
        update = ctx.optimizer.step(
            lr=ctx.learning_rate.lr(samples),
            decoupled_lr=ctx.learning_rate.decoupled_lr(samples),
            scaled_lr=ctx.learning_rate.lr(samples, mup_lr_mult(optimizer.optimizer, optimizer.mup_width_mult)),
            weight_decay=ctx.weight_decay.weight_decay(samples),
            norm=result.norm,
            row_factors=qk_clip_factors(peaks, ps, model.qk_clip_threshold, model.qk_clip_alpha)
            if model.qk_clip
            else {},
        )
    if args.training.empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    max_logit = global_max_logit(peaks, ps, ctx.runtime.device) if args.output.log_max_attention_logit else None
    dumps.write_params()
    return StepResult(
        losses,
        update.updated,
        update.grad_norm,
        update.num_zeros,
        moe.dropped_tokens,
        moe.per_layer,
        loads,
        between_ranks,
        num_repeats=num_repeats,
        max_attention_logit=max_logit,
    )


def frozen_step(ctx: TrainContext, num_microbatches: int) -> StepResult:
    """Compute the losses of an iteration of --freeze-all-layers with forward passes only."""
    assert ctx.train_batches is not None
    with ctx.timers("forward-backward"), torch.no_grad():
        sums = run_microbatches(ctx, ctx.train_batches, num_microbatches, forward_only=True, replay=ctx.replay)
    loss_sum, tokens = reduce_loss(ctx, sums)
    return StepResult({"lm loss": loss_sum / max(tokens, 1.0)})


def forward_backward_reduce(
    ctx: TrainContext,
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
    args, ps = ctx.args, ctx.ps
    assert ctx.optimizer is not None and ctx.grads is not None
    ctx.optimizer.zero_grad()
    start_iteration(ctx.chunks)
    reset_max_logits(ctx.chunks)
    begin_iteration(ctx.chunks, state.iteration)
    eager = eager or counts_on_host
    for chunk in ctx.chunks:
        chunk.graphs.begin_iteration(eager=eager)
    # the mean over dp_cp divides by cp too, although the ranks of cp share a microbatch
    grad_scale = ctx.optimizer.loss_scale * (1 if ctx.per_token else ps.cp.size / num_microbatches)
    defer_counts = ctx.may_lose_tokens and not eager  # recorded tokens must be complete
    with receive_scope(ctx.chunks, defer_counts):
        sums = train_microbatches(ctx, num_microbatches, grad_scale, eager)
    for chunk in ctx.chunks:
        chunk.graphs.end_iteration()
    sums = inject_error(ctx, state, sums, repeated)
    (loss_sum, tokens, *mtp), (num_overflowed, num_growing, num_grown), indexer = _copy_to_host(
        _reduce_sums(ctx, sums, get_mtp_sums(ctx.chunks)),
        _count_small_buffers(ctx),
        reduce_indexer_loss(ctx.chunks, ps, args.model, ctx.runtime.device),
    )
    if num_growing:
        drop_graphs(ctx)
    has_grown_budgets = num_grown > 0
    if num_overflowed:
        return StepEvaluation(sums, math.nan, tokens, math.nan, overflowed=True)
    if ctx.per_token:
        # gradients of balancing losses, times the tokens of their microbatches, have no scale without a trained token
        ctx.grads.scale(1.0 / tokens if tokens else 0.0)
    loss = loss_sum / max(tokens, 1.0)
    with ctx.timers("optimizer"):
        norm = ctx.optimizer.grad_norm(
            signal_nonfinite=state.history.judge_loss(loss, rejection_rules(args)) is not None
        )
    return StepEvaluation(sums, loss, tokens, norm, tuple(mtp), tuple(indexer), has_grown_budgets=has_grown_budgets)


def drop_graphs(ctx: TrainContext) -> None:
    """Drop the CUDA graphs: receive buffers were too small, or the paged stash of a rank will have other memory.

    All ranks do so together, because a capture of communication may itself communicate.
    """
    if ctx.iteration_graph is not None:
        ctx.iteration_graph.drop()
    for chunk in ctx.chunks:
        chunk.graphs.drop()


def train_microbatches(ctx: TrainContext, num_microbatches: int, grad_scale: float, eager: bool) -> list[Tensor]:
    """Run the next training microbatches and reduce the gradients, as one CUDA graph if enabled and not `eager`.

    Returns:
        As run_microbatches.
    """
    source, optimizer, grads = ctx.train_batches, ctx.optimizer, ctx.grads
    assert source is not None and optimizer is not None and grads is not None

    def run(ctx: TrainContext, batches: Iterator[Batch], grad_scale: float | Tensor, captured: bool) -> list[Tensor]:
        optimizer.start_deferred_gather(always=captured)
        with ctx.timers("forward-backward"):
            sums = run_microbatches(ctx, batches, num_microbatches, grad_scale, replay=ctx.replay)
        with ctx.timers("all-grads-sync"):
            grads.finish()
        finalize_grads(grads, ctx.ps, ctx.timers)
        if captured:
            optimizer.wait_params()  # of modules that did not run: a graph ends with all communication finished
        return sums

    if ctx.iteration_graph is None or not ctx.iteration_graph.begin_iteration(eager=eager):
        return run(ctx, source, grad_scale, captured=False)

    def mark_finished(finished: Any) -> None:
        optimizer.mark_params_gathered()
        grads.mark_finished(finished)

    with ctx.timers("batch-generator"), as_user_error("data"):
        batches = [_to_captured(ctx, next(source)) for _ in range(num_microbatches)]
    untimed = replace(ctx, timers=Timers(0, trace=ctx.ps.trace))  # a timer synchronizes with the device
    scale = torch.full((), grad_scale, dtype=torch.float32, device=ctx.runtime.device)
    with ctx.timers("forward-backward"):
        return ctx.iteration_graph.run(
            num_microbatches,
            (scale, *batches),
            lambda inputs: run(untimed, iter(inputs[1:]), inputs[0], captured=True),
            grads.get_finished,
            mark_finished,
        )


def _to_captured(ctx: TrainContext, batch: Batch) -> Batch:
    """Return a batch that a captured iteration reads: on the device, with the borders of documents and sequences."""
    device, packed = ctx.runtime.device, batch.packed
    batch = batch.to(device, with_documents=True)
    if not isinstance(packed, PackedSequences):
        return batch
    max_sequences = ctx.args.parallel.thd_max_packed_sequences
    assert max_sequences is not None, "rejected: arguments/rules/packing.py"
    return replace(batch, packed=packed.on_device(device, max_sequences))


def run_microbatches(
    ctx: TrainContext,
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
    chunks, trace = ctx.chunks, ctx.ps.trace

    def read() -> Batch:
        with ctx.timers("batch-generator"), as_user_error("data"):
            return next(batches).to(ctx.runtime.device)

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
        return masked_loss(chunk, output, batch, ctx.per_token) if chunk.layout.has_loss else (output, None)

    def input_spec(index: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        batch = get_batch.peek(microbatch)
        micro_batch_size, seq_length = batch.tokens_BS.shape
        return chunks[index].input_spec(micro_batch_size, seq_length, batch.packed)

    inputs: ScheduleInputs[Tensor] = ScheduleInputs(
        forward_step,
        num_microbatches,
        spec=input_spec,
        grad_scale=grad_scale,
        accumulate=nullcontext if ctx.grads is None else ctx.grads.accumulate,
        timer=ctx.timers,
        mark=ctx.timers.ranges,
        forward_only=forward_only,
    )
    with cached_weight_casts(chunks, num_microbatches):
        results = ctx.schedule.run(inputs)
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


def reduce_loss(ctx: TrainContext, sums: list[Tensor]) -> tuple[float, float]:
    """Return the sum of token losses and the number of tokens over all microbatches and ranks.

    Communication: two fp64 numbers, all-reduced over ps.dp_cp and broadcast from the last pipeline stage.
    """
    loss_sum, tokens = _reduce_sums(ctx, sums).tolist()
    return loss_sum, tokens


def _copy_to_host(*tensors: Tensor) -> list[list[float]]:
    """Copy several device vectors of one dtype to the host with a single synchronization."""
    return [part.tolist() for part in torch.cat(tensors).cpu().split([len(tensor) for tensor in tensors])]


def _reduce_sums(ctx: TrainContext, sums: list[Tensor], further: Tensor | None = None) -> Tensor:
    """Return the two numbers of reduce_loss, fp64 on the device, followed by `further` ones reduced in the same way."""
    ps = ctx.ps
    total = (
        torch.stack(sums).double().sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=ctx.runtime.device)
    )
    if further is not None:
        total = torch.cat([total, further])
    if ps.is_last_stage:
        total = collectives.all_reduce(total, ps.dp_cp)
    return collectives.broadcast(total, ps.pp, src=ps.pp.size - 1)


def _count_small_buffers(ctx: TrainContext) -> Tensor:
    """Return the numbers of layers whose buffers overflowed, stashes that will grow, and layers whose buffers grew.

    fp64 [3] on the device.

    They are over all ranks if tokens may be lost, else of this rank.

    Communication: the three numbers over the world, if tokens may be lost. Otherwise graphs contain no stash.
    """
    device = ctx.runtime.device
    overflowed, growing = count_overflows(ctx.chunks, device), count_growing_stashes(ctx.chunks, device)
    counts_3 = torch.cat([overflowed, growing, overflowed.new_full((1,), len(get_grown_budgets(ctx.chunks)))])
    return collectives.all_reduce(counts_3, ctx.ps.world) if ctx.may_lose_tokens else counts_3


def agree_on_budgets(ctx: TrainContext, where: str, was_repeated: bool = False) -> None:
    """Adopt the factors to which buffers have grown, and log the sufficient ones.

    Collective if tokens may be lost: then fixed buffers have one size, of the largest factor on any rank, and rank 0
    logs. Otherwise every rank has its own sizes and logs what grew.

    Args:
        where: what has been computed, for the log.
        was_repeated: it is an iteration in which tokens were lost and which was repeated.
    """
    if ctx.args.moe.moe_expert_rank_capacity_factor is None:
        return
    budgets, stashes, rank = get_receive_budgets(ctx.chunks), get_stashes(ctx.chunks), ctx.ps.world.rank
    grown = [(budget.factor, budget.fixed_factor, budget.name, rank) for budget in get_grown_budgets(ctx.chunks)]
    factors = {budget.name: budget.factor for budget in budgets}
    full = [stash.sufficient_factor for stash in stashes if stash.has_overflowed and was_repeated]
    local = grown, factors, max(full, default=0.0)
    gathered = collectives.all_gather_object(local, ctx.ps.world) if ctx.may_lose_tokens else [local]
    grown = [each for of_rank, _, _ in gathered for each in of_rank]
    largest: dict[str, float] = {}
    for _, factors, _ in gathered:
        for name, factor in factors.items():
            largest[name] = max(factor, largest.get(name, factor))
    for budget in budgets:
        budget.adopt(largest[budget.name])
    stash_factor = max(factor for _, _, factor in gathered)
    for stash in stashes if stash_factor else ():
        stash.adopt(stash_factor)
    if grown:
        drop_graphs(ctx)
    if ctx.may_lose_tokens and rank:
        return
    if stash_factor:
        logger.warning(
            f"{where}: the paged stash was full; nothing of it has taken effect, and it was repeated. "
            f"--moe-paged-stash-buffer-size-factor-cuda {stash_factor:g} would have been enough"
        )
    if grown:
        after, before, name, fullest = max(grown)
        layers, ranks = {name for _, _, name, _ in grown}, {rank for *_, rank in grown}
        outcome = (
            "nothing of it has taken effect, and it was repeated with larger ones"
            if was_repeated
            else "no token is lost"
        )
        logger.warning(
            f"{where}: experts received more tokens than their receive buffers hold; {outcome}. Buffers grew (layers: "
            f"{len(layers)}, ranks: {len(ranks)}): the factor of {name} on rank {fullest} grew from {before:g} to "
            f"{after:g}. --moe-expert-rank-capacity-factor {max(largest.values()):g} would have been enough"
        )


def check_losses_finite(ctx: TrainContext, state: TrainState, losses: dict[str, float]) -> None:
    """Raise FloatingPointError for a non-finite loss (unless --no-check-for-nan-in-loss-and-grad)."""
    bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
    if bad:
        raise FloatingPointError(
            f"iteration {state.iteration + 1}: {', '.join(f'{name} is {value}' for name, value in bad.items())}; "
            f"{describe_stop(ctx, state)}. --no-check-for-nan-in-loss-and-grad disables this check"
        )
