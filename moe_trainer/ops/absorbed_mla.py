"""Absorbed latent attention: only the keys that a query selected are read and multiplied.

W_k moves to the query's side and W_v after the sum, so keys and values of single heads are never made (derivation and
cost: docs/design/sparse_attention.md). Work is done per tile of queries, and within it for as many as keep the gathered
rows small. Backward gathers again, recomputes probabilities from the log-sum-exp, and accumulates row gradients in fp32
or wider, in a fixed order on CPU or with deterministic algorithms.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1.2); DeepSeek-V3.2-Exp report. Shapes: T queries (positions x
sequences), K rows of all sequences, C selected keys per query, N heads, D = nope + rope, R kv latent width, W = R +
rope, E value width, F = nope + E.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE, TILE_CUDA = 64, 512
"""Queries that are brought to latents together."""
ROWS, ROWS_CUDA = 1 << 20, 1 << 26
"""Elements of gathered rows at most, but for those of one query."""


@dataclass(frozen=True)
class Latents:
    """Latents that queries attend to.

    Args:
        rows_KW: see the module docstring.
        weight_NFR: the up-projection, per head first W_k, then W_v.
    """

    rows_KW: Tensor
    weight_NFR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Width R of the kv latent."""
        return self.weight_NFR.shape[2]

    def nope(self, q_TND: Tensor) -> int:
        """Return the number of query channels that are not rotated."""
        return q_TND.shape[2] - (self.rows_KW.shape[1] - self.rank)

    def absorb(self, q_TND: Tensor) -> Tensor:
        """Apply W_k to the queries: [T, N, W]."""
        nope = self.nope(q_TND)
        return torch.cat([_by_head(q_TND[..., :nope], self.weight_NFR[:, :nope]), q_TND[..., nope:]], dim=-1)

    def scores(self, q_TNW: Tensor, rows_TCW: Tensor, keys_TC: Tensor) -> Tensor:
        """Return scaled scores [T, N, C], fp32 or wider; -inf where there is no key."""
        hidden = torch.zeros(keys_TC.shape, dtype=q_TNW.dtype, device=q_TNW.device).masked_fill_(
            keys_TC < 0, float("-inf")
        )
        return wide(torch.baddbmm(hidden.unsqueeze(1), q_TNW, rows_TCW.transpose(1, 2), alpha=self.scale))

    def gather(self, keys_TC: Tensor) -> Tensor:
        """Gather the selected rows [T, C, W]; the first row where there is no key."""
        return self.rows_KW.index_select(0, keys_TC.clamp(min=0).flatten()).view(*keys_TC.shape, -1)

    def parts(self, keys_TC: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield queries that are computed together, their keys and gathered rows."""
        limit = ROWS_CUDA if keys_TC.is_cuda else ROWS
        for rows in _slices(len(keys_TC), max(1, limit // (keys_TC.shape[1] * self.rows_KW.shape[1]))):
            yield rows, keys_TC[rows], self.gather(keys_TC[rows])


class TileKernels(NamedTuple):
    """Forward and backward of a tile of absorbed queries: the functions below, or kernels."""

    forward: Callable[[Tensor, Latents, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Latents, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_of_tile(q_TNW: Tensor, latents: Latents, keys_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the selected latents by the heads' probabilities [T, N, R], and log-sum-exp [T, N]."""
    mean, lse = q_TNW.new_empty(*q_TNW.shape[:2], latents.rank), wide(q_TNW.new_empty(0)).new_empty(q_TNW.shape[:2])
    for part, keys, rows in latents.parts(keys_TC):
        scores = latents.scores(q_TNW[part], rows, keys)
        lse[part] = torch.logsumexp(scores, -1)
        torch.bmm(_probabilities(scores, lse[part]).to(q_TNW.dtype), rows[..., : latents.rank], out=mean[part])
    return mean, lse


def backward_of_tile(
    q_TNW: Tensor,
    latents: Latents,
    keys_TC: Tensor,
    grad_TNR: Tensor,
    delta_TN1: Tensor,
    lse_TN: Tensor,
    grad_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accumulate the gradient of rows in grad_rows; return the gradient of q, and the mean again.

    Args:
        grad_TNR: gradient of the mean.
        delta_TN1: subtracted from its matmul with rows.
    """
    mean, grad_q = torch.empty_like(grad_TNR), torch.empty_like(q_TNW)
    for part, keys, rows in latents.parts(keys_TC):
        probs = _probabilities(latents.scores(q_TNW[part], rows, keys), lse_TN[part])
        narrow, values = probs.to(q_TNW.dtype), rows[..., : latents.rank]
        torch.bmm(narrow, values, out=mean[part])
        grad_scores = (
            wide(torch.bmm(grad_TNR[part], values.transpose(1, 2)))
            .sub_(delta_TN1[part])
            .mul_(probs)
            .mul_(latents.scale)
            .to(q_TNW.dtype)
        )
        torch.bmm(grad_scores, rows, out=grad_q[part])
        of_rows = torch.bmm(grad_scores.transpose(1, 2), q_TNW[part])
        of_rows[..., : latents.rank].baddbmm_(narrow.transpose(1, 2), grad_TNR[part])
        grad_rows.index_add_(0, keys.clamp(min=0).flatten(), of_rows.flatten(0, 1).to(grad_rows.dtype))
    return grad_q, mean


TORCH_TILE_KERNELS = TileKernels(forward_of_tile, backward_of_tile)


def attend(
    q_TND: Tensor, latents: Latents, keys_TC: Tensor, kernels: TileKernels = TORCH_TILE_KERNELS
) -> tuple[Tensor, Tensor]:
    """Return the output [T, N, E] in the dtype of q, and log-sum-exp [T, N] in fp32 or wider.

    Args:
        keys_TC: int32 row numbers, -1 for none.
    """
    nope = latents.nope(q_TND)
    out = q_TND.new_empty(*q_TND.shape[:2], latents.weight_NFR.shape[1] - nope)
    lse = wide(q_TND.new_empty(0)).new_empty(q_TND.shape[:2])
    for tile in _slices(len(q_TND), _tile(q_TND)):
        mean, lse[tile] = kernels.forward(latents.absorb(q_TND[tile]), latents, keys_TC[tile])
        out[tile] = _by_head(mean, latents.weight_NFR[:, nope:].transpose(1, 2))
    return out, lse


def attend_backward(
    grad_TNE: Tensor,
    q_TND: Tensor,
    latents: Latents,
    keys_TC: Tensor,
    out_TNE: Tensor,
    lse_TN: Tensor,
    kernels: TileKernels = TORCH_TILE_KERNELS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, in its dtype, and of rows_KW and weight_NFR, in fp32 or wider."""
    rank, nope, weight = latents.rank, latents.nope(q_TND), latents.weight_NFR
    grad_q = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    grad_rows, grad_weight = (
        torch.zeros(x.shape, dtype=lse_TN.dtype, device=x.device) for x in (latents.rows_KW, weight)
    )
    for tile in _slices(len(q_TND), _tile(q_TND)):
        q, grad = latents.absorb(q_TND[tile]), grad_TNE[tile]
        grad_mean, delta = _by_head(grad, weight[:, nope:]), (wide(grad) * out_TNE[tile]).sum(-1, keepdim=True)
        grad_latent, mean = kernels.backward(q, latents, keys_TC[tile], grad_mean, delta, lse_TN[tile], grad_rows)
        grad_q[tile, :, :nope] = _by_head(grad_latent[..., :rank], weight[:, :nope].transpose(1, 2))
        grad_q[tile, :, nope:] = grad_latent[..., rank:]
        grad_weight[:, :nope] += torch.bmm(
            q_TND[tile, :, :nope].permute(1, 2, 0), grad_latent[..., :rank].transpose(0, 1)
        )
        grad_weight[:, nope:] += torch.bmm(grad.permute(1, 2, 0), mean.transpose(0, 1))
    return grad_q, grad_rows, grad_weight


def attention_of_all_heads(q_TND: Tensor, latents: Latents, keys_TC: Tensor) -> Tensor:
    """Return the probabilities of the listed keys, summed over heads, [T, C], fp32 or wider."""
    q = latents.absorb(q_TND)
    return torch.cat(
        [torch.softmax(latents.scores(q[part], rows, keys), -1).sum(1) for part, keys, rows in latents.parts(keys_TC)]
    )


def _probabilities(scores: Tensor, lse_TN: Tensor) -> Tensor:
    """Turn scores into probabilities in place; zeros where there is no key at all."""
    return scores.sub_(lse_TN.masked_fill(lse_TN == float("-inf"), 0.0).unsqueeze(-1)).exp_()


def _by_head(x_TND: Tensor, weight_NDE: Tensor) -> Tensor:
    """Multiply per head: [T, N, E]."""
    return torch.bmm(x_TND.transpose(0, 1), weight_NDE).transpose(0, 1)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _tile(x: Tensor) -> int:
    return TILE_CUDA if x.is_cuda else TILE


def wide(x: Tensor) -> Tensor:
    """Convert to fp32, unless x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
