"""The state-space part of a Mamba-2 layer: convolution, chunked scan, skip, gated normalization.

Of every head, S[t] = exp(dt[t] A) S[t - 1] + dt[t] b[t] x[t]^T and y[t] = c[t]^T S[t] + D x[t], with A = -exp(a_log)
and dt = softplus(. + dt_bias). The heads of a group share b and c. Within a chunk this is masked attention (its dual
form), between chunks the state is carried, as in gated_delta_rule.py. All is computed in fp32 (fp64 for fp64). Forward
saves its inputs only; backward computes it again.

Source: arXiv 2405.21060; the order of gate and norm is that of Megatron-Core and Nemotron-H (gate, then norm).
Shapes: S sequence, B microbatch, I inner channels, C channels of the convolution, H heads, P channels of a head, G
groups, N channels of the state, W width of the convolution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.block_sizes import DELTA_CHUNK as CHUNK
from moe_trainer.ops.gated_delta_rule import ChunkBorders, causal_convolution, chunked

NORM_EPS = 1e-5
"""Of the gated norm, whatever --norm-epsilon says, as in Megatron-Core."""


@dataclass(frozen=True)
class StateSpaceSizes:
    """Numbers and widths of the heads and groups of a rank: H, G, P, N, and the limits of their step sizes."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        """Channels of all heads, I."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of x, b and c, which pass the convolution."""
        return self.inner, self.groups * self.state_dim, self.groups * self.state_dim


def scan(
    x_SBHP: Tensor,
    dt_SBH: Tensor,
    rate_H: Tensor,
    b_SBGN: Tensor,
    c_SBGN: Tensor,
    state: Tensor | None = None,
    ids_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence without its skip, from a state [B, G, H / G, N, P] or an empty one. Differentiable.

    Args:
        dt_SBH: step sizes; 0 leaves the state as it is.
        rate_H: A, negative.
        ids_BS: packed documents, which start with an empty state; only without a state.

    Returns:
        y_SBHP, and the state after the last position.
    """
    length, groups = x_SBHP.shape[0], b_SBGN.shape[2]
    size = min(CHUNK, length)
    pad, heads = -length % size, (groups, x_SBHP.shape[2] // groups)
    x = chunked(x_SBHP * dt_SBH.unsqueeze(-1), pad, size, heads)
    b, c = (chunked(each, pad, size, (groups, 1)) for each in (b_SBGN, c_SBGN))
    total = chunked(dt_SBH * rate_H, pad, size, heads).cumsum(-1)
    # the decay between two positions, at most one; what is above the diagonal would be more
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp(max=0.0).exp().tril()
    before, after, carried = total.exp(), (total[..., -1:] - total).exp(), total[..., -1:, None].exp()
    if ids_BS is not None:
        borders = ChunkBorders.of(ids_BS, ids_BS[:, 0], pad, size)
        pairs, before, after, carried = (
            pairs * borders.pairs,
            before * borders.before,
            after * borders.after,
            carried * borders.carried,
        )
    inside = ((c @ b.mT) * pairs) @ x
    read, written = c * before.unsqueeze(-1), (b * after.unsqueeze(-1)).mT @ x
    # unbind, not indexing: the gradient of every indexed chunk would have the size of the full tensor
    chunks = list(zip(*(each.unbind(3) for each in (inside, read, written, carried))))
    outputs = []
    if state is None:
        inside_m, _, state, _ = chunks.pop(0)
        outputs.append(inside_m)
    for inside_m, read_m, written_m, carried_m in chunks:
        outputs.append(inside_m + read_m @ state)
        state = carried_m * state + written_m
    y = torch.stack(outputs, 3).flatten(3, 4)[:, :, :, :length]
    return y.flatten(1, 2).permute(2, 0, 1, 3), state


class StateSpaceParams(NamedTuple):
    """Parameters of the local heads.

    Attributes:
        weight_CW, bias_C: of the convolution.
        a_log_H, dt_bias_H, skip_H: of the heads.
        gain_I: of the norm, which is over the channels of a group.
    """

    weight_CW: Tensor
    bias_C: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor
    skip_H: Tensor
    gain_I: Tensor


def _mix(
    tensors: Sequence[Tensor],
    sizes: StateSpaceSizes,
    ids_BS: Tensor | None,
    state: Tensor | None = None,
    halo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return y_SBI and the state after the last position.

    Args:
        tensors: z_SBI, x_SBC, dt_SBH and the parameters; x starts `halo` positions early, for the convolution.
    """
    z_SBI, x_SBC, dt_SBH, *params = tensors
    weight_CW, bias_C, a_log_H, dt_bias_H, skip_H, gain_I = StateSpaceParams(*params)
    x_SBC = causal_convolution(x_SBC, weight_CW, ids_BS, bias_C)[halo:]
    x, b, c = x_SBC.split(sizes.channels, -1)
    x = x.unflatten(-1, (sizes.heads, sizes.head_dim))
    groups = (sizes.groups, sizes.state_dim)
    y, state = scan(
        x,
        _step_sizes(dt_SBH + dt_bias_H, *sizes.step_limits),
        -a_log_H.exp(),
        b.unflatten(-1, groups),
        c.unflatten(-1, groups),
        state,
        ids_BS,
    )
    y = (y + skip_H.unsqueeze(-1) * x).flatten(2) * F.silu(z_SBI)
    y = y.unflatten(-1, (sizes.groups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)).flatten(2)
    return y * gain_I, state


def _step_sizes(raw_SBH: Tensor, low: float, high: float) -> Tensor:
    steps_SBH = F.softplus(raw_SBH)
    if low <= 0.0 and high == math.inf:
        return steps_SBH
    # padding, whose input is minus infinity, stays without a step
    return steps_SBH.clamp(low, high).masked_fill(raw_SBH == -math.inf, 0.0)


def _widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in fp32, or fp64 if the first is."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [each.detach().to(wide) for each in tensors]


class _StateSpace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *tensors, sizes, ids_BS = inputs
        ctx.save_for_backward(*tensors)
        ctx.rest = sizes, ids_BS
        return _mix(_widen(tensors), sizes, ids_BS)[0].to(tensors[0].dtype)

    @staticmethod
    def backward(ctx, grad_SBI):
        tensors = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [each.requires_grad_() for each in _widen(tensors)]
            y_SBI, _ = _mix(leaves, *ctx.rest)
        grads = torch.autograd.grad(y_SBI, leaves, grad_SBI.to(y_SBI.dtype))
        return *(grad.to(each.dtype) for grad, each in zip(grads, tensors)), None, None


def state_space(
    z_SBI: Tensor,
    x_SBC: Tensor,
    dt_SBH: Tensor,
    params: StateSpaceParams,
    sizes: StateSpaceSizes,
    ids_BS: Tensor | None = None,
) -> Tensor:
    """Apply convolution, scan, skip, gate and norm to a full sequence; return y_SBI in the dtype of z.

    Args:
        z_SBI: the gate before its SiLU.
        x_SBC: x, b and c before the convolution.
        dt_SBH: step sizes before the softplus.
        ids_BS: packed documents.
    """
    return _StateSpace.apply(z_SBI, x_SBC, dt_SBH, *params, sizes, ids_BS)


@torch.no_grad()
def continue_state_space(
    z_SBI: Tensor,
    x_SBC: Tensor,
    dt_SBH: Tensor,
    params: StateSpaceParams,
    sizes: StateSpaceSizes,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply state_space from a state (see scan) on; return y_SBI, and the state after the last position.

    Args:
        x_SBC: starts W - 1 positions early, with what the convolution reads of earlier positions.
        dt_SBH: minus infinity at padding, which then leaves the state as it is.
    """
    wide = _widen((z_SBI, x_SBC, dt_SBH, *params))
    y_SBI, after = _mix(wide, sizes, None, state, params.weight_CW.shape[1] - 1)
    return y_SBI.to(z_SBI.dtype), after
