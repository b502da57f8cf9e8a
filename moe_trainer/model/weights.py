"""Model weights by global name: out of the chunks and into them (--export-weights, --init-from)."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel.params import info_of, unique_params

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


def export_named_weights(chunks: Iterable[Transformer]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron-Core name, tensor) of every parameter and checkpointed buffer.

    The tensors are views of the live storage, stacked experts one by one.
    """
    chunks = list(chunks)
    yield from _named_tensors(chunks)
    yield from _named_buffers(chunks)


@torch.no_grad()
def load_named_weights(chunks: Iterable[Transformer], mapping: Mapping[str, Tensor], strict: bool = True) -> None:
    """Copy tensors into the model by name, converting dtypes.

    Buffers (expert_bias) may be missing. strict False lets parameters be missing and ignores unexpected names; shapes
    must fit in either case. Nothing is copied when anything is wrong.
    Raises: ValueError that lists all missing and unexpected names and all shape mismatches.
    """
    chunks = list(chunks)
    params, buffers = dict(_named_tensors(chunks)), dict(_named_buffers(chunks))
    known = {**params, **buffers}
    problems = []
    if strict:
        problems += _listing("missing", [name for name in params if name not in mapping])
        problems += _listing("unexpected", [name for name in mapping if name not in known])
    present = [(name, target, mapping[name]) for name, target in known.items() if name in mapping]
    problems += _listing("of another shape", [
        f"{name}: given {list(value.shape)}, the model has {list(target.shape)}"
        for name, target, value in present if value.shape != target.shape])
    if problems:
        raise ValueError("the weights do not fit the model:\n" + "\n".join(problems))
    for _, target, value in present:
        target.copy_(value)


def _listing(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"    ... and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {len(items)} {what}:"] + [f"    {item}" for item in items[:_SHOWN]] + more
