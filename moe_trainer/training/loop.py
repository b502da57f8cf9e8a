"""The training loop: iterations with their reports, evaluations, saves and exit conditions."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import nullcontext
from signal import Signals
from typing import NamedTuple

import torch

from moe_trainer.errors import as_user_error
from moe_trainer.estimate.flops import training_flops
from moe_trainer.metrics.console import memory_line
from moe_trainer.metrics.iteration import IterationRecord, StepResult
from moe_trainer.metrics.timers import format_report
from moe_trainer.parallel import collectives
from moe_trainer.resilience.signals import ExitSignalHandler
from moe_trainer.resilience.timeouts import TimeoutManager
from moe_trainer.training.checkpointing import finish_save, save_checkpoint, save_is_due
from moe_trainer.training.evaluate import can_validate, set_training, validate
from moe_trainer.training.evaluate_tasks import evaluate_tasks
from moe_trainer.training.generate_samples import write_samples
from moe_trainer.training.monitors import RankMonitors, peak_memory_mb
from moe_trainer.training.record_step import record_folder, record_step
from moe_trainer.training.rerun import snapshot_iteration_start
from moe_trainer.training.run import BaseRun, FrozenRun, TrainRun, TrainState, print_rank_0
from moe_trainer.training.step import frozen_step, train_step

logger = logging.getLogger(__name__)


class ExitDecision(NamedTuple):
    """Decision that is equal on every rank.

    Attributes:
        saving: some rank is still writing a checkpoint.
        reason: why to save and exit now, in Megatron-LM's words, or None.
        interrupted: a signal or the time limit asked for it, not the plan.
    """

    saving: bool
    reason: str | None
    interrupted: bool = False


def train(
    run: BaseRun,
    state: TrainState,
    monitors: RankMonitors,
    started: float,
    timeouts: TimeoutManager,
    exit_signal: ExitSignalHandler | None,
) -> ExitDecision | None:
    """Train until the last iteration or an exit condition.

    Returns:
        Why the run ends early, None if all iterations are done.
    """
    training, outputs = run.args.training, run.outputs
    if training.manual_gc:
        gc.disable()
        gc.collect()
    set_training(run.chunks, True)
    is_first = True
    monitors.run_due_checks(run.chunks, run.wait_params, state.iteration)
    if outputs.weight_stream is not None:
        with timeouts.extended():
            outputs.weight_stream.write(state.iteration)
    while state.iteration < run.train_iters:
        with timeouts.extended() if record_folder(run, state) else nullcontext():
            train_iteration(run, state, monitors)
        if is_first:
            timeouts.use_training_timeout()
        is_first = False
        if evaluation_is_due(run, state):
            with timeouts.extended():
                validate(run, state, f"iteration {state.iteration}")
        weight_stream, interval = outputs.weight_stream, run.args.output.stream_weights_interval
        if weight_stream is not None and is_due_or_last(run, state, interval):
            with timeouts.extended():
                weight_stream.write(state.iteration)
        if outputs.tasks is not None and is_due_or_last(run, state, training.eval_tasks_interval):
            with timeouts.extended():
                evaluate_tasks(run, state, outputs.tasks)
        if outputs.completer is not None and is_due_or_last(run, state, training.sample_interval):
            with timeouts.extended():
                write_samples(run, state, outputs.completer)
        if training.manual_gc and training.manual_gc_interval and state.iteration % training.manual_gc_interval == 0:
            gc.collect()
        decision = sync_exit_decision(run, state, started, exit_signal)
        if run.saver.in_progress and not decision.saving:
            with timeouts.extended():
                finish_save(run)
        folder = run.save_folder if save_is_due(run, state) or decision.reason is not None else None
        if isinstance(run, TrainRun) and folder is not None:
            with timeouts.extended():
                save_checkpoint(run, state, folder)
        if decision.reason is not None:
            return decision
    if state.rerun_statistics.repeats:
        print_rank_0(run.runtime, f"--rerun-mode report_stats: {state.rerun_statistics.text}")
    return None


def train_iteration(run: BaseRun, state: TrainState, monitors: RankMonitors) -> None:
    """Run one iteration, report it and advance `state`."""
    begin = time.perf_counter()
    iteration = state.iteration + 1
    run.ps.trace.iteration, run.ps.trace.microbatch = iteration, None
    consumed = state.consumed_train_samples
    microbatches, samples = run.batch_size.num_microbatches(consumed), run.batch_size.global_batch_size(consumed)
    plans = run.inputs.packing
    packing = None if plans is None else plans.summarize(plans.plan(consumed, samples))
    if packing is not None:
        microbatches = packing.num_microbatches
    if iteration in run.args.training.iterations_to_skip:
        skip_iteration(run, state, microbatches, samples)
        return
    run.profiler.before(iteration)
    monitors.start()
    learning_rate = run.get_lr(state.scheduled_samples)
    with run.timers.ranges(f"iteration {iteration}"):
        result = run_step(run, state, microbatches)
    state.iteration = iteration
    state.consumed_train_samples += samples
    if result.skipped is not None:
        state.skipped_train_samples += samples
        state.history.skip(
            iteration, state.consumed_train_samples - samples, state.consumed_train_samples, result.skipped
        )
    if result.updated:
        state.scheduled_samples += samples
    seq_length = run.args.data.seq_length
    if packing is None:
        flops, tokens = training_flops(run.args, samples, seq_length, run.padded_vocab_size), samples * seq_length
    else:
        flops, tokens = packing.cost, packing.tokens
    if isinstance(run, FrozenRun):
        flops /= 3  # forward only; backward is twice as much
    state.total_flops += flops
    trace = run.profiler.after(iteration)
    if trace is not None:
        logger.warning("profile of this rank written to %s", trace)
    params_norm = run.optimizer.params_norm() if isinstance(run, TrainRun) and run.args.output.log_params_norm else None
    elapsed = time.perf_counter() - begin
    report = monitors.stop(iteration)
    if run.metrics is not None:
        record = IterationRecord(
            step=result,
            iteration=iteration,
            consumed_samples=state.consumed_train_samples,
            learning_rate=learning_rate,
            next_learning_rate=run.get_lr(state.scheduled_samples),
            loss_scale=run.loss_scale,
            global_batch_size=samples,
            skipped=isinstance(run, TrainRun) and not result.updated,
            elapsed_s=elapsed,
            tokens=tokens,
            flops=flops,
            max_memory_mb=peak_memory_mb(run.runtime.device),
            skipped_samples=state.skipped_train_samples,
            params_norm=params_norm,
            compute_times=report.compute_times,
            energy=report.energy,
            rejected=state.history.skipped,
            packing=None if packing is None else packing.metrics,
        )
        run.metrics.record(record)
        for line in report.lines:
            run.metrics.print(line)
    report_timers(run, iteration)
    report_memory(run, iteration)
    monitors.run_due_checks(run.chunks, run.wait_params, iteration)


def run_step(run: BaseRun, state: TrainState, num_microbatches: int) -> StepResult:
    """Run the next iteration of either kind of run, and record it if that is due."""
    if isinstance(run, TrainRun):
        folder = record_folder(run, state)
        if folder is not None:
            return record_step(run, state, num_microbatches, folder)
        return train_step(run, state, num_microbatches)
    return frozen_step(run, state, num_microbatches)


def skip_iteration(run: BaseRun, state: TrainState, microbatches: int, samples: int) -> None:
    """Consume the samples of an iteration of --iterations-to-skip and advance `state`."""
    snapshot_iteration_start(run)
    for _ in range(microbatches):
        with as_user_error("data"):
            next(run.train_batches)
    state.iteration += 1
    state.consumed_train_samples += samples
    state.skipped_train_samples += samples
    logger.info("iteration %d is skipped (--iterations-to-skip); its %d samples are consumed", state.iteration, samples)


def evaluation_is_due(run: BaseRun, state: TrainState) -> bool:
    """Return whether a validation follows this iteration."""
    training, iteration = run.args.training, state.iteration
    if iteration % training.eval_interval != 0:
        return False
    return iteration >= (training.start_eval_at_iter or 0) and can_validate(run)


def is_due_or_last(run: BaseRun, state: TrainState, interval: int | None) -> bool:
    """Return whether the iteration is at the interval or the last one; never without an interval."""
    return interval is not None and (state.iteration % interval == 0 or state.iteration == run.train_iters)


def report_timers(run: BaseRun, iteration: int) -> None:
    """Log the timers of all ranks at the log interval."""
    output = run.args.output
    if iteration % output.log_interval != 0 or output.timing_log_level == 0:
        return
    own_times = run.timers.take()
    per_rank = collectives.all_gather_object(own_times, run.ps.world)
    logger.info("%s", format_report(per_rank, output.timing_log_option, output.log_interval))
    if run.metrics is not None:
        run.metrics.timers(own_times, iteration)


def report_memory(run: BaseRun, iteration: int) -> None:
    """Print the device memory of the first rank of each data-parallel group, early or at --log-memory-interval."""
    output, device = run.args.output, run.runtime.device
    interval = output.log_memory_interval
    is_due = iteration % interval == 0 if interval else iteration in (1, output.log_interval, 2 * output.log_interval)
    if device.type == "cuda" and is_due and run.ps.dp.rank == 0:
        cuda, used = torch.cuda, None
        counters = (cuda.memory_allocated, cuda.max_memory_allocated, cuda.memory_reserved, cuda.max_memory_reserved)
        if output.log_device_memory_used:  # including other processes, communicators and the driver
            free, total = cuda.mem_get_info(device)
            used = total - free
        rank = run.runtime.launch_env.rank
        print(memory_line(rank, iteration, *(counter(device) for counter in counters), used), flush=True)


def sync_exit_decision(
    run: BaseRun, state: TrainState, started: float, exit_signal: ExitSignalHandler | None
) -> ExitDecision:
    """Return the decision of all ranks. `started` is time.monotonic() at the start of the program.

    Clocks, signals and disks differ by rank.

    Communication: a maximum of three float32 over the world, if the decision depends on the ranks.
    """
    training = run.args.training
    signalled, minutes, saving = 0, 0.0, False
    if exit_signal is not None or training.exit_duration_in_mins is not None or run.saver.in_progress:
        received = None if exit_signal is None else exit_signal.received
        local = [received or 0, (time.monotonic() - started) / 60.0, run.saver.writing]
        facts = torch.tensor(local, dtype=torch.float32, device=run.runtime.device)
        # one signal is enough, the slowest clock decides, and so does the slowest disk
        signalled, minutes, saving = collectives.all_reduce(facts, run.ps.world, op="max").tolist()
    if signalled:
        return ExitDecision(bool(saving), f"exiting program after receiving {Signals(int(signalled)).name}.", True)
    if training.exit_duration_in_mins is not None and minutes > training.exit_duration_in_mins:
        return ExitDecision(bool(saving), f"exiting program after {minutes} minutes", True)
    ends_phase = not run.args.data.phase_data_args_path and state.iteration in run.args.data.phase_transitions
    if ends_phase or (training.exit_interval is not None and state.iteration % training.exit_interval == 0):
        return ExitDecision(bool(saving), f"exiting program at iteration {state.iteration}")
    return ExitDecision(bool(saving), None)
