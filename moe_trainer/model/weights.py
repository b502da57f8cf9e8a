"""Model weights by global name: out of the chunks and into them (--export-weights, --init-from, --dump-step).

Every tensor of the model lives somewhere on the grid: its stage (pp, virtual chunk), its experts (ep), its piece of a cut
dimension (tp; etp for experts), with replicas over the rest. Each piece has one representative, which every rank knows without
asking: the first of its data-parallel group and, where the tensor is not cut, of its tensor-parallel group. Rank 0 of the world
learns from the representatives which pieces there are and receives them one by one, in the order of the model,
so that it holds one tensor at a time (one rank's stack, for experts) and no other rank more than its own. Names on the receiving
side do not tell the layout. What comes in is read by every rank for itself, cut, and judged by all together.

Rejected: gathers over tp, ep and pp one after the other (three orders to keep in step, and ranks that only pass data on).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives, p2p
from moe_trainer.parallel.params import ParamInfo, get_param_info, is_global_owner, part_lengths, unique_params
from moe_trainer.parallel.shards import full_tensor
from moe_trainer.parallel.state import ParallelState

_SHOWN = 10
# what a tensor may be on the wire; its position is sent ahead of it
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Held:
    """A tensor of this rank. place: (virtual stage, position in its chunk); get: called once, in order, on every rank."""

    place: tuple[int, int]
    info: ParamInfo
    shape: tuple[int, ...]
    get: Callable[[], Tensor]


@dataclass(frozen=True)
class _Part:
    """What rank 0 must know of a tensor that `rank` is going to send. place: as above, and the rank in the expert group."""

    place: tuple[int, int, int]
    rank: int
    info: ParamInfo
    shape: tuple[int, ...]


def gather_named_tensors(
    chunks: Iterable[Transformer], ps: ParallelState, value: Callable[[Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron-Core name, whole tensor) for every parameter of the model, stacked experts one by one, tied tensors once.

    value: what to take of a parameter, in its shape (the parameter itself, its main gradient). Called on every rank for each
    of its parameters in the model's order, so it may be collective over ranks that hold the same ones.
    Only rank 0 of the world gets anything; where nothing is cut the tensors are views of what value() gave.
    Collective over ps.world: every rank must run through the whole iteration.
    """
    chunks = list(chunks)
    held = [
        _Held((stage, position), get_param_info(param), tuple(param.shape), lambda param=param: value(param).detach())
        for stage, chunk in chunk_stages(chunks, ps)
        for position, param in enumerate(unique_params(chunk.parameters()))
    ]
    return _gather(held, ps, _device(chunks))


def get_main_grad(param: Parameter) -> Tensor:
    """The main gradient, after it was gathered; zeros of a parameter that is frozen."""
    return param.main_grad if param.requires_grad else torch.zeros_like(param)


def export_named_weights(chunks: Iterable[Transformer], ps: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron-Core name, whole tensor) of every parameter and checkpointed buffer, stacked experts one by one.

    On one rank the tensors are views of the live storage. Only rank 0 of the world gets anything.
    Collective over ps.world: every rank must run through the whole iteration.
    """
    chunks = list(chunks)
    yield from gather_named_tensors(chunks, ps, full_tensor)
    buffers = [
        _Held((stage, position), ParamInfo((name,)), tuple(buffer.shape), lambda buffer=buffer: buffer)
        for stage, chunk in chunk_stages(chunks, ps)
        for position, (name, buffer) in enumerate(chunk.named_state_buffers())
    ]
    yield from _gather(buffers, ps, _device(chunks))


def chunk_stages(chunks: Iterable[Transformer], ps: ParallelState) -> list[tuple[int, Transformer]]:
    """(virtual stage, chunk): chunk c of pipeline rank r is number c * pp + r from the front of the model."""
    return [(index * ps.pp.size + ps.pp.rank, chunk) for index, chunk in enumerate(chunks)]


def _device(chunks: Iterable[Transformer]) -> torch.device:
    return next((param.device for chunk in chunks for param in chunk.parameters()), torch.device("cpu"))


def _gather(held: Sequence[_Held], ps: ParallelState, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Bring tensors to rank 0; all ranks walk through them in the order of the model."""
    parts = [
        _Part((*entry.place, ps.ep.rank if entry.info.kind == "expert" else 0), ps.world.rank, entry.info, entry.shape)
        for entry in held
        if is_global_owner(entry.info, ps)
    ]
    everything = collectives.gather_object(parts, ps.world)
    if everything is None:
        for entry in held:
            tensor = entry.get()
            if is_global_owner(entry.info, ps):
                header = torch.tensor([_DTYPES.index(tensor.dtype)], device=tensor.device)
                for message in (header, tensor.contiguous()):
                    p2p.isend(message, ps.world, 0).wait()
        return
    own = {entry.place: entry.get for entry in held}
    seen: set[str] = set()
    ordered = sorted(chain.from_iterable(everything), key=lambda part: (part.place, part.info.shard_rank))
    for place, group in groupby(ordered, key=lambda part: part.place):
        shards = list(group)
        info = shards[0].info
        assert len(shards) == info.shard_count, f"{info.names[0]}: {len(shards)} pieces of {info.shard_count}"
        assert seen.isdisjoint(info.names), f"{info.names[0]} is held twice; is one of them a copy?"
        seen.update(info.names)
        whole = join_shards(
            [own[place[:2]]() if part.rank == 0 else _receive(part, ps, device) for part in shards], info
        )
        yield from zip(info.names, whole.unbind(0) if info.stacked else (whole,))


def _receive(part: _Part, ps: ParallelState, device: torch.device) -> Tensor:
    header = torch.zeros(1, dtype=torch.int64, device=device)
    p2p.irecv(header, ps.world, part.rank).wait()
    tensor = torch.empty(part.shape, dtype=_DTYPES[int(header)], device=device)
    p2p.irecv(tensor, ps.world, part.rank).wait()
    return tensor


def join_shards(shards: Sequence[Tensor], info: ParamInfo) -> Tensor:
    """Put the pieces of a cut tensor (or stack of tensors) together, in shard order; `info` is that of any of them."""
    if len(shards) == 1:
        return shards[0]
    dim = info.sharded_dim + int(info.stacked)
    cut = [shard.split(part_lengths(info, shard.shape[dim]), dim) for shard in shards]
    return torch.cat([pieces[part] for part in range(info.parts) for pieces in cut], dim)


def take_local_shard(whole: Tensor, info: ParamInfo) -> Tensor:
    """This rank's piece of one named (unstacked) tensor: a view, unless the tensor has several parts."""
    if info.shard_count == 1:
        return whole
    parts = whole.split(part_lengths(info, whole.shape[info.sharded_dim]), info.sharded_dim)
    pieces = [part.chunk(info.shard_count, info.sharded_dim)[info.shard_rank] for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, info.sharded_dim)


def _whole_shape(shape: Sequence[int], info: ParamInfo) -> list[int]:
    """The shape of a named tensor from that of this rank's piece."""
    whole = list(shape)
    if info.sharded_dim is not None:
        whole[info.sharded_dim] *= info.shard_count
    return whole


def _named_tensors(chunks: Iterable[Transformer]) -> Iterator[tuple[str, Tensor, ParamInfo]]:
    """Live tensors of all parameters, stacks split by expert."""
    for chunk in chunks:
        for param in unique_params(chunk.parameters()):
            info = get_param_info(param)
            for name, tensor in zip(info.names, param.data.unbind(0) if info.stacked else (param.data,)):
                yield name, tensor, info


@torch.no_grad()
def load_named_weights(
    chunks: Iterable[Transformer], mapping: Mapping[str, Tensor], ps: ParallelState, strict: bool = True
) -> None:
    """Copy tensors into the model by name, converting dtypes.

    `mapping` has the whole model on every rank; a rank takes its stages, its experts and its piece of cut tensors. Buffers
    (expert_bias) may be missing. strict False lets parameters be missing and ignores unexpected names; shapes must fit
    in either case. Nothing is copied on any rank when anything is wrong on one. Collective over ps.world.
    Raises: ValueError that lists all missing and unexpected names and all shape mismatches, the same on every rank.
    """
    chunks = list(chunks)
    params = list(_named_tensors(chunks))
    buffers = [(name, buffer, ParamInfo((name,))) for chunk in chunks for name, buffer in chunk.named_state_buffers()]
    present = [(target, info, mapping[name], name) for name, target, info in params + buffers if name in mapping]
    missing = [name for name, _, _ in params if name not in mapping]
    misshapen = [
        f"{name}: given {list(value.shape)}, the model has {_whole_shape(target.shape, info)}"
        for target, info, value, name in present
        if list(value.shape) != _whole_shape(target.shape, info)
    ]
    known = [name for name, _, info in params + buffers if is_global_owner(info, ps)]
    problem = collectives.broadcast_object(
        _judge(collectives.gather_object((known, missing, misshapen), ps.world), mapping, strict), ps.world
    )
    if problem:
        raise ValueError("the weights do not fit the model:\n" + problem)
    for target, info, value, _ in present:
        target.copy_(take_local_shard(value, info))


def _judge(
    found: Sequence[tuple[list[str], list[str], list[str]]] | None, mapping: Mapping[str, Tensor], strict: bool
) -> str:
    """On rank 0: what is wrong, over all ranks. found: of every rank the names it speaks for, and what it misses or cannot fit."""
    if found is None:
        return ""
    everywhere, missing, misshapen = (
        list(dict.fromkeys(item for rank in found for item in rank[part])) for part in range(3)
    )
    problems = []
    if strict:
        problems += _listing("missing", missing)
        problems += _listing("unexpected", sorted(set(mapping) - set(everywhere)))
    return "\n".join(problems + _listing("of another shape", misshapen))


def _listing(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"    ... and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {len(items)} {what}:"] + [f"    {item}" for item in items[:_SHOWN]] + more
