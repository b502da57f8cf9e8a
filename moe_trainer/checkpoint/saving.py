"""Write one checkpoint: a collective plan, local writes, a collective commit.

A synchronous save runs the three steps in a row on live storage. A background save copies this rank's share to host
memory after planning and writes it in a thread, which does not communicate; the main thread commits when every rank has
written.
"""

import contextlib
import datetime
import errno
import logging
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from moe_trainer.checkpoint import common_state, random_state
from moe_trainer.checkpoint.directory import (
    TRACKER,
    acquire_lock,
    append_progress,
    check_filesystem_mounted,
    complete_iterations,
    delete_checkpoint,
    filesystem_id,
    flush_folder,
    folder_name,
    publish,
    read_tracker,
    release_lock,
    remove_directory,
    remove_stale,
    staging_path,
)
from moe_trainer.checkpoint.errors import CheckpointError, StorageError
from moe_trainer.checkpoint.format_writer import FormatWriter, SavedRun
from moe_trainer.checkpoint.formats import writer_of
from moe_trainer.checkpoint.index import check
from moe_trainer.checkpoint.options import CheckpointState, SaveOptions
from moe_trainer.checkpoint.ownership import KINDS, ShardList, assign_owners, digest_shards
from moe_trainer.checkpoint.save_planner import ShardSavePlanner, describe_plans
from moe_trainer.checkpoint.sharding import KeyScheme, make_shards, rng_key
from moe_trainer.checkpoint.shared_folder import check_seen_by_all
from moe_trainer.io import flush_file
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import (
    ParamInfo,
    get_param_info,
    is_quantized_param,
    is_unique_replica,
    replica_group,
    unique_params,
)
from moe_trainer.parallel.shards import shards_to_save
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)

MAIN = "fp32_param"


class PendingSave:
    """A checkpoint between its plan and its commit."""

    def __init__(
        self,
        directory: Path,
        state: CheckpointState,
        chunks: Sequence[Any],
        optimizer: Any | None,
        ps: ParallelState,
        options: SaveOptions,
        copy_to_host: bool,
    ):
        """Plan the save. Collective. With `copy_to_host` the model may change as soon as this returns.

        Raises:
            StorageError: if the folder cannot be created.
            CheckpointError: if the parameters of the ranks do not fit together.
        """
        self._directory = Path(directory)
        self._iteration = state.iteration
        self._ps = ps
        self._options = options
        self._results: list = []
        format_writer = writer_of(options.ckpt_format)
        self._error: str | None = None
        self._changed = False  # the model is not that of the first save, so retrying would not help
        if ps.world.rank == 0:
            logger.info(
                "[%s] saving checkpoint at iteration %7d to %s in %s format",
                datetime.datetime.now(),
                state.iteration,
                self._directory,
                format_writer.name,
            )
        self._temporary = self._open(format_writer)
        if optimizer is not None:
            optimizer.wait_params()
        saved_optimizer = optimizer if options.save_optim else None
        scalars = saved_optimizer.scalars() if saved_optimizer is not None else None
        common = common_state.build(state, scalars) if ps.world.rank == 0 else None
        self._format = format_writer(self._temporary, SavedRun(state, chunks, scalars, common), ps, options)
        self._planner, self._index = self._plan_writes(
            _shard_lists(state, chunks, saved_optimizer, ps, format_writer.keeps_chunks),
            _objects(state, chunks, common, ps, options),
        )
        self._writer = FileSystemWriter(format_writer.chunks_folder(self._temporary), thread_count=1, sync_files=True)
        self._writer.set_up_storage_writer(ps.world.rank == 0)
        # the writer numbers files by the position of a plan in the list of all plans
        others = [SavePlan([])] * ps.world.rank
        self._plan = self._writer.prepare_global_plan([*others, self._planner.create_local_plan()])[-1]
        if copy_to_host:
            self._planner.copy_to_host()

    def _plan_writes(self, batches: list[ShardList], objects: dict[str, bytes]) -> tuple[ShardSavePlanner, Metadata]:
        """Return what this rank writes, and on rank 0 the index of what all ranks write, on others an empty one."""
        ps, cache = self._ps, self._options.plan_cache
        key = digest_shards(shard for batch in batches for shard in batch.shards)
        if cache is not None and cache.writes is not None:
            if cache.digest != key:
                self._changed = True
                self._error = (
                    f"rank {ps.world.rank}: the model or the optimizer state is not what it was at the first "
                    "save; run without --ckpt-assume-constant-structure"
                )
            mine = [shard for batch in batches for shard in batch.shards if (shard.key, shard.offsets) in cache.writes]
            return ShardSavePlanner(mine, objects), replace(cache.index)
        mine = [shard for shared in assign_owners(batches, ps, self._options.fully_parallel) for shard in shared.owned]
        planner = ShardSavePlanner(mine, objects)
        plans = collectives.gather_object(planner.create_local_plan(), ps.world)
        index, problem = Metadata({}), None
        if plans is not None:
            try:
                index = describe_plans(plans)
            except CheckpointError as error:
                problem = str(error)
                remove_directory(self._temporary)
        problem = collectives.broadcast_object(problem, ps.world)
        if problem is not None:
            raise self._failure(problem, CheckpointError)
        if cache is not None:
            cache.digest, cache.index = key, replace(index)
            cache.writes = frozenset((shard.key, shard.offsets) for shard in mine)
        return planner, index

    def _open(self, format_writer: type[FormatWriter]) -> Path:
        """Create an empty staging folder, the same for all ranks."""
        folder, problem = None, None
        if self._ps.world.rank == 0:
            try:
                check_filesystem_mounted(self._directory, self._options.filesystem_id)
                self._directory.mkdir(parents=True, exist_ok=True)
                remove_stale(self._directory)
                folder = staging_path(self._directory, self._iteration, "tmp")
                remove_directory(folder)
                format_writer.chunks_folder(folder).mkdir(parents=True)
            except OSError as error:
                problem = self._describe(error)
        folder, problem = collectives.broadcast_object((folder, problem), self._ps.world)
        if problem is not None:
            raise self._failure(problem)
        return folder

    def write(self) -> None:
        """Write this rank's share and flush it. Not collective; errors are kept for `commit`."""
        try:
            if self._plan.items and self._error is None:
                self._results = self._writer.write_data(self._plan, self._planner).wait()
            if self._error is None:
                self._format.write()
        except (OSError, RuntimeError) as error:  # torch.save reports a failed write as RuntimeError
            self._error = f"rank {self._ps.world.rank}: {self._describe(error)}"

    def commit(self, crash: BaseException | None = None) -> None:
        """Make the checkpoint visible. Collective. `crash` is an unexpected exception of the write on this rank.

        Raises:
            StorageError: on every rank if any rank could not write; the staging folder is removed.
            CheckpointError: on every rank if the checkpoint would be wrong.
        """
        error = f"rank {self._ps.world.rank}: {crash!r}" if crash else self._error
        shares = collectives.gather_object((error, self._changed, self._results), self._ps.world)
        problem: str | None = None
        kind: type[CheckpointError] = StorageError
        if shares is not None:
            problem = "; ".join(error for error, _, _ in shares if error is not None) or None
            kind = CheckpointError if any(changed for _, changed, _ in shares) else StorageError
            if problem is None:
                try:
                    self._writer.finish(self._index, [results for _, _, results in shares])
                except OSError as error:
                    problem = self._describe(error)
        self._abort_on_error(problem, kind)
        if not self._format.keeps_chunks:
            self._abort_on_error(*self._convert())
        problem = None
        if shares is not None:
            try:
                self._finish()
            except OSError as error:
                problem = self._describe(error)
        self._abort_on_error(problem)

    def _abort_on_error(self, problem: str | None, kind: type[CheckpointError] = StorageError) -> None:
        """Raise on all ranks if rank 0 has a problem. Collective."""
        if problem is not None and self._ps.world.rank == 0:
            remove_directory(self._temporary)
        problem, kind = collectives.broadcast_object((problem, kind), self._ps.world)
        if problem is not None:
            raise self._failure(problem, kind)

    def _convert(self) -> tuple[str | None, type[CheckpointError]]:
        """Make the files of the format from the written chunks; return the first problem on rank 0. Collective."""
        problem: tuple[str | None, type[CheckpointError]] = None, StorageError
        try:
            self._format.convert()
        except (OSError, RuntimeError) as error:
            problem = f"rank {self._ps.world.rank}: {self._describe(error)}", StorageError
        except CheckpointError as error:
            problem = str(error), CheckpointError
        problems = collectives.gather_object(problem, self._ps.world) or []
        return next((each for each in problems if each[0] is not None), (None, StorageError))

    def _finish(self) -> None:
        """Write side files and completion mark, rename, update the tracker and apply retention, on one rank."""
        folder = self._temporary
        if self._options.tokenizer_files:
            (folder / "tokenizer").mkdir()
            for path in self._options.tokenizer_files:
                flush_file(Path(shutil.copyfile(path, folder / "tokenizer" / path.name)))
            flush_folder(folder / "tokenizer")
        self._format.complete()
        flush_folder(folder)
        previous = _tracked_iteration(self._directory)
        publish(folder, self._directory, self._iteration)
        try:
            self._after(previous)
        except OSError as error:  # the checkpoint itself is complete
            logger.warning("after saving the checkpoint of iteration %d: %s", self._iteration, error)

    def _after(self, previous: int | None) -> None:
        """Report the save and delete older checkpoints."""
        ps, options = self._ps, self._options
        logger.info(
            "  [%s] successfully saved checkpoint from iteration %7d to %s [ t %d/%d, gtp_remat 1/1, p %d/%d ]",
            datetime.datetime.now(),
            self._iteration,
            self._directory,
            ps.tp.rank + 1,
            ps.tp.size,
            ps.pp.rank + 1,
            ps.pp.size,
        )
        if options.log_progress:
            append_progress(self._directory, ps.world.size, f"Saved checkpoint\tIteration: {self._iteration}")
        expired = options.expired(complete_iterations(self._directory), self._iteration, previous)
        if expired:
            # some file systems lose written bytes: delete older checkpoints only if the newer one is valid
            problems = check(self._directory / folder_name(self._iteration))
            if problems:
                raise OSError(f"{problems[0]}; older checkpoints are kept (iteration {', '.join(map(str, expired))})")
            for iteration in expired:
                delete_checkpoint(self._directory, iteration)

    def _failure(self, problem: str, kind: type[CheckpointError] = StorageError) -> CheckpointError:
        return kind(
            f"cannot save the checkpoint of iteration {self._iteration} to {self._directory}: {problem}. "
            f"{_remaining_checkpoint(self._directory)}"
        )

    def _describe(self, error: BaseException) -> str:
        """Return the cause of a failed write, with the space that is free where it is the cause."""
        cause = _root_cause(error)
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        text = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        return text + (_free_space(self._directory) if is_full else "")


def _shard_lists(
    state: CheckpointState, chunks: Sequence[Any], optimizer: Any | None, ps: ParallelState, to_keep: bool
) -> list[ShardList]:
    """Return this rank's shards, optimizer state (which may be sharded further) before weights. Collective.

    With `to_keep` the chunks are the checkpoint, and main parameters have Megatron-LM's names.
    """
    scheme = KeyScheme.from_record(state.args)
    weights, moments = ({kind: ShardList(kind) for kind in KINDS} for _ in range(2))
    buffers = ShardList("dense")  # separate: every rank holds them fully even if the weights are fully sharded
    runs = {}
    entries = list(optimizer.tensors()) if optimizer is not None else []
    # Megatron-LM's distributed optimizer has main parameters, called param, of fp32 weights too
    distributed = to_keep and optimizer is not None and bool(state.args.get("use_distributed_optimizer"))
    with_mains = _dtypes_with_main_params(entries, ps) if distributed else frozenset()
    for chunk in chunks:
        for param in unique_params(chunk.parameters()):
            info = get_param_info(param)
            if is_unique_replica(info, ps):
                runs[id(param)] = scheme.placements(info, tuple(param.shape))
                for data, start, stop, read in shards_to_save(param):
                    # the values of a quantized weight are those of the optimizer state, and sharded like it
                    batch = (moments if is_quantized_param(param) else weights)[info.kind]
                    batch.shards += make_shards(runs[id(param)], data, start, stop, read=read)
                    if distributed and param.dtype not in with_mains:
                        batch.shards += make_shards(runs[id(param)], data, start, stop, "optimizer.state.param.", read)
        for name, buffer in (*chunk.named_state_buffers(), *chunk.named_scaling_state()):
            info = ParamInfo((name,))
            if is_unique_replica(info, ps):
                buffers.shards += make_shards(scheme.placements(info, tuple(buffer.shape)), buffer, 0, buffer.numel())
    for entry in entries:
        if id(entry.param) in runs:
            name = "param" if distributed and entry.state_name == MAIN else entry.state_name
            moments[get_param_info(entry.param).kind].shards += make_shards(
                runs[id(entry.param)], entry.tensor, entry.start, entry.stop, f"optimizer.state.{name}.", entry.read
            )
    return [*moments.values(), *weights.values(), buffers]


def _dtypes_with_main_params(states: Sequence[Any], ps: ParallelState) -> frozenset[torch.dtype]:
    """Return the dtypes of parameters for which the optimizer of any rank keeps main parameters. Collective."""
    mine = {entry.param.dtype for entry in states if entry.state_name == MAIN}
    return frozenset().union(*collectives.all_gather_object(mine, ps.world))


def _objects(
    state: CheckpointState,
    chunks: Sequence[Any],
    common: dict[str, Any] | None,
    ps: ParallelState,
    options: SaveOptions,
) -> dict[str, bytes]:
    scheme = KeyScheme.from_record(state.args)
    empty = common_state.dump_object(None)
    objects: dict[str, bytes] = {}
    for info in (get_param_info(param) for chunk in chunks for param in unique_params(chunk.parameters())):
        if is_unique_replica(info, ps) and info.shard_rank == 0:
            group = replica_group(info.kind, ps)
            share = group.size if options.fully_parallel else 1
            mine = scheme.extra_state_keys(info)[group.rank :: share] if group.rank < share else ()
            objects |= dict.fromkeys(mine, empty)
    if options.save_rng:
        states = collectives.gather_object(
            random_state.capture_for_checkpoint(random_state.get_streams(chunks), ps), ps.dp_cp
        )
        if states is not None:
            objects[rng_key(ps)] = common_state.dump_object(states)
    if common is not None:
        objects[common_state.KEY] = common_state.dump_object(common)
    return objects


def _tracked_iteration(directory: Path) -> int | None:
    try:
        iteration = read_tracker(directory)
    except CheckpointError as error:
        logger.warning("%s; it will be replaced", error)
        return None
    return iteration if isinstance(iteration, int) else None


def _free_space(directory: Path) -> str:
    try:
        folder = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
        return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free)"
    except OSError:  # of the failed disk
        return ""


def _remaining_checkpoint(directory: Path) -> str:
    try:
        valid = read_tracker(directory)
    except CheckpointError:
        return ""
    if valid is None:
        return "No earlier checkpoint is there."
    return f"The checkpoint of iteration {valid} there is complete and remains the one that --load finds."


def _root_cause(error: BaseException) -> BaseException:
    """Return the error of the operating system, if any; torch.save hides it behind an internal one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause


def check_writable(directory: str | Path, ps: ParallelState) -> int | None:
    """Create, test and lock the save folder, so that a wrong --save ends the run at its start. Collective.

    All ranks look for a file that rank 0 writes there.

    Returns:
        The number of its file system on rank 0, for SaveOptions.filesystem_id.

    Raises:
        CheckpointError: if it cannot be written, another run is saving there, or a node does not see it.
    """
    problem, identity, folder = None, None, Path(directory)
    probe = folder / f".write_test-{socket.gethostname()}-{secrets.token_hex(4)}"
    try:
        if ps.world.rank == 0:
            problem, identity = _prepare_folder(folder, probe)
        problem, name = collectives.broadcast_object((problem, probe.name), ps.world)
        if problem is not None:
            raise CheckpointError(f"--save {directory}: {problem}")
        check_seen_by_all(folder, folder / name, "Every rank writes its part of a checkpoint", ps, "--save ")
    except CheckpointError:
        if ps.world.rank == 0:
            release_lock(folder)
        raise
    finally:
        if ps.world.rank == 0:
            with contextlib.suppress(OSError):
                probe.unlink()
    return identity


def _prepare_folder(directory: Path, probe: Path) -> tuple[str | None, int | None]:
    """Create and lock the save folder, and write `probe`; return a problem, and the number of its file system."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        holder = acquire_lock(directory)
        identity = filesystem_id(directory)
        if (directory / TRACKER).is_dir():
            return (
                f"{directory / TRACKER} is a folder, and the file that names the newest checkpoint is needed; remove it"
            ), None
    except OSError as error:
        return f"cannot write there: {error}", None
    if holder:
        return f"another run is saving there ({holder}); end it, or choose another folder", None
    return None, identity
