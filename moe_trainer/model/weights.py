"""Full model weights by global name, gathered to rank 0 or loaded (--export-weights, --init-from, --dump-step).

Every shard has one owner in the world (params.is_global_owner), which sends it to rank 0 in the order of the model.
Rank 0 holds one full tensor at a time (for experts: one rank's stack).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives, p2p
from moe_trainer.parallel.coordination import run_on_rank0
from moe_trainer.parallel.params import (
    ParamInfo,
    get_param_info,
    is_global_owner,
    named_slices,
    part_lengths,
    unique_params,
)
from moe_trainer.parallel.shards import full_tensor
from moe_trainer.parallel.state import ParallelState

_MAX_SHOWN_NAMES = 10
# the index of the dtype is sent before the tensor
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _LocalTensor:
    """A tensor of this rank; `index` is (virtual stage, position in its chunk), `get` may be collective."""

    index: tuple[int, int]
    info: ParamInfo
    shape: tuple[int, ...]
    get: Callable[[], Tensor]


@dataclass(frozen=True)
class _ShardHeader:
    """A shard that `rank` will send; `index` is that of the local tensor, and the expert-parallel rank."""

    index: tuple[int, int, int]
    rank: int
    info: ParamInfo
    shape: tuple[int, ...]


def gather_named_tensors(
    chunks: Iterable[Transformer], ps: ParallelState, value: Callable[[Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron-Core name, full tensor) on rank 0: stacked experts one by one, tied tensors once.

    Collective over ps.world: every rank must exhaust the iterator.

    Args:
        chunks: of this rank.
        ps: parallel state.
        value: returns what to gather of a parameter, in its shape; may be collective over its replicas. Unsharded
            tensors are yielded as views of it.
    """
    chunks = list(chunks)
    tensors = [
        _LocalTensor(
            (stage, position),
            get_param_info(param),
            tuple(param.shape),
            functools.partial(_call_detached, value, param),
        )
        for stage, chunk in chunk_stages(chunks, ps)
        for position, param in enumerate(unique_params(chunk.parameters()))
    ]
    return _gather(tensors, ps, _device(chunks))


def _call_detached(value: Callable[[Parameter], Tensor], param: Parameter) -> Tensor:
    return value(param).detach()


def get_main_grad(param: Parameter) -> Tensor:
    """Return the gathered main gradient; zeros for a frozen parameter."""
    return param.main_grad if param.requires_grad else torch.zeros_like(param)  # type: ignore[attr-defined]


def export_named_weights(chunks: Iterable[Transformer], ps: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Yield full parameters and checkpointed buffers on rank 0; see gather_named_tensors."""
    chunks = list(chunks)
    yield from gather_named_tensors(chunks, ps, full_tensor)
    buffers = [
        _LocalTensor(
            (stage, position), ParamInfo((name,)), tuple(buffer.shape), functools.partial(torch.detach, buffer)
        )
        for stage, chunk in chunk_stages(chunks, ps)
        for position, (name, buffer) in enumerate(chunk.named_state_buffers())
    ]
    yield from _gather(buffers, ps, _device(chunks))


def chunk_stages(chunks: Iterable[Transformer], ps: ParallelState) -> list[tuple[int, Transformer]]:
    """Return (virtual stage, chunk) pairs."""
    return [(index * ps.pp.size + ps.pp.rank, chunk) for index, chunk in enumerate(chunks)]


def _device(chunks: Iterable[Transformer]) -> torch.device:
    return next((param.device for chunk in chunks for param in chunk.parameters()), torch.device("cpu"))


def _gather(tensors: Sequence[_LocalTensor], ps: ParallelState, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    local_headers = [
        _ShardHeader(
            (*local.index, ps.ep.rank if local.info.kind == "expert" else 0), ps.world.rank, local.info, local.shape
        )
        for local in tensors
        if is_global_owner(local.info, ps)
    ]
    headers = collectives.gather_object(local_headers, ps.world)
    if headers is None:
        for local in tensors:
            tensor = local.get()
            if is_global_owner(local.info, ps):
                dtype = torch.tensor([_DTYPES.index(tensor.dtype)], device=tensor.device)
                for message in (dtype, tensor.contiguous()):
                    p2p.isend(message, ps.world, 0).wait()
        return
    get_by_index = {local.index: local.get for local in tensors}
    seen: set[str] = set()
    ordered = sorted(chain.from_iterable(headers), key=lambda header: (header.index, header.info.shard_rank))
    for index, group in groupby(ordered, key=lambda header: header.index):
        shard_headers = list(group)
        info = shard_headers[0].info
        assert len(shard_headers) == info.shard_count, (
            f"{info.names[0]}: {len(shard_headers)} shards of {info.shard_count}"
        )
        assert seen.isdisjoint(info.names), f"{info.names[0]} has two owners; is one of them a replica?"
        seen.update(info.names)
        shards = [
            get_by_index[index[:2]]() if header.rank == 0 else _receive(header, ps, device) for header in shard_headers
        ]
        full = join_shards(shards, info)
        yield from named_slices(info, full)


def _receive(header: _ShardHeader, ps: ParallelState, device: torch.device) -> Tensor:
    dtype = torch.zeros(1, dtype=torch.int64, device=device)
    p2p.irecv(dtype, ps.world, header.rank).wait()
    tensor = torch.empty(header.shape, dtype=_DTYPES[int(dtype)], device=device)
    p2p.irecv(tensor, ps.world, header.rank).wait()
    return tensor


def join_shards(shards: Sequence[Tensor], info: ParamInfo) -> Tensor:
    """Concatenate the tensor-parallel shards of a tensor (or stack); `info` is that of any of them."""
    if info.sharded_dim is None or len(shards) == 1:
        return shards[0]
    dim = info.sharded_dim + int(info.stacked)
    shard_parts = [shard.split(part_lengths(info, shard.shape[dim]), dim) for shard in shards]
    return torch.cat([parts[index] for index in range(info.parts) for parts in shard_parts], dim)


def take_local_shard(full: Tensor, info: ParamInfo) -> Tensor:
    """Return this rank's shard of one named tensor; a view unless it has several parts."""
    dim = info.sharded_dim
    if dim is None or info.shard_count == 1:
        return full
    parts = full.split(part_lengths(info, full.shape[dim]), dim)
    shards = [part.chunk(info.shard_count, dim)[info.shard_rank] for part in parts]
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim)


def _full_shape(shape: Sequence[int], info: ParamInfo) -> list[int]:
    full = list(shape)
    if info.sharded_dim is not None:
        full[info.sharded_dim] *= info.shard_count
    return full


def _named_tensors(chunks: Iterable[Transformer]) -> Iterator[tuple[str, Tensor, ParamInfo]]:
    """Yield the storage of all named tensors."""
    for chunk in chunks:
        for param in unique_params(chunk.parameters()):
            info = get_param_info(param)
            for name, tensor in named_slices(info, param.data):
                yield name, tensor, info


@torch.no_grad()
def load_named_weights(
    chunks: Iterable[Transformer], mapping: Mapping[str, Tensor], ps: ParallelState, strict: bool = True
) -> None:
    """Copy full tensors into the model by name. Collective over ps.world.

    Args:
        chunks: of this rank.
        mapping: the full model, on every rank; buffers (expert_bias) may be missing.
        ps: parallel state.
        strict: require all parameters and no other names.

    Raises:
        ValueError: on every rank, with all missing and unexpected names and shape mismatches; nothing is copied.
    """
    chunks = list(chunks)
    params = list(_named_tensors(chunks))
    buffers = [(name, buffer, ParamInfo((name,))) for chunk in chunks for name, buffer in chunk.named_state_buffers()]
    present = [(target, info, mapping[name], name) for name, target, info in params + buffers if name in mapping]
    missing = [name for name, _, _ in params if name not in mapping]
    misshapen = [
        f"{name}: given {list(value.shape)}, the model has {_full_shape(target.shape, info)}"
        for target, info, value, name in present
        if list(value.shape) != _full_shape(target.shape, info)
    ]
    known = [name for name, _, info in params + buffers if is_global_owner(info, ps)]
    by_rank = collectives.gather_object((known, missing, misshapen), ps.world) or []
    run_on_rank0(lambda: _check_names_and_shapes(by_rank, mapping, strict), ps.world)
    for target, info, value, _ in present:
        target.copy_(take_local_shard(value, info))


def _check_names_and_shapes(
    by_rank: Sequence[tuple[list[str], list[str], list[str]]], mapping: Mapping[str, Tensor], strict: bool
) -> None:
    known, missing, misshapen = (
        list(dict.fromkeys(chain.from_iterable(lists[index] for lists in by_rank))) for index in range(3)
    )
    lines = []
    if strict:
        lines += _format_names("missing", missing)
        lines += _format_names("unexpected", sorted(set(mapping) - set(known)))
    lines += _format_names("of another shape", misshapen)
    if lines:
        raise ValueError("\n".join(["the weights do not fit the model:", *lines]))


def _format_names(problem: str, names: list[str]) -> list[str]:
    if not names:
        return []
    rest = len(names) - _MAX_SHOWN_NAMES
    more = [f"    ... and {rest} more"] if rest > 0 else []
    return [f"  {len(names)} {problem}:"] + [f"    {name}" for name in names[:_MAX_SHOWN_NAMES]] + more
