"""Process groups of one rank.

All ranks create all communicators in the same order, including those of groups they are not in. A group of one rank
has no communicator. Groups with the same kind of traffic ("lane") and the same ranks share one; different lanes never
do, so that a small all-reduce does not queue behind overlapped gradient reductions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from moe_trainer.parallel.grid import LAYOUT_SIZES, make_layout
from moe_trainer.parallel.groups import DYNAMIC_CP, DYNAMIC_TP_CP, plan_groups
from moe_trainer.parallel.nccl_options import Options, make_options
from moe_trainer.parallel.trace import Trace, TracedWork


@dataclass(frozen=True)
class Group:
    """A process group and this rank in it. `handle` is None for one rank."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    size: int
    handle: ProcessGroup | None = None
    trace: Trace = field(default_factory=Trace, compare=False, repr=False)  # shared by all groups of a rank

    @staticmethod
    def single(name: str, rank: int = 0) -> "Group":
        """Return a group of one global rank."""
        return Group(name, (rank,), 0, 1)


def communicate(
    group: Group, operation: str, x: Tensor | None, async_op: bool, launch: Callable[..., Any], /, *args: Any, **kw: Any
) -> TracedWork | None:
    """Run `launch(*args, **kw)`, a function of torch.distributed, as a call of the group's trace.

    Args:
        group: ranks that communicate.
        operation: for messages.
        x: a tensor of the call, which determines the device.
        async_op: whether launch returns a work object.
        launch: function of torch.distributed.
        args: of launch.
        kw: of launch.

    Returns:
        The work object of an asynchronous call.
    """
    call = group.trace.begin(operation, group.name, group.ranks)
    observer = None if async_op else group.trace.observer
    if observer is not None:
        observer.wait()
    try:
        work = launch(*args, **kw)
    except RuntimeError as error:
        raise call.failure(error) from error
    if async_op:
        return TracedWork(call, work, x)
    if observer is not None:
        observer.end_wait()
    call.end(x)
    return None


@dataclass(frozen=True)
class ContextGroups:
    """The groups of this rank that may share sequences.

    Attributes:
        fixed: of microbatches that do not choose (--context-parallel-size).
        by_size: of those that do (dynamic context parallelism).
    """

    fixed: Group
    by_size: Mapping[int, Group] = field(default_factory=dict)

    def of(self, size: int | None) -> Group:
        """Return the group of a microbatch; None for the fixed one."""
        return self.fixed if size is None else self.by_size[size]

    @property
    def max_size(self) -> int:
        return max((self.fixed.size, *self.by_size))


@dataclass(frozen=True)
class ParallelState:
    """The groups of this rank.

    * Dense grid: tp, cp, dp, pp; dp_cp reduces dense gradients; tp_cp and tp_dp_cp reduce router statistics.
    * Expert grid: etp, ep, edp (reduces expert gradients), tp_ep (etp x ep).
    * ep_intra, ep_inter: ep inside a node, and across nodes with the same position in each; all of ep and one rank if
      nodes are unknown.
    * dp_cp_inner, edp_inner: one instance of the distributed optimizer, which shards its state over it; dp_cp_outer,
      edp_outer: the ranks of all instances with the same shard.
    * cp_a2a, cp_p2p: the two levels of hierarchical context parallelism; otherwise one rank and all of cp.
    * pp_second: the ranks of pp, with a second communicator if messages of interleaved stages overlap.
    * embedding: the pipeline stages with the word embeddings; each other stage is a group of one.
    * dynamic_cp, dynamic_tp_cp: by number of ranks of dp_cp, those that may share sequences, and the same with their
      tensor ranks; empty without dynamic context parallelism.
    """

    world: Group
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    dp_cp: Group
    tp_cp: Group
    tp_dp_cp: Group
    etp: Group
    ep: Group
    edp: Group
    tp_ep: Group
    dp_cp_inner: Group
    dp_cp_outer: Group
    edp_inner: Group
    edp_outer: Group
    cp_a2a: Group
    cp_p2p: Group
    ep_intra: Group
    ep_inter: Group
    pp_second: Group
    embedding: Group
    dynamic_cp: Mapping[int, Group] = field(default_factory=dict)
    dynamic_tp_cp: Mapping[int, Group] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, Group]:
        """All groups by name."""
        named = {name: value for name, value in vars(self).items() if isinstance(value, Group)}
        named |= {f"{DYNAMIC_CP}{size}": group for size, group in self.dynamic_cp.items()}
        return named | {f"{DYNAMIC_TP_CP}{size}": group for size, group in self.dynamic_tp_cp.items()}

    @property
    def context(self) -> ContextGroups:
        """Groups that share sequences."""
        return ContextGroups(self.cp, self.dynamic_cp)

    @property
    def tensor_context(self) -> ContextGroups:
        """The same groups with their tensor ranks, for router statistics of a microbatch."""
        return ContextGroups(self.tp_cp, self.dynamic_tp_cp)

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def trace(self) -> Trace:
        return self.world.trace

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of every communicator, from its next collective on."""
        set_timeout = getattr(distributed_c10d, "_set_pg_timeout", None)  # torch has no public name for it
        if set_timeout is None:
            raise RuntimeError(
                "this version of torch cannot change timeouts: run without --distributed-timeout-seconds-after-init"
            )
        for handle in dict.fromkeys(group.handle for group in self.groups.values() if group.handle is not None):
            set_timeout(timeout, handle)

    @staticmethod
    def single() -> "ParallelState":
        """Return groups of size one, which need no torch.distributed."""
        groups: dict[str, Any] = {
            field.name: Group.single(field.name) for field in fields(ParallelState) if field.type is Group
        }
        return ParallelState(**groups)

    @staticmethod
    def create(
        world_size: int,
        rank: int,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        nccl: Options | None = None,
        **sizes: Any,
    ) -> "ParallelState":
        """Create every communicator. Collective: all ranks pass the same arguments.

        Args:
            world_size: torch.distributed must be initialized if it is more than 1.
            rank: global rank.
            backend: default: that of the default group.
            timeout: default: torch's default (NOTE: not that of the default group).
            nccl: options of communicators, if they are NCCL's.
            sizes: see grid.make_layout and groups.plan_groups.

        Raises:
            ValueError: see grid.make_layout and groups.plan_groups.
        """
        axes = {name: sizes.pop(name) for name in LAYOUT_SIZES if name in sizes}
        plans = plan_groups(make_layout(world_size, **axes), **sizes)
        factory = _GroupFactory(rank, backend, timeout, _options_of_communicators(plans, nccl or {}))
        handle = dist.group.WORLD if world_size > 1 else None
        world = Group("world", tuple(range(world_size)), rank, world_size, handle, factory.trace)
        groups = {name: factory.make(name, *plan) for name, plan in plans.items()}
        dynamic_cp, dynamic_tp_cp = (
            {int(name[len(start) :]): groups.pop(name) for name in plans if name.startswith(start)}
            for start in (DYNAMIC_CP, DYNAMIC_TP_CP)
        )
        return ParallelState(world=world, **groups, dynamic_cp=dynamic_cp, dynamic_tp_cp=dynamic_tp_cp)


def _options_of_communicators(
    plans: Mapping[str, tuple[Iterable[tuple[int, ...]], str]], nccl: Options
) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    """Return the options of every communicator that has some; groups that share it contribute theirs."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for name, options in nccl.items():
        partition, lane = plans[name]
        for ranks in partition:
            found.setdefault((lane, ranks), {}).update(options)
    return found


class _GroupFactory:
    """Creates the communicators of partitions, one per lane and set of ranks."""

    def __init__(
        self,
        rank: int,
        backend: str | None,
        timeout: timedelta | None,
        nccl: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]],
    ):
        self.rank, self.nccl = rank, nccl
        self.trace = Trace(rank)
        self.options: dict[str, Any] = {"backend": backend, "timeout": timeout}
        self.handles: dict[tuple[str, tuple[int, ...]], ProcessGroup | None] = {}

    def make(self, name: str, partition: Sequence[tuple[int, ...]], lane: str) -> Group:
        for ranks in partition:
            if len(ranks) > 1 and (lane, ranks) not in self.handles:
                nccl = self.nccl.get((lane, ranks))
                options = None if nccl is None or not self._is_nccl() else make_options(nccl)
                self.handles[lane, ranks] = dist.new_group(
                    list(ranks), group_desc=f"{lane}: {name}", pg_options=options, **self.options
                )
        (ranks,) = (each for each in partition if self.rank in each)
        handle = self.handles.get((lane, ranks))
        return Group(name, ranks, ranks.index(self.rank), len(ranks), handle, self.trace)

    def _is_nccl(self) -> bool:
        return "nccl" in (self.options["backend"] or dist.get_backend())


def communicator_timeout(seconds: float, device: torch.device) -> timedelta:
    """Return the timeout to set on communicators.

    NCCL's is longer than `seconds`, because NCCL kills the process; resilience/watchdog.py, which reports the place
    and the other ranks, should be first.
    """
    return timedelta(seconds=seconds if device.type == "cpu" else seconds + 120.0)


def close_groups(ps: ParallelState) -> None:
    """Destroy all communicators. Collective: a peer's communication threads may abort if a process simply exits."""
    if ps.world.size > 1:
        communicate(ps.world, "barrier at the end", None, False, dist.barrier, group=ps.world.handle)
        dist.destroy_process_group()
