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
from moe_trainer.training.context import BaseRun, TrainRun, TrainState
from moe_trainer.training.data_setup import merged_stream_states

logger = logging.getLogger(__name__)


def save_is_due(ctx: BaseRun, state: TrainState) -> bool:
    """Return whether --save-interval requires a checkpoint of this iteration."""
    interval = ctx.args.output.save_interval
    return interval is not None and state.iteration % interval == 0


def save_checkpoint(ctx: TrainRun, state: TrainState, folder: str) -> None:
    """Save a checkpoint under `folder`, in the background with --async-save. Collective.

    I/O failures are logged and counted.

    Raises:
        UserError: on every rank, after too many consecutive I/O failures or for any other error.
    """
    content = make_checkpoint_state(ctx, state)
    if ctx.metrics is not None:
        # a run killed later resumes from this checkpoint, so everything logged until now must be on disk
        ctx.metrics.flush()
    finish_save(ctx)
    with ctx.timers("save-checkpoint"), as_user_error(f"--save {folder}"), _counting_failures(ctx):
        ctx.wait_params()
        ctx.save_history.begin(state.iteration)
        if ctx.args.output.async_save:
            ctx.saver.start(folder, content, ctx.chunks, ctx.optimizer, ctx.ps, ctx.save_options)
        else:
            save(folder, content, ctx.chunks, ctx.optimizer, ctx.ps, ctx.save_options)
            _note_success(ctx)


def save_upcycled(ctx: TrainRun, state: TrainState, folder: str) -> None:
    """Save the model of --moe-use-upcycling under `folder` before training. Collective.

    Raises:
        UserError: on every rank, if the folder cannot be written.
    """
    output = ctx.args.output
    with ctx.timers("save-checkpoint"), as_user_error(f"--save {folder}"):
        ctx.wait_params()
        save(folder, make_checkpoint_state(ctx, state), ctx.chunks, ctx.optimizer, ctx.ps, ctx.save_options)
    logger.info(
        f"--moe-use-upcycling: the model made of {output.load or output.pretrained_checkpoint} is saved to {folder}"
    )


def convert_checkpoint(ctx: TrainRun, state: TrainState, parent: str, ckpt_format: str) -> None:
    """Write the loaded checkpoint in a format to parent/ckpt_format (--ckpt-convert-save). Collective.

    Weights loaded without optimizer state are written without it.

    Raises:
        UserError: on every rank, if the folder cannot be written.
    """
    output = ctx.args.output
    with as_user_error(f"--ckpt-convert-save {parent}"):
        folder = Path(parent) / ckpt_format
        with_state = ctx.save_options.save_optim and not output.no_load_optim and state.iteration > 0
        options = replace(
            ctx.save_options,
            ckpt_format=ckpt_format,
            save_optim=with_state,
            retain_interval=None,
            total_limit=None,
            filesystem_id=check_writable(folder, ctx.ps),
        )
        try:
            save(folder, make_checkpoint_state(ctx, state), ctx.chunks, ctx.optimizer, ctx.ps, options)
        finally:
            if ctx.ps.world.rank == 0:
                release_lock(folder)


def make_checkpoint_state(ctx: TrainRun, state: TrainState) -> CheckpointState:
    """Return everything of a checkpoint except tensors. Collective with --dataloader-type external."""
    # values that Megatron-LM records in addition to the flags, and that its loader compares or uses
    megatron_args = {
        "padded_vocab_size": ctx.padded_vocab_size,
        "world_size": ctx.ps.world.size,
        "data_parallel_size": ctx.ps.dp.size,
        # read by torch's own reader; the other strategy needs a package that is not used here
        "async_strategy": "mcore",
    }
    extra = {"history": state.history.as_dict(), "fingerprint": state.fingerprint, "streams": merged_stream_states(ctx)}
    return CheckpointState(
        iteration=state.iteration,
        args=ctx.args.as_dict() | megatron_args,
        consumed_train_samples=state.consumed_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        skipped_train_samples=state.skipped_train_samples,
        num_floating_point_operations_so_far=state.total_flops,
        scheduler=scheduler_state_dict(ctx.learning_rate, ctx.weight_decay, state.scheduled_samples),
        extra={name: value for name, value in extra.items() if value},
    )


def finish_save(ctx: BaseRun) -> None:
    """Wait for the background save, if any, and make it visible. Collective. Raises as save_checkpoint."""
    if ctx.saver.in_progress:
        with ctx.timers("save-checkpoint"), as_user_error(f"--save {ctx.args.output.save}"), _counting_failures(ctx):
            ctx.saver.finish()
            _note_success(ctx)


def _note_success(ctx: BaseRun) -> None:
    ctx.save_history.succeeded()
    if ctx.metrics is not None:
        ctx.metrics.saved(ctx.save_history.saved[-1])


@contextmanager
def _counting_failures(ctx: BaseRun) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        ctx.save_history.failed(error)
        if ctx.runtime.launch_env.rank == 0:
            logger.error(
                f"WARNING: {error} The run continues and retries at the next save; failure "
                f"{ctx.save_history.consecutive_failures} in a row, the run ends at {MAX_CONSECUTIVE_FAILURES}"
            )
