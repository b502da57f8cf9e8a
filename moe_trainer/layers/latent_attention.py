"""Latent attention to listed keys (ops/latent_attention.py) over a sequence that is cut over ranks: latents come to the queries.

Every rank receives the latents of the whole sequence, one row per position for all heads instead of a key and a value per head: once in
forward, for attention and for what learns from it (`latents_of`), and once more in backward, whose gradient of them is reduce-scattered in
fp32 (or wider). Saved are the inputs, the list of keys, the output and its log-sum-exp.

The gradient of the up-projection's weight is a sum over queries and comes out of the same pass as that of the latents, so it never
waits in a WeightGradQueue.

Shapes: S positions of this rank, B sequences, N heads of this rank, D width of queries, R of the kv latent, W of latents with their rotated
key, C chosen keys of a query, E value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.ops.latent_attention import PLAIN, Latents, TileSteps, attend, attend_backward
from moe_trainer.ops.sparse_attention import numbers_of_rows
from moe_trainer.parallel.mappings import reduce_scatter_rows
from moe_trainer.parallel.sequence import SequenceShard, rank_order
from moe_trainer.parallel.state import Group


class LatentKeys(NamedTuple):
    """Keys and values before they are made: latents with their rotated key [S, B, W], and what makes heads of them,
    [N * (nope + E), R], by head [k_nope, v]."""

    latents_SBW: Tensor
    up_projection: Parameter


def latents_of(latents_SBW: Tensor, weight: Tensor, heads: int, scale: float, group: Group) -> Latents:
    """Latents of the whole sequence, without a gradient. Communication: an all-gather over the group."""
    rows_BKW = SequenceShard(group).full(latents_SBW.detach(), 0).transpose(0, 1)
    return Latents(rows_BKW.flatten(0, 1), weight.detach().unflatten(0, (heads, -1)), scale)


def latent_attention(q_SBND: Tensor, keys: LatentKeys, latents: Latents, chosen_BSC: Tensor, group: Group,
                     steps: TileSteps = PLAIN) -> Tensor:
    """Attention of this rank's queries to their chosen keys of the whole sequence. latents: `latents_of` the keys; chosen: int32 places, -1: none.

    Returns: [S, B, N * E]. Communication, in backward: S * B * W elements all-gathered over the group, and as many in fp32 or wider
    reduce-scattered.
    """
    rows_TC = numbers_of_rows(chosen_BSC, keys.latents_SBW.shape[0] * group.size)
    return _LatentAttention.apply(q_SBND, *keys, rows_TC, latents, group, steps)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SBND, latents_SBW, weight, rows_TC, latents, group, steps):
        out_TNE, lse_TN = attend(q_SBND.flatten(0, 1), latents, rows_TC, steps)
        out_SBH = out_TNE.flatten(1).unflatten(0, q_SBND.shape[:2])
        ctx.save_for_backward(q_SBND, latents_SBW, weight, rows_TC, out_SBH, lse_TN)
        ctx.how = latents.scale, group, steps
        return out_SBH

    @staticmethod
    def backward(ctx, grad_SBH):
        (q_SBND, latents_SBW, weight, rows_TC, out_SBH, lse_TN), (scale, group, steps) = ctx.saved_tensors, ctx.how
        batch, heads = q_SBND.shape[1:3]
        latents = latents_of(latents_SBW, weight, heads, scale, group)
        grad_TNE, out_TNE = (x.reshape(-1, heads, x.shape[2] // heads) for x in (grad_SBH, out_SBH))
        grad_q, grad_rows, grad_weight = attend_backward(grad_TNE, q_SBND.flatten(0, 1), latents, rows_TC, out_TNE, lse_TN, steps)
        grad_KBW = grad_rows.unflatten(0, (batch, -1)).transpose(0, 1)
        if group.size > 1:
            grad_KBW = reduce_scatter_rows(rank_order(grad_KBW, group.size), group)[0]
        return grad_q.view_as(q_SBND), grad_KBW.to(latents_SBW.dtype), grad_weight.view_as(weight).to(weight.dtype), None, None, None, None
