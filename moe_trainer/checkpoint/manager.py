"""Save and load a training run: the public interface of this package.

save, AsyncSaver, load and check_writable are collective over `ps.world`; every failure becomes a CheckpointError on
every rank. See directory.py for atomic commits, sharding.py for keys and ownership.py for who writes what.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from moe_trainer.checkpoint import common_state, random_state
from moe_trainer.checkpoint.directory import (
    TRACKER,
    complete_iterations,
    folder_name,
    is_same_folder,
    recover_interrupted_rename,
    tokenizer_files,
)
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.flat_states import FlatStateMetadata, has_flat_states
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.loading import Loader
from moe_trainer.checkpoint.options import CheckpointState, LoadedState, LoadOptions, SaveOptions
from moe_trainer.checkpoint.resolve import (
    check_format,
    folder_iteration,
    is_weights_only,
    latest_iteration,
    read_complete,
    read_saved_args,
    resolve_checkpoint,
    saved_padded_vocab_size,
)
from moe_trainer.checkpoint.saving import PendingSave, check_writable
from moe_trainer.checkpoint.shared_folder import check_seen_by_all, describe_place
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS
from moe_trainer.checkpoint.upcycling import UpcycledMetadata
from moe_trainer.parallel import collectives
from moe_trainer.parallel.coordination import gather_errors
from moe_trainer.parallel.state import ParallelState

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "CheckpointState",
    "LoadOptions",
    "LoadedState",
    "SaveOptions",
    "check_writable",
    "latest_iteration",
    "load",
    "read_saved_args",
    "save",
    "saved_padded_vocab_size",
    "tokenizer_files",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


def save(
    directory: str | Path,
    state: CheckpointState,
    chunks: Sequence[Any],
    optimizer: Any | None,
    ps: ParallelState,
    options: SaveOptions,
) -> None:
    """Write `directory/iter_XXXXXXX` and then the tracker file; return when both are on disk.

    The parameters of `chunks` carry `info`; chunks have `named_state_buffers()` and `named_scaling_state()`. The
    optimizer has tensors(), scalars() and wait_params(); None saves weights only.

    Raises:
        StorageError: on every rank if any rank cannot write; the previous checkpoint stays valid.

    Communication: the plans and the write results of all ranks, gathered as objects.
    """
    pending = PendingSave(Path(directory), state, chunks, optimizer, ps, options, copy_to_host=False)
    pending.write()
    pending.commit()


class AsyncSaver:
    """Saves in the background (--async-save): at most one save is in progress.

    Costs a host copy of this rank's share until it is written.
    """

    def __init__(self) -> None:
        self._started: tuple[PendingSave, Future[None]] | None = None
        # a new thread starts on GPU 0; this one must stay on its rank's own
        on_device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
        self._worker = ThreadPoolExecutor(1, "checkpoint", *on_device)

    def start(
        self,
        directory: str | Path,
        state: CheckpointState,
        chunks: Sequence[Any],
        optimizer: Any | None,
        ps: ParallelState,
        options: SaveOptions,
    ) -> None:
        """Copy this rank's share to host memory and start writing it, after finishing an earlier save."""
        self.finish()
        pending = PendingSave(Path(directory), state, chunks, optimizer, ps, options, copy_to_host=True)
        self._started = pending, self._worker.submit(pending.write)

    @property
    def in_progress(self) -> bool:
        """Whether a save has started and is not committed yet; equal on every rank."""
        return self._started is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's share is still being written; `finish` waits until no rank is writing."""
        return self._started is not None and not self._started[1].done()

    def finish(self) -> None:
        """Wait for the save in progress, if any, and commit it. Collective.

        Call before exit and before a synchronous save.

        Raises:
            StorageError: if the save failed on any rank.
        """
        if self._started is None:
            return
        pending, written = self._started
        crash = written.exception()  # waits
        self._started = None
        pending.commit(crash)


def load(
    directory: str | Path, chunks: Sequence[Any], optimizer: Any | None, ps: ParallelState, options: LoadOptions
) -> LoadedState | None:
    """Load the checkpoint that the tracker (or options.ckpt_step) names into model and optimizer, in place.

    It may have been written under any mapping and with any format of optimizer state: a checkpoint holds fp32. Calls
    optimizer.begin_load, load_scalars and after_load, and restores the random states. A release or a Hugging Face
    folder has only weights, and iteration 0.

    Returns:
        None if `directory` has no checkpoint and options.exit_on_missing is False; a warning is logged.

    Raises:
        CheckpointError: if a required checkpoint is missing, not all ranks see it, or it is of another architecture.
        DamagedError: if it is incomplete or damaged, before anything is overwritten if file sizes show it.
    """
    directory = Path(directory)
    found = _raise_on_all_ranks(lambda: _find_checkpoint(directory, options) if ps.world.rank == 0 else None, ps)
    folder, known = found or (None, None)
    folder = collectives.broadcast_object(folder, ps.world)
    if folder is None:
        _nothing_to_load(directory, options, ps)
        return None
    check_seen_by_all(directory, folder, "Every rank reads the checkpoint", ps)
    weights_only = is_weights_only(folder)
    if weights_only:
        options = replace(options, load_optim=False, load_rng=False)
    index: Metadata = _raise_on_all_ranks(lambda: known or read_index(folder, options.hf_mapping), ps)
    if has_flat_states(index) and optimizer is not None and not options.finetune:
        index = _raise_on_all_ranks(lambda: FlatStateMetadata(folder, index), ps)
    state, scalars, from_megatron = _raise_on_all_ranks(
        lambda: common_state.parse(common_state.read(folder, index)), ps
    )
    if options.upcycle:
        index = _raise_on_all_ranks(lambda: UpcycledMetadata(folder, index, state.args, options.args), ps)
    with_optim = optimizer is not None and options.load_optim and not options.finetune
    with_main = optimizer is not None and options.load_main_params and not with_optim
    loader = Loader(folder, index, options, state.args, ps.world.rank == 0, from_megatron)
    _raise_on_all_ranks(lambda: loader.request_model(chunks), ps)
    if not options.finetune:
        loader.request_scaling(chunks)
    loader.gather_key_mismatches(ps, _device(chunks))
    _raise_on_all_ranks(loader.check, ps)
    if optimizer is not None and (with_optim or with_main):
        optimizer.begin_load()
        _raise_on_all_ranks(lambda: loader.request_optimizer(optimizer, None if with_optim else ("fp32_param",)), ps)
    loader.assign_readers(ps)
    _raise_on_all_ranks(loader.read, ps)
    loader.exchange(_device(chunks))
    if optimizer is not None and with_optim:
        try:
            optimizer.load_scalars(scalars)
        except DECODE_ERRORS as error:
            raise CheckpointError(
                str(error)
                if type(error) is ValueError
                else f"{folder}: the optimizer's step and loss scale are damaged ({type(error).__name__}: {error})"
            ) from error
    if optimizer is not None:
        optimizer.after_load(params_changed=True, state_loaded=with_optim or with_main)
    rng_loaded = _raise_on_all_ranks(lambda: _restore_random(loader, folder, chunks, state.iteration, ps, options), ps)
    iteration = 0 if options.finetune or weights_only else state.iteration
    if ps.world.rank == 0:
        logger.info(
            "  successfully loaded checkpoint from %s [ t %d/%d, gtp_remat 1/1, p %d/%d ] at iteration %d",
            directory,
            ps.tp.rank + 1,
            ps.tp.size,
            ps.pp.rank + 1,
            ps.pp.size,
            iteration,
        )
    return LoadedState(iteration, folder, state, with_optim, rng_loaded, from_megatron, weights_only)


def _find_checkpoint(directory: Path, options: LoadOptions) -> tuple[Path, Metadata] | None:
    """Return the folder to load and its index, which is checked."""
    folder = resolve_checkpoint(directory, options.ckpt_step, loads=True)
    iteration = None if folder is None else folder_iteration(folder)
    if iteration is not None:
        recover_interrupted_rename(directory, iteration)
        folder = directory / folder_name(iteration)
    if folder is None:
        return None
    check_format(folder)
    return folder, read_complete(folder, options.verify_integrity, options.hf_mapping)


def _nothing_to_load(directory: Path, options: LoadOptions, ps: ParallelState) -> None:
    def look() -> bool:
        return (directory / TRACKER).is_file() or bool(complete_iterations(directory))

    has_checkpoint = _raise_on_all_ranks(look, ps)
    others = gather_errors(describe_place(directory, ps) if has_checkpoint else None, ps.world)
    if others:
        raise CheckpointError(
            f"{directory}: rank 0 sees no checkpoint in this folder, and others do: {others[0]}. Give the absolute "
            "path of a folder that all nodes share"
        )
    if options.exit_on_missing:
        raise CheckpointError(
            f"{directory}: there is no checkpoint (could not find the metadata file {directory / TRACKER}), and "
            "--exit-on-missing-checkpoint, --ckpt-convert-format or --moe-use-upcycling needs one"
        )
    if ps.world.rank == 0:
        logger.warning("WARNING: could not find the metadata file %s", directory / TRACKER)
        logger.warning("    will not load any checkpoints and will start from random")
        save = options.args.get("save")
        if save is None or not is_same_folder(directory, save):  # else the run may be its own first part
            logger.warning("%s", "\n".join(_describe_random_start(directory, options)))


def _describe_random_start(directory: Path, options: LoadOptions) -> list[str]:
    """Return the lines of a warning that stands out among those of a start."""
    found = "this folder has no checkpoint" if directory.is_dir() else "there is no such folder"
    lines = [f"--load {directory}: {found}.", "THIS RUN TRAINS FROM RANDOM WEIGHTS, not from a trained model."]
    if options.finetune:
        lines.append("--finetune has nothing to start from.")
    lines.append("--exit-on-missing-checkpoint ends such a run instead.")
    rule = "!" * max(map(len, lines))
    return [f"!!! {line}" for line in (rule, *lines, rule)]


def _device(chunks: Sequence[Any]) -> torch.device:
    return next((param.device for chunk in chunks for param in chunk.parameters()), torch.device("cpu"))


def _restore_random(
    loader: Loader, folder: Path, chunks: Sequence[Any], iteration: int, ps: ParallelState, options: LoadOptions
) -> bool:
    """Restore every random stream or start a new one; return whether this rank's states were stored."""
    if not options.load_rng or options.finetune:
        return False
    streams = random_state.get_streams(chunks)
    try:
        states = loader.random_states(ps)
        if states is None:
            random_state.reseed(int(options.args.get("seed", 0)), iteration, ps, streams)
        else:
            random_state.restore(states, streams, folder)
        if random_state.has_named(streams):
            random_state.restore_named(loader.all_random_states(), streams)
    except CheckpointError:
        raise
    except DECODE_ERRORS as error:
        raise CheckpointError(
            f"{folder}: its random states are not those of a run ({type(error).__name__}: "
            f"{str(error) or 'no reason given'}). --no-load-rng starts new ones"
        ) from error
    return states is not None


def _raise_on_all_ranks(step: Callable[[], T], ps: ParallelState) -> T:
    """Run a step on every rank; raise an error of files or of the checkpoint of any rank on all of them. Collective."""
    result: Any = None
    failure: tuple[str, bool] | None = None
    try:
        result = step()
    except CheckpointError as error:
        failure = (str(error), isinstance(error, DamagedError))
    except OSError as error:  # perhaps of one node, while the others wait for it
        failure = (f"on node {socket.gethostname()}: {error}", False)
    failures = gather_errors(failure, ps.world)
    if failures:
        kind = DamagedError if any(damaged for _, damaged in failures) else CheckpointError
        raise kind("\n".join(dict.fromkeys(text for text, _ in failures)))
    return result
