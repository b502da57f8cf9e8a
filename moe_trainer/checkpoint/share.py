"""Which of several ranks that hold the same box writes it, or (--ckpt-fully-parallel-load) reads it for the others.

A tensor's replicas stand in its data-parallel group (dp x cp; edp for experts); a tensor that is not cut over tp (etp) also
has one on every tensor-parallel rank, of which the first one's count. Whether two members of a group hold the same boxes they
find out by a digest of their lists: weights always, optimizer state unless the distributed optimizer has cut it, or
within each instance of it. Members with equal lists share them by size, each computing the same result. So what
travels is one digest per list; no rank sees another's plan, and none gathers a tensor.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moe_trainer.checkpoint.sharding import Piece
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import replicas
from moe_trainer.parallel.state import Group, ParallelState

KINDS = ("dense", "expert")
_ENTRY_BYTES = 1200  # what every entry costs beside its elements


@dataclass
class Batch:
    """Pieces of one kind ("dense" or "expert") that are shared out together, in the same order on all that hold them."""

    kind: str
    pieces: list[Piece] = field(default_factory=list)

    @property
    def cost(self) -> int:
        return sum(map(_cost, self.pieces))


@dataclass(frozen=True)
class Shared:
    """A batch and who takes what of it.

    peers: the members of `group` that hold the same pieces, by their rank in it. owners: of each piece, one of the peers.
    """

    pieces: tuple[Piece, ...]
    group: Group
    peers: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def mine(self) -> list[Piece]:
        """The pieces that this rank takes."""
        return [piece for piece, owner in zip(self.pieces, self.owners) if owner == self.group.rank]


def structure(pieces: Iterable[Piece]) -> str:
    """A digest of keys, places and types: equal for equal lists."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(f"{piece.key}{piece.global_shape}{piece.offsets}{piece.sizes}{piece.data.dtype}\n".encode())
    return digest.hexdigest()


def share_out(batches: Sequence[Batch], ps: ParallelState, in_parallel: bool) -> list[Shared]:
    """Divide each batch among the ranks that hold it; collective over dp_cp and edp.

    in_parallel: by size, earlier batches of the same kind considered; otherwise the first of them takes all.
    All members of a group bring the same number of batches of each kind in the same order.
    """
    found = {}
    for kind in KINDS:
        group, own = replicas(kind, ps), [batch for batch in batches if batch.kind == kind]
        everyone = collectives.all_gather_object([(structure(batch.pieces), batch.cost) for batch in own], group)
        load = [0.0] * group.size
        for number, batch in enumerate(own):
            digests = [theirs[number] for theirs in everyone]
            peers = tuple(member for member, digest in enumerate(digests) if digest == digests[group.rank])
            owners = _by_size(batch.pieces, peers, load) if in_parallel else (peers[0],) * len(batch.pieces)
            found[id(batch)] = Shared(tuple(batch.pieces), group, peers, owners)
            for member, digest in enumerate(digests):
                # not the exact shares of other peers, which this rank cannot know, but what all members agree upon
                load[member] += digest[1] / digests.count(digest)
    return [found[id(batch)] for batch in batches]


def _cost(piece: Piece) -> int:
    return piece.num_bytes + _ENTRY_BYTES


def _by_size(pieces: Sequence[Piece], peers: tuple[int, ...], load: Sequence[float]) -> tuple[int, ...]:
    """Give the largest first, each to the peer with the least so far."""
    busy = {member: load[member] for member in peers}
    owners = [peers[0]] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda number: (-_cost(pieces[number]), number)):
        owners[number] = min(peers, key=lambda member: busy[member])
        busy[owners[number]] += _cost(pieces[number])
    return tuple(owners)
