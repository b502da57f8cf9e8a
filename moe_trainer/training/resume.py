"""From the flags to the checkpoint that a run goes on from, and into it.

`--auto-resume`: the same command line starts a run and, after whatever ended it, goes on with it.

Found before anything is built, since the padding of the vocabulary follows the checkpoint too. What is found is put where
--load and its companions stand, so that there is one way to load. Without a checkpoint of its own the run starts as its
flags say, --load BASE --finetune included; with one, those have had their effect in the first start and are left out.
"""

import logging
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from arguments import Arguments
from moe_trainer.checkpoint.checkpoint import check_writable, latest_iteration, load
from moe_trainer.checkpoint.errors import DamagedError
from moe_trainer.checkpoint.find import newest_whole
from moe_trainer.checkpoint.options import CheckpointState, LoadedState, LoadOptions
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import InputError, user_input
from moe_trainer.guard.rejection import History
from moe_trainer.optim.schedule_record import resume_schedules
from moe_trainer.parallel.state import ParallelState
from moe_trainer.run import Run, TrainState, as_rank_0_sees_it

logger = logging.getLogger(__name__)


def find_own_checkpoint(args: Arguments, ps: ParallelState) -> Arguments:
    """The flags of a start, or of going on from the newest whole checkpoint under --save. Collective with --auto-resume.

    Raises: InputError when --save cannot be looked at.
    """
    output = args.output
    if not output.auto_resume:
        return args
    with user_input(f"--auto-resume: --save {output.save}"):
        newest = as_rank_0_sees_it(lambda: newest_whole(Path(output.save), output.verify_integrity), ps)
    if newest is None:
        logger.info("--auto-resume: no complete checkpoint in %s; the run starts as its other flags say", output.save)
        return args
    logger.info("--auto-resume: going on from iteration %d in %s", newest, output.save)
    moe = replace(args.moe, moe_use_upcycling=False)  # what goes on is a MoE model
    resumed = replace(
        output, load=output.save, ckpt_step=newest, finetune=False, pretrained_checkpoint=None, load_main_params_from_ckpt=False,
        override_ckpt_iteration=None,
        # all that this run has saved, whatever was taken of what it started from
        no_load_optim=output.no_save_optim, no_load_rng=output.no_save_rng,
    )
    source = {**args.source, **dict.fromkeys(("load", "ckpt_step"), "derived")}
    return replace(args, output=resumed, moe=moe, source=MappingProxyType(source))


def resume(run: Run, tokenizer: Tokenizer) -> tuple[Run, TrainState]:
    """Load the checkpoint that `--load` names, if there is one; returns where the run goes on, and with which schedules."""
    output = run.args.output
    state = TrainState()
    if run.saves:
        with user_input("--save"):
            options = replace(run.save_options, file_system=check_writable(output.save, run.ps))
        run = replace(run, save_options=options)
    with user_input(f"--load {output.load}"):
        weights_only = output.pretrained_checkpoint is not None and (output.load is None or not holds_checkpoint(output.load, run.ps))
    folder, finetune = (output.pretrained_checkpoint, True) if weights_only else (output.load, output.finetune)
    if folder is None:
        return run, state
    options = LoadOptions.from_args(output, run.args.as_dict(), tokenizer.vocab_size)
    if run.args.evaluates_only:  # nothing is drawn in an evaluation
        options = replace(options, load_optim=False, load_rng=False)
    upcycle = run.args.moe.moe_use_upcycling
    if upcycle:
        with user_input(f"--save {output.save}"):
            if holds_checkpoint(output.save, run.ps):
                raise InputError(f"--moe-use-upcycling: --save {output.save} has a checkpoint already; to go on from it, --load it without this flag (or "
                                 "give --auto-resume too), else name another folder")
        # what of the dense model has no place in the new one is an error, unless another strictness is asked for
        strictness = "raise_unexpected" if options.strictness == "assume_ok_unexpected" else options.strictness
        finetune, options = True, replace(options, upcycle=True, exit_on_missing=True, strictness=strictness)
    with run.timers("load-checkpoint"), user_input(f"--pretrained-checkpoint {folder}" if weights_only else f"--load {folder}"):
        loaded = _load(folder, run, replace(options, finetune=finetune))
        if loaded is None and weights_only:  # to start from random weights is not what was asked for
            raise InputError(f"--pretrained-checkpoint {folder}: there is no checkpoint in this folder")
        if loaded is None and run.args.evaluates_only:
            raise InputError(f"--load {folder}: there is no checkpoint in this folder, so there is nothing to evaluate (--skip-train)")
    if loaded is None or finetune or loaded.weights_only:
        return run, state if loaded is None or finetune else _at_iteration(state, run)
    saved = loaded.state
    run, scheduled_samples = _resume_schedules(run, saved)
    with user_input(f"--load {output.load}"):
        history = History.of(saved.extra.get("history"))
    return run, _at_iteration(TrainState(
        iteration=loaded.iteration,
        consumed_train_samples=saved.consumed_train_samples,
        consumed_valid_samples=saved.consumed_valid_samples,
        skipped_train_samples=saved.skipped_train_samples,
        scheduled_samples=scheduled_samples,
        total_flops=saved.num_floating_point_operations_so_far,
        history=history,
        fingerprint=saved.extra.get("fingerprint") or {},
    ), run)


def _at_iteration(state: TrainState, run: Run) -> TrainState:
    """With --override-ckpt-iteration the run goes on at that iteration, and the data where so many full batches end, as in Megatron-LM."""
    iteration = run.args.output.override_ckpt_iteration
    if iteration is None:
        return state
    return replace(state, iteration=iteration, consumed_train_samples=iteration * run.args.training.global_batch_size, skipped_train_samples=0)


def _resume_schedules(run: Run, saved: CheckpointState) -> tuple[Run, int]:
    """The schedules of learning rate and weight decay, and the samples after which they go on.

    As in Megatron-LM (main, d98e8a64): --no-load-optim leaves the scheduler out too, so the learning rate starts its schedule again while
    the iteration and the data go on; --override-opt_param-scheduler counts the schedule by the samples consumed.
    Raises: InputError when the flags' schedules are not the checkpoint's.
    """
    output, optimizer = run.args.output, run.args.optimizer
    if run.args.evaluates_only:
        return run, 0
    goes_on_by_itself = output.auto_resume and output.load == output.save  # then the flag means that there is no state to load
    if output.no_load_optim and not goes_on_by_itself and output.ckpt_convert_format is None:
        if run.runtime.place.rank == 0:
            logger.info("--no-load-optim: the schedules of learning rate and weight decay start at their beginning, as in Megatron-LM")
        return run, 0
    with user_input(f"--load {output.load}"):
        learning_rate, weight_decay = resume_schedules(
            run.learning_rate, run.weight_decay, saved.scheduler,
            override=optimizer.override_opt_param_scheduler, use_saved=optimizer.use_checkpoint_opt_param_scheduler,
        )
    override = optimizer.override_opt_param_scheduler
    samples = saved.consumed_train_samples if override else saved.scheduler.get("num_steps", saved.consumed_train_samples)
    return replace(run, learning_rate=learning_rate, weight_decay=weight_decay), samples


def _load(folder: str, run: Run, options: LoadOptions) -> LoadedState | None:
    """Load; with --auto-resume a checkpoint whose bytes turn out damaged is passed over for the one before it. Collective."""
    own = run.args.output.auto_resume and folder == run.args.output.save and options.ckpt_step is not None
    while True:
        try:
            return load(folder, run.chunks, run.optimizer, run.ps, options)
        except DamagedError as error:
            if not own:
                raise
            if run.runtime.place.rank == 0:
                logger.warning("WARNING: the checkpoint of iteration %d is passed over: %s", options.ckpt_step, error)
            newest = as_rank_0_sees_it(lambda: newest_whole(Path(folder), options.verify_integrity, before=options.ckpt_step), run.ps)
            logger.info("--auto-resume: going on from iteration %d instead", newest)
            options = replace(options, ckpt_step=newest)


def holds_checkpoint(folder: str, ps: ParallelState) -> bool:
    """Is there a checkpoint in the folder? Collective."""
    return as_rank_0_sees_it(lambda: latest_iteration(folder) is not None, ps)
