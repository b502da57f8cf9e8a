"""Which keys a query attends to, chosen by an index (DeepSeek-V3.2's lightning indexer), and what the index learns from attention.

The index has few narrow heads and one key for all of them. Its score of key s for query t is

    I[t, s] = sum_i w[t, i] * relu(q[t, i] . k[s])

in fp32; of the keys that the causal rule and documents show, a query attends to the `topk` best. Of equal scores (relu makes many zeros)
the earlier keys win, so that the choice does not depend on a device's sorting. It is kept as one bit per query and key
(block_attention.Selection), by which blockwise attention (block_attention.py) masks its tiles; or as a list, see below.

The index learns to score as attention attends. Its target is what the heads attend to together,

    p[t, s] = sum_n softmax_s(scale * q_n[t] . k_n[s]), divided by its sum over s,

over all visible keys or the chosen ones alone; its loss is the divergence KL(p || softmax_s(I)), both logarithms taken with 1e-10 added.
The target is a constant, so the gradient has a closed form,

    g = -p / (r + 1e-10),    dL/dI = r * (g - <g, r>),    r = softmax(I)

and is computed beside the forward pass, while the scores of a block are there; what is kept is the gradient of the index' inputs, to be
attached to attention's output (attach_loss.attach_gradients). So the loss needs no second look at the target in backward, where it would
be summed over tensor-parallel ranks once more. Kept for a graph of their own, scores and targets of all heads would be S x K tensors.

Everything is done for a block of queries at a time against all keys that they may see: [heads, block, keys] is the largest tensor.
Masked attention saves no products over dense attention. Where that pays (shape/sparse_keys.py) the choice is written down as a list of keys
instead, and attention gathers and multiplies these alone (latent_attention.py); then a teacher of the chosen keys does, too.

Source: DeepSeek-V3.2-Exp report; names and constants of Megatron-Core.
Shapes: S queries of this rank, K keys of the whole sequence, B sequences, I heads of the index, F their width, N attention heads of this
rank, D width of their keys.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_trainer.ops.block_attention import Rule, Run, Selection
from moe_trainer.ops.latent_attention import Latents, attention_of_all_heads, wide

EPSILON = 1e-10
QUERY_BLOCK = 64
QUERY_BLOCK_CUDA = 512
CUDA_ELEMENTS = 1 << 27  # of [heads, block, keys]


class Index(NamedTuple):
    """What scores are made of: queries [S, B, I, F], keys [K, B, F], and the weights of heads [S, B, I] with all their factors."""

    q_SBIF: Tensor
    k_KBF: Tensor
    weights_SBI: Tensor


class Block(NamedTuple):
    """Queries that are looked at together: their rows in a rank's tensors, the keys that some of them may see, and for each of them, bool
    [B, 1, S, K], which it may not; None: it may see all."""

    rows: slice
    keys: Run
    hidden: Tensor | None


class Teacher(Protocol):
    """The attention that the index learns from. selected_only: over the chosen keys. heads: of this rank."""

    selected_only: bool
    heads: int

    def together(self, block: Block, list_BSC: Tensor | None) -> Tensor:
        """What the heads of all ranks attend to, summed: [B, S, K] in fp32 or wider. list: the chosen keys, where these are listed."""


class HeadTeacher:
    """With keys of every head, all of which it multiplies. sum_over_ranks: adds up over the ranks that hold the other heads, in place."""

    def __init__(self, q_SBND: Tensor, k_KBND: Tensor, scale: float, sum_over_ranks: Callable[[Tensor], Tensor], selected_only: bool = False):
        self.heads, self.selected_only = q_SBND.shape[2], selected_only
        self._q, self._k = (wide(x).permute(1, 2, 0, 3) for x in (q_SBND, k_KBND))
        self._scale, self._sum_over_ranks = scale, sum_over_ranks

    def together(self, block: Block, list_BSC: Tensor | None) -> Tensor:
        """See Teacher."""
        logits = torch.matmul(self._q[:, :, block.rows], self._k[:, :, block.keys.start:block.keys.stop].transpose(2, 3)).mul_(self._scale)
        if block.hidden is not None:
            logits.masked_fill_(block.hidden, float("-inf"))
        return self._sum_over_ranks(torch.softmax(logits, -1).sum(1))


class LatentTeacher:
    """With latents, of which it gathers the listed ones: those of one sequence after the other."""

    selected_only = True

    def __init__(self, q_SBND: Tensor, latents: Latents, sum_over_ranks: Callable[[Tensor], Tensor]):
        self.heads = q_SBND.shape[2]
        self._q, self._latents, self._sum_over_ranks = q_SBND, latents, sum_over_ranks

    def together(self, block: Block, list_BSC: Tensor | None) -> Tensor:
        """See Teacher."""
        q_SBND = self._q[block.rows]
        probs_TC = attention_of_all_heads(q_SBND.flatten(0, 1), self._latents, numbers_of_rows(list_BSC, len(self._latents.rows_KW) // q_SBND.shape[1]))
        probs_BSC = self._sum_over_ranks(probs_TC.unflatten(0, q_SBND.shape[:2]).transpose(0, 1).contiguous())
        # no key: nothing is added, wherever
        return probs_BSC.new_zeros(*probs_BSC.shape[:2], block.keys.size).scatter_add_(-1, (list_BSC - block.keys.start).clamp(min=0).long(), probs_BSC)


class Lesson(NamedTuple):
    """loss: the divergences of all S * B queries, added up; its gradient of the index' inputs, fp32 or wider."""

    loss: Tensor
    grads: Index


@torch.no_grad()
def choose_keys(index: Index, rule: Rule, runs: tuple[Run, ...], topk: int | None, relu: bool = True, teacher: Teacher | None = None,
                listed: bool = False) -> tuple[Selection | Tensor | None, Lesson | None]:
    """Choose the keys of every query, and learn from the teacher if there is one.

    runs: where the S queries stand in the sequence. topk: None: no choice, every visible key counts. relu: of the scores of heads.
    listed: the choice is a list, int32 [B, S, topk], ascending, -1 where a query sees no more keys.
    Returns: the choice or None, the lesson or None.
    """
    index = Index(*(wide(x).transpose(0, 1) for x in index))
    length = index.k_KBF.shape[1]
    found, lesson = [], None if teacher is None else _Lesson(index, teacher, relu)
    for queries, rows in _blocks(runs, _block_rows(index, length, teacher)):
        keys = rule.clip(queries, Run(0, length))
        hidden = rule.hidden(queries, keys, index.k_KBF.device)
        heads_BSIK = _heads(index, rows, keys, relu)
        scores_BSK = torch.matmul(index.weights_SBI[:, rows].unsqueeze(2), heads_BSIK).squeeze(2)
        if hidden is not None:
            scores_BSK.masked_fill_(hidden[:, 0], float("-inf"))
        chosen_BSK = None if topk is None else best(scores_BSK, topk)
        list_BSC = list_keys(chosen_BSK, topk, keys.start) if listed and chosen_BSK is not None else None
        if list_BSC is not None:
            found.append(list_BSC)
        elif chosen_BSK is not None:
            whole = torch.zeros(*scores_BSK.shape[:2], length, dtype=torch.bool, device=scores_BSK.device)
            whole[:, :, keys.start:keys.stop] = chosen_BSK
            found.append(Selection.pack(whole))
        if lesson is not None:
            lesson.learn(Block(rows, keys, hidden), heads_BSIK, scores_BSK, chosen_BSK, list_BSC)
    choice = torch.cat(found, 1) if found else None
    return choice if listed or choice is None else Selection(choice, runs), None if lesson is None else lesson.whole()


def best(scores_BSK: Tensor, topk: int) -> Tensor:
    """The `topk` largest scores of every row, or all above -inf where these are fewer; of equal ones the first. Bool [B, S, K]."""
    visible = scores_BSK > float("-inf")
    if topk >= scores_BSK.shape[-1]:
        return visible
    least = scores_BSK.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores_BSK > least, scores_BSK == least
    left = topk - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= left))) & visible


def list_keys(chosen_BSK: Tensor, topk: int, first: int = 0) -> Tensor:
    """The chosen keys of every row, ascending, int32 [B, S, topk]; -1 behind the last one. first: number of the first column."""
    ranks = torch.arange(1, topk + 1, dtype=torch.int32, device=chosen_BSK.device).expand(*chosen_BSK.shape[:2], topk)
    # the first column up to which so many are chosen
    columns = torch.searchsorted(chosen_BSK.cumsum(-1, dtype=torch.int32), ranks.contiguous(), out_int32=True)
    return torch.where(columns < chosen_BSK.shape[-1], columns + first, -1)


def numbers_of_rows(list_BSC: Tensor, length: int) -> Tensor:
    """Places in sequences of `length` as numbers of rows, one sequence after the other: [S * B, C], -1: none."""
    first_B11 = torch.arange(len(list_BSC), dtype=torch.int32, device=list_BSC.device)[:, None, None] * length
    return torch.where(list_BSC < 0, list_BSC, list_BSC + first_B11).transpose(0, 1).flatten(0, 1)


class _Lesson:
    """Gathers the loss and its gradients, block by block."""

    def __init__(self, index: Index, teacher: Teacher, relu: bool):
        self._index, self._teacher, self._relu = index, teacher, relu
        self._loss = index.k_KBF.new_zeros(())
        self._grads = Index(*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in index))

    def learn(self, block: Block, heads_BSIK: Tensor, scores_BSK: Tensor, chosen_BSK: Tensor | None, list_BSC: Tensor | None) -> None:
        """Add the queries of one block. heads: scores of single heads, without weights."""
        if self._teacher.selected_only and chosen_BSK is not None:
            block = block._replace(hidden=~chosen_BSK.unsqueeze(1))
            scores_BSK = scores_BSK.masked_fill(~chosen_BSK, float("-inf"))
        together = self._teacher.together(block, list_BSC)
        target = together / together.sum(-1, keepdim=True)  # rows sum to one
        found = torch.softmax(scores_BSK, -1)
        self._loss += (target * ((target + EPSILON).log() - (found + EPSILON).log())).sum()
        slope = -target / (found + EPSILON)
        grad_BSK = found * (slope - (slope * found).sum(-1, keepdim=True))
        self._spread(block.rows, block.keys, heads_BSIK, grad_BSK)

    def _spread(self, rows: slice, keys: Run, heads_BSIK: Tensor, grad_BSK: Tensor) -> None:
        """From the gradient of the scores to that of what they are made of."""
        grad_q, grad_k, grad_w = self._grads
        q, columns = self._index.q_SBIF[:, rows], slice(keys.start, keys.stop)
        grad_w[:, rows] = torch.matmul(heads_BSIK, grad_BSK.unsqueeze(-1)).squeeze(-1)
        grad_heads = self._index.weights_SBI[:, rows].unsqueeze(-1) * grad_BSK.unsqueeze(2)
        if self._relu:
            grad_heads.masked_fill_(heads_BSIK <= 0, 0.0)
        flat = grad_heads.flatten(1, 2)
        grad_q[:, rows] = torch.bmm(flat, self._index.k_KBF[:, columns]).view_as(q)
        grad_k[:, columns] += torch.bmm(flat.transpose(1, 2), q.flatten(1, 2))

    def whole(self) -> Lesson:
        return Lesson(self._loss, Index(*(x.transpose(0, 1) for x in self._grads)))


def _heads(index: Index, rows: slice, keys: Run, relu: bool) -> Tensor:
    """Scores of the single heads, [B, S, I, K]."""
    q = index.q_SBIF[:, rows]
    dots = torch.bmm(q.flatten(1, 2), index.k_KBF[:, keys.start:keys.stop].transpose(1, 2)).view(*q.shape[:3], -1)
    return dots.relu_() if relu else dots


def _block_rows(index: Index, length: int, teacher: Teacher | None) -> int:
    """Queries that are looked at together."""
    if index.k_KBF.device.type != "cuda":
        return QUERY_BLOCK
    heads = max(index.q_SBIF.shape[2], 0 if teacher is None else teacher.heads)
    return min(QUERY_BLOCK_CUDA, max(1, CUDA_ELEMENTS // (heads * length * index.k_KBF.shape[0])))


def _blocks(runs: tuple[Run, ...], size: int) -> Iterator[tuple[Run, slice]]:
    """Queries with their rows in a rank's tensors."""
    before = 0
    for run in runs:
        for start in range(run.start, run.stop, size):
            block = Run(start, min(start + size, run.stop))
            yield block, slice(before + block.start - run.start, before + block.stop - run.start)
        before += run.size
