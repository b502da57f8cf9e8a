"""Experts from outside (--moe-enable-routing-replay): rollout routing replay, and the replay of a routing trace.

Reinforcement learning trains on tokens that an inference engine has generated. The two programs round differently, so
some tokens would go to other experts in training, and the ratio of the two policies would jump. The engine therefore
records the experts of every token, and training takes those ("rollout routing replay", R3). The router still computes
the probabilities, from its logits at the given experts, so gradients reach it.

    replay = RoutingReplay(args, chunks, {0: experts, 1: experts})     # arrays [tokens, layers, K] by sample
    with replay.given(chunk, [experts, experts]):                      # or directly, for one forward pass
        loss = chunk(tokens, positions, labels)

Files are described in docs/reinforcement_learning.md. Shape letters: S sequence, B microbatch, L MoE layers of the
decoder, K experts of a token, T tokens of this rank.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from arguments import Arguments
from arguments.layer_pattern import moe_layer_pattern
from arguments.regular_file import regular_file
from moe_trainer.data.loader import Batch
from moe_trainer.debug.routing_trace import TRACE_FILES, RoutingTraceReader, parse_layer
from moe_trainer.errors import UserError
from moe_trainer.model.sequence_borders import shard_of
from moe_trainer.model.transformer import Transformer
from moe_trainer.ops.packed_sequences import Packed, PackedSequences

_FLAG = "--moe-routing-replay-path"
_FORMATS = (".safetensors", ".npz")
_NO_SAMPLES: Mapping[int, Any] = MappingProxyType({})
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_HEADERS = MappingProxyType({(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0})


class RoutingReplay:
    """Gives the routers of this rank the experts of every microbatch.

    Multi-token prediction has no experts in a rollout: its routers choose, except in the replay of a trace.

    Args:
        args: of the run, with --moe-enable-routing-replay.
        chunks: of the model on this rank.
        source: experts [tokens, layers, K] by the number of the sample, of any integer type; or a reader of a trace.
            Layers are those of the decoder, or its MoE layers. There is a row for every input token; one more, of the
            token that is only predicted, is ignored. A row of -1: the router chooses.
        name: of the source, in errors.

    Raises:
        ValueError: without --moe-enable-routing-replay, or with CUDA graphs.
    """

    def __init__(
        self,
        args: Arguments,
        chunks: Sequence[Transformer],
        source: Mapping[int, Any] | RoutingTraceReader = _NO_SAMPLES,
        name: str = "routing replay",
    ):
        if not args.moe.moe_enable_routing_replay:
            raise ValueError("routers take experts from outside only with --moe-enable-routing-replay")
        if args.training.cuda_graph_impl != "none":
            raise ValueError("a CUDA graph would route every microbatch as the captured one: --cuda-graph-impl none")
        pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        self._moe_layers = [layer for layer, is_moe in enumerate(pattern) if is_moe]
        self._num_layers, self._num_experts = len(pattern), args.moe.expert_count
        self._topk = args.moe.moe_router_topk
        self._chunks, self._source, self._name, self._iteration = chunks, source, name, 0

    @staticmethod
    def of_folder(args: Arguments, chunks: Sequence[Transformer], rank: int, world_size: int) -> RoutingReplay | None:
        """Make the replay of --moe-routing-replay-path; None without the flag.

        Raises:
            UserError: if the folder has neither a trace nor arrays, or both, or the trace of more ranks.
        """
        path = args.moe.moe_routing_replay_path
        if path is None or not args.moe.num_experts:
            return None
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"{_FLAG} {path}: there is no such directory")
        source: Mapping[int, Any] | RoutingTraceReader = SampleFolder(folder)
        if any(folder.glob(TRACE_FILES)):
            if source:
                raise UserError(f"{_FLAG} {path} has a routing trace and arrays of samples; one of them is needed")
            source = RoutingTraceReader(folder, rank, world_size, args.moe.moe_router_topk)
        elif not source:
            raise UserError(
                f"{_FLAG} {path} has neither {TRACE_FILES} (--moe-routing-trace-path) nor .npz or .safetensors files "
                "of samples"
            )
        return RoutingReplay(args, chunks, source, f"{_FLAG} {path}")

    def begin_iteration(self, iteration: int) -> None:
        """Set the iteration, counted from 1, of the next microbatches."""
        self._iteration = iteration

    def begin_microbatch(self, chunk: Transformer, microbatch: int, batch: Batch) -> None:
        """Give the routers of a chunk the experts of a microbatch, counted from 0.

        Raises:
            UserError: naming the sample or the line, if experts are missing or are none of this model.
        """
        routers = [layer.router for layer in chunk.moe_layers()]
        if not routers:
            return
        if isinstance(self._source, RoutingTraceReader):
            self._give_traced(self._source, chunk, routers, microbatch, batch)
            return
        rows = [self._get_sample(self._source, number) for number in batch.sample_numbers]
        self._give(chunk, rows, batch.tokens_BS.shape[1], batch.packed, batch.lengths, batch.sample_numbers)

    @contextmanager
    def given(self, chunk: Transformer, experts: Sequence[Any], packed: Packed | None = None) -> Iterator[None]:
        """Give the routers of a chunk the experts of one forward pass; afterwards they choose again.

        Backward needs nothing: a recomputed layer takes the experts of its first pass.

        Args:
            chunk: of this rank.
            experts: arrays [tokens, layers, K] of all sequences of the microbatch, whole; see RoutingReplay.
            packed: lengths of packed sequences; None for rows of equal length.

        Raises:
            UserError: if they are no experts of this model.
        """
        length = len(experts[0]) if packed is None else 0
        self._give(chunk, experts, length, packed, None, range(len(experts)))
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Let all routers choose again."""
        for chunk in self._chunks:
            for layer in chunk.moe_layers():
                layer.router.given_TK = None

    def _get_sample(self, source: Mapping[int, Any], number: int) -> Any:
        try:
            return source[number]
        except KeyError:
            raise UserError(f"{self._name} has no experts of sample {number}") from None

    def _give(
        self,
        chunk: Transformer,
        experts: Sequence[Any],
        seq_length: int,
        packed: Packed | None,
        lengths: Sequence[int] | None,
        numbers: Sequence[int],
    ) -> None:
        if packed is None:
            places = [(0, row, seq_length if lengths is None else lengths[row]) for row in range(len(experts))]
            shape = (seq_length, len(experts))
        else:
            assert isinstance(packed, PackedSequences), "rejected: arguments/rules/router.py"
            places = [(start, 0, length) for start, length in zip(packed.cu_seqlens_padded, packed.lengths)]
            shape = (packed.num_tokens, 1)
            if len(experts) != len(places):
                raise UserError(f"{self._name}: experts of {len(experts)} of the {len(places)} packed sequences")
        table_SBLK = np.full((*shape, len(self._moe_layers), self._topk), -1, dtype=np.int64)
        for given, (start, row, length), number in zip(experts, places, numbers):
            table_SBLK[start : start + length, row] = self._check_sample(given, length, number)
        sequence = shard_of(chunk.sequence, packed)
        for router in (layer.router for layer in chunk.moe_layers()):
            block, layer, _ = parse_layer(router.name)
            if block == "decoder":
                column = torch.from_numpy(table_SBLK[:, :, self._moe_layers.index(layer)])
                (router.given_TK,) = chunk.shard_for_router(sequence, column)

    def _check_sample(self, given: Any, length: int, number: int) -> np.ndarray:
        """Return the experts [length, L, K] of a sample."""
        where = f"{self._name}: sample {number}"
        shape = given.shape if isinstance(given, StoredExperts) else np.shape(given)
        counts = sorted({self._num_layers, len(self._moe_layers)})
        if len(shape) != 3 or shape[1] not in counts or shape[2] != self._topk:
            layers = " or ".join(map(str, counts))
            raise UserError(
                f"{where} has the shape {list(shape)}; [{length} tokens, {layers} layers, {self._topk} experts] "
                "is needed (--num-layers, --moe-layer-freq, --moe-router-topk)"
            )
        if not length <= shape[0] <= length + 1:
            raise UserError(f"{where} has the experts of {shape[0]} tokens; the sample has {length} input tokens")
        array = given.read() if isinstance(given, StoredExperts) else np.asarray(given)
        if array.dtype.kind not in "iu":
            raise UserError(f"{where} is of {array.dtype}; experts are integers")
        if array.shape[1] == self._num_layers:
            array = array[:, self._moe_layers]
        array = array[:length].astype(np.int64)
        self._check_experts(array, where)
        return array

    def _check_experts(self, array: np.ndarray, where: str) -> None:
        is_open = (array == -1).all(-1, keepdims=True)
        outside = ((array < 0) | (array >= self._num_experts)) & ~is_open
        if outside.any():
            token = np.argwhere(outside)[0]
            raise UserError(
                f"{where}: token {token[0]} has the expert {array[tuple(token)]}; experts are 0 to "
                f"{self._num_experts - 1} (--num-experts {self._num_experts}), or all of a token's are -1"
            )
        repeated = (np.diff(np.sort(array, -1), axis=-1) == 0).any(-1, keepdims=True) & ~is_open
        if repeated.any():
            token = np.argwhere(repeated)[0][:-1]
            raise UserError(f"{where}: token {token[0]} has an expert twice: {array[tuple(token)].tolist()}")

    def _give_traced(
        self, trace: RoutingTraceReader, chunk: Transformer, routers: Sequence[Any], microbatch: int, batch: Batch
    ) -> None:
        (shard_T,) = chunk.shard_for_router(shard_of(chunk.sequence, batch.packed), batch.tokens_BS.t())
        for router in routers:
            experts_TK = trace.experts(self._iteration, router.name, microbatch)
            where = f"{trace.path}: iteration {self._iteration}, {router.name}, microbatch {microbatch + 1}"
            if len(experts_TK) != len(shard_T):
                raise UserError(
                    f"{where} has {len(experts_TK)} tokens, and this rank routes {len(shard_T)}; a trace can be "
                    "replayed by a run with the same parallel sizes and batch sizes"
                )
            self._check_experts(experts_TK.numpy(), where)
            router.given_TK = experts_TK.to(router.weight.device)


class StoredExperts:
    """An array of a file, whose shape is known before it is read: a small compressed file can have a huge one.

    Raises:
        UserError: if the file is damaged, or its array in an .npz file is not of integers.
    """

    def __init__(self, path: Path, name: str):
        self._path, self._name = path, name
        with _named_errors(path):
            self.shape = self._read_shape()

    def _read_shape(self) -> tuple[int, ...]:
        if self._path.suffix != ".npz":
            with safe_open(self._path, framework="np") as file:
                return tuple(file.get_slice(self._name).get_shape())
        with ZipFile(self._path) as archive, archive.open(f"{self._name}.npy") as file:
            read_header = _HEADERS[np.lib.format.read_magic(file)]
            shape, _, dtype = read_header(file)
        if dtype.kind not in "iu":
            raise ValueError(f"its array {self._name} is of {dtype}; experts are integers")
        return shape

    def read(self) -> np.ndarray:
        """Return the array. Raises as the class."""
        with _named_errors(self._path):
            if self._path.suffix == ".npz":
                with np.load(self._path, allow_pickle=False) as arrays:
                    return arrays[self._name]
            with safe_open(self._path, framework="np") as file:
                return file.get_tensor(self._name)


class SampleFolder(Mapping[int, StoredExperts]):
    """Arrays of the .npz and .safetensors files of a folder, by the number of the sample, which is their name.

    Files may be added during the run: one whose name ends in another suffix is not read, so a writer renames it
    when it is complete.
    """

    def __init__(self, folder: Path):
        self._folder, self._files, self._read = folder, dict[int, Path](), set[Path]()
        self._scan()

    def __getitem__(self, number: int) -> StoredExperts:
        if number not in self._files:
            self._scan()
        return StoredExperts(self._files[number], str(number))

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _scan(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.suffix not in _FORMATS or path in self._read:
                continue
            for name in _names(path):
                if not _NUMBER.fullmatch(name):
                    raise UserError(
                        f"{_FLAG}: {path} has the array {name[:80]!r}; the name must be the sample's number"
                    )
                if int(name) in self._files:
                    raise UserError(f"{_FLAG}: sample {name} is in {self._files[int(name)]} and in {path}")
                self._files[int(name)] = path
            self._read.add(path)


def _names(path: Path) -> list[str]:
    with _named_errors(path):
        regular_file(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return list(arrays.files)
        with safe_open(path, framework="np") as file:
            return list(file.keys())


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        EOFError,
        TypeError,
        NotImplementedError,
        BadZipFile,
        zlib.error,
        SafetensorError,
    ) as error:
        raise UserError(f"{_FLAG}: {path} cannot be read: {error}") from error
