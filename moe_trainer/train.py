"""The training loop: the one place where the model wing and the machinery wing meet.

Read `pretrain` first: it is the order of everything. `train` is the loop, `train_step` (training/step.py) one iteration,
`evaluate` the validation pass. Nothing here is a class with hooks:
what always runs stands in the text. Whatever depends on flags was decided when `Run` was built.

State that a checkpoint must carry is `TrainState` plus what model and optimizer hold; everything else (learning rate,
batch size, data order) is a function of it, which is what makes a resumed run continue bit for bit.
"""

from __future__ import annotations

import datetime
import gc
import logging
import os
import resource
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from arguments import Arguments
from moe_trainer.checkpoint.directory import release
from moe_trainer.data.tokenizer import Tokenizer, build_tokenizer
from moe_trainer.errors import told_once, user_input
from moe_trainer.exit_codes import ExitCode
from moe_trainer.guard.bulletin import Bulletin
from moe_trainer.guard.flight_recorder import open_recorder
from moe_trainer.guard.patience import Patience
from moe_trainer.guard.signals import ExitSignal
from moe_trainer.guard.watchdog import Watchdog
from moe_trainer.initialize import Runtime, counter_of_words, initialize
from moe_trainer.memory.host_allocator import keep_freed_memory
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import close_groups
from moe_trainer.place import Place
from moe_trainer.report.console import arguments_block, memory_line
from moe_trainer.report.metrics import IterationRecord
from moe_trainer.report.timers import format_report
from moe_trainer.run import (
    Run,
    TrainState,
    build_run,
    open_data,
    print_rank_0,
)
from moe_trainer.shape.flops import training_flops
from moe_trainer.training.agreement import Agreement, agree
from moe_trainer.training.checkpoint import convert_checkpoint, finish_save, save_checkpoint, save_is_due, save_upcycled
from moe_trainer.training.description import describe_run
from moe_trainer.training.evaluation import can_validate, evaluate, evaluate_checkpoint, set_training, validate
from moe_trainer.training.export import export_weights
from moe_trainer.training.judgement import recall_suspicion, remember, remembering, tell_spread
from moe_trainer.training.metrics import close_metrics, open_metrics
from moe_trainer.training.outputs import check_outputs
from moe_trainer.training.record import record_step, recording_is_due
from moe_trainer.training.resume import find_own_checkpoint, resume
from moe_trainer.training.step import train_step
from moe_trainer.training.watches import Watches

logger = logging.getLogger(__name__)


def pretrain(args: Arguments, place: Place, exit_signal: ExitSignal | None = None) -> int:
    """Run the whole job of one process: build, resume, train, evaluate, save. Returns the exit code.

    exit_signal: listens already; a signal that it remembers ends the run, saved, after the iteration under way.
    Raises: InputError for whatever the user can mend.
    """
    started = time.monotonic()  # the time of day may jump
    with user_input("start-up"):
        runtime = initialize(args, place)
    if runtime.device.type == "cpu":
        keep_freed_memory()
    print_rank_0(runtime, f"time to initialize megatron (seconds): {time.monotonic() - started:.3f}")
    with watch(args, runtime) as watchdog, told_once(counter_of_words(runtime.store)):
        return run_job(args, runtime, watchdog, started, exit_signal)


def watch(args: Arguments, runtime: Runtime) -> Watchdog:
    """The watchdog of this rank; it tells the other ranks, and is told by them, when one ends or hangs."""
    bulletin = None if runtime.store is None else Bulletin(runtime.store, runtime.place.rank)
    recorder = open_recorder(os.environ, runtime.place.rank)
    return Watchdog(runtime.ps.trace, runtime.place.world_size, bulletin, args.parallel.distributed_timeout_minutes * 60.0, recorder=recorder)


def run_job(args: Arguments, runtime: Runtime, watchdog: Watchdog, started: float, exit_signal: ExitSignal | None) -> int:
    """Everything between joining the other ranks and leaving them. Returns the exit code."""
    args = find_own_checkpoint(args, runtime.ps)
    announce(args, runtime)
    parallel = args.parallel
    patience = Patience(runtime.ps, watchdog, runtime.device, parallel.distributed_timeout_minutes * 60.0,
                        parallel.distributed_timeout_seconds_after_init)
    with user_input("tokenizer"):
        tokenizer = build_tokenizer(args.data)
    run = build_run(args, runtime, tokenizer)
    run, state = resume(run, tokenizer)
    if args.output.ckpt_convert_format is not None:
        convert_checkpoint(run, state)
        close_groups(runtime.ps)
        return 0
    check_outputs(run, state)
    if run.args.moe.moe_use_upcycling:
        save_upcycled(run, state)
    run = remembering(open_data(run, state, tokenizer))
    recall_suspicion(run, state)
    describe_run(run)
    run = replace(open_metrics(run, state), watches=Watches(args, runtime))
    if run.metrics is not None:
        run.metrics.begin()
    print_rank_0(runtime, f"done with setup ... ({time.monotonic() - started:.1f} s)")
    try:
        leaving = train_and_evaluate(run, state, started, patience, exit_signal, tokenizer)
    except KeyboardInterrupt:
        if run.metrics is not None and not args.training.skip_train:
            run.metrics.end(f"interrupted after iteration {state.iteration}", run.save_history.saved)
            run.metrics.flush()
        raise
    if leaving is not None:
        print_datetime(runtime, leaving.reason)
    if run.metrics is not None and not args.training.skip_train:
        run.metrics.end(why_ended(run, state, leaving), run.save_history.saved)
    close_metrics(run)
    run.save_history.settle()
    if run.saves and runtime.place.rank == 0:
        release(Path(args.output.save))
    run.watches.close()
    close_groups(runtime.ps)
    # Megatron-LM's launchers expect 0 of a run that a signal has ended; whoever asks for --auto-resume wants it started again
    return ExitCode.RESTART if leaving is not None and leaving.interrupted and args.output.auto_resume else 0


def train_and_evaluate(run: Run, state: TrainState, started: float, patience: Patience, exit_signal: ExitSignal | None,
                       tokenizer: Tokenizer) -> Agreement | None:
    """All that follows the setup, until the last save is on disk. Returns: why the run leaves early, None at the end."""
    args, runtime = run.args, run.runtime
    leaving = None
    if args.training.skip_train:
        print_rank_0(runtime, "skipping training (--skip-train is on) ...")
    else:
        print_rank_0(runtime, "training ...")
        leaving = train(run, state, started, patience, exit_signal)
    if leaving is None:
        if not args.training.skip_train:
            print_datetime(runtime, "after training is done")
        with patience.longer():
            if args.evaluates_only:
                evaluate_checkpoint(run, state, tokenizer)
            else:
                finish(run, state)
            if args.output.export_weights is not None:
                export_weights(run, args.output.export_weights)
    with patience.longer():
        finish_save(run)
    return leaving


def why_ended(run: Run, state: TrainState, leaving: Agreement | None) -> str:
    """One line for the summary."""
    if leaving is None:
        return f"all {run.train_iters} iterations are done"
    return f"early, after iteration {state.iteration}: {leaving.reason.rstrip('.')}"


def announce(args: Arguments, runtime: Runtime) -> None:
    """Print what will run: notes on the flags, then the settings that are not at their defaults (all with --log-all-arguments)."""
    for note in args.notes:
        logger.info("%s", note)
    settings = args.as_dict()
    shown = settings if args.output.log_all_arguments else {
        name: value for name, value in settings.items() if args.source.get(name, "default") != "default"}
    print_rank_0(runtime, arguments_block(shown))
    if len(shown) < len(settings):
        print_rank_0(runtime, f"{len(settings) - len(shown)} settings are at their defaults (--log-all-arguments prints them too)")


def print_datetime(runtime: Runtime, text: str) -> None:
    """Print Megatron-LM's dated marker line."""
    print_rank_0(runtime, f"[{text}] datetime: {datetime.datetime.now().strftime('%Y-%m-%d %H:%M:%S')} ")


def train(run: Run, state: TrainState, started: float, patience: Patience, exit_signal: ExitSignal | None) -> Agreement | None:
    """Train until the last iteration or an exit condition.

    Returns: None at the end, else why the run leaves early.
    """
    training = run.args.training
    if training.manual_gc:
        gc.disable()
        gc.collect()
    set_training(run.chunks, True)
    first = True
    run.watches.look(run.chunks, run.optimizer, state.iteration)
    while state.iteration < run.train_iters:
        with patience.longer() if recording_is_due(run, state) else nullcontext():
            train_iteration(run, state)
        if first:
            patience.shorten()
        first = False
        if evaluation_is_due(run, state):
            with patience.longer():
                validate(run, state, f"iteration {state.iteration}")
        if training.manual_gc and training.manual_gc_interval and state.iteration % training.manual_gc_interval == 0:
            gc.collect()
        agreed = agree(run, state, started, exit_signal)
        if run.saver.under_way and not agreed.saving:
            with patience.longer():
                finish_save(run)
        if run.saves and (save_is_due(run, state) or agreed.reason is not None):
            with patience.longer():
                save_checkpoint(run, state)
        if agreed.reason is not None:
            return agreed
    tell_spread(run, state)
    return None


def train_iteration(run: Run, state: TrainState) -> None:
    """One iteration and its report; advances `state`."""
    begin = time.perf_counter()
    number = state.iteration + 1
    run.ps.trace.iteration, run.ps.trace.microbatch = number, None
    microbatches = run.batch_size.num_microbatches(state.consumed_train_samples)
    samples = microbatches * run.args.training.micro_batch_size * run.ps.dp.size
    if number in run.args.training.iterations_to_skip:
        pass_over(run, state, microbatches, samples)
        return
    run.profiler.before(number)
    run.watches.start()
    learning_rate = 0.0 if run.learning_rate is None else run.learning_rate.lr(state.scheduled_samples)
    result = (record_step if recording_is_due(run, state) else train_step)(run, state, microbatches)
    state.iteration = number
    state.consumed_train_samples += samples
    if result.skipped is not None:
        state.skipped_train_samples += samples
        state.history.skip(number, state.consumed_train_samples - samples, state.consumed_train_samples, result.skipped)
    if result.updated:
        state.scheduled_samples += samples
    seq_length = run.args.data.seq_length
    flops = training_flops(run.args, samples, seq_length, run.padded_vocab_size)
    if run.args.keeps_weights:
        flops /= 3  # the forward alone; the backward is twice that
    state.total_flops += flops
    trace = run.profiler.after(number)
    if trace is not None:
        logger.warning("profile of this rank written to %s", trace)
    params_norm = run.optimizer.params_norm() if run.args.output.log_params_norm and run.optimizer is not None else None
    elapsed = time.perf_counter() - begin
    observed = run.watches.stop(number)
    if run.metrics is not None:
        record = IterationRecord(
            iteration=number,
            consumed_samples=state.consumed_train_samples,
            losses=result.losses,
            learning_rate=learning_rate,
            next_learning_rate=0.0 if run.learning_rate is None else run.learning_rate.lr(state.scheduled_samples),
            grad_norm=result.grad_norm,
            loss_scale=1.0 if run.optimizer is None else run.optimizer.loss_scale,
            global_batch_size=samples,
            skipped=not result.updated and run.optimizer is not None,
            elapsed_s=elapsed,
            tokens=samples * seq_length,
            flops=flops,
            max_memory_mb=peak_memory_mb(run.runtime.device),
            dropped_tokens=result.dropped_tokens,
            skipped_samples=state.skipped_train_samples,
            num_zeros=result.num_zeros,
            max_attention_logit=result.max_attention_logit,
            params_norm=params_norm,
            per_layer=result.per_layer,
            loads=result.loads,
            own_times=observed.own_times,
            energy=observed.energy,
            rejected=state.history.skipped,
        )
        run.metrics.record(record)
        for line in observed.lines:
            run.metrics.print(line)
    report_timers(run, number)
    report_memory(run, number)
    run.watches.look(run.chunks, run.optimizer, number)


def pass_over(run: Run, state: TrainState, microbatches: int, samples: int) -> None:
    """An iteration of --iterations-to-skip: its samples are consumed, nothing else happens; advances `state`."""
    remember(run)
    for _ in range(microbatches):
        with user_input("data"):
            next(run.train_batches)
    state.iteration += 1
    state.consumed_train_samples += samples
    state.skipped_train_samples += samples
    logger.info("iteration %d is skipped (--iterations-to-skip); its %d samples are consumed", state.iteration, samples)


def evaluation_is_due(run: Run, state: TrainState) -> bool:
    """Is this iteration followed by a validation?"""
    training = run.args.training
    start = training.start_eval_at_iter or 0
    return (
        training.eval_interval is not None
        and state.iteration % training.eval_interval == 0
        and state.iteration >= start
        and can_validate(run)
    )


def finish(run: Run, state: TrainState) -> None:
    """What follows the last iteration: save, validate, test."""
    training = run.args.training
    unsaved = not save_is_due(run, state) or run.save_history.in_a_row > 0
    if run.saves and state.iteration > 0 and unsaved and not training.skip_train:
        save_checkpoint(run, state)
    if can_validate(run):
        validate(run, state, f"iteration {state.iteration} on validation set")
    if run.datasets.test is not None and training.eval_iters > 0:
        evaluate(run, state, f"iteration {state.iteration} on test set", "test", run.datasets.test, 0, False)


def report_timers(run: Run, iteration: int) -> None:
    """Log the timers at the log interval, over all ranks."""
    output = run.args.output
    if iteration % output.log_interval != 0 or output.timing_log_level == 0:
        return
    mine = run.timers.take()
    per_rank = collectives.all_gather_object(mine, run.ps.world)
    logger.info("%s", format_report(per_rank, output.timing_log_option, output.log_interval))
    if run.metrics is not None:
        run.metrics.timers(mine, iteration)


def report_memory(run: Run, iteration: int) -> None:
    """Print the device memory of every data-parallel group's first rank, early in the run or at --log-memory-interval."""
    output, device = run.args.output, run.runtime.device
    interval = output.log_memory_interval
    due = iteration % interval == 0 if interval else iteration in (1, output.log_interval, 2 * output.log_interval)
    if device.type == "cuda" and due and run.ps.dp.rank == 0:
        cuda = torch.cuda
        print(memory_line(
            run.runtime.place.rank, iteration, cuda.memory_allocated(device), cuda.max_memory_allocated(device),
            cuda.memory_reserved(device), cuda.max_memory_reserved(device), used_of_device(device) if output.log_device_memory_used else None,
        ), flush=True)


def used_of_device(device: torch.device) -> int:
    """Bytes of the device that are taken, by this process and others, its communicators' and the driver's included."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MiB: of the device on CUDA, else the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
