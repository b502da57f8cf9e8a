"""The core of linear attention: short causal convolution, gates, and the gated delta rule in chunks.

A head's state maps keys to values: S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  y = S^T q. The decay exp(g) is a
number of a head (gated DeltaNet), or of each of its key channels (Kimi-Linear). Inside a chunk of CHUNK
positions the corrections solve one unit triangular system (arXiv 2412.06464, section 3.3), so all but one step per
chunk are matmuls. Everything is fp32 or wider. Saved for backward: the inputs and the state before every segment of
SEGMENT chunks; backward recomputes segment by segment. At a document's first position the state is empty. Kernels and
formulas: docs/design/gated_delta_rule.md.

Shapes: S sequence, B batch, C channels (queries, keys, values), W convolution width, K key heads, N value heads (each
key head serves N / K consecutive ones), D and E widths of a key and a value, A = N or N D decays; in chunks M chunks of
L positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.block_sizes import DELTA_CHUNK as CHUNK
from moe_trainer.ops.block_sizes import DELTA_SEGMENT as SEGMENT

LENGTH_EPS = 1e-6
BLOCK = 16
"""Positions whose decays by channel are compared one by one (_decayed_products)."""


@dataclass(frozen=True)
class Heads:
    """Numbers and widths of the heads: K, N, D, E.

    Attributes:
        decays: decays of a value head, 1 or D.
        lower_bound: of the decays' logarithms g, which are then a sigmoid; None: they have none.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    decays: int = 1
    lower_bound: float | None = None

    @property
    def channels(self) -> tuple[int, int, int]:
        """Number of channels of queries, keys and values."""
        return self.keys * self.key_dim, self.keys * self.key_dim, self.values * self.value_dim


def causal_convolution(
    x_SBC: Tensor,
    weight_CW: Tensor,
    ids_BS: Tensor | None = None,
    bias_C: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] | None = F.silu,
) -> Tensor:
    """Return the activation of y[t] = bias + sum over w of weight[:, w] x[t - W + 1 + w], within a document."""
    activate = activation or (lambda y: y)
    width, length = weight_CW.shape[1], x_SBC.shape[0]
    if x_SBC.is_cuda and ids_BS is None:
        x_BCS = x_SBC.permute(1, 2, 0).contiguous()
        y_BCS = F.conv1d(x_BCS, weight_CW.unsqueeze(1), bias_C, padding=width - 1, groups=len(weight_CW))[..., :length]
        return activate(y_BCS.permute(2, 0, 1))
    y = x_SBC * weight_CW[:, -1]
    for back in range(1, min(width, length)):
        term = x_SBC[:-back] * weight_CW[:, width - 1 - back]
        if ids_BS is not None:
            term = term * (ids_BS[:, back:] == ids_BS[:, :-back]).t().unsqueeze(-1)
        y = y + F.pad(term, (0, 0, 0, 0, back, 0))
    return activate(y if bias_C is None else y + bias_C)


def _unit(x: Tensor) -> Tensor:
    """Scale rows to length one."""
    if x.is_cuda:  # in one kernel: the mean of squares is their sum over the width
        return F.rms_norm(x, x.shape[-1:], None, LENGTH_EPS / x.shape[-1]) * x.shape[-1] ** -0.5
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def chunked(x: Tensor, pad: int, size: int, heads: tuple[int, ...]) -> Tensor:
    """Reshape [S, B, heads, ...] to [B, *heads, M, L, ...], padded with zeros."""
    if pad:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, pad))
    x = x.unflatten(2, heads).unflatten(0, (-1, size))
    dims = len(heads)
    return x.permute(2, *range(3, 3 + dims), 0, 1, *range(3 + dims, x.dim()))


@dataclass(frozen=True)
class ChunkBorders:
    """Factors of a chunk that document boundaries leave nonzero.

    Attributes:
        pairs: [B, 1, 1, M, L, L], positions of one document.
        before: [B, 1, 1, M, L], the position's document is that before the chunk.
        after: [B, 1, 1, M, L], it is that of the chunk's last position.
        carried: [B, 1, 1, M, 1, 1], the document before the chunk continues after it.
    """

    pairs: Tensor
    before: Tensor
    after: Tensor
    carried: Tensor

    @staticmethod
    def of(ids_BS: Tensor, previous_B: Tensor, pad: int, size: int) -> "ChunkBorders":
        ids = torch.cat([ids_BS, ids_BS[:, -1:].expand(-1, pad)], 1).unflatten(1, (-1, size))[:, None, None]
        last = ids[..., -1:]
        previous = torch.cat([previous_B[:, None, None, None, None], last[..., :-1, :]], -2)
        return ChunkBorders(
            ids.unsqueeze(-1) == ids.unsqueeze(-2), ids == previous, ids == last, (last == previous).unsqueeze(-1)
        )


def _decayed_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over channels of q[i] k[j] exp(total[i] - total[j]) for j up to i, and those of k[i] k[j].

    exp(total) and exp(-total) alone may be zero and infinite. Between blocks of BLOCK positions the factors are
    exp(total[i] - total[first]) and exp(total[first] - total[j]), at most one each (arXiv 2312.06635, section 4.3).

    Args:
        total: [..., L, D], the sums of g up to a position.
    """
    both, rows, length = torch.stack(torch.broadcast_tensors(q, k), -2), [], k.shape[-2]
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        read, mine, first = both[..., start:stop, :, :], total[..., start:stop, :], total[..., start : start + 1, :]
        within = (mine.unsqueeze(-2) - mine.unsqueeze(-3)).clamp(max=0.0).exp() * k[..., None, start:stop, :]
        earlier = k[..., :start, :] * (first - total[..., :start, :]).exp()
        decayed = read * (mine - first).exp().unsqueeze(-2)
        before = (decayed.flatten(-3, -2) @ earlier.mT).unflatten(-2, (-1, 2))
        rows.append(F.pad(torch.cat([before, read @ within.mT], -1), (0, length - stop)))
    scores, system = torch.cat(rows, -3).unbind(-2)
    return scores.tril(), system.tril()


def delta_rule(
    q_SBKD: Tensor,
    k_SBKD: Tensor,
    v_SBNE: Tensor,
    g: Tensor,
    beta_SBN: Tensor,
    state: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule from a state [B, K, N / K, D, E], or an empty one. Differentiable.

    Args:
        g: [S, B, N], or [S, B, N, D] of the channels of keys.
        documents: ids_BS of packed documents, and [B], that of the position before the first.

    Returns:
        y_SBNE, and the state after the last position.
    """
    length, _, keys, key_dim = q_SBKD.shape
    size = min(CHUNK, length)
    pad = -length % size
    shared = (keys, v_SBNE.shape[2] // keys)
    q, k = (chunked(_unit(x), pad, size, (keys, 1)) for x in (q_SBKD, k_SBKD))
    v, g, beta = (chunked(x, pad, size, shared) for x in (v_SBNE, g if g.dim() == 4 else g.unsqueeze(-1), beta_SBN))
    q, beta = q * key_dim**-0.5, beta.unsqueeze(-1)
    total = g.cumsum(-2)
    before, after, carried = total.exp(), (total[..., -1:, :] - total).exp(), total[..., -1, :, None].exp()
    if g.shape[-1] == 1:
        # the decay between two positions, at most one; what is above the diagonal would be more
        pairs = (total - total.mT).clamp(max=0.0).exp().tril()
        scores, system = (q @ k.mT) * pairs, (k @ k.mT) * pairs
    else:
        scores, system = _decayed_products(q, k, total)
    if documents is not None:
        borders = ChunkBorders.of(*documents, pad, size)
        scores, system = scores * borders.pairs, system * borders.pairs
        before, after = before * borders.before.unsqueeze(-1), after * borders.after.unsqueeze(-1)
        carried = carried * borders.carried
    solved = torch.linalg.solve_triangular(
        beta * system, torch.cat([beta * v, beta * before * k], -1), upper=False, unitriangular=True
    )
    values, read_keys = solved.split([v.shape[-1], key_dim], -1)
    q, written = q * before, (k * after).mT
    # unbind, not indexing: the gradient of every indexed chunk would have the size of the full tensor
    chunks = list(zip(*(x.unbind(-3) for x in (values, read_keys, q, scores, written, carried))))
    outputs = []
    if state is None:
        values_m, _, _, scores_m, written_m, _ = chunks.pop(0)
        outputs.append(scores_m @ values_m)
        state = written_m @ values_m
    for values_m, read_m, q_m, scores_m, written_m, carried_m in chunks:
        corrected = values_m - read_m @ state
        outputs.append(q_m @ state + scores_m @ corrected)
        state = carried_m * state + written_m @ corrected
    y = torch.stack(outputs, 3).flatten(3, 4)[:, :, :, :length]
    return y.flatten(1, 2).permute(2, 0, 1, 3), state


class _Inputs(NamedTuple):
    """Tensors of the gated delta rule; see `gated_delta`."""

    x_SBC: Tensor
    beta_SBN: Tensor
    alpha_SBA: Tensor
    weight_CW: Tensor
    a_log_N: Tensor
    dt_bias_A: Tensor

    def segment(self, start: int, halo: int, wide: torch.dtype) -> "_Inputs":
        """Return the inputs of the segment that starts at a position, in a wide dtype; x starts `halo` before it."""
        stop = start + CHUNK * SEGMENT
        own = (self.x_SBC[start - halo : stop], self.beta_SBN[start:stop], self.alpha_SBA[start:stop], *self[3:])
        return _Inputs(*(x.to(wide) for x in own))


def _segment(
    inputs: _Inputs, state: Tensor | None, heads: Heads, halo: int, ids_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (y, final state) of one segment; x and ids start `halo` positions early, for the convolution."""
    x_SBC, beta_SBN, alpha_SBA, weight_CW, a_log_N, dt_bias_A = inputs
    x_SBC = causal_convolution(x_SBC, weight_CW, ids_BS)[halo:]
    q, k, v = x_SBC.split(heads.channels, -1)
    steps, rate_N1 = (alpha_SBA + dt_bias_A).unflatten(-1, (heads.values, heads.decays)), a_log_N.exp().unsqueeze(-1)
    if heads.lower_bound is None:
        g = -rate_N1 * F.softplus(steps)
    else:
        g = heads.lower_bound * (rate_N1 * steps).sigmoid()
    keys = (heads.keys, heads.key_dim)
    documents = None if ids_BS is None else (ids_BS[:, halo:], ids_BS[:, max(halo - 1, 0)])
    return delta_rule(
        q.unflatten(-1, keys),
        k.unflatten(-1, keys),
        v.unflatten(-1, (heads.values, heads.value_dim)),
        g,
        beta_SBN.sigmoid(),
        state,
        documents,
    )


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBC, beta_SBN, alpha_SBA, weight_CW, a_log_N, dt_bias_A, heads, ids_BS):
        wide, outputs, state = torch.promote_types(x_SBC.dtype, torch.float32), [], None
        states: list[Tensor] = []
        tensors = _Inputs(x_SBC, beta_SBN, alpha_SBA, weight_CW, a_log_N, dt_bias_A)
        for start in range(0, x_SBC.shape[0], CHUNK * SEGMENT):
            if state is not None:
                states.append(state)
            halo, ids = _halo(start, weight_CW, ids_BS)
            y, state = _segment(tensors.segment(start, halo, wide), state, heads, halo, ids)
            outputs.append(y.to(x_SBC.dtype))
        ctx.save_for_backward(*tensors, *states)
        ctx.rest = heads, ids_BS, wide
        return torch.cat(outputs) if states else outputs[0]

    @staticmethod
    def backward(ctx, grad_SBNE):
        heads, ids_BS, wide = ctx.rest
        saved = ctx.saved_tensors  # asked for once: a recomputed region gives them once
        tensors, states = _Inputs(*saved[:6]), saved[6:]
        sums: list[Tensor] = []
        grad_state = None
        for number in reversed(range(len(states) + 1)):
            start = number * CHUNK * SEGMENT
            halo, ids = _halo(start, tensors.weight_CW, ids_BS)
            first = start - halo
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in tensors.segment(start, halo, wide)]
                if number:
                    leaves.append(states[number - 1].detach().requires_grad_())
                y, after = _segment(_Inputs(*leaves[:6]), leaves[6] if number else None, heads, halo, ids)
            outs = [(y, grad_SBNE[start : start + y.shape[0]].to(wide))] + (
                [] if grad_state is None else [(after, grad_state)]
            )
            grads = torch.autograd.grad([out for out, _ in outs], leaves, [grad for _, grad in outs])
            if not states:
                sums = list(grads)
                break
            sums = sums or [torch.zeros(x.shape, dtype=wide, device=x.device) for x in tensors]
            sums[0][first : first + len(grads[0])] += grads[0]
            for total, grad in zip(sums[1:3], grads[1:3]):
                total[start : start + len(grad)] = grad
            for total, grad in zip(sums[3:], grads[3:6]):
                total += grad
            grad_state = grads[6] if number else None
        return *(total.to(x.dtype) for total, x in zip(sums, tensors)), None, None


def _halo(start: int, weight_CW: Tensor, ids_BS: Tensor | None) -> tuple[int, Tensor | None]:
    """Return how many positions the convolution of a segment reads before it, and the segment's ids with theirs."""
    halo = min(weight_CW.shape[1] - 1, start)
    return halo, None if ids_BS is None else ids_BS[:, start - halo : start + CHUNK * SEGMENT]


@torch.no_grad()
def continue_gated_delta(
    x_SBC: Tensor,
    beta_SBN: Tensor,
    alpha_SBA: Tensor,
    weight_CW: Tensor,
    a_log_N: Tensor,
    dt_bias_A: Tensor,
    heads: Heads,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply gated_delta from a state (see delta_rule) on; return y_SBNE, and the state after the last position.

    Args:
        x_SBC: starts W - 1 positions early, with what the convolution reads of earlier positions.
    """
    halo, wide = weight_CW.shape[1] - 1, torch.promote_types(x_SBC.dtype, torch.float32)

    def segment(start: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        stop = start + CHUNK * SEGMENT
        tensors = (x_SBC[start : stop + halo], beta_SBN[start:stop], alpha_SBA[start:stop], weight_CW)
        inputs = _Inputs(*(x.to(wide) for x in (*tensors, a_log_N, dt_bias_A)))
        y, state = _segment(inputs, state, heads, halo, None)
        return y.to(x_SBC.dtype), state

    y, after = segment(0, state)
    outputs = [y]
    for start in range(CHUNK * SEGMENT, beta_SBN.shape[0], CHUNK * SEGMENT):
        y, after = segment(start, after)
        outputs.append(y)
    return torch.cat(outputs), after


def gated_delta(
    x_SBC: Tensor,
    beta_SBN: Tensor,
    alpha_SBA: Tensor,
    weight_CW: Tensor,
    a_log_N: Tensor,
    dt_bias_A: Tensor,
    heads: Heads,
    ids_BS: Tensor | None = None,
) -> Tensor:
    """Apply convolution, gates and delta rule to a full sequence; return y_SBNE in the dtype of x.

    Args:
        x_SBC: queries, keys and values before the convolution.
        beta_SBN, alpha_SBA: before the sigmoid and the softplus; g = -exp(a_log) softplus(alpha + dt_bias),
            or heads.lower_bound sigmoid(exp(a_log) (alpha + dt_bias)).
        ids_BS: packed documents.
    """
    return _GatedDelta.apply(x_SBC, beta_SBN, alpha_SBA, weight_CW, a_log_N, dt_bias_A, heads, ids_BS)
