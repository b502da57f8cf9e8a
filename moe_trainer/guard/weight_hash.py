"""Do data-parallel replicas still hold the same weights? (`--check-weight-hash-across-dp-replicas-interval`)

They start equal and get equal gradients, so a difference is a fault: of memory, of a device, of a link, or of this program. Compared are
parameters over dp_cp, and those of experts over edp, tensor by tensor and expert by expert. What is cut over all of these ranks
(fully sharded parameters) exists once and cannot be compared.

The hash is computed where the weights lie, in integers, so that it does not depend on the device: the sum of all words, each times an odd
number of its own, modulo 2^64. A change of one word, whatever it is, always changes it (an odd number has an inverse), two words
that change places nearly always. It is no defence against somebody who wants to deceive.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import KINDS, info_of, is_stored, replicas, unique_params
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.trace import shown_ranks

_WORDS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd; neighbours get multipliers that have little in common
_AT_ONCE = 1 << 22  # words: 32 MiB of products
_SHOWN = 10


class WeightsDifferError(ArithmeticError):
    """Replicas of the same parameters hold different values; the message says which parameters and ranks."""


@torch.no_grad()
def weight_hash(x: Tensor) -> Tensor:
    """The hash of a tensor's bits, int64 []."""
    words = x.detach().contiguous().view(-1)
    words = words.view(_WORDS[words.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, words.numel(), _AT_ONCE):
        some = words[begin:begin + _AT_ONCE]
        odd = torch.arange(begin, begin + some.numel(), device=x.device).mul_(_STEP).bitwise_or_(1)
        total += odd.mul_(some).sum()
    return total


def check_weights(params: Iterable[Parameter], ps: ParallelState, iteration: int) -> None:
    """Compare this rank's parameters with their replicas. Collective over ps.world; all weights must have arrived.

    Raises: WeightsDifferError on every rank, whoever found it.
    """
    params, found = unique_params(params), []
    for kind in KINDS:
        group = replicas(kind, ps)
        found += _differences([named for param in params if info_of(param).kind == kind for named in _tensors(param)], group)
    everyone = collectives.all_gather_object(found[:_SHOWN], ps.world)
    lines = sorted({line for lines in everyone for line in lines})
    if lines:
        rest = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise WeightsDifferError("\n".join([
            f"iteration {iteration}: data-parallel replicas do not hold the same weights any more (a fault of a machine, or of this program; "
            "checkpoints written since the last comparison may hold either):", *lines[:_SHOWN], *rest]))


def _tensors(param: Parameter) -> Iterator[tuple[str, Tensor]]:
    """What to compare of a parameter, by name: experts one by one, bytes and scales where it is kept in 8 bits."""
    info = info_of(param)
    parts = (("", param.stored.codes), (" (scales)", param.stored.inverse_e)) if is_stored(param) else (("", param),)
    for suffix, x in parts:
        slices = x if info.stacked else [x]
        yield from ((name + suffix, piece) for name, piece in zip(info.names, slices, strict=True))


def _differences(named: Sequence[tuple[str, Tensor]], group: Group) -> list[str]:
    """A line for every tensor that the group's members do not agree on, the same on all of them. Collective over the group."""
    if group.size == 1 or not named:
        return []
    mine = torch.stack([weight_hash(x) for _, x in named])
    everyone = mine.new_empty(mine.numel() * group.size)
    collectives.all_gather_flat(everyone, mine, group)
    table = everyone.view(group.size, -1)
    columns = (table != table[:1]).any(0).nonzero().flatten().tolist()
    return [_line(named[column][0], table[:, column].tolist(), group) for column in columns]


def _line(name: str, hashes: Sequence[int], group: Group) -> str:
    camps: dict[int, list[int]] = {}
    for rank, value in zip(group.ranks, hashes):
        camps.setdefault(value, []).append(rank)
    told = sorted(camps.items(), key=lambda camp: (-len(camp[1]), camp[1]))
    return f"  {name}: " + ", ".join(f"rank{'s' if len(ranks) > 1 else ''} {shown_ranks(ranks)} hash {value % 2**64:016x}"
                                     for value, ranks in told)
