"""Process groups of one rank: made once, at start-up, and passed down as values.

Every communicator is created on every rank in one order (a rank that skips a group it is not in deadlocks the
others). A group of one rank has no communicator: `handle is None`, and its collectives return their input.
Groups that carry the same kind of traffic over the same ranks share one communicator ("lanes"), so a plain
data-parallel run opens a single one for gradients; traffic of different kinds never shares, so that an overlapped
reduction cannot stand in front of a small statistic.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from moe_trainer.parallel.grid import DEFAULT_ORDER
from moe_trainer.parallel.groups import plan_groups
from moe_trainer.parallel.trace import Trace, communicate


@dataclass(frozen=True)
class Group:
    """One communicator, seen from this rank. `handle` is None when the group has one member."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    size: int
    handle: ProcessGroup | None = None
    trace: Trace = field(default_factory=Trace, compare=False, repr=False)  # shared by all groups of a rank

    @staticmethod
    def single(name: str, rank: int = 0) -> "Group":
        """A group of one: the given global rank."""
        return Group(name, (rank,), 0, 1, None)


@dataclass(frozen=True)
class ParallelState:
    """All groups this rank belongs to.

    Dense side: tp cp dp pp, and dp_cp (reduces dense gradients), tp_cp, tp_dp_cp (router statistics).
    Expert side: etp ep edp (reduces expert gradients), tp_ep (etp x ep).
    dp_cp_inner, edp_inner: the part of dp_cp and of edp inside one instance of the distributed optimizer, which shards its state
    over it; dp_cp_outer, edp_outer: the ranks of all instances that hold the same shard. One instance: inner is everything.
    cp_a2a, cp_p2p: the two levels of cp (neighbours; across them) when hierarchical context parallelism gives their sizes;
    otherwise one rank and all of cp.
    pp_second: the ranks of pp, by a communicator of its own where messages of interleaved stages overlap (pipeline/p2p_program.py: channel).
    embedding: the pipeline stages that hold the word embeddings; any other stage has a group of its own.
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
    pp_second: Group
    embedding: Group

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def trace(self) -> Trace:
        """What this rank waits for, and where its program stands."""
        return self.world.trace

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of every communicator, from its next collective on.

        Raises: RuntimeError when this torch cannot.
        """
        set_timeout = getattr(distributed_c10d, "_set_pg_timeout", None)  # torch has no public name for it
        if set_timeout is None:
            raise RuntimeError(
                "this version of torch cannot change timeouts: run without --distributed-timeout-seconds-after-init"
            )
        groups = [getattr(self, field.name) for field in fields(self)]
        for handle in dict.fromkeys(group.handle for group in groups if group.handle is not None):
            set_timeout(timeout, handle)

    @staticmethod
    def single() -> "ParallelState":
        """Everything of size one: any layer or optimizer runs without torch.distributed."""
        return ParallelState(**{field.name: Group.single(field.name) for field in fields(ParallelState)})

    @staticmethod
    def create(
        world_size: int,
        rank: int,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int = 1,
        order: str = DEFAULT_ORDER,
        *,
        optimizer_instances: int = 1,
        embedding_stages: Collection[int] | None = None,
        cp_levels: Sequence[int] | None = None,
        second_pipeline: bool = False,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> "ParallelState":
        """Create every communicator. Collective: all ranks call it with the same arguments.

        optimizer_instances: parts of dp_cp, and of edp, that each hold all of the sharded optimizer state.
        embedding_stages: pipeline ranks that hold the word embeddings; None: the first and the last.
        cp_levels: sizes of cp_a2a and cp_p2p, whose product is cp; None: 1 and cp.
        second_pipeline: whether pp_second has a communicator of its own; else it is that of pp.

        torch.distributed must be initialized when world_size > 1. backend None: that of the default group.
        timeout None: torch's default (NOTE: not that of the default group).
        Raises: ValueError when the sizes do not fit (see grid.make_layout).
        """
        partitions = plan_groups(
            world_size,
            tp=tp,
            cp=cp,
            pp=pp,
            ep=ep,
            etp=etp,
            order=order,
            optimizer_instances=optimizer_instances,
            embedding_stages=embedding_stages,
            cp_levels=cp_levels,
            second_pipeline=second_pipeline,
        )
        factory = _Factory(rank, backend, timeout)
        world = Group(
            "world",
            tuple(range(world_size)),
            rank,
            world_size,
            dist.group.WORLD if world_size > 1 else None,
            factory.trace,
        )
        return ParallelState(world=world, **{name: factory.make(name, *plan) for name, plan in partitions.items()})


class _Factory:
    """Creates communicators for whole partitions, remembering those of the same lane and membership."""

    def __init__(self, rank: int, backend: str | None, timeout: timedelta | None):
        self.rank = rank
        self.trace = Trace(rank)
        self.options = {"backend": backend, "timeout": timeout}
        self.handles: dict[tuple[str, tuple[int, ...]], ProcessGroup | None] = {}

    def make(self, name: str, partition: Iterable[tuple[int, ...]], lane: str) -> Group:
        mine = None
        for ranks in partition:
            if len(ranks) > 1 and (lane, ranks) not in self.handles:
                self.handles[lane, ranks] = dist.new_group(list(ranks), group_desc=f"{lane}: {name}", **self.options)
            if self.rank in ranks:
                mine = Group(
                    name, ranks, ranks.index(self.rank), len(ranks), self.handles.get((lane, ranks)), self.trace
                )
        assert mine is not None, f"rank {self.rank} is in no {name} group"
        return mine


def communicator_timeout(seconds: float, device: torch.device) -> timedelta:
    """The timeout to give the communicators themselves, for collectives that may take so many seconds.

    On the CPU the same. NCCL's own is longer: it kills the process with a message of its own, and resilience/watchdog.py, which
    can say where in the program and what the others are doing, should be first.
    """
    return timedelta(seconds=seconds if device.type == "cpu" else seconds + 120.0)


def close_groups(ps: ParallelState) -> None:
    """End of a run that went well: leave every communicator together. Collective.

    A process that simply exits leaves its peers' communication threads behind, and they may abort.
    """
    if ps.world.size > 1:
        world = ps.world
        communicate(
            world.trace, world.name, world.ranks, "barrier at the end", None, False, dist.barrier, group=world.handle
        )
        dist.destroy_process_group()
