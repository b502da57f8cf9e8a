"""Find and load the checkpoint from which a run continues.

With --auto-resume the same command line starts and continues a run. The checkpoint is resolved before anything is
built, since the padded vocabulary follows it, and becomes the value of --load and its companion flags. Without a
checkpoint under --save the run starts as its flags describe, including --load BASE --finetune; with one, those flags
are dropped.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from arguments import Arguments
from moe_trainer.checkpoint.directory import complete_iterations, is_same_folder
from moe_trainer.checkpoint.errors import DamagedError
from moe_trainer.checkpoint.manager import check_writable, latest_iteration, load
from moe_trainer.checkpoint.options import CheckpointState, LoadedState, LoadOptions
from moe_trainer.checkpoint.resolve import folder_iteration, is_named_in, latest_valid
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.optim.scheduler_state import resume_schedules
from moe_trainer.parallel.coordination import run_on_rank0
from moe_trainer.parallel.state import ParallelState
from moe_trainer.resilience.rejection import LossHistory
from moe_trainer.training.initialize import Runtime
from moe_trainer.training.run import BaseRun, TrainRun, TrainState
from moe_trainer.training.setup import build_run

logger = logging.getLogger(__name__)


def resolve_auto_resume(args: Arguments, ps: ParallelState) -> Arguments:
    """Return the arguments of a start, or of continuing from the newest complete checkpoint under --save.

    Raises:
        UserError: if --save cannot be read.

    Collective with --auto-resume.
    """
    output = args.output
    if not output.auto_resume or output.save is None:
        return args
    save = Path(output.save)
    with as_user_error(f"--auto-resume: --save {output.save}"):
        newest = run_on_rank0(lambda: latest_valid(save, output.verify_integrity), ps.world)
    if newest is None:
        logger.info("--auto-resume: no complete checkpoint in %s; the run starts as its other flags say", output.save)
        return args
    logger.info("--auto-resume: going on from iteration %d in %s", newest, output.save)
    moe = replace(args.moe, moe_use_upcycling=False)  # the checkpoint under --save is a MoE model
    resumed = replace(
        output,
        load=output.save,
        ckpt_step=newest,
        finetune=False,
        pretrained_checkpoint=None,
        load_main_params_from_ckpt=False,
        override_ckpt_iteration=None,
        # everything this run saved, independent of what was loaded at its start
        no_load_optim=output.no_save_optim,
        no_load_rng=output.no_save_rng,
    )
    source = {**args.source, **dict.fromkeys(("load", "ckpt_step"), "derived")}
    return replace(args, output=resumed, moe=moe, source=MappingProxyType(source))


def _upcycling_options(options: LoadOptions, run: BaseRun) -> LoadOptions:
    """Return the options to load a dense model into the MoE model. Collective."""
    save = run.args.output.save
    with as_user_error(f"--save {save}"):
        if save is not None and holds_checkpoint(save, run.ps):
            raise UserError(
                f"--moe-use-upcycling: --save {save} has a checkpoint already; to continue from it, "
                "--load it without this flag (or give --auto-resume too), else name another folder"
            )
    return replace(options, upcycle=True, exit_on_missing=True)


def build_and_resume(args: Arguments, runtime: Runtime, tokenizer: Tokenizer) -> tuple[BaseRun, TrainState]:
    """Build a run and load the checkpoint of `--load`, if any. Collective.

    Returns:
        The run with the checkpoint's schedules, and the state from which the run continues.
    """
    will_be_loaded = _replaces_all_weights(args, runtime.ps)
    return _resume(build_run(args, runtime, tokenizer, will_be_loaded), tokenizer, not will_be_loaded)


def _replaces_all_weights(args: Arguments, ps: ParallelState) -> bool:
    """Return whether a checkpoint with all weights of the model is loaded, or the run refused. Collective."""
    output, model = args.output, args.model
    may_lack_some = args.moe.moe_use_upcycling or model.lora_dim is not None or model.dsa_indexer_topk is not None
    if may_lack_some or LoadOptions.from_args(args).accepts_missing:
        return False
    if output.pretrained_checkpoint is not None:
        return True
    folder = output.load
    with as_user_error(f"--load {folder}"):
        return folder is not None and run_on_rank0(lambda: is_named_in(folder), ps.world)


def _check_total_limit(run: BaseRun) -> None:
    """Refuse --save-total-limit where --save has checkpoints that the run does not continue. Collective.

    When the run is started again nothing would tell them from its own, which are deleted.
    """
    limit, save = run.save_options.total_limit, run.save_folder
    if limit is None or save is None:
        return
    with as_user_error("--save"):
        others = run_on_rank0(lambda: complete_iterations(Path(save)), run.ps.world)
    if others:
        raise UserError(
            f"--save-total-limit {limit}: {save} has checkpoints that this run does not continue (iteration "
            f"{', '.join(map(str, others))}); name an empty folder, or --load {save}"
        )


def _resume(run: BaseRun, tokenizer: Tokenizer, has_initial_weights: bool) -> tuple[BaseRun, TrainState]:
    output = run.args.output
    state = TrainState()
    if (folder := run.save_folder) is not None:
        with as_user_error("--save"):
            filesystem_id = check_writable(folder, run.ps)
        run = replace(run, save_options=replace(run.save_options, filesystem_id=filesystem_id))
    with as_user_error(f"--load {output.load}"):
        weights_only = output.pretrained_checkpoint is not None and (
            output.load is None or not holds_checkpoint(output.load, run.ps)
        )
    folder, finetune = (output.pretrained_checkpoint, True) if weights_only else (output.load, output.finetune)
    if folder is None:
        _check_total_limit(run)
        return run, state
    options = replace(LoadOptions.from_args(run.args, tokenizer.vocab_size), has_initial_weights=has_initial_weights)
    if run.args.is_eval_only:  # an evaluation draws no random numbers
        options = replace(options, load_optim=False, load_rng=False)
    if run.args.moe.moe_use_upcycling:
        finetune, options = True, _upcycling_options(options, run)
    with (
        run.timers("load-checkpoint"),
        as_user_error(f"--pretrained-checkpoint {folder}" if weights_only else f"--load {folder}"),
    ):
        loaded = _load(folder, run, replace(options, finetune=finetune))
        if loaded is None and weights_only:  # starting from random weights would be wrong
            raise UserError(f"--pretrained-checkpoint {folder}: there is no checkpoint in this folder")
        if loaded is None and not has_initial_weights:
            raise UserError(f"--load {folder}: the checkpoint that was in this folder a moment ago is gone")
        if loaded is None and run.args.is_eval_only:
            raise UserError(
                f"--load {folder}: there is no checkpoint in this folder, so there is nothing to evaluate "
                "(--skip-train)"
            )
    if loaded is None or finetune or loaded.weights_only:
        _check_total_limit(run)
        return run, state if loaded is None or finetune else _at_iteration(state, run)
    if output.save is not None and is_same_folder(loaded.folder.parent, output.save):  # then all there is of this run
        iteration = folder_iteration(loaded.folder)
        protected = frozenset() if iteration is None else frozenset([iteration])
        run = replace(run, save_options=replace(run.save_options, protected=protected))
    else:
        _check_total_limit(run)
    saved = loaded.state
    scheduled_samples = 0
    if isinstance(run, TrainRun):
        run, scheduled_samples = _resume_schedules(run, saved)
    with as_user_error(f"--load {output.load}"):
        history = LossHistory.from_dict(saved.extra.get("history"))
    return run, _at_iteration(
        TrainState(
            iteration=loaded.iteration,
            consumed_train_samples=saved.consumed_train_samples,
            consumed_valid_samples=saved.consumed_valid_samples,
            skipped_train_samples=saved.skipped_train_samples,
            scheduled_samples=scheduled_samples,
            total_flops=saved.num_floating_point_operations_so_far,
            history=history,
            fingerprint=saved.extra.get("fingerprint") or {},
            flags=saved.args,
            text_streams=saved.extra.get("streams") or {},
        ),
        run,
    )


def _at_iteration(state: TrainState, run: BaseRun) -> TrainState:
    """Apply --override-ckpt-iteration: the data continues after that many full batches, as in Megatron-LM."""
    iteration = run.args.output.override_ckpt_iteration
    if iteration is None:
        return state
    return replace(
        state,
        iteration=iteration,
        consumed_train_samples=iteration * run.args.training.global_batch_size,
        skipped_train_samples=0,
    )


def _resume_schedules(run: TrainRun, saved: CheckpointState) -> tuple[TrainRun, int]:
    """Return the run with resumed schedules, and the samples after which they continue.

    As in Megatron-LM (main, d98e8a64), --no-load-optim does not load the scheduler either: the learning rate restarts
    its schedule while the iteration and the data continue; --override-opt_param-scheduler counts the consumed samples.

    Raises:
        UserError: if the schedules of the flags differ from those of the checkpoint.
    """
    output, optimizer = run.args.output, run.args.optimizer
    resumes_own_run = output.auto_resume and output.load == output.save  # then the flag means that no state was saved
    if output.no_load_optim and not resumes_own_run and output.ckpt_convert_format is None:
        if run.runtime.launch_env.rank == 0:
            logger.info(
                "--no-load-optim: the schedules of learning rate and weight decay start at their beginning, as in "
                "Megatron-LM"
            )
        return run, 0
    override, use_saved = optimizer.override_opt_param_scheduler, optimizer.use_checkpoint_opt_param_scheduler
    with as_user_error(f"--load {output.load}"):
        learning_rate, weight_decay = resume_schedules(
            run.learning_rate, run.weight_decay, saved.scheduler, override=override, use_saved=use_saved
        )
    consumed = saved.consumed_train_samples
    samples = consumed if override else saved.scheduler.get("num_steps", consumed)
    return replace(run, learning_rate=learning_rate, weight_decay=weight_decay), samples


def _load(folder: str, run: BaseRun, options: LoadOptions) -> LoadedState | None:
    """Load; with --auto-resume skip a damaged checkpoint and use the one before it. Collective."""
    resumes_own_run = run.args.output.auto_resume and folder == run.args.output.save and options.ckpt_step is not None
    optimizer = run.optimizer if isinstance(run, TrainRun) else None
    while True:
        try:
            return load(folder, run.chunks, optimizer, run.ps, options)
        except DamagedError as error:
            if not resumes_own_run:
                raise
            if run.runtime.launch_env.rank == 0:
                logger.warning("WARNING: skipping the checkpoint of iteration %d: %s", options.ckpt_step, error)
            find = partial(latest_valid, Path(folder), options.verify_integrity, before=options.ckpt_step)
            newest = run_on_rank0(find, run.ps.world)
            if newest is None:
                raise
            logger.info("--auto-resume: going on from iteration %d instead", newest)
            options = replace(options, ckpt_step=newest)


def holds_checkpoint(folder: str, ps: ParallelState) -> bool:
    """Return whether the folder holds a checkpoint. Collective."""
    return run_on_rank0(lambda: latest_iteration(folder) is not None, ps.world)
