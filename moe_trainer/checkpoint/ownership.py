"""Assign every shard to one of its replicas, which writes it or reads it for the others (--ckpt-fully-parallel-load).

A tensor's replicas are in its data-parallel group (dp x cp; edp for experts). A tensor that is not sharded over tp
(etp) also has one on every tensor-parallel rank, of which the first one counts. Members of a group compare digests of
their shard lists: weights are always equal, optimizer state unless the distributed optimizer shards it. Members with
equal lists split them by size, each computing the same result. Only one digest per list is communicated.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moe_trainer.checkpoint.sharding import TensorShard
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import replica_group
from moe_trainer.parallel.state import Group, ParallelState

KINDS = ("dense", "expert")
_ENTRY_BYTES = 1200  # overhead of an entry


@dataclass
class ShardList:
    """Shards of one kind ("dense" or "expert") that are assigned together, in the same order on all replicas."""

    kind: str
    shards: list[TensorShard] = field(default_factory=list)

    @property
    def cost(self) -> int:
        return sum(map(_cost, self.shards))


@dataclass(frozen=True)
class OwnerAssignment:
    """A list of shards and their owners.

    Attributes:
        peers: members of `group` that hold the same shards, by their rank in it.
        owners: of each shard, one of the peers.
    """

    shards: tuple[TensorShard, ...]
    group: Group
    peers: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def owned(self) -> list[TensorShard]:
        """The shards that this rank owns."""
        return [shard for shard, owner in zip(self.shards, self.owners) if owner == self.group.rank]


def digest_shards(shards: Iterable[TensorShard]) -> str:
    """Return a digest of keys, places and dtypes: equal for equal lists."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        digest.update(f"{shard.key}{shard.global_shape}{shard.offsets}{shard.sizes}{shard.data.dtype}\n".encode())
    return digest.hexdigest()


def assign_owners(batches: Sequence[ShardList], ps: ParallelState, in_parallel: bool) -> list[OwnerAssignment]:
    """Assign the shards of each list to the ranks that hold them. Collective over dp_cp and edp.

    All members of a group pass the same number of lists of each kind in the same order. `in_parallel` balances sizes,
    including earlier lists of the same kind; otherwise the first replica owns all.
    """
    assignments = {}
    for kind in KINDS:
        group, own = replica_group(kind, ps), [batch for batch in batches if batch.kind == kind]
        everyone = collectives.all_gather_object([(digest_shards(batch.shards), batch.cost) for batch in own], group)
        load = [0.0] * group.size
        for number, batch in enumerate(own):
            digests = [theirs[number] for theirs in everyone]
            peers = tuple(member for member, digest in enumerate(digests) if digest == digests[group.rank])
            owners = _by_size(batch.shards, peers, load) if in_parallel else (peers[0],) * len(batch.shards)
            assignments[id(batch)] = OwnerAssignment(tuple(batch.shards), group, peers, owners)
            for member, digest in enumerate(digests):
                # not the exact shares of other peers, which are unknown here, but what all members agree on
                load[member] += digest[1] / digests.count(digest)
    return [assignments[id(batch)] for batch in batches]


def _cost(shard: TensorShard) -> int:
    return shard.num_bytes + _ENTRY_BYTES


def _by_size(shards: Sequence[TensorShard], peers: tuple[int, ...], load: Sequence[float]) -> tuple[int, ...]:
    """Assign the largest first, each to the peer with the least so far."""
    busy = {member: load[member] for member in peers}
    owners = [peers[0]] * len(shards)
    for number in sorted(range(len(shards)), key=lambda number: (-_cost(shards[number]), number)):
        owners[number] = min(peers, key=lambda member: busy[member])
        busy[owners[number]] += _cost(shards[number])
    return tuple(owners)
