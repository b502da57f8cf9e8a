"""Point-to-point messages between members of a Group.

`isend` and `irecv` start one message each; `exchange` starts several together, which on NCCL become one batch that cannot
deadlock whatever the order of sends and receives. All return a work object with `wait()`; keep the tensors alive until then.
Between two members messages arrive in the order in which they were sent. Nobody can send to itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_trainer.parallel.state import Group
from moe_trainer.parallel.trace import communicate


@dataclass(frozen=True)
class Send:
    """`x`, contiguous, goes to the group's member number `to`."""

    x: Tensor
    to: int


@dataclass(frozen=True)
class Receive:
    """`out`, contiguous, is overwritten by what the group's member number `source` sends: shape and dtype must agree."""

    out: Tensor
    source: int


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        return True


def isend(x: Tensor, group: Group, to: int) -> Any:
    """Start sending `x` to the group's member number `to`; returns the work object."""
    assert to != group.rank, f"{group.name}: member {to} sends to itself"
    return _run(group, f"send to rank {group.ranks[to]}", x, dist.isend, x, dst=group.ranks[to], group=group.handle)


def irecv(out: Tensor, group: Group, source: int) -> Any:
    """Start receiving from the group's member number `source` into `out`; returns the work object."""
    assert source != group.rank, f"{group.name}: member {source} receives from itself"
    return _run(
        group,
        f"receive from rank {group.ranks[source]}",
        out,
        dist.irecv,
        out,
        src=group.ranks[source],
        group=group.handle,
    )


def exchange(ops: Sequence[Send | Receive], group: Group) -> Any:
    """Start all messages as one batch; returns one work object for all. No ops: nothing to wait for.

    NOTE: the first communication ever of an NCCL group must involve all its members (torch's rule for batches).
    """
    if not ops:
        return Works(())
    batch = [
        dist.P2POp(dist.isend, op.x, group.ranks[op.to], group.handle)
        if isinstance(op, Send)
        else dist.P2POp(dist.irecv, op.out, group.ranks[op.source], group.handle)
        for op in ops
    ]
    told = " and ".join(
        f"send to rank {group.ranks[op.to]}" if isinstance(op, Send) else f"receive from rank {group.ranks[op.source]}"
        for op in ops
    )
    first = ops[0].x if isinstance(ops[0], Send) else ops[0].out
    return _run(group, told, first, lambda: Works(dist.batch_isend_irecv(batch)))


def _run(group: Group, operation: str, x: Tensor, launch: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return communicate(group.trace, group.name, group.ranks, operation, x, True, launch, *args, **kwargs)
