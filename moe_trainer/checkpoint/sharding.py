"""Keys, global shapes and offsets of every local element in a checkpoint, independent of the layout.

A checkpoint is a set of global tensors. `KeyScheme` maps a parameter's global names (`ParamInfo.names`) to
Megatron-Core's torch_dist keys and coordinates:

* `decoder.layers.{l}.X` becomes `decoder.layers.X` with a new leading axis of size num_layers, row l. A model whose
  layers differ (--moe-layer-freq given as a list or as a number above 1) keeps `decoder.layers.{l}.X` without that
  axis. MTP layers always keep their number.
* `...experts.local_experts.{e}.linear_fc1.weight` becomes `...experts.experts.linear_fc1.weight` with an axis over
  experts.
* The layer inside an MTP depth is called `transformer_layer`; hybrid models keep `mtp_model_layer` and its list.
* Norms that Megatron-Core fuses into the following linear, or names as if it did, have names of that linear
  (layer_spec.py).
* A sharded dimension of several parts (`ParamInfo.parts`; a gated fc1 has gate rows and up rows) is stored part by
  part, so that a tensor-parallel shard of each is a chunk.

A parameter's local memory is thus a sequence of contiguous runs, each a chunk of a global tensor (`Placement`). The
distributed optimizer holds flat ranges of parameters; `split_flat_range` splits a range of a run into at most 2 * ndim
- 1 chunks, which the storage layer writes as they are. Nothing is gathered, and the keys do not depend on the writer.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from moe_trainer.checkpoint import layer_spec
from moe_trainer.checkpoint.flavors import is_hybrid, to_flavor
from moe_trainer.parallel.params import ParamInfo, named_shapes, part_lengths
from moe_trainer.parallel.state import ParallelState

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.(.+)$")
# the layer inside an MTP depth: its module, its name in Megatron-Core's GPT checkpoints and in early ones of ours
_MTP_MODULE = "mtp_model_layer."
MTP_LAYERS = ("transformer_layer", "mtp_model_layer")
_IN_DEPTH = re.compile(r"^mtp_model_layer\.(?:layers\.(\d+)\.)?")
_EXPERT = re.compile(r"^(.*\bexperts\.)local_experts\.(\d+)\.(.+)$")
# modules whose Megatron counterparts write an (empty) `_extra_state` object for their weight, under either spec
_LINEAR = re.compile(r"(^|\.)(linear_\w+|eh_proj|in_proj|out_proj|fc[12]_latent_proj)\.weight$")
_Of = TypeVar("_Of")


@dataclass(frozen=True)
class Placement:
    """A contiguous run of a local parameter and the chunk of the global tensor that it fills.

    It starts at element `start` of the flat local parameter and has prod(shape) elements, row-major.
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorShard:
    """A chunk of a global tensor and the local storage that holds it, a view of shape `sizes`.

    `read` returns the values if no storage holds them as they are stored (optimizer state in another format); only the
    shape and dtype of `data` are valid then.
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Tensor
    read: Callable[[], Tensor] | None = None

    def values(self) -> Tensor:
        return self.data if self.read is None else self.read().view(self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class KeyScheme:
    """Mapping of global names to checkpoint keys; depends on architecture and --transformer-impl, not on the layout.

    Attributes:
        stacked: all decoder layers are alike and share one tensor with a leading layer axis.
        norms: fused norms of every decoder layer, and then of the layers of an MTP depth.
        engine: modules of layers other than linears that have an `_extra_state` (layer_spec.te_modules_of_layers).
        mtp_layer: name of the layer inside an MTP depth.
        translates_to: the names are those of the other flavor (flavors.py); whether the keys are of a hybrid model.
    """

    num_layers: int
    num_experts: int
    stacked: bool
    norms: tuple[tuple[layer_spec.NormPrefixes, ...], ...]
    engine: tuple[tuple[str, ...], ...] = ((),)
    mtp_layer: str = MTP_LAYERS[0]
    translates_to: bool | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any], named_by: Mapping[str, Any] | None = None) -> "KeyScheme":
        """Return the scheme of a model described by flags, by destination.

        `named_by` are the flags of the model whose names are located, if that may be of the other flavor.
        """
        freq = record.get("moe_layer_freq", 1)
        alike = not isinstance(freq, (list, tuple)) and int(freq or 1) == 1
        linear_freq = record.get("linear_attention_freq")
        alike = (
            alike
            and not record.get("hybrid_layer_pattern")
            and not record.get("moe_n_hash_layers")  # only these layers have a table
            and not record.get("csa_compress_ratios")
            and not isinstance(linear_freq, (list, tuple))
            and int(linear_freq or 1) == 1
        )
        return cls(
            num_layers=int(record["num_layers"]),
            num_experts=int(record.get("num_experts") or 0),
            stacked=alike,
            norms=layer_spec.norms_of_layers(record),
            mtp_layer=MTP_LAYERS[is_hybrid(record)],
            engine=layer_spec.te_modules_of_layers(record),
            translates_to=is_hybrid(record)
            if named_by is not None and is_hybrid(named_by) != is_hybrid(record)
            else None,
        )

    def alternatives(self) -> Iterator["KeyScheme"]:
        """Return the schemes under which a checkpoint of the same model may have been written, this one first.

        Another --transformer-impl, or an earlier version of either program, fuses other norms, and the same layers may
        have been described as alike (stacked) or as a list. Every name is looked up separately, so all or none of the
        fused names cover every mixture.
        """
        every = tuple(
            (
                layer_spec.IN_PROJ if layer_spec.IN_PROJ in layer else layer_spec.INPUT,
                layer_spec.MIXER,
                layer_spec.MLP,
                *layer_spec.LATENT,
            )
            for layer in self.norms
        )
        for stacked in (self.stacked, not self.stacked):
            for norms in (self.norms, ((),) * len(self.norms), every):
                for mtp_layer in sorted(MTP_LAYERS, key=lambda each: each != self.mtp_layer):
                    yield replace(self, stacked=stacked, norms=norms, mtp_layer=mtp_layer)

    def locate(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return (key, coordinates, extents) of a global name; the coordinates are those of the added leading axes."""
        at: tuple[int, ...] = ()
        extents: tuple[int, ...] = ()
        name = self._own_name(name)
        layer = _LAYER.match(name)
        prefix, rest = "", name
        if layer:
            block, number, rest = layer[1], int(layer[2]), layer[3]
            prefix = f"{block}.layers.{number}."
            if block == "decoder" and self.stacked:
                prefix, at, extents = f"{block}.layers.", (number,), (self.num_layers,)
            inside = _IN_DEPTH.match(rest) if block == "mtp" else None
            rest = _fused(rest, entry_of(self.norms, self.layer_at(name)), inside[0] if inside else "")
            if rest.startswith(_MTP_MODULE):
                rest = f"{self.mtp_layer}.{rest.removeprefix(_MTP_MODULE)}"
        expert = _EXPERT.match(rest)
        if expert:
            rest = f"{expert[1]}experts.{expert[3]}"
            at, extents = (*at, int(expert[2])), (*extents, self.num_experts)
        return prefix + rest, at, extents

    def _own_name(self, name: str) -> str:
        return name if self.translates_to is None else to_flavor(name, self.translates_to)

    def layer_at(self, name: str) -> int:
        """Return the number of a name's layer among those of the decoder, and then of a depth; 0 without one."""
        layer = _LAYER.match(name)
        if layer is None or layer[1] == "decoder":
            return int(layer[2]) if layer else 0
        inside = _IN_DEPTH.match(layer[3])
        return self.num_layers + int((inside and inside[1]) or 0)

    def placements(self, info: ParamInfo, shape: tuple[int, ...]) -> list[Placement]:
        """Split a local parameter of this shape into its runs, in memory order."""
        runs, start = [], 0
        for name, named_shape in named_shapes(info, shape):
            runs += self._named_placements(name, info, named_shape, start)
            start += math.prod(named_shape)
        return runs

    def _named_placements(self, name: str, info: ParamInfo, local: tuple[int, ...], start: int) -> list[Placement]:
        """Yield a run per part, whose shard is a chunk of the global tensor and contiguous in the local one."""
        key, at, extents = self.locate(name)
        assert info.parts == 1 or info.sharded_dim == 0, (
            f"{name}: only rows have parts, not dimension {info.sharded_dim}"
        )
        full, box = list(local), list(local)
        if info.sharded_dim is not None:
            full[info.sharded_dim] *= info.shard_count
        lengths = [0] if info.sharded_dim is None else part_lengths(info, local[info.sharded_dim])
        runs, begin, named = [], 0, info.part_names
        for part, length in enumerate(lengths):
            first = [0] * len(local)
            if info.sharded_dim is not None:
                box[info.sharded_dim] = length
                first[info.sharded_dim] = (0 if named else begin * info.shard_count) + info.shard_rank * length
                begin += length
                if named:
                    full[info.sharded_dim] = length * info.shard_count
            runs.append(
                Placement(
                    f"{key}.{named[part]}" if named else key,
                    (*extents, *full),
                    (*at, *first),
                    (*((1,) * len(at)), *box),
                    start,
                )
            )
            start += math.prod(box)
        return runs

    def extra_state_keys(self, info: ParamInfo) -> list[str]:
        """Keys of the empty `_extra_state` objects that Megatron's loader expects for these weights."""
        keys = []
        for name in info.names:
            key, at, extents = self.locate(name)
            bases = (
                [key.removesuffix("weight") + "_extra_state"]
                if _LINEAR.search(name) and not name.startswith("output_layer.")
                else []
            )
            parts = entry_of(self.engine, self.layer_at(self._own_name(name)))
            bases += layer_spec.te_extra_states(key, parts)
            keys += [object_key(base, at or (0,), extents or (1,)) for base in bases]
        return keys


def entry_of(of_layers: Sequence[_Of], number: int) -> _Of:
    """Return the entry of a layer; the last one is of all further layers."""
    return of_layers[min(number, len(of_layers) - 1)]


def _fused(rest: str, norms: tuple[layer_spec.NormPrefixes, ...], inner: str) -> str:
    """Return the name inside a layer, if it is that of a norm, in its fused form; `inner`: prefix of MTP layers."""
    for alone, fused in norms:
        if rest.startswith(inner + alone):
            return inner + fused + rest[len(inner + alone) :]
    return rest


def object_key(base: str, at: tuple[int, ...], extents: tuple[int, ...]) -> str:
    """Return the key of one shard of a non-tensor entry."""
    return f"{base}/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, extents))}"


def rng_key(ps: ParallelState) -> str:
    """Return the key of the random states of all data-parallel ranks of this pipeline and tensor position."""
    return object_key("rng_state", (ps.pp.rank, ps.tp.rank), (ps.pp.size, ps.tp.size))


def split_flat_range(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the flat row-major range [start, stop) of a tensor into chunks.

    Yields:
        (offsets, sizes) in memory order; their volumes add up to stop - start.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, inside = divmod(start, row)
        whole = (stop - start) // row
        if inside == 0 and whole:
            yield (index, *([0] * (len(shape) - 1))), (whole, *shape[1:])
            start += whole * row
        else:
            end = min(stop, (index + 1) * row)
            for offsets, sizes in split_flat_range(shape[1:], inside, inside + end - start):
                yield (index, *offsets), (1, *sizes)
            start = end


def make_shards(
    runs: list[Placement],
    tensor: Tensor,
    start: int,
    stop: int,
    prefix: str = "",
    read: Callable[[int, int], Tensor] | None = None,
) -> Iterator[TensorShard]:
    """Split the flat range [start, stop) of the parameter that `runs` describe into shards of global tensors.

    `tensor` stores the elements of the range, `prefix` is put before every key ("optimizer.state.exp_avg."). `read`
    returns a range of the values, counted from `start`, if `tensor` does not store them (TensorShard.read).
    """
    assert tensor.is_contiguous() and tensor.numel() == stop - start, (
        f"{runs[0].key}: a contiguous tensor of {stop - start} elements is needed, got {tuple(tensor.shape)}"
    )
    flat = tensor.detach().reshape(-1)
    for run in runs:
        low, high = max(start, run.start), min(stop, run.start + run.numel)
        position = low
        for offsets, sizes in split_flat_range(run.shape, low - run.start, high - run.start):
            count = math.prod(sizes)
            data = flat[position - start : position - start + count].view(sizes)
            values = None if read is None else functools.partial(read, position - start, position - start + count)
            position += count
            yield TensorShard(
                prefix + run.key,
                run.global_shape,
                tuple(a + b for a, b in zip(run.offsets, offsets)),
                sizes,
                data,
                values,
            )
