"""The order of everything in a pretraining job.

`pretrain` joins the other ranks, `run_job` builds, resumes, trains and saves. The loop is training/loop.py, one
iteration training/step.py. There are no hooks: what always runs is written in these functions, and what depends on
flags was decided when the run was built.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from arguments import Arguments
from moe_trainer.data.tokenizer import Tokenizer, build_tokenizer
from moe_trainer.errors import UserError, as_user_error, report_once_per_job
from moe_trainer.exit_codes import ExitCode
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.memory.host_allocator import tune_malloc
from moe_trainer.metrics.console import arguments_block
from moe_trainer.metrics.run_state import RunEnd
from moe_trainer.parallel.state import close_groups
from moe_trainer.resilience.flight_recorder import make_flight_recorder
from moe_trainer.resilience.heartbeat import HeartbeatStore
from moe_trainer.resilience.signals import ExitSignalHandler, SignalWatch
from moe_trainer.resilience.timeouts import TimeoutManager
from moe_trainer.resilience.watchdog import Watchdog, nothing_to_record
from moe_trainer.training.checkpointing import (
    convert_checkpoint,
    finish_save,
    save_checkpoint,
    save_is_due,
    save_upcycled,
)
from moe_trainer.training.data_setup import build_inputs
from moe_trainer.training.evaluate import can_validate, evaluate, evaluate_checkpoint, validate
from moe_trainer.training.export import export_weights
from moe_trainer.training.initialize import Runtime, initialize, make_error_dedup_counter
from moe_trainer.training.loop import ExitDecision, train
from moe_trainer.training.metrics import close_metrics
from moe_trainer.training.monitors import RankMonitors
from moe_trainer.training.outputs import open_outputs
from moe_trainer.training.preflight import check_output_paths
from moe_trainer.training.rerun import load_pending_fault_report, with_rewindable_batches
from moe_trainer.training.resume import build_and_resume, resolve_auto_resume
from moe_trainer.training.run import BaseRun, TrainRun, TrainState, print_rank_0
from moe_trainer.training.run_end import EndRecorder, end_by, record_failed_start, release_save_folder
from moe_trainer.training.run_manifest import write_run_manifest

logger = logging.getLogger(__name__)


def pretrain(args: Arguments, launch_env: LaunchEnv, exit_signal: ExitSignalHandler | None = None) -> int:
    """Run the job of one process and return its exit code.

    A signal that `exit_signal` received ends the run after the current iteration, with a checkpoint.

    Raises:
        UserError: for errors the user can correct.
    """
    started = time.monotonic()  # the time of day may jump
    with as_user_error("start-up"):
        runtime = initialize(args, launch_env)
    if runtime.device.type == "cpu":
        tune_malloc()
    print_rank_0(runtime, f"time to initialize megatron (seconds): {time.monotonic() - started:.3f}")
    try:
        with (
            make_watchdog(args, runtime) as watchdog,
            report_once_per_job(make_error_dedup_counter(runtime.store)),
            SignalWatch(watchdog.report_signal, partial(end_process, args, launch_env.rank)),
        ):
            return run_job(args, runtime, watchdog, started, exit_signal)
    finally:
        release_save_folder(args, launch_env.rank)


def end_process(args: Arguments, rank: int, code: int) -> None:
    """End this process at once, since its main thread is stuck."""
    release_save_folder(args, rank)
    os._exit(code)


def make_watchdog(args: Arguments, runtime: Runtime) -> Watchdog:
    """Create this rank's watchdog, which reports a local failure and aborts when another rank fails or hangs."""
    rank = runtime.launch_env.rank
    return Watchdog(
        runtime.ps.trace,
        runtime.launch_env.world_size,
        None if runtime.store is None else HeartbeatStore(runtime.store, rank),
        args.parallel.distributed_timeout_minutes * 60.0,
        partial(end_process, args, rank),
        recorder=make_flight_recorder(os.environ, rank),
    )


def run_job(
    args: Arguments, runtime: Runtime, watchdog: Watchdog, started: float, exit_signal: ExitSignalHandler | None
) -> int:
    """Build, resume, train, evaluate and save; return the exit code."""
    args = resolve_auto_resume(args, runtime.ps)
    watchdog.on_failure = partial(record_failed_start, args, runtime.launch_env.rank, time.time())
    log_arguments(args, runtime)
    startup_s, training_s = watchdog.timeout, args.parallel.distributed_timeout_seconds_after_init
    timeouts = TimeoutManager(runtime.ps, watchdog, runtime.device, startup_s, training_s)
    with as_user_error("tokenizer"):
        tokenizer = build_tokenizer(args.data)
    run, state = build_and_resume(args, runtime, tokenizer)
    folder, ckpt_format = args.output.ckpt_convert_save, args.output.ckpt_convert_format
    if isinstance(run, TrainRun) and folder is not None and ckpt_format is not None:
        convert_checkpoint(run, state, folder, ckpt_format)
        close_groups(runtime.ps)
        return ExitCode.OK
    check_output_paths(run, state)
    if isinstance(run, TrainRun) and args.moe.moe_use_upcycling and run.save_folder is not None:
        save_upcycled(run, state, run.save_folder)
    run = replace(run, inputs=build_inputs(run, state, tokenizer))
    if isinstance(run, TrainRun):
        run = with_rewindable_batches(run)
    load_pending_fault_report(run, state)
    write_run_manifest(args, run.chunks, runtime.ps)
    run = replace(run, outputs=open_outputs(run, state, tokenizer))
    recorder = EndRecorder(run, state)
    watchdog.on_failure = recorder.fail
    monitors = RankMonitors(args, runtime)
    if run.metrics is not None:
        run.metrics.begin()
    print_rank_0(runtime, f"done with setup ... ({time.monotonic() - started:.1f} s)")
    decision = train_and_evaluate(run, state, monitors, started, timeouts, exit_signal, tokenizer)
    if decision is not None and decision.reason is not None:
        print_datetime(runtime, decision.reason)
    try:
        run.save_history.raise_if_unsaved()
    except UserError as error:  # of every rank
        recorder.end(end_by(error, state.iteration))
        with suppress(UserError):  # the lost save matters more
            close_metrics(run)
        raise
    # Megatron-LM's launchers expect 0 from a run that a signal ended; with --auto-resume it is to be restarted.
    restarts = decision is not None and decision.interrupted and args.output.auto_resume
    code = ExitCode.RESTART if restarts else ExitCode.OK
    recorder.end(planned_end(run, state, decision, code))
    close_metrics(run)
    monitors.close()
    run.close()
    watchdog.on_failure = nothing_to_record  # the recorder holds process groups, which end before the interpreter
    close_groups(runtime.ps)
    return code


def train_and_evaluate(
    run: BaseRun,
    state: TrainState,
    monitors: RankMonitors,
    started: float,
    timeouts: TimeoutManager,
    exit_signal: ExitSignalHandler | None,
    tokenizer: Tokenizer,
) -> ExitDecision | None:
    """Train, evaluate and export until the last save is complete.

    Returns:
        Why the run ends early, None if it is complete.
    """
    args, runtime = run.args, run.runtime
    decision = None
    if args.training.skip_train:
        print_rank_0(runtime, "skipping training (--skip-train is on) ...")
    else:
        print_rank_0(runtime, "training ...")
        decision = train(run, state, monitors, started, timeouts, exit_signal)
    if decision is None:
        if not args.training.skip_train:
            print_datetime(runtime, "after training is done")
        with timeouts.extended():
            if args.is_eval_only:
                evaluate_checkpoint(run, state, tokenizer)
            else:
                finalize_training(run, state)
            if args.output.export_weights is not None:
                export_weights(run, args.output.export_weights)
    with timeouts.extended():
        finish_save(run)
    return decision


def finalize_training(run: BaseRun, state: TrainState) -> None:
    """Save, validate and test after the last iteration."""
    training = run.args.training
    unsaved = not save_is_due(run, state) or run.save_history.consecutive_failures > 0
    folder = run.save_folder if state.iteration > 0 and unsaved and not training.skip_train else None
    if isinstance(run, TrainRun) and folder is not None:
        save_checkpoint(run, state, folder)
    if can_validate(run):
        validate(run, state, f"iteration {state.iteration} on validation set")
    test = run.inputs.datasets.test
    if test is not None and training.eval_iters > 0:
        evaluate(run, state, f"iteration {state.iteration} on test set", "test", test, 0, False)


def planned_end(run: BaseRun, state: TrainState, decision: ExitDecision | None, code: ExitCode) -> RunEnd:
    """Return the end of a run that is complete, or that saved and ends early."""
    if decision is None:
        return RunEnd("finished", state.iteration, code, f"all {run.train_iters} iterations are done")
    reason = f"early, after iteration {state.iteration}: {(decision.reason or '').rstrip('.')}"
    return RunEnd("stopped", state.iteration, code, reason)


def log_arguments(args: Arguments, runtime: Runtime) -> None:
    """Log the notes on the flags, then the settings that differ from their defaults (all with --log-all-arguments)."""
    for note in args.notes:
        logger.info("%s", note)
    settings = args.as_dict()
    shown = (
        settings
        if args.output.log_all_arguments
        else {name: value for name, value in settings.items() if args.source.get(name, "default") != "default"}
    )
    print_rank_0(runtime, arguments_block(shown))
    if len(shown) < len(settings):
        print_rank_0(
            runtime,
            f"{len(settings) - len(shown)} settings are at their defaults (--log-all-arguments prints them too)",
        )


def print_datetime(runtime: Runtime, text: str) -> None:
    """Print Megatron-LM's dated marker line."""
    print_rank_0(runtime, f"[{text}] datetime: {datetime.datetime.now().strftime('%Y-%m-%d %H:%M:%S')} ")
