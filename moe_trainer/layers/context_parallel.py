"""Core attention under context parallelism (--context-parallel-size, --cp-comm-type).

| kind | communicated | computed by a rank |
|---|---|---|
| p2p | keys and values around the ring | its queries, all heads |
| allgather (all_gather) | all keys and values to every rank | its queries, all heads |
| a2a | queries, keys, values, outputs, once each | the full sequence, 1 / cp of the heads |
| a2a+p2p | a2a inside groups of neighbors, a ring across them | the neighbors' queries, 1 / neighbors of the heads |

They differ in cost, not in result: see docs/design/context_parallel.md, with shapes and sources.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from arguments.model import ModelArgs
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.layers.ring_attention import gathered_attention, ring_attention
from moe_trainer.parallel.collectives import all_to_all
from moe_trainer.parallel.sequence import sequential_to_zigzag, zigzag_to_sequential
from moe_trainer.parallel.state import ContextGroups, Group, ParallelState


def get_cp_comm_type(layer_number: int, comm_types: Sequence[str]) -> str:
    """Return --cp-comm-type of a layer, counted from 1.

    The flag has one value for all layers, or one per layer; the last one also serves multi-token prediction.
    """
    return comm_types[min(layer_number, len(comm_types)) - 1]


def make_core_attention(
    model: ModelArgs,
    layer_number: int,
    *,
    head_dim: int,
    scale: float | None = None,
    ps: ParallelState,
    comm_types: Sequence[str],
    backend: SDPBackend | None = None,
) -> CoreAttention:
    """Build the core attention of one layer; see CoreAttention for the arguments."""
    context = ps.context
    if context.max_size == 1:
        return CoreAttention(model, layer_number, head_dim=head_dim, scale=scale, backend=backend)
    kind = get_cp_comm_type(layer_number, comm_types)
    heads, positions = {
        "p2p": (None, context),
        "allgather": (None, context),
        "all_gather": (None, context),
        "a2a": (context, None),
        "a2a+p2p": (ContextGroups(ps.cp_a2a), ContextGroups(ps.cp_p2p)),
    }[kind]
    return ContextParallelAttention(
        model,
        layer_number,
        head_dim=head_dim,
        scale=scale,
        backend=backend,
        heads=heads,
        positions=positions,
        gathered=kind in ("allgather", "all_gather"),
    )


class ContextParallelAttention(CoreAttention):
    """Attention of the local positions to those of all ranks.

    Args:
        heads: groups of ranks that exchange heads for positions; None for none.
        positions: groups of ranks that keep their positions and exchange keys, in a ring or `gathered`; None for none.
            The product of a microbatch's groups is its context-parallel group.
    """

    def __init__(
        self,
        model: ModelArgs,
        layer_number: int,
        *,
        head_dim: int,
        scale: float | None = None,
        backend: SDPBackend | None = None,
        heads: ContextGroups | None,
        positions: ContextGroups | None,
        gathered: bool = False,
    ):
        super().__init__(model, layer_number, head_dim=head_dim, scale=scale, backend=backend)
        self._heads, self._positions = heads, positions
        self.attend = gathered_attention if gathered else ring_attention

    def groups(self, visible: AttentionMask | None) -> tuple[Group, Group]:
        """Return the ranks that exchange heads, and those that exchange keys, of a microbatch."""
        size = None if visible is None else visible.cp_size
        heads, positions = (
            self._local_group if groups is None else groups.of(size) for groups in (self._heads, self._positions)
        )
        return heads, positions

    def should_pad_values(self, length: int, visible: AttentionMask | None, device: torch.device) -> bool:
        """Return False: padding before communication would send zeros."""
        return False

    def forward(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        visible: AttentionMask | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Return [S, B, N * E] of the local positions.

        Args:
            visible: document ids of the full sequence.

        Raises:
            ValueError: if heads do not divide over the ranks, or for an explicit mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("an explicit attention mask cannot be cut over context-parallel ranks; give document ids")
        lengths, (heads, positions) = () if visible is None else visible.lengths, self.groups(visible)
        q, k, v = all_to_all_seq_to_heads(heads, q_SBND, k_SBGD, v_SBGE, lengths=lengths)
        if sink_N is not None:
            sink_N = sink_N.chunk(heads.size)[heads.rank]
        if positions.size == 1:
            out = super().forward(q, k, v, visible, sink_N)
        else:
            out = self.attend(q, k, v, self.scale, self.block_mask(visible, q.device), positions, self.sinks(q, sink_N))
        return all_to_all_heads_to_seq(heads, out, lengths)


def all_to_all_seq_to_heads(group: Group, *tensors: Tensor, lengths: Sequence[int] = ()) -> tuple[Tensor, ...]:
    """Exchange [S, B, N, D] for [S * size, B, N / size, D], in sequence order. Differentiable.

    `lengths`: of packed sequences.

    Raises:
        ValueError: if heads do not divide over the ranks.
    """
    size = group.size
    if size == 1:
        return tensors
    for x in tensors:
        if x.shape[2] % size:
            raise ValueError(
                f"{x.shape[2]} heads of a rank do not divide over {size} context-parallel ranks (--cp-comm-type "
                "a2a): query and key-value heads of a tensor rank must be multiples of it"
            )
    rows = tensors[0].shape[0]
    pieces = [x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).flatten(0, 1) for x in tensors]
    received = all_to_all(group, [rows] * size, [rows] * size, *pieces)
    return tuple(zigzag_to_sequential(x, size, lengths) for x in received)


def all_to_all_heads_to_seq(group: Group, x_SBH: Tensor, lengths: Sequence[int] = ()) -> Tensor:
    """Exchange [S * size, B, H / size] for [S, B, H]. Differentiable."""
    size = group.size
    if size == 1:
        return x_SBH
    rows = x_SBH.shape[0] // size
    (x,) = all_to_all(group, [rows] * size, [rows] * size, sequential_to_zigzag(x_SBH, size, lengths))
    return x.unflatten(0, (size, rows)).permute(1, 2, 0, 3).flatten(2)
