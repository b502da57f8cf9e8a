"""When a run saves, and what happens when its disk refuses.

A save that fails costs no work: the previous checkpoint is complete and stays, and the training can go on. So the run says so
as loudly as it can, goes on, and tries again when the next save is due. It ends, with what the disk said, at the third
failure in a row, and when the last save of all has failed: a run that is never saved is worth nothing. Whatever else is wrong
with a save (ranks that do not fit together) ends the run at once: waiting would mend nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moe_trainer.checkpoint.checkpoint import check_writable, save
from moe_trainer.checkpoint.errors import StorageError
from moe_trainer.checkpoint.options import CheckpointState
from moe_trainer.errors import user_input
from moe_trainer.guard.save_history import MOST_IN_A_ROW
from moe_trainer.optim.schedule_record import schedule_record
from moe_trainer.run import Run, TrainState
from moe_trainer.training.judgement import history_of

logger = logging.getLogger(__name__)


def save_is_due(run: Run, state: TrainState) -> bool:
    """Does --save-interval ask for a checkpoint of this iteration?"""
    interval = run.args.output.save_interval
    return interval is not None and state.iteration % interval == 0


def save_checkpoint(run: Run, state: TrainState) -> None:
    """Write a checkpoint of this moment, in the background with --async-save; one that the disk refuses is told and counted. Collective.

    Raises: InputError on every rank at the third failure in a row, and for whatever else than the disk is wrong.
    """
    output = run.args.output
    content = content_of(run, state)
    if run.metrics is not None:
        run.metrics.flush()  # a run killed after this goes on from here: nothing logged until now may be lost
    finish_save(run)
    with run.timers("save-checkpoint"), user_input(f"--save {output.save}"), _counting_failures(run):
        run.wait_params()
        run.save_history.begin(state.iteration)
        if output.async_save:
            run.saver.start(output.save, content, run.chunks, run.optimizer, run.ps, run.save_options)
        else:
            save(output.save, content, run.chunks, run.optimizer, run.ps, run.save_options)
            run.save_history.succeeded()


def save_upcycled(run: Run, state: TrainState) -> None:
    """Write the model that --moe-use-upcycling has made, before it is trained; without it there is no run. Collective.

    Raises: InputError on every rank when the folder cannot be written.
    """
    output = run.args.output
    with run.timers("save-checkpoint"), user_input(f"--save {output.save}"):
        run.optimizer.wait_params()
        save(output.save, content_of(run, state), run.chunks, run.optimizer, run.ps, run.save_options)
    logger.info("--moe-use-upcycling: the model made of %s is saved to %s", output.load or output.pretrained_checkpoint, output.save)


def convert_checkpoint(run: Run, state: TrainState) -> None:
    """--ckpt-convert-format: write what was loaded to --ckpt-convert-save/FORMAT. Collective.

    Weights that came without optimizer state are written without it.
    Raises: InputError on every rank when the folder cannot be written.
    """
    output = run.args.output
    with user_input(f"--ckpt-convert-save {output.ckpt_convert_save}"):
        folder = Path(output.ckpt_convert_save) / output.ckpt_convert_format
        with_state = run.save_options.save_optim and not output.no_load_optim and state.iteration > 0
        options = replace(run.save_options, ckpt_format=output.ckpt_convert_format, save_optim=with_state, retain_interval=None,
                          file_system=check_writable(folder, run.ps))
        save(folder, content_of(run, state), run.chunks, run.optimizer, run.ps, options)


def content_of(run: Run, state: TrainState) -> CheckpointState:
    """All but the tensors of a checkpoint of this moment."""
    return CheckpointState(
        iteration=state.iteration,
        args=run.args.as_dict() | _facts(run),
        consumed_train_samples=state.consumed_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        skipped_train_samples=state.skipped_train_samples,
        num_floating_point_operations_so_far=state.total_flops,
        scheduler=schedule_record(run.learning_rate, run.weight_decay, state.scheduled_samples),
        extra=history_of(state) | ({"fingerprint": state.fingerprint} if state.fingerprint else {}),
    )


def _facts(run: Run) -> dict[str, object]:
    """What Megatron-LM records as flags beside those of the command line, and its loader compares or goes by."""
    return {
        "padded_vocab_size": run.padded_vocab_size,
        "world_size": run.ps.world.size,
        "data_parallel_size": run.ps.dp.size,
        "async_strategy": "mcore",  # read by torch's own reader; what the other strategy saves needs a package that this did not use
    }


def finish_save(run: Run) -> None:
    """Wait for the save in the background, if there is one, and make it visible. Collective. Raises: as save_checkpoint."""
    if run.saver.under_way:
        with run.timers("save-checkpoint"), user_input(f"--save {run.args.output.save}"), _counting_failures(run):
            run.saver.finish()
            run.save_history.succeeded()


@contextmanager
def _counting_failures(run: Run) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        run.save_history.failed(error)
        if run.runtime.place.rank == 0:
            logger.error("WARNING: %s The run goes on and tries again at the next save; failure %d in a row, the run ends at %d",
                         error, run.save_history.in_a_row, MOST_IN_A_ROW)
