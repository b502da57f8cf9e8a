"""Checks of outputs and iterations before training, instead of failures at the first save."""

import logging

from moe_trainer.checkpoint.resolve import latest_iteration
from moe_trainer.errors import UserError
from moe_trainer.io import why_unwritable
from moe_trainer.training.run import BaseRun, TrainState

logger = logging.getLogger(__name__)


def check_output_paths(run: BaseRun, state: TrainState) -> None:
    """Check where the run will write.

    Raises:
        UserError: if there is nothing to train or the exported weights could not be written.
    """
    if run.train_iters <= 0 and not run.args.training.skip_train:
        raise UserError(
            f"--train-iters or --train-samples give {run.train_iters} iterations: there is nothing to train "
            "(--skip-train evaluates only)"
        )
    target = run.args.output.export_weights
    problem = None if target is None else why_unwritable(target, "file in a folder that exists")
    if problem is not None:
        raise UserError(f"--export-weights {target}: {problem}")
    warn_if_newer_checkpoint(run, state)
    warn_if_never_recorded(run, state)


def warn_if_newer_checkpoint(run: BaseRun, state: TrainState) -> None:
    """Warn if the newest checkpoint of the save folder is ahead of this run, whose saves move the tracker back."""
    save = run.save_folder
    if save is None or run.args.output.load == save or run.runtime.launch_env.rank != 0:
        return
    newest = latest_iteration(save)
    if newest is not None and newest > state.iteration:
        logger.warning(
            f"--save {save} already holds a checkpoint of iteration {newest}, and this run starts at "
            f"{state.iteration}: its saves will move latest_checkpointed_iteration.txt back. To continue from there: "
            f"--load {save}; else choose another folder"
        )


def warn_if_never_recorded(run: BaseRun, state: TrainState) -> None:
    """Warn if this run does not reach the iteration of --record-step."""
    number, skipped = run.args.output.record_step, run.args.training.iterations_to_skip
    if number is None or run.runtime.launch_env.rank != 0:
        return
    if run.args.training.skip_train:
        logger.warning("--record-step %d: nothing will be recorded; --skip-train leaves the training out", number)
    elif not state.iteration < number <= run.train_iters or number in skipped:
        logger.warning(
            "--record-step %d: nothing will be recorded; this run goes from iteration %d to %d%s",
            number,
            state.iteration + 1,
            run.train_iters,
            " and skips that one" if number in skipped else "",
        )
