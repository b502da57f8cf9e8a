"""Absorbed latent attention to selected keys (ops/absorbed_mla.py) under context parallelism.

Every rank gathers the latents of the full sequence: one row per position for all heads, instead of a key and a value
per head. They are gathered once in forward and again in backward, where their gradient is reduce-scattered in fp32 or
wider. Saved for backward: inputs, key indices, output and log-sum-exp. The gradient of the up-projection comes out of
the same pass, so a WeightGradQueue never defers it.

Shapes: S local positions, B sequences, N local heads, D query width, R kv latent width, W = R + rotary width, C
selected keys per query, E value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops.absorbed_mla import TORCH_TILE_KERNELS, Latents, TileKernels, attend, attend_backward
from moe_trainer.ops.sparse_attention import flat_key_indices
from moe_trainer.parallel.mappings import reduce_scatter_rows
from moe_trainer.parallel.sequence import SequenceShard, sequential_to_zigzag
from moe_trainer.parallel.state import Group


class CompressedKV(NamedTuple):
    """Latents with their rotated key [S, B, W], and the up-projection [N * (nope + E), R], by head [k_nope, v]."""

    latents_SBW: Tensor
    up_projection: Tensor


def gather_latents(
    latents_SBW: Tensor, weight: Tensor, heads: int, scale: float, group: Group, lengths: tuple[int, ...] = ()
) -> Latents:
    """Gather the latents of the full sequence, without gradient. Communication: an all-gather over the group.

    `lengths`: of packed sequences.
    """
    rows_BKW = SequenceShard(group, lengths).full(latents_SBW.detach(), 0).transpose(0, 1)
    return Latents(rows_BKW.flatten(0, 1), weight.detach().unflatten(0, (heads, -1)), scale)


def latent_attention(
    q_SBND: Tensor,
    keys: CompressedKV,
    latents: Latents,
    chosen_BSC: Tensor,
    group: Group,
    kernels: TileKernels = TORCH_TILE_KERNELS,
    lengths: tuple[int, ...] = (),
) -> Tensor:
    """Compute attention of the local queries to their selected keys of the full sequence.

    Args:
        latents: from `gather_latents`.
        chosen_BSC: int32 positions, -1 for none.
        group: ranks that share the sequence.
        kernels: of the tiles.
        lengths: of packed sequences.

    Returns:
        [S, B, N * E].

    Communication: in backward, S * B * W elements all-gathered over the group, and as many in fp32 or wider
    reduce-scattered.
    """
    rows_TC = flat_key_indices(chosen_BSC, keys.latents_SBW.shape[0] * group.size)
    return _LatentAttention.apply(q_SBND, *keys, rows_TC, latents, group, kernels, lengths)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SBND, latents_SBW, weight, rows_TC, latents, group, kernels, lengths):
        out_TNE, lse_TN = attend(q_SBND.flatten(0, 1), latents, rows_TC, kernels)
        out_SBH = out_TNE.flatten(1).unflatten(0, q_SBND.shape[:2])
        ctx.save_for_backward(q_SBND, latents_SBW, weight, rows_TC, out_SBH, lse_TN)
        ctx.how = latents.scale, group, kernels, lengths
        return out_SBH

    @staticmethod
    def backward(ctx, grad_SBH):
        q_SBND, latents_SBW, weight, rows_TC, out_SBH, lse_TN = ctx.saved_tensors
        scale, group, kernels, lengths = ctx.how
        batch, heads = q_SBND.shape[1:3]
        latents = gather_latents(latents_SBW, weight, heads, scale, group, lengths)
        grad_TNE, out_TNE = (x.reshape(-1, heads, x.shape[2] // heads) for x in (grad_SBH, out_SBH))
        grad_q, grad_rows, grad_weight = attend_backward(
            grad_TNE, q_SBND.flatten(0, 1), latents, rows_TC, out_TNE, lse_TN, kernels
        )
        grad_KBW = grad_rows.unflatten(0, (batch, -1)).transpose(0, 1)
        if group.size > 1:
            grad_KBW = reduce_scatter_rows(sequential_to_zigzag(grad_KBW, group.size, lengths), group)[0]
        return (
            grad_q.view_as(q_SBND),
            grad_KBW.to(latents_SBW.dtype),
            grad_weight.view_as(weight).to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
        )
