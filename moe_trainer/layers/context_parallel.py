"""Core attention when the sequence is cut over the context-parallel ranks (--context-parallel-size, --cp-comm-type).

| kind       | what travels                                   | what a rank computes                               |
|------------|------------------------------------------------|----------------------------------------------------|
| p2p        | keys and values round the ring                 | its queries, all heads                             |
| allgather  | all keys and values to everybody               | its queries, all heads                             |
| a2a        | queries, keys, values and outputs, once each   | the whole sequence, 1 / cp of the heads            |
| a2a+p2p    | a2a among neighbours, a ring across them       | the neighbours' queries, 1 / neighbours of the heads |

They differ in cost, not in result. a2a moves the least and runs the attention of a single rank unchanged, but needs heads
to deal out; p2p hides its messages behind the computation and needs none; allgather (all_gather in TransformerEngine) is one
message at a time and holds the keys and values of the whole sequence. --hierarchical-context-parallel-sizes gives a2a+p2p
its two sizes, a2a first: those ranks are next to each other, where links are fast. Exchanging heads among neighbours of a
zigzag cut yields, in order of the sequence, the chunks of a zigzag cut over the groups of neighbours, so the outer ring is the
plain one.

All kinds work with grouped queries, values narrower than keys (latent attention), windows, packed documents and dropout
(every rank draws its own). An explicit mask is refused: it would be as large as what context parallelism avoids.

Source: Ring Attention (arXiv 2310.01889), DeepSpeed Ulysses (arXiv 2309.14509); kinds and defaults of Megatron-LM.
Shapes: S local positions, B sequences, N query heads, G key-value heads, D key width, E value width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.core_attention import CoreAttention, Visible
from moe_trainer.layers.ring_attention import gathered_attention, ring_attention
from moe_trainer.parallel.collectives import all_to_all
from moe_trainer.parallel.sequence import natural_order, rank_order
from moe_trainer.parallel.state import Group, ParallelState


def comm_type_of(layer_number: int, comm_types: Sequence[str]) -> str:
    """--cp-comm-type of a layer (counted from 1): one for all, or one per layer, the last one for multi-token prediction."""
    return comm_types[min(layer_number, len(comm_types)) - 1]


def make_core_attention(model: ModelArgs, layer_number: int, *, head_dim: int, scale: float | None = None,
                        ps: ParallelState, comm_types: Sequence[str]) -> nn.Module:
    """The core attention of one layer: see CoreAttention for the arguments, and this module for the kinds."""
    if ps.cp.size == 1:
        return CoreAttention(model, layer_number, head_dim=head_dim, scale=scale)
    kind = comm_type_of(layer_number, comm_types)
    single = Group.single("no heads travel")
    heads, positions = {
        "p2p": (single, ps.cp), "allgather": (single, ps.cp), "all_gather": (single, ps.cp),
        "a2a": (ps.cp, Group.single("no keys travel")), "a2a+p2p": (ps.cp_a2a, ps.cp_p2p),
    }[kind]
    return ContextParallelAttention(model, layer_number, head_dim=head_dim, scale=scale, heads=heads, positions=positions,
                                    gathered=kind in ("allgather", "all_gather"))


class ContextParallelAttention(CoreAttention):
    """Attention of this rank's positions to those of all ranks.

    heads: ranks that exchange heads for positions. positions: ranks that keep their positions; keys travel among them,
    round a ring or `gathered`. The product of both is the context-parallel group.
    """

    def __init__(self, model: ModelArgs, layer_number: int, *, head_dim: int, scale: float | None = None, heads: Group,
                 positions: Group, gathered: bool = False):
        super().__init__(model, layer_number, head_dim=head_dim, scale=scale)
        self.heads, self.positions = heads, positions
        self.attend = gathered_attention if gathered else ring_attention

    def pads_values(self, length: int, visible: Visible | None, device: torch.device) -> bool:
        """Never before they travel."""
        return False

    def forward(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, visible: Visible | None = None,
                sink_N: Tensor | None = None) -> Tensor:
        """All of this rank's positions; visible: document ids of the whole sequence. Returns: [S, B, N * E].

        Raises: ValueError when heads cannot be dealt out, or for an explicit mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("an explicit attention mask cannot be cut over context-parallel ranks; give document ids")
        q, k, v = heads_for_positions(self.heads, q_SBND, k_SBGD, v_SBGE)
        if sink_N is not None:
            sink_N = sink_N.chunk(self.heads.size)[self.heads.rank]
        if self.positions.size == 1:
            out = super().forward(q, k, v, visible, sink_N)
        else:
            out = self.attend(q, k, v, self.scale, self.rule(visible, q.device), self.positions, self.sinks(q, sink_N))
        return positions_for_heads(self.heads, out)


def heads_for_positions(group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[S, B, N, D] -> [S * size, B, N / size, D], all members' positions in the order of the sequence. Differentiable.

    Raises: ValueError when heads cannot be dealt out.
    """
    size = group.size
    if size == 1:
        return tensors
    for x in tensors:
        if x.shape[2] % size:
            raise ValueError(f"{x.shape[2]} heads of a rank cannot be dealt out to {size} context-parallel ranks (--cp-comm-type "
                             "a2a): query and key-value heads of a tensor rank must be multiples of it")
    rows = tensors[0].shape[0]
    pieces = [x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).flatten(0, 1) for x in tensors]
    return tuple(natural_order(x, size) for x in all_to_all(group, [rows] * size, [rows] * size, *pieces))


def positions_for_heads(group: Group, x_SBH: Tensor) -> Tensor:
    """[S * size, B, H / size] -> [S, B, H]: the way back. Differentiable."""
    size = group.size
    if size == 1:
        return x_SBH
    rows = x_SBH.shape[0] // size
    (x,) = all_to_all(group, [rows] * size, [rows] * size, rank_order(x_SBH, size))
    return x.unflatten(0, (size, rows)).permute(1, 2, 0, 3).flatten(2)
