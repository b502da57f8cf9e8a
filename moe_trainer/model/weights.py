"""Model weights by global name: out of the chunks and into them (--export-weights, --init-from, --dump-step).

Ranks of one expert-parallel group hold different experts. What leaves the model is gathered on the group's first rank one parameter at
a time, so no other rank ever holds more than its own; what comes in is read by every rank for itself, and judged by all together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import info_of, unique_params
from moe_trainer.parallel.state import ParallelState

_SHOWN = 10


def _named_tensors(chunks: Iterable[Transformer]) -> Iterator[tuple[str, Tensor]]:
    """Live tensors of all parameters, stacks split by expert."""
    for chunk in chunks:
        for param in unique_params(chunk.parameters()):
            info = info_of(param)
            yield from zip(info.names, param.data.unbind(0) if info.stacked else (param.data,))


def _named_buffers(chunks: Iterable[Transformer]) -> Iterator[tuple[str, Tensor]]:
    for chunk in chunks:
        yield from chunk.named_state_buffers()


def gather_named(chunks: Iterable[Transformer], ps: ParallelState,
                 value: Callable[[Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron-Core name, value of that tensor) for every parameter of the model, stacked experts one by one.

    value: what to take of a parameter, in its shape (the parameter itself, its main gradient). Only the first rank of each
    expert-parallel group gets anything. Collective over ps.ep: every rank must run through the whole iteration.
    """
    params = [param for chunk in chunks for param in unique_params(chunk.parameters())]
    spread = [info_of(param).kind == "expert" for param in params]
    names = collectives.all_gather_object([info_of(param).names for param, apart in zip(params, spread) if apart], ps.ep)
    parts_of = iter(zip(*names))
    for param, apart in zip(params, spread):
        tensor = value(param).detach()
        name_parts = next(parts_of) if apart else (info_of(param).names,)
        tensors = collectives.gather(tensor.contiguous(), ps.ep) if apart else [tensor]
        if ps.ep.rank == 0:
            for part_names, part in zip(name_parts, tensors):
                yield from zip(part_names, part.unbind(0) if info_of(param).stacked else (part,))


def export_named_weights(chunks: Iterable[Transformer], ps: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron-Core name, tensor) of every parameter and checkpointed buffer, stacked experts one by one.

    On one rank the tensors are views of the live storage. Only the first rank of each expert-parallel group gets anything.
    Collective over ps.ep.
    """
    chunks = list(chunks)
    yield from gather_named(chunks, ps, lambda param: param.data)
    if ps.ep.rank == 0:
        yield from _named_buffers(chunks)


@torch.no_grad()
def load_named_weights(chunks: Iterable[Transformer], mapping: Mapping[str, Tensor], ps: ParallelState,
                       strict: bool = True) -> None:
    """Copy tensors into the model by name, converting dtypes.

    `mapping` has the whole model; a rank takes its own experts. Buffers (expert_bias) may be missing. strict False lets
    parameters be missing and ignores unexpected names; shapes must fit in either case. Nothing is copied on any rank when anything
    is wrong on one. Collective over ps.ep.
    Raises: ValueError that lists all missing and unexpected names and all shape mismatches.
    """
    chunks = list(chunks)
    params, buffers = dict(_named_tensors(chunks)), dict(_named_buffers(chunks))
    known = {**params, **buffers}
    present = [(name, target, mapping[name]) for name, target in known.items() if name in mapping]
    missing = [name for name in params if name not in mapping]
    misshapen = [f"{name}: given {list(value.shape)}, the model has {list(target.shape)}"
                 for name, target, value in present if value.shape != target.shape]
    # every rank learns what all of them know and lack, so that all of them raise the same or none does
    found = collectives.all_gather_object((list(known), missing, misshapen), ps.ep)
    everywhere, missing, misshapen = (list(dict.fromkeys(item for rank in found for item in rank[part])) for part in range(3))
    problems = []
    if strict:
        problems += _listing("missing", missing)
        problems += _listing("unexpected", sorted(set(mapping) - set(everywhere)))
    problems += _listing("of another shape", misshapen)
    if problems:
        raise ValueError("the weights do not fit the model:\n" + "\n".join(problems))
    for _, target, value in present:
        target.copy_(value)


def _listing(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"    ... and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {len(items)} {what}:"] + [f"    {item}" for item in items[:_SHOWN]] + more
