"""Attention to a window of recent keys and to keys that stand for whole windows of tokens (DeepSeek-V4).

One head of keys, which are the values too, serves all query heads. A pooled key is the softmax-weighted sum of the keys
of `ratio` tokens; a query sees it once all of them are in its past.

Shapes: S positions, B sequences, N heads, D channels, R tokens of a pooled key, T = S // R pooled keys, K keys of a
block of queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pool_windows(kv_SBW: Tensor, gate_SBW: Tensor, bias_RW: Tensor, overlapping: bool) -> Tensor:
    """Return one key per window of R tokens, [T, B, D]; tokens after the last full window are left out.

    Args:
        kv_SBW, gate_SBW: keys and the logits of their weights, W = D, or 2 D for overlapping windows: a token has one
            key for the window after its own, then one for its own.
        bias_RW: added to the logits, by place in the window.
    """
    windows = kv_SBW.shape[0] // len(bias_RW)
    kv, gate = (x[: windows * len(bias_RW)].unflatten(0, (windows, len(bias_RW))) for x in (kv_SBW, gate_SBW))
    gate = gate + bias_RW.unsqueeze(1)
    if overlapping:
        kv, gate = _with_previous(kv, 0.0), _with_previous(gate, float("-inf"))
    weights = gate.softmax(1, dtype=torch.promote_types(gate.dtype, torch.float32)).to(kv.dtype)
    return (kv * weights).sum(1)


def _with_previous(x_TRBW: Tensor, fill: float) -> Tensor:
    """Return [T, 2 R, B, D]: the first halves of the window before, then the second halves of the window."""
    before, own = x_TRBW.chunk(2, dim=-1)
    first = before.new_full(before[:1].shape, fill)
    return torch.cat([torch.cat([first, before[:-1]]), own], dim=1)


def select_pooled(
    q_SBIF: Tensor, k_TBF: Tensor, weights_SBI: Tensor, ratio: int, topk: int, relu: bool, block: int = 512
) -> Tensor | None:
    """Return which pooled keys each query may attend to, bool [S, B, T]; None if it may attend to all in its past.

    Args:
        q_SBIF, k_TBF, weights_SBI: the indexer's queries, keys and head weights.
        relu: applied to the scores of heads.
        block: queries whose scores exist at a time.
    """
    if len(k_TBF) <= topk:
        return None
    selected = []
    for first in range(0, len(q_SBIF), block):
        q, weights = q_SBIF[first : first + block], weights_SBI[first : first + block]
        scores = torch.einsum("sbif,tbf->sbit", q.to(weights.dtype), k_TBF.to(weights.dtype))
        scores = torch.einsum("sbit,sbi->sbt", scores.relu() if relu else scores, weights)
        scores = scores.masked_fill(~_is_past(first, len(q), len(k_TBF), ratio, q.device), float("-inf"))
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        selected.append(chosen.scatter_(-1, scores.topk(topk, dim=-1).indices, True))
    return torch.cat(selected)


def _is_past(first: int, queries: int, keys: int, ratio: int, device: torch.device) -> Tensor:
    """Return which of the first pooled keys lie in the past of queries, bool [queries, 1, keys]."""
    complete = (torch.arange(first, first + queries, device=device) + 1) // ratio
    return torch.arange(keys, device=device) < complete.view(-1, 1, 1)


class _Block:
    """The keys that a block of queries may see: slices of the keys and of the pooled keys."""

    def __init__(self, first: int, size: int, length: int, window: int, ratio: int, num_pooled: int):
        self.queries = slice(first, min(first + size, length))
        self.window, self.ratio = window, ratio
        self.near = slice(max(0, first - window + 1), self.queries.stop)
        self.pooled = slice(0, min(num_pooled, self.queries.stop // ratio) if num_pooled else 0)

    def mask(self, selected_SBT: Tensor | None, device: torch.device) -> Tensor:
        """Return the visible keys, bool [S, B or 1, K]."""
        distance = torch.arange(self.queries.start, self.queries.stop, device=device).unsqueeze(1)
        distance = distance - torch.arange(self.near.start, self.near.stop, device=device)
        near = ((distance >= 0) & (distance < self.window)).unsqueeze(1)
        if not self.pooled.stop:
            return near
        past = _is_past(self.queries.start, len(near), self.pooled.stop, self.ratio, device)
        if selected_SBT is not None:
            past = past & selected_SBT[self.queries, :, self.pooled]
        return torch.cat([near.expand(-1, past.shape[1], -1), past], dim=-1)


def _attend(q_SBND: Tensor, keys_KBD: Tensor, sink_N: Tensor, scale: float, mask_SBK: Tensor) -> Tensor:
    """Return the attention of one block, [S, B, N, D]; sums and the softmax are fp32 or wider."""
    scores = torch.einsum("sbnd,kbd->sbnk", q_SBND, keys_KBD)
    scores = scores.to(sink_N.dtype) * scale
    scores = scores.masked_fill(~mask_SBK.unsqueeze(2), float("-inf"))
    log_sum = torch.logaddexp(scores.logsumexp(-1), sink_N).unsqueeze(-1)
    return torch.einsum("sbnk,kbd->sbnd", (scores - log_sum).exp().to(keys_KBD.dtype), keys_KBD)


class _CompressedAttention(torch.autograd.Function):
    """Attention block by block; backward computes each block again, so that no scores are saved."""

    @staticmethod
    def forward(ctx, q_SBND, kv_SBD, pooled_TBD, sink_N, selected_SBT, scale: float, blocks: Sequence[_Block]):
        ctx.save_for_backward(q_SBND, kv_SBD, pooled_TBD, sink_N, selected_SBT)
        ctx.scale, ctx.blocks = scale, blocks
        out = torch.empty_like(q_SBND)
        for each in blocks:
            keys = torch.cat([kv_SBD[each.near], pooled_TBD[each.pooled]])
            mask = each.mask(selected_SBT, q_SBND.device)
            out[each.queries] = _attend(q_SBND[each.queries], keys, sink_N, scale, mask)
        return out

    @staticmethod
    def backward(ctx, grad_SBND):
        q_SBND, kv_SBD, pooled_TBD, sink_N, selected_SBT = ctx.saved_tensors
        grad_q = torch.empty_like(q_SBND)
        grad_kv, grad_pooled, grad_sink = (
            torch.zeros_like(x, dtype=sink_N.dtype) for x in (kv_SBD, pooled_TBD, sink_N)
        )
        for each in ctx.blocks:
            inputs = (q_SBND[each.queries], torch.cat([kv_SBD[each.near], pooled_TBD[each.pooled]]), sink_N)
            with torch.enable_grad():
                q, keys, sink = (x.detach().requires_grad_() for x in inputs)
                out = _attend(q, keys, sink, ctx.scale, each.mask(selected_SBT, q_SBND.device))
            of_q, of_keys, of_sink = torch.autograd.grad(out, (q, keys, sink), grad_SBND[each.queries])
            grad_q[each.queries] = of_q
            num_near = each.near.stop - each.near.start
            grad_kv[each.near] += of_keys[:num_near]
            grad_pooled[each.pooled] += of_keys[num_near:]
            grad_sink += of_sink
        return grad_q, grad_kv.to(kv_SBD.dtype), grad_pooled.to(pooled_TBD.dtype), grad_sink, None, None, None


def compressed_attention(
    q_SBND: Tensor,
    kv_SBD: Tensor,
    pooled_TBD: Tensor,
    sink_N: Tensor,
    selected_SBT: Tensor | None,
    *,
    scale: float,
    window: int,
    ratio: int,
    block: int | None = None,
) -> Tensor:
    """Return attention to the last `window` keys and to the pooled keys of the past, [S, B, N, D].

    Args:
        pooled_TBD: T may be 0.
        sink_N: score of every head's extra key, whose value is zero; fp32 or wider.
        selected_SBT: see `select_pooled`; no gradient.
        ratio: tokens of a pooled key.
        block: queries that are computed together; the window's length, or 128 if that is more, by default.
    """
    block, length = block or max(window, 128), len(q_SBND)
    blocks = [_Block(first, block, length, window, ratio, len(pooled_TBD)) for first in range(0, length, block)]
    return _CompressedAttention.apply(q_SBND, kv_SBD, pooled_TBD, sink_N, selected_SBT, scale, blocks)
