"""Top-k key selection by an indexer (DeepSeek-V3.2's lightning indexer), and the indexer's loss.

Score of key s for query t, in fp32: I[t, s] = sum_i w[t, i] * relu(q[t, i] . k[s]). A query attends to the `topk` best
visible keys; earlier keys win ties, so the choice does not depend on a device's sort. The choice is a bit mask
(block_attention.Selection) or a list of keys (absorbed_mla.py). The loss is KL(attention of all heads || softmax(I));
its closed-form gradient is computed in forward and attached to attention's output. See docs/design/sparse_attention.md.
Work is done per block of queries.

Source: DeepSeek-V3.2-Exp report; names and constants of Megatron-Core. Shapes: S local queries, K keys of the full
sequence, B sequences, I indexer heads, F their width, N local attention heads, D width of their keys.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_trainer.ops.absorbed_mla import Latents, attention_of_all_heads, wide
from moe_trainer.ops.block_attention import BlockMask, PositionRange, Selection
from moe_trainer.ops.block_sizes import QUERY_BLOCK, SPARSE_ELEMENTS_CUDA, SPARSE_QUERY_BLOCK_CUDA

EPSILON = 1e-10


class IndexerOutput(NamedTuple):
    """Queries [S, B, I, F], keys [K, B, F] and head weights [S, B, I] of the scores."""

    q_SBIF: Tensor
    k_KBF: Tensor
    weights_SBI: Tensor


class QueryBlock(NamedTuple):
    """Queries that are processed together.

    Attributes:
        rows: in the rank's tensors.
        keys: visible to some of them.
        hidden: bool [B, 1, S, K], hidden keys per query; None if all are visible.
    """

    rows: slice
    keys: PositionRange
    hidden: Tensor | None


class IndexerTarget(Protocol):
    """The attention that the indexer learns.

    Attributes:
        selected_only: over the selected keys.
        heads: number of local heads.
    """

    selected_only: bool
    heads: int

    def summed_attention(self, block: QueryBlock, list_BSC: Tensor | None) -> Tensor:
        """Return the attention summed over the heads of all ranks, [B, S, K], fp32 or wider.

        Args:
            list_BSC: the selected keys, if they are listed.
        """


class DenseAttentionTarget:
    """Target from the keys of every head.

    Args:
        sum_over_ranks: sums over the ranks that hold the other heads, in place.
    """

    def __init__(
        self,
        q_SBND: Tensor,
        k_KBND: Tensor,
        scale: float,
        sum_over_ranks: Callable[[Tensor], Tensor],
        selected_only: bool = False,
    ):
        self.heads, self.selected_only = q_SBND.shape[2], selected_only
        self._q, self._k = (wide(x).permute(1, 2, 0, 3) for x in (q_SBND, k_KBND))
        self._scale, self._sum_over_ranks = scale, sum_over_ranks

    def summed_attention(self, block: QueryBlock, list_BSC: Tensor | None) -> Tensor:
        """See IndexerTarget."""
        logits = torch.matmul(
            self._q[:, :, block.rows], self._k[:, :, block.keys.start : block.keys.stop].transpose(2, 3)
        ).mul_(self._scale)
        if block.hidden is not None:
            logits.masked_fill_(block.hidden, float("-inf"))
        return self._sum_over_ranks(torch.softmax(logits, -1).sum(1))


class LatentAttentionTarget:
    """Target from latents, of which it gathers the listed ones."""

    selected_only = True

    def __init__(self, q_SBND: Tensor, latents: Latents, sum_over_ranks: Callable[[Tensor], Tensor]):
        self.heads = q_SBND.shape[2]
        self._q, self._latents, self._sum_over_ranks = q_SBND, latents, sum_over_ranks

    def summed_attention(self, block: QueryBlock, list_BSC: Tensor | None) -> Tensor:
        """See IndexerTarget."""
        if list_BSC is None:
            raise ValueError("LatentAttentionTarget: the selected keys must be listed")
        q_SBND = self._q[block.rows]
        probs_TC = attention_of_all_heads(
            q_SBND.flatten(0, 1),
            self._latents,
            flat_key_indices(list_BSC, len(self._latents.rows_KW) // q_SBND.shape[1]),
        )
        probs_BSC = self._sum_over_ranks(probs_TC.unflatten(0, q_SBND.shape[:2]).transpose(0, 1).contiguous())
        # no key: nothing is added, wherever
        return probs_BSC.new_zeros(*probs_BSC.shape[:2], block.keys.size).scatter_add_(
            -1, (list_BSC - block.keys.start).clamp(min=0).long(), probs_BSC
        )


class IndexerLoss(NamedTuple):
    """Sum of the divergences of all S * B queries, and its gradient of the indexer's output, fp32 or wider."""

    loss: Tensor
    grads: IndexerOutput


@torch.no_grad()
def select_topk_keys(
    index: IndexerOutput,
    block_mask: BlockMask,
    runs: tuple[PositionRange, ...],
    topk: int | None,
    relu: bool = True,
    attention_target: IndexerTarget | None = None,
    listed: bool = False,
    counted_S: Tensor | None = None,
) -> tuple[Selection | Tensor | None, IndexerLoss | None]:
    """Select the keys of every query, and compute the indexer's loss if there is a target.

    Args:
        runs: positions of the S queries.
        topk: None selects nothing; all visible keys count.
        relu: apply relu to the scores of heads.
        listed: return the selection as a list, int32 [B, S, topk], ascending, -1 for none.
        counted_S: queries that have a loss; None for all.

    Returns:
        The selection or None, the loss or None.
    """
    index = IndexerOutput(*(wide(x).transpose(0, 1) for x in index))
    length = index.k_KBF.shape[1]
    selections: list[Tensor] = []
    indexer_loss_grads = None
    if attention_target is not None:
        indexer_loss_grads = _IndexerLossSum(index, attention_target, relu, counted_S)
    for queries, rows in _blocks(runs, _block_rows(index, length, attention_target)):
        keys = PositionRange(block_mask.first_key(queries), min(queries.stop, length))
        hidden = block_mask.hidden(queries, keys, index.k_KBF.device)
        heads_BSIK = _heads(index, rows, keys, relu)
        scores_BSK = torch.matmul(index.weights_SBI[:, rows].unsqueeze(2), heads_BSIK).squeeze(2)
        if hidden is not None:
            scores_BSK.masked_fill_(hidden[:, 0], float("-inf"))
        chosen_BSK = list_BSC = None
        if topk is not None:
            chosen_BSK = topk_mask(scores_BSK, topk)
            if listed:
                list_BSC = list_selected_keys(chosen_BSK, topk, keys.start)
                selections.append(list_BSC)
            else:
                whole = torch.zeros(*scores_BSK.shape[:2], length, dtype=torch.bool, device=scores_BSK.device)
                whole[:, :, keys.start : keys.stop] = chosen_BSK
                selections.append(Selection.pack(whole))
        if indexer_loss_grads is not None:
            indexer_loss_grads.learn(QueryBlock(rows, keys, hidden), heads_BSIK, scores_BSK, chosen_BSK, list_BSC)
    choice = torch.cat(selections, 1) if selections else None
    return choice if listed or choice is None else Selection(
        choice, runs
    ), None if indexer_loss_grads is None else indexer_loss_grads.whole()


def decode_scores(index: IndexerOutput, keys_TKF: Tensor, relu: bool = True) -> Tensor:
    """Return the scores [T, K] of all positions for T sequences with one query each; `index` has them as one [T, 1]."""
    queries = IndexerOutput(*(wide(x) for x in index._replace(k_KBF=keys_TKF)))
    heads_TSIK = _heads(queries, slice(0, 1), PositionRange(0, keys_TKF.shape[1]), relu)
    return torch.matmul(queries.weights_SBI.unsqueeze(2), heads_TSIK).flatten(1)


def topk_mask(scores_BSK: Tensor, topk: int) -> Tensor:
    """Return bool [B, S, K] of the `topk` largest scores above -inf in every row; the first of equal ones win."""
    visible = scores_BSK > float("-inf")
    if topk >= scores_BSK.shape[-1]:
        return visible
    least = scores_BSK.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores_BSK > least, scores_BSK == least
    left = topk - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= left))) & visible


def list_selected_keys(chosen_BSK: Tensor, topk: int, first: int = 0) -> Tensor:
    """Return the selected keys of every row, ascending, int32 [B, S, topk], -1 after the last.

    Args:
        first: key of the first column.
    """
    ranks = torch.arange(1, topk + 1, dtype=torch.int32, device=chosen_BSK.device).expand(*chosen_BSK.shape[:2], topk)
    # the first column up to which so many are chosen
    columns = torch.searchsorted(chosen_BSK.cumsum(-1, dtype=torch.int32), ranks.contiguous(), out_int32=True)
    return torch.where(columns < chosen_BSK.shape[-1], columns + first, -1)


def flat_key_indices(list_BSC: Tensor, length: int) -> Tensor:
    """Convert positions in sequences of `length` to row numbers over all sequences: [S * B, C], -1 for none."""
    first_B11 = torch.arange(len(list_BSC), dtype=torch.int32, device=list_BSC.device)[:, None, None] * length
    return torch.where(list_BSC < 0, list_BSC, list_BSC + first_B11).transpose(0, 1).flatten(0, 1)


class _IndexerLossSum:
    """Accumulator of the loss and its gradients over blocks."""

    def __init__(
        self, index: IndexerOutput, attention_target: IndexerTarget, relu: bool, counted_S: Tensor | None = None
    ):
        self._index, self._teacher, self._relu, self._counted_S = index, attention_target, relu, counted_S
        self._loss = index.k_KBF.new_zeros(())
        self._grads = IndexerOutput(*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in index))

    def learn(
        self,
        block: QueryBlock,
        heads_BSIK: Tensor,
        scores_BSK: Tensor,
        chosen_BSK: Tensor | None,
        list_BSC: Tensor | None,
    ) -> None:
        """Add the queries of one block.

        Args:
            heads_BSIK: scores of single heads, without weights.
        """
        if self._teacher.selected_only and chosen_BSK is not None:
            block = block._replace(hidden=~chosen_BSK.unsqueeze(1))
            scores_BSK = scores_BSK.masked_fill(~chosen_BSK, float("-inf"))
        summed_attention = self._teacher.summed_attention(block, list_BSC)
        target = summed_attention / summed_attention.sum(-1, keepdim=True)  # rows sum to one
        predicted = torch.softmax(scores_BSK, -1)
        if self._counted_S is not None:
            target = target * self._counted_S[block.rows, None]
        self._loss += (target * ((target + EPSILON).log() - (predicted + EPSILON).log())).sum()
        slope = -target / (predicted + EPSILON)
        grad_BSK = predicted * (slope - (slope * predicted).sum(-1, keepdim=True))
        self._spread(block.rows, block.keys, heads_BSIK, grad_BSK)

    def _spread(self, rows: slice, keys: PositionRange, heads_BSIK: Tensor, grad_BSK: Tensor) -> None:
        """Propagate the gradient of the scores to the indexer's output."""
        grad_q, grad_k, grad_w = self._grads
        q, columns = self._index.q_SBIF[:, rows], slice(keys.start, keys.stop)
        grad_w[:, rows] = torch.matmul(heads_BSIK, grad_BSK.unsqueeze(-1)).squeeze(-1)
        grad_heads = self._index.weights_SBI[:, rows].unsqueeze(-1) * grad_BSK.unsqueeze(2)
        if self._relu:
            grad_heads.masked_fill_(heads_BSIK <= 0, 0.0)
        flat = grad_heads.flatten(1, 2)
        grad_q[:, rows] = torch.bmm(flat, self._index.k_KBF[:, columns]).view_as(q)
        grad_k[:, columns] += torch.bmm(flat.transpose(1, 2), q.flatten(1, 2))

    def whole(self) -> IndexerLoss:
        return IndexerLoss(self._loss, IndexerOutput(*(x.transpose(0, 1) for x in self._grads)))


def _heads(index: IndexerOutput, rows: slice, keys: PositionRange, relu: bool) -> Tensor:
    """Return the scores of single heads, [B, S, I, K]."""
    q = index.q_SBIF[:, rows]
    dots = torch.bmm(q.flatten(1, 2), index.k_KBF[:, keys.start : keys.stop].transpose(1, 2)).view(*q.shape[:3], -1)
    return dots.relu_() if relu else dots


def _block_rows(index: IndexerOutput, length: int, attention_target: IndexerTarget | None) -> int:
    """Return the number of queries that are processed together."""
    if index.k_KBF.device.type != "cuda":
        return QUERY_BLOCK
    heads = max(index.q_SBIF.shape[2], 0 if attention_target is None else attention_target.heads)
    return min(SPARSE_QUERY_BLOCK_CUDA, max(1, SPARSE_ELEMENTS_CUDA // (heads * length * index.k_KBF.shape[0])))


def _blocks(runs: tuple[PositionRange, ...], size: int) -> Iterator[tuple[PositionRange, slice]]:
    """Yield queries with their rows in the rank's tensors."""
    before = 0
    for run in runs:
        for start in range(run.start, run.stop, size):
            block = PositionRange(start, min(start + size, run.stop))
            yield block, slice(before + block.start - run.start, before + block.stop - run.start)
        before += run.size
