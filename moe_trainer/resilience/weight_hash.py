"""Check that data-parallel replicas hold equal weights (`--check-weight-hash-across-dp-replicas-interval`).

Replicas start equal and receive equal gradients, so a difference is a fault of memory, a device, a link, or this
program. The check compares dense parameters over dp_cp and expert parameters over edp, tensor by tensor and expert by
expert. Fully sharded parameters have no replicas and cannot be compared.

The hash is computed on the parameters' device in integer arithmetic, so it does not depend on the device: the sum of
all words, each multiplied by its own odd number, modulo 2^64. A change of one word always changes it, because an odd
number has an inverse; two swapped words nearly always do. It does not protect against a deliberate forgery.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import (
    KINDS,
    get_param_info,
    is_quantized_param,
    named_slices,
    replica_group,
    unique_params,
)
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.trace import format_ranks

_WORDS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd; adjacent words get unrelated multipliers
_CHUNK_WORDS = 1 << 22  # 32 MiB of multiplied words at a time
_MAX_LINES = 10


class WeightsDifferError(ArithmeticError):
    """Replicas of a parameter hold different values. The message names the parameters and ranks."""


@torch.no_grad()
def weight_hash(x: Tensor) -> Tensor:
    """Return the hash of a tensor's bits, int64 []."""
    words = x.detach().contiguous().view(-1)
    words = words.view(_WORDS[words.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[begin : begin + _CHUNK_WORDS]
        odd = torch.arange(begin, begin + chunk.numel(), device=x.device).mul_(_STEP).bitwise_or_(1)
        total += odd.mul_(chunk).sum()
    return total


def check_replica_weights(params: Iterable[Parameter], ps: ParallelState, iteration: int) -> None:
    """Compare this rank's parameters with their replicas. Collective over ps.world; no all-gather may be in flight.

    Raises:
        WeightsDifferError: on every rank, if any rank finds a difference.
    """
    params, differences = unique_params(params), []
    for kind in KINDS:
        group = replica_group(kind, ps)
        differences += _differences(
            [named for param in params if get_param_info(param).kind == kind for named in _tensors(param)], group
        )
    gathered = collectives.all_gather_object(differences[:_MAX_LINES], ps.world)
    lines = sorted({line for lines in gathered for line in lines})
    if lines:
        title = (
            f"iteration {iteration}: data-parallel replicas hold different weights (a hardware fault or a bug; "
            "checkpoints written since the last comparison may hold either value):"
        )
        rest = [f"  ... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        raise WeightsDifferError("\n".join([title, *lines[:_MAX_LINES], *rest]))


def _tensors(param: Parameter) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter by name: each expert separately, and codes and scales of a quantized one."""
    info = get_param_info(param)
    parts: Mapping[str, Tensor] = {"": param}
    if is_quantized_param(param):
        parts = param.stored_weight.tensors()  # type: ignore[attr-defined]
    for suffix, x in parts.items():
        if info.row_counts and suffix:  # scales may span rows of both
            yield info.names[0] + suffix, x
        else:
            yield from ((name + suffix, piece) for name, piece in named_slices(info, x))


def _differences(named: Sequence[tuple[str, Tensor]], group: Group) -> list[str]:
    """Return a line for every tensor that differs over the group, equal on all members. Collective over the group."""
    if group.size == 1 or not named:
        return []
    local = torch.stack([weight_hash(x) for _, x in named])
    gathered = local.new_empty(local.numel() * group.size)
    collectives.all_gather_flat(gathered, local, group)
    table = gathered.view(group.size, -1)
    columns = (table != table[:1]).any(0).nonzero().flatten().tolist()
    return [_line(named[column][0], table[:, column].tolist(), group) for column in columns]


def _line(name: str, hashes: Sequence[int], group: Group) -> str:
    ranks_by_hash: dict[int, list[int]] = {}
    for rank, value in zip(group.ranks, hashes):
        ranks_by_hash.setdefault(value, []).append(rank)
    largest_first = sorted(ranks_by_hash.items(), key=lambda item: (-len(item[1]), item[1]))
    return f"  {name}: " + ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} hash {value % 2**64:016x}"
        for value, ranks in largest_first
    )
