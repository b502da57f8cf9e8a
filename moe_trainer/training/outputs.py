"""Where a run is going to write, looked at before it trains: what would only be found out at the first save, or after it."""

import logging

from moe_trainer.checkpoint.find import latest_iteration
from moe_trainer.errors import InputError
from moe_trainer.run import Run, TrainState
from moe_trainer.training.files import why_unwritable

logger = logging.getLogger(__name__)


def check_outputs(run: Run, state: TrainState) -> None:
    """Look at where the run is going to write before it trains for days.

    Raises: InputError if there is nothing to train or the exported weights could not be written.
    """
    if run.train_iters <= 0 and not run.args.training.skip_train:
        raise InputError(
            f"--train-iters or --train-samples give {run.train_iters} iterations: there is nothing to train "
            "(--skip-train evaluates only)"
        )
    target = run.args.output.export_weights
    problem = None if target is None else why_unwritable(target, "file in a folder that exists")
    if problem is not None:
        raise InputError(f"--export-weights {target}: {problem}")
    warn_of_newer_checkpoints(run, state)
    warn_of_no_record(run, state)


def warn_of_newer_checkpoints(run: Run, state: TrainState) -> None:
    """Say so when the save folder's newest checkpoint is ahead of this run, which is going to move the tracker back."""
    save = run.args.output.save
    if not run.saves or run.args.output.load == save or run.runtime.place.rank != 0:
        return
    newest = latest_iteration(save)
    if newest is not None and newest > state.iteration:
        logger.warning(
            "--save %s already holds a checkpoint of iteration %d, and this run starts at %d: its saves will move "
            "latest_checkpointed_iteration.txt back. To go on from there: --load %s; else choose another folder",
            save, newest, state.iteration, save,
        )


def warn_of_no_record(run: Run, state: TrainState) -> None:
    """Say so when this run does not come by the iteration that --record-step names."""
    wanted, skipped = run.args.output.record_step, run.args.training.iterations_to_skip
    if wanted is None or run.runtime.place.rank != 0:
        return
    if run.args.training.skip_train:
        logger.warning("--record-step %d: nothing will be recorded; --skip-train leaves the training out", wanted)
    elif not state.iteration < wanted <= run.train_iters or wanted in skipped:
        logger.warning("--record-step %d: nothing will be recorded; this run goes from iteration %d to %d%s", wanted, state.iteration + 1,
                       run.train_iters, " and skips that one" if wanted in skipped else "")
