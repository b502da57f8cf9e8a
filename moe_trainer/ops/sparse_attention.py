"""Which keys a query attends to, chosen by an index (DeepSeek-V3.2's lightning indexer), and what the index learns from attention.

The index has few narrow heads and one key for all of them. Its score of key s for query t is

    I[t, s] = sum_i w[t, i] * relu(q[t, i] . k[s])

in fp32; of the keys that the causal rule and documents show, a query attends to the `topk` best. Of equal scores (relu makes many zeros)
the earlier keys win, so that the choice does not depend on a device's sorting. It is kept as one bit per query and key
(block_attention.Selection), by which blockwise attention (block_attention.py) masks its tiles.

The index learns to score as attention attends. Its target is what the heads attend to together,

    p[t, s] = sum_n softmax_s(scale * q_n[t] . k_n[s]), divided by its sum over s,

over all visible keys or the chosen ones alone; its loss is the divergence KL(p || softmax_s(I)), both logarithms taken with 1e-10 added.
The target is a constant, so the gradient has a closed form,

    g = -p / (r + 1e-10),    dL/dI = r * (g - <g, r>),    r = softmax(I)

and is computed beside the forward pass, while the scores of a block are there; what is kept is the gradient of the index' inputs, to be
attached to attention's output (attach_loss.attach_gradients). So the loss needs no second look at the target in backward, where it would
be summed over tensor-parallel ranks once more. Kept for a graph of their own, scores and targets of all heads would be S x K tensors.

Everything is done for a block of queries at a time against all keys that they may see: [heads, block, keys] is the largest tensor.
Masked attention saves no products over dense attention: for that a kernel that gathers keys is needed.

Source: DeepSeek-V3.2-Exp report; names and constants of Megatron-Core.
Shapes: S queries of this rank, K keys of the whole sequence, B sequences, I heads of the index, F their width, N attention heads of this
rank, D width of their keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops.block_attention import Rule, Run, Selection

EPSILON = 1e-10
QUERY_BLOCK = 64
QUERY_BLOCK_CUDA = 512
CUDA_ELEMENTS = 1 << 27  # of [heads, block, keys]


class Index(NamedTuple):
    """What scores are made of: queries [S, B, I, F], keys [K, B, F], and the weights of heads [S, B, I] with all their factors."""

    q_SBIF: Tensor
    k_KBF: Tensor
    weights_SBI: Tensor


@dataclass(frozen=True)
class Teacher:
    """The attention that the index learns from.

    sum_over_ranks: adds up [B, S, K] over the ranks that hold the other heads, in place. selected_only: over the chosen keys.
    """

    q_SBND: Tensor
    k_KBND: Tensor
    scale: float
    sum_over_ranks: Callable[[Tensor], Tensor]
    selected_only: bool = False


class Lesson(NamedTuple):
    """loss: the divergences of all S * B queries, added up; its gradient of the index' inputs, fp32 or wider."""

    loss: Tensor
    grads: Index


@torch.no_grad()
def choose_keys(index: Index, rule: Rule, runs: tuple[Run, ...], topk: int | None, relu: bool = True,
                teacher: Teacher | None = None) -> tuple[Selection | None, Lesson | None]:
    """Choose the keys of every query, and learn from the teacher if there is one.

    runs: where the S queries stand in the sequence. topk: None: no choice, every visible key counts. relu: of the scores of heads.
    Returns: the choice or None, the lesson or None.
    """
    index = Index(*(_wide(x).transpose(0, 1) for x in index))
    length = index.k_KBF.shape[1]
    bits, lesson = [], None if teacher is None else _Lesson(index, teacher, relu)
    for queries, rows in _blocks(runs, _block_rows(index, length, teacher)):
        keys = rule.clip(queries, Run(0, length))
        hidden = rule.hidden(queries, keys, index.k_KBF.device)
        heads_BSIK = _heads(index, rows, keys, relu)
        scores_BSK = torch.matmul(index.weights_SBI[:, rows].unsqueeze(2), heads_BSIK).squeeze(2)
        if hidden is not None:
            scores_BSK.masked_fill_(hidden[:, 0], float("-inf"))
        chosen_BSK = None if topk is None else best(scores_BSK, topk)
        if chosen_BSK is not None:
            whole = torch.zeros(*scores_BSK.shape[:2], length, dtype=torch.bool, device=scores_BSK.device)
            whole[:, :, keys.start:keys.stop] = chosen_BSK
            bits.append(Selection.pack(whole))
        if lesson is not None:
            lesson.learn(rows, keys, heads_BSIK, scores_BSK, hidden, chosen_BSK)
    selection = None if topk is None else Selection(torch.cat(bits, 1), runs)
    return selection, None if lesson is None else lesson.whole()


def best(scores_BSK: Tensor, topk: int) -> Tensor:
    """The `topk` largest scores of every row, or all above -inf where these are fewer; of equal ones the first. Bool [B, S, K]."""
    visible = scores_BSK > float("-inf")
    if topk >= scores_BSK.shape[-1]:
        return visible
    least = scores_BSK.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores_BSK > least, scores_BSK == least
    left = topk - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= left))) & visible


class _Lesson:
    """Gathers the loss and its gradients, block by block."""

    def __init__(self, index: Index, teacher: Teacher, relu: bool):
        self._index, self._teacher, self._relu = index, teacher, relu
        self._q, self._k = (_wide(x).permute(1, 2, 0, 3) for x in (teacher.q_SBND, teacher.k_KBND))
        self._loss = index.k_KBF.new_zeros(())
        self._grads = Index(*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in index))

    def learn(self, rows: slice, keys: Run, heads_BSIK: Tensor, scores_BSK: Tensor, hidden: Tensor | None, chosen_BSK: Tensor | None) -> None:
        """Add the queries of one block. heads: scores of single heads, without weights."""
        if self._teacher.selected_only and chosen_BSK is not None:
            hidden = ~chosen_BSK.unsqueeze(1)
            scores_BSK = scores_BSK.masked_fill(~chosen_BSK, float("-inf"))
        target = self._target(rows, keys, hidden)
        found = torch.softmax(scores_BSK, -1)
        self._loss += (target * ((target + EPSILON).log() - (found + EPSILON).log())).sum()
        slope = -target / (found + EPSILON)
        grad_BSK = found * (slope - (slope * found).sum(-1, keepdim=True))
        self._spread(rows, keys, heads_BSIK, grad_BSK)

    def _target(self, rows: slice, keys: Run, hidden: Tensor | None) -> Tensor:
        """What all heads of all ranks attend to together, [B, S, K]; rows sum to one."""
        logits = torch.matmul(self._q[:, :, rows], self._k[:, :, keys.start:keys.stop].transpose(2, 3)).mul_(self._teacher.scale)
        if hidden is not None:
            logits.masked_fill_(hidden, float("-inf"))
        together = self._teacher.sum_over_ranks(torch.softmax(logits, -1).sum(1))
        return together / together.sum(-1, keepdim=True)

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


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _block_rows(index: Index, length: int, teacher: Teacher | None) -> int:
    """Queries that are looked at together."""
    if index.k_KBF.device.type != "cuda":
        return QUERY_BLOCK
    heads = max(index.q_SBIF.shape[2], 0 if teacher is None else teacher.q_SBND.shape[2])
    return min(QUERY_BLOCK_CUDA, max(1, CUDA_ELEMENTS // (heads * length * index.k_KBF.shape[0])))


def _blocks(runs: tuple[Run, ...], size: int) -> Iterator[tuple[Run, slice]]:
    """Queries with their rows in a rank's tensors."""
    before = 0
    for run in runs:
        for start in range(run.start, run.stop, size):
            block = Run(start, min(start + size, run.stop))
            yield block, slice(before + block.start - run.start, before + block.stop - run.start)
        before += run.size
