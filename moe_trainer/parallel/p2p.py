"""Point-to-point communication in a Group.

All functions return a work object with `wait()`; keep the contiguous tensors alive until then. Messages between two
ranks arrive in the order in which they were sent. `exchange` starts a batch, which on NCCL cannot deadlock, whatever
the order of sends and receives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_trainer.parallel.state import Group, communicate


@dataclass(frozen=True)
class Send:
    """Send `x` to group rank `peer`."""

    x: Tensor
    peer: int


@dataclass(frozen=True)
class Receive:
    """Receive from group rank `peer` into `x`, of the same shape and dtype."""

    x: Tensor
    peer: int


class Works:
    """Several work objects as one."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True


def isend(x: Tensor, group: Group, to: int) -> Any:
    return _start(Send(x, to), group)


def irecv(out: Tensor, group: Group, source: int) -> Any:
    return _start(Receive(out, source), group)


def exchange(ops: Sequence[Send | Receive], group: Group) -> Any:
    """Start all messages as one batch and return one work object.

    NOTE: the first communication of an NCCL group must involve all its ranks (torch's rule for batches).
    """
    if not ops:
        return Works(())
    batch = [dist.P2POp(_launcher(op), op.x, group.ranks[op.peer], group.handle) for op in ops]
    operation = " and ".join(_describe(op, group) for op in ops)
    return communicate(group, operation, ops[0].x, True, lambda: Works(dist.batch_isend_irecv(batch)))


def _start(op: Send | Receive, group: Group) -> Any:
    operation, peer = _describe(op, group), group.ranks[op.peer]
    assert op.peer != group.rank, f"{group.name}: rank {group.rank}: {operation} is a message to itself"
    return communicate(group, operation, op.x, True, _launcher(op), op.x, peer, group.handle)


def _launcher(op: Send | Receive) -> Callable[..., Any]:
    return dist.isend if isinstance(op, Send) else dist.irecv


def _describe(op: Send | Receive, group: Group) -> str:
    return f"{'send to' if isinstance(op, Send) else 'receive from'} rank {group.ranks[op.peer]}"
