"""A legacy checkpoint of Megatron-LM (`--ckpt-format torch`) as an index that any mapping can load.

Every file `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` is opened without reading its elements (they are mapped into
memory, and read with their chunk). Its content, and that of `distrib_optim.pt`, gets the keys and chunks of a native
checkpoint, so that the same code reads both. names.py describes the files.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from arguments.mechanisms.selections import SAVED_NAMES
from arguments.mup import recorded_width_mult
from moe_trainer.checkpoint.archive import load_mapped, verify_checksums
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.megatron_legacy import names as legacy
from moe_trainer.checkpoint.optimizer_record import is_decoupled, param_group
from moe_trainer.checkpoint.ownership import KINDS
from moe_trainer.checkpoint.sharding import KeyScheme, object_key
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS, to_builtin
from moe_trainer.checkpoint.virtual_index import VirtualMetadata, add_chunk, incomplete_tensors

FORMAT = "torch"
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "fp32_param")
_DEFAULT_BUCKET = 40_000_000
# names of saved tensors that are not parameters
BUFFERS = (
    "expert_bias",
    *SAVED_NAMES,
    "local_tokens_per_expert",
    "global_tokens_per_expert",
    "ga_steps",
)


def is_legacy_folder(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*"))


@dataclass(frozen=True)
class RankFile:
    """A file and the rank that wrote it."""

    path: Path
    tp: int
    pp: int
    ep: int

    @property
    def state_path(self) -> Path:
        return self.path.with_name(legacy.STATE_FILE)


def open_file(path: Path) -> Any:
    """Decode a file; its tensors are mapped, not read.

    Raises:
        DamagedError: if it is missing or damaged.
    """
    try:
        return load_mapped(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except DECODE_ERRORS as error:
        raise DamagedError(
            f"{path} is damaged: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
        ) from error


def read_recorded_flags(folder: Path) -> dict[str, Any]:
    """Return the flags of the run that wrote a checkpoint.

    Raises:
        CheckpointError: if it cannot be read.
    """
    paths = sorted(folder.glob(f"mp_rank_*/{legacy.MODEL_FILE}"))
    if not paths:
        raise DamagedError(f"{folder}: no mp_rank_* folder there has a {legacy.MODEL_FILE}")
    content = open_file(paths[0])
    try:
        record = to_builtin(content["args"]) if isinstance(content, dict) and "args" in content else None
    except ValueError as error:
        raise DamagedError(f"{paths[0]} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{paths[0]} holds no args: it is no checkpoint of Megatron-LM's training")
    return record


def rank_files(folder: Path, sizes: legacy.LayoutSizes) -> list[RankFile]:
    """Return all files, those of the first expert-parallel rank first.

    Raises:
        DamagedError: naming a missing file of the model, or one that belongs to no rank.
    """
    parts = [
        RankFile(path, tp, pp, ep)
        for ep in range(sizes.ep)
        for pp in range(sizes.pp)
        for tp in range(sizes.tp)
        if (path := folder / sizes.folder(tp, pp, ep) / legacy.MODEL_FILE).is_file()
    ]
    for pp in range(sizes.pp):
        for tp in range(sizes.tp):
            if not any((file.tp, file.pp) == (tp, pp) for file in parts):
                raise DamagedError(f"{folder / sizes.folder(tp, pp, 0) / legacy.MODEL_FILE} is missing")
        for ep in range(sizes.ep):
            for etp in range(sizes.etp):
                if not any((file.tp % sizes.etp, file.pp, file.ep) == (etp, pp, ep) for file in parts):
                    raise DamagedError(f"{folder / sizes.folder(etp, pp, ep) / legacy.MODEL_FILE} is missing")
    unread = set(folder.glob(f"mp_rank_*/{legacy.MODEL_FILE}")) - {file.path for file in parts}
    if unread:
        raise DamagedError(
            f"{min(unread)} is of a rank that the flags recorded in the checkpoint do not have: {sizes.tp} "
            f"tensor-, {sizes.pp} pipeline- and {sizes.ep} expert-parallel"
        )
    return parts


class LegacyMetadata(VirtualMetadata):
    """The index of a native checkpoint with this model; see the head of this file."""

    def __init__(self, folder: Path):
        super().__init__()
        self.record = read_recorded_flags(folder)
        self._folder = folder
        self._sizes = legacy.LayoutSizes.from_record(self.record)
        try:
            self._scheme = KeyScheme.from_record(self.record)
        except ValueError as error:
            raise DamagedError(f"{folder}: the recorded flags are damaged: {error}") from error
        self._tensors: dict[MetadataIndex, tuple[Tensor, Path]] = {}
        self._verified: set[Path] = set()
        self._with_states: set[tuple] = set()  # the places whose optimizer state is entered
        self.state_problem: str | None = None
        """Why the optimizer state cannot be read, where the weights can."""
        files = rank_files(folder, self._sizes)
        contents = [open_file(file.path) for file in files]
        self.common = {key: value for key, value in contents[0].items() if not key.startswith("model")}
        if not isinstance(self.common.get("optimizer"), (dict, list)):
            self.common.pop("optimizer", None)
        firsts = self._first_layers(files, contents)
        added: set[tuple] = set()
        for file, content in zip(files, contents, strict=True):
            self._add_file(file, content, firsts, self._new_kinds(file, KINDS, added))
        if self.state_problem is not None:
            for key in [key for key in self.state_dict_metadata if key.startswith("optimizer.")]:
                del self.state_dict_metadata[key]
        for key, stored, full in incomplete_tensors(self):
            raise DamagedError(f"{folder}: {key}: {stored} of {full} elements are stored")

    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return the tensor of one chunk.

        Raises:
            DamagedError: if the bytes of its file have changed.
        """
        tensor, path = self._tensors[MetadataIndex(key, chunk.offsets)]
        self._verify(path)
        return tensor.reshape(chunk.sizes)

    def modified_files(self) -> list[str]:
        """Return the files that differ from their checksums. Reads everything."""
        problems = []
        for path in self.files:
            try:
                self._verify(path)
            except DamagedError as error:
                problems.append(str(error))
        return problems

    @property
    def files(self) -> list[Path]:
        return sorted({path for _, path in self._tensors.values()})

    def _verify(self, path: Path) -> None:
        """Compare a file with the checksums that it holds, once."""
        if path not in self._verified:
            try:
                verify_checksums(path)
            except DECODE_ERRORS as error:
                raise DamagedError(f"{path} is damaged: {error}") from error
            self._verified.add(path)

    def _first_layers(self, files: Sequence[RankFile], contents: Sequence[Mapping]) -> dict[tuple[int, int], int]:
        """Return the global number of the first layer of each (stage, model chunk), chunk by chunk."""
        counts: dict[tuple[int, int], int] = {}
        for file, content in zip(files, contents, strict=True):
            for number, chunk in enumerate(_chunks(file, content)):
                counts.setdefault((number, file.pp), legacy.count_layers(list(chunk)))
        firsts, total = {}, 0
        for number, pp in sorted(counts):
            firsts[pp, number] = total
            total += counts[number, pp]
        if total != int(self.record["num_layers"]):
            raise DamagedError(
                f"{self._folder}: its files have {total} decoder layers together, and its args say "
                f"{self.record['num_layers']}"
            )
        return firsts

    def _add_file(self, file: RankFile, content: Mapping, firsts: Mapping, takes: Mapping[str, bool]) -> None:
        """Add what no earlier file had."""
        chunks: list[dict[str, Tensor]] = []
        copies: set[str] = set()
        for number, chunk in enumerate(_chunks(file, content)):
            first_expert = file.ep * self._sizes.local_experts
            named = {
                legacy.global_name(name, firsts[file.pp, number], first_expert): value
                for name, value in chunk.items()
                if isinstance(value, Tensor) and not name.endswith("_extra_state")
            }
            chunks.append(named)
            copies |= legacy.tied_copies(named, self.record, file.pp)
            for name, value in named.items():
                if name not in copies:
                    self._add(name, value, "", file, file.path, takes)
        if content.get("optimizer") is not None:
            try:
                for state, name, value, path, takes in self._states(file, content["optimizer"], chunks):
                    if name not in copies:
                        self._add(name, value, f"optimizer.state.{state}.", file, path, takes)
            except CheckpointError as error:
                self.state_problem = str(error)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                self.state_problem = (
                    f"the optimizer state in {file.path.parent} has not the form of Megatron-LM's: {error!r}"
                )
        key = object_key("rng_state", (file.pp, file.tp), (self._sizes.pp, self._sizes.tp))
        if content.get("rng_state") is not None and key not in self.objects:
            self.objects[key] = content["rng_state"]
            self.state_dict_metadata[key] = BytesStorageMetadata()

    def _add(
        self, name: str, value: Tensor, prefix: str, file: RankFile, path: Path, takes: Mapping[str, bool]
    ) -> None:
        count, rank = self._sizes.tp, file.tp
        if _kind(name) == "expert":
            count, rank = self._sizes.etp, file.tp % self._sizes.etp
        if name.endswith((".experts.weight1", ".experts.weight2")):
            raise CheckpointError(
                f"{path}: {name} is of the retired --moe-use-legacy-grouped-gemm; convert it with an older Megatron-LM"
            )
        if not takes[_kind(name)]:
            return
        dim, parts = legacy.tp_split(name, value.shape, self.record, count)
        if dim is None and rank > 0:
            return
        key, at, extents = self._scheme.locate(name)
        full = list(value.shape)
        if dim is not None:
            full[dim] *= count
        earlier = self.state_dict_metadata.get(prefix + key)
        if isinstance(earlier, TensorStorageMetadata) and earlier.size != torch.Size((*extents, *full)):
            raise DamagedError(
                f"{path}: {name} is a piece of {full}, and other files hold pieces of {list(earlier.size[len(at) :])}"
            )
        for part, shard in enumerate(value.chunk(parts, 0) if parts > 1 else (value,)):
            first = [0] * value.dim()
            if dim is not None:
                first[dim] = (part * count + rank) * shard.shape[dim]
            index = add_chunk(
                self,
                (prefix + key, at, extents),
                shard.shape,
                value.dtype,
                path.relative_to(self._folder),
                int(shard.storage_offset()),
                0,
                full,
                first,
            )
            self._tensors[index] = shard, path

    def _new_kinds(self, file: RankFile, kinds: Sequence[str], seen: set[tuple]) -> dict[str, bool]:
        """Return which of the kinds of parameters no file of the same place had, and remember them in `seen`."""
        places = {
            "dense": ("dense", file.tp, file.pp),
            "expert": ("expert", file.tp % self._sizes.etp, file.pp, file.ep),
        }
        takes = {kind: kind in kinds and place not in seen for kind, place in places.items()}
        seen |= {places[kind] for kind in kinds}
        return takes

    def _states(
        self, file: RankFile, optimizer: Any, chunks: list[dict[str, Tensor]]
    ) -> Iterator[tuple[str, str, Tensor, Path, dict[str, bool]]]:
        """Yield (state, name, values, file, kinds of parameters to use) of all optimizer states of a file."""
        chain = optimizer if isinstance(optimizer, list) else [optimizer]
        trained = [{name: value for name, value in chunk.items() if not name.endswith(BUFFERS)} for chunk in chunks]
        kinds: list[tuple[str, ...]] = [KINDS] if len(chain) == 1 else [(kind,) for kind in KINDS]
        if len(chain) not in (1, 2) or (len(chain) == 2 and self._sizes.ep == 1):
            raise CheckpointError(
                f"{file.path}: its optimizer state is a chain of {len(chain)} optimizers, and only one of "
                "experts and one of the other parameters are supported"
            )
        is_distributed = bool(self.record.get("use_distributed_optimizer"))
        if is_distributed:
            buffers = open_file(file.state_path)
            buffers = buffers if isinstance(buffers, list) else [buffers]
            if len(buffers) != len(chain):
                raise CheckpointError(
                    f"{file.state_path}: it holds the states of {len(buffers)} optimizers, and {file.path.name} "
                    f"has {len(chain)}"
                )
            chain = buffers
        for number, one in enumerate(chain):
            if one is None and is_distributed:
                continue  # the first data-parallel rank has it: for experts that may be another one
            owned = [
                {name: value for name, value in chunk.items() if _kind(name) in kinds[number]} for chunk in trained
            ]
            takes = self._new_kinds(file, kinds[number], self._with_states)
            read = self._buffer_states if is_distributed else self._numbered_states
            yield from ((*entry, takes) for entry in read(file, one, owned, number))

    def _numbered_states(
        self, file: RankFile, optimizer: Mapping, chunks: list[dict[str, Tensor]], _chain_number: int
    ) -> Iterator[tuple[str, str, Tensor, Path]]:
        """Yield the states of an optimizer that identifies its parameters by number.

        Half-precision parameters also have main parameters.
        """
        params = {name: value for chunk in chunks for name, value in chunk.items()}
        inner = optimizer.get("optimizer", optimizer)
        mains = optimizer.get("fp32_from_fp16_params")
        for group_number, group in enumerate(inner["param_groups"]):
            names = [
                name
                for name, value in params.items()
                if _is_in_group(name, value, group, self.record, self._sizes.ep > 1)
            ]
            if mains is not None:  # half-precision parameters first, then fp32 ones
                names = sorted(names, key=lambda name: params[name].dtype == torch.float32)
                half = [name for name in names if params[name].dtype != torch.float32]
                for name, value in zip(half, mains[group_number], strict=True):
                    yield "fp32_param", name, value, file.path
            if len(names) != len(group["params"]):
                raise CheckpointError(
                    f"{file.path}: a parameter group of its optimizer has {len(group['params'])} parameters, and "
                    f"{len(names)} of the model belong to it"
                )
            for number, name in zip(group["params"], names, strict=True):
                for state, value in inner["state"].get(number, {}).items():
                    if state in STATES and isinstance(value, Tensor):
                        if value.shape != params[name].shape:
                            raise CheckpointError(
                                f"{file.path}: the {state} of number {number} has shape {tuple(value.shape)}, and "
                                f"{name}, whose it should be, {tuple(params[name].shape)}"
                            )
                        yield state, name, value, file.path

    def _buffer_states(
        self, file: RankFile, buffers: Mapping, chunks: list[dict[str, Tensor]], chain_number: int
    ) -> Iterator[tuple[str, str, Tensor, Path]]:
        """Yield the states of a distributed optimizer: flat buffers, one per model chunk."""
        if not buffers.get("buckets_coalesced"):
            raise CheckpointError(
                f"{file.state_path}: its buckets are stored one by one, as Megatron-LM did before 2024; load and "
                "save it there once"
            )
        chunks = [chunk for chunk in chunks if chunk]
        numbers = sorted(number for number in buffers if isinstance(number, int))
        if len(numbers) != len(chunks) or any(len(buffers[number]) != 1 for number in numbers):
            raise CheckpointError(
                f"{file.state_path}: {len(numbers)} buffers for {len(chunks)} model chunks, or buffers of several types"
            )
        for number, chunk in zip(numbers, chunks, strict=True):
            (tensors,) = buffers[number].values()
            ranges = list(
                legacy.buffer_offsets(
                    [(name, value.numel()) for name, value in chunk.items()],
                    *bucketing(self.record, self._sizes, file.pp, number, chain_number == 1),
                )
            )
            needed = max(first + numel for _, first, numel in ranges)
            for state, flat in ((name, value) for name, value in tensors.items() if isinstance(value, Tensor)):
                if flat.numel() != needed:
                    raise CheckpointError(
                        f"{file.state_path}: {state} of buffer {number} has {flat.numel()} elements, and the "
                        f"parameters in buckets as the flags of the checkpoint make them {needed}"
                    )
                for name, first, numel in ranges:
                    yield (
                        "fp32_param" if state == "param" else state,
                        name,
                        flat[first : first + numel].view(chunk[name].shape),
                        file.state_path,
                    )


def bucketing(
    record: Mapping[str, Any], sizes: legacy.LayoutSizes, pp: int, chunk: int, expert: bool
) -> tuple[int | None, int, frozenset[str], bool]:
    """Return bucket size, data-parallel size, names with a separate bucket and padding, for `buffer_offsets`."""
    world = int(record.get("world_size") or sizes.tp * sizes.pp)
    dp_cp = world // (sizes.tp * sizes.pp)
    ranks = world // (sizes.etp * sizes.ep * sizes.pp) if expert else dp_cp
    bucket = None
    if record.get("overlap_grad_reduce") and pp == 0 and chunk == 0:
        data_ranks = max(dp_cp // int(record.get("context_parallel_size") or 1), 1)
        bucket = int(record.get("ddp_bucket_size") or max(_DEFAULT_BUCKET, 1_000_000 * data_ranks))
    return (
        bucket,
        ranks,
        legacy.shared_embedding_names(record, sizes.pp),
        bool(record.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )


def _kind(name: str) -> str:
    return "expert" if legacy.EXPERT in name else "dense"


def _is_in_group(name: str, value: Tensor, group: Mapping, record: Mapping[str, Any], experts_apart: bool) -> bool:
    """Return whether a parameter is in a group of the optimizer, by the settings of the group."""
    kind = legacy.param_group_kind(name, value.dim(), record)
    if (group.get("wd_mult", 1.0) != 0.0) != kind.decayed:
        return False
    if bool(group.get("is_expert_parallel")) != (experts_apart and legacy.EXPERT in name):
        return False
    if recorded_width_mult(record) != 1.0:
        return group.get("max_lr") == param_group(record, **kind._asdict(), experts=False)["max_lr"]
    return record.get("decoupled_lr") is None or is_decoupled(group) == kind.decoupled


def _chunks(file: RankFile, content: Mapping) -> list[Mapping[str, Any]]:
    numbered = (f"model{number}" for number in itertools.count())
    keys = ["model"] if "model" in content else list(itertools.takewhile(content.__contains__, numbered))
    chunks = [content[key] for key in keys]
    if not chunks or any("language_model" in chunk for chunk in chunks):
        raise CheckpointError(
            f"{file.path} holds no model of Megatron-Core: convert it with the Megatron-LM that wrote it"
        )
    return chunks
