"""When a run saves, and how it handles I/O failures.

A failed save does not end the run: the previous checkpoint stays valid, the failure is logged and counted, and the next
save is tried when it is due. The run ends after several consecutive failures, or if the last save of the run failed.
Other errors of a save (ranks that do not match) end it at once, since retrying would not help.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moe_trainer.checkpoint.directory import release_lock
from moe_trainer.checkpoint.errors import StorageError
from moe_trainer.checkpoint.manager import check_writable, save
from moe_trainer.checkpoint.options import CheckpointState
from moe_trainer.errors import as_user_error
from moe_trainer.optim.scheduler_state import scheduler_state_dict
from moe_trainer.resilience.save_failures import MAX_CONSECUTIVE_FAILURES
from moe_trainer.training.data_setup import merged_stream_states
from moe_trainer.training.run import BaseRun, TrainRun, TrainState

logger = logging.getLogger(__name__)


def save_is_due(run: BaseRun, state: TrainState) -> bool:
    """Return whether --save-interval requires a checkpoint of this iteration."""
    interval = run.args.output.save_interval
    return interval is not None and state.iteration % interval == 0


def save_checkpoint(run: TrainRun, state: TrainState, folder: str) -> None:
    """Save a checkpoint under `folder`, in the background with --async-save. Collective.

    I/O failures are logged and counted.

    Raises:
        UserError: on every rank, after too many consecutive I/O failures or for any other error.
    """
    content = make_checkpoint_state(run, state)
    if run.metrics is not None:
        # a run killed later resumes from this checkpoint, so everything logged until now must be on disk
        run.metrics.flush()
    finish_save(run)
    with run.timers("save-checkpoint"), as_user_error(f"--save {folder}"), _counting_failures(run):
        run.wait_params()
        run.save_history.begin(state.iteration)
        if run.args.output.async_save:
            run.saver.start(folder, content, run.chunks, run.optimizer, run.ps, run.save_options)
        else:
            save(folder, content, run.chunks, run.optimizer, run.ps, run.save_options)
            _note_success(run)


def save_upcycled(run: TrainRun, state: TrainState, folder: str) -> None:
    """Save the model of --moe-use-upcycling under `folder` before training. Collective.

    Raises:
        UserError: on every rank, if the folder cannot be written.
    """
    output = run.args.output
    with run.timers("save-checkpoint"), as_user_error(f"--save {folder}"):
        run.wait_params()
        save(folder, make_checkpoint_state(run, state), run.chunks, run.optimizer, run.ps, run.save_options)
    logger.info(
        f"--moe-use-upcycling: the model made of {output.load or output.pretrained_checkpoint} is saved to {folder}"
    )


def convert_checkpoint(run: TrainRun, state: TrainState, parent: str, ckpt_format: str) -> None:
    """Write the loaded checkpoint in a format to parent/ckpt_format (--ckpt-convert-save). Collective.

    Weights loaded without optimizer state are written without it.

    Raises:
        UserError: on every rank, if the folder cannot be written.
    """
    output = run.args.output
    with as_user_error(f"--ckpt-convert-save {parent}"):
        folder = Path(parent) / ckpt_format
        with_state = run.save_options.save_optim and not output.no_load_optim and state.iteration > 0
        options = replace(
            run.save_options,
            ckpt_format=ckpt_format,
            save_optim=with_state,
            retain_interval=None,
            total_limit=None,
            filesystem_id=check_writable(folder, run.ps),
        )
        try:
            save(folder, make_checkpoint_state(run, state), run.chunks, run.optimizer, run.ps, options)
        finally:
            if run.ps.world.rank == 0:
                release_lock(folder)


def make_checkpoint_state(run: TrainRun, state: TrainState) -> CheckpointState:
    """Return everything of a checkpoint except tensors. Collective with --dataloader-type external."""
    # values that Megatron-LM records in addition to the flags, and that its loader compares or uses
    megatron_args = {
        "padded_vocab_size": run.padded_vocab_size,
        "world_size": run.ps.world.size,
        "data_parallel_size": run.ps.dp.size,
        # read by torch's own reader; the other strategy needs a package that is not used here
        "async_strategy": "mcore",
    }
    extra = {"history": state.history.as_dict(), "fingerprint": state.fingerprint, "streams": merged_stream_states(run)}
    return CheckpointState(
        iteration=state.iteration,
        args=run.args.as_dict() | megatron_args,
        consumed_train_samples=state.consumed_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        skipped_train_samples=state.skipped_train_samples,
        num_floating_point_operations_so_far=state.total_flops,
        scheduler=scheduler_state_dict(run.learning_rate, run.weight_decay, state.scheduled_samples),
        extra={name: value for name, value in extra.items() if value},
    )


def finish_save(run: BaseRun) -> None:
    """Wait for the background save, if any, and make it visible. Collective. Raises as save_checkpoint."""
    if run.saver.in_progress:
        with run.timers("save-checkpoint"), as_user_error(f"--save {run.args.output.save}"), _counting_failures(run):
            run.saver.finish()
            _note_success(run)


def _note_success(run: BaseRun) -> None:
    run.save_history.succeeded()
    if run.metrics is not None:
        run.metrics.saved(run.save_history.saved[-1])


@contextmanager
def _counting_failures(run: BaseRun) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        run.save_history.failed(error)
        if run.runtime.launch_env.rank == 0:
            logger.error(
                f"WARNING: {error} The run continues and retries at the next save; failure "
                f"{run.save_history.consecutive_failures} in a row, the run ends at {MAX_CONSECUTIVE_FAILURES}"
            )
