"""Point-to-point communication in a Group.

All functions return a work object with `wait()`; keep the contiguous tensors alive until then. Messages between two
ranks arrive in the order in which they were sent. `exchange` starts a batch, which on NCCL cannot deadlock, whatever
the order of sends and receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_trainer.parallel.state import Group, communicate


@dataclass(frozen=True)
class Send:
    """Send `x` to group rank `to`."""

    x: Tensor
    to: int

    def describe(self, group: Group) -> str:
        return f"send to rank {group.ranks[self.to]}"


@dataclass(frozen=True)
class Receive:
    """Receive from group rank `source` into `out`, of the same shape and dtype."""

    out: Tensor
    source: int

    def describe(self, group: Group) -> str:
        return f"receive from rank {group.ranks[self.source]}"


class Works:
    """Several work objects as one."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True


def isend(x: Tensor, group: Group, to: int) -> Any:
    assert to != group.rank, f"{group.name}: rank {to} sends to itself"
    return communicate(
        group, Send(x, to).describe(group), x, True, dist.isend, x, dst=group.ranks[to], group=group.handle
    )


def irecv(out: Tensor, group: Group, source: int) -> Any:
    assert source != group.rank, f"{group.name}: rank {source} receives from itself"
    operation = Receive(out, source).describe(group)
    return communicate(group, operation, out, True, dist.irecv, out, src=group.ranks[source], group=group.handle)


def exchange(ops: Sequence[Send | Receive], group: Group) -> Any:
    """Start all messages as one batch and return one work object.

    NOTE: the first communication of an NCCL group must involve all its ranks (torch's rule for batches).
    """
    if not ops:
        return Works(())
    batch = [
        dist.P2POp(dist.isend, op.x, group.ranks[op.to], group.handle)
        if isinstance(op, Send)
        else dist.P2POp(dist.irecv, op.out, group.ranks[op.source], group.handle)
        for op in ops
    ]
    operation = " and ".join(op.describe(group) for op in ops)
    first = ops[0].x if isinstance(ops[0], Send) else ops[0].out
    return communicate(group, operation, first, True, lambda: Works(dist.batch_isend_irecv(batch)))
