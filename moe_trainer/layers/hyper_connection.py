"""Manifold-constrained hyper-connections: several residual streams, mixed by learned weights of every token.

A sublayer reads a weighted sum of the streams. Its output is added to every stream with another weight, and the streams
are mixed by a doubly stochastic matrix, so that their norm does not grow with depth. Before the final norm one more
weighted sum makes the model's output.

Sources: arXiv 2512.24880; DeepSeek-V4 and Megatron-Core's dev branch (--enable-hyper-connections). Everything but the
streams is computed in fp32.

Shape letters: S sequence, B microbatch, N streams, H hidden, M = N*N + 2*N weights of a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.init import make_parameter
from moe_trainer.parallel.params import ParamInfo

EPS = 1e-6


def _sinkhorn(logits_SBNN: Tensor, iterations: int) -> Tensor:
    mixing_SBNN = logits_SBNN.softmax(-1) + EPS
    for iteration in range(iterations):
        if iteration:
            mixing_SBNN = mixing_SBNN / (mixing_SBNN.sum(-1, keepdim=True) + EPS)
        mixing_SBNN = mixing_SBNN / (mixing_SBNN.sum(-2, keepdim=True) + EPS)
    return mixing_SBNN


class _DoublyStochastic(torch.autograd.Function):
    """Sinkhorn's normalization of rows and columns; backward runs it again instead of saving every iteration."""

    @staticmethod
    def forward(ctx, logits_SBNN: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(logits_SBNN)
        ctx.iterations = iterations
        return _sinkhorn(logits_SBNN, iterations)

    @staticmethod
    def backward(ctx, grad_SBNN: Tensor):
        (logits_SBNN,) = ctx.saved_tensors
        with torch.enable_grad():
            logits_SBNN = logits_SBNN.detach().requires_grad_()
            mixing_SBNN = _sinkhorn(logits_SBNN, ctx.iterations)
        return torch.autograd.grad(mixing_SBNN, logits_SBNN, grad_SBNN)[0], None


def _normed_projection(x_SBNH: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the projection of the streams of a token, together normalized to mean square 1."""
    x = x_SBNH.flatten(2)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.linear(x, weight.to(x.dtype)) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def expand_streams(x_SBH: Tensor, num_streams: int) -> Tensor:
    """Return x in every stream [S, B, N*H]."""
    return x_SBH.repeat(1, 1, num_streams)


class HyperConnection(nn.Module):
    """The hyper-connection of one sublayer.

    Parameters, with Megatron-Core's names: mapping_proj.weight [M, N*H], bias [M]; alpha_pre, alpha_post and alpha_res
    [1].
    """

    def __init__(self, model: ModelArgs, *, name: str, partial: bool = False):
        """Create the hyper-connection `name`; `partial`: it sees a part of the tensor-parallel group's tokens."""
        super().__init__()
        self.num_streams, self.iterations = model.num_residual_streams, model.mhc_sinkhorn_iterations
        streams, self.eps = self.num_streams, model.layernorm_epsilon

        def param(leaf: str, *shape: int, init: str, value: float = 0.0) -> nn.Parameter:
            info = ParamInfo((f"{name}.{leaf}",), is_grad_partial=partial, init=init, init_value=value)
            return make_parameter(shape, info)

        numbers = streams * streams + 2 * streams
        projection = param("mapping_proj.weight", numbers, streams * model.hidden_size, init="xavier_uniform")
        self.mapping_proj = nn.ParameterDict({"weight": projection})
        self.bias = param("bias", numbers, init="zeros")
        factor = model.mhc_init_gating_factor
        self.alpha_pre = param("alpha_pre", 1, init="constant", value=factor)
        self.alpha_post = param("alpha_post", 1, init="constant", value=factor)
        self.alpha_res = param("alpha_res", 1, init="constant", value=factor)

    def forward(self, x_SBF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sublayer's input [S, B, H], and what `merge` needs, from the streams [S, B, N*H]."""
        streams = self.num_streams
        x_SBNH = x_SBF.unflatten(-1, (streams, -1))
        parts = (streams, streams, streams * streams)
        projected = _normed_projection(x_SBNH, self.mapping_proj["weight"], self.eps).split(parts, -1)
        biases = self.bias.to(projected[0].dtype).split(parts)
        alphas = (self.alpha_pre, self.alpha_post, self.alpha_res)
        pre, post, mixing = (part * alpha.to(part.dtype) + bias for part, alpha, bias in zip(projected, alphas, biases))
        pre_SB1N = (pre.sigmoid() + EPS).unsqueeze(-2)
        post_SBN1 = (2 * post.sigmoid()).unsqueeze(-1)
        mixing_SBNN = _DoublyStochastic.apply(mixing.unflatten(-1, (streams, streams)), self.iterations)
        x_SBH = (pre_SB1N.to(x_SBF.dtype) @ x_SBNH).squeeze(-2)
        return x_SBH, post_SBN1.to(x_SBF.dtype), mixing_SBNN.to(x_SBF.dtype)

    @staticmethod
    def spread(y_SBH: Tensor, post_SBN1: Tensor) -> Tensor:
        """Return what a sublayer's output adds to every stream [S, B, N*H]."""
        return (post_SBN1 * y_SBH.unsqueeze(-2)).flatten(-2)

    @staticmethod
    def mix(x_SBF: Tensor, mixing_SBNN: Tensor) -> Tensor:
        """Return the mixed streams; stream k is the sum over j of mixing[j, k] times stream j."""
        x_SBNH = x_SBF.unflatten(-1, (mixing_SBNN.shape[-1], -1))
        return (mixing_SBNN.transpose(-1, -2) @ x_SBNH).flatten(-2)


class StreamContraction(nn.Module):
    """The weighted sum of the streams before the final norm.

    Parameters: hc_head_fn [N, N*H], hc_head_base [N], hc_head_scale [1] of the decoder, as in Megatron-Core.
    """

    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter

    def __init__(self, model: ModelArgs, *, name: str, partial: bool = False):
        """Create the contraction of `name`; see HyperConnection."""
        super().__init__()
        streams = self.num_streams = model.num_residual_streams
        self.eps = model.layernorm_epsilon
        shapes = {"fn": (streams, streams * model.hidden_size), "base": (streams,), "scale": (1,)}
        inits = {"fn": "xavier_uniform", "base": "zeros", "scale": "ones"}
        for leaf, shape in shapes.items():
            info = ParamInfo((f"{name}.hc_head_{leaf}",), is_grad_partial=partial, init=inits[leaf])
            self.register_parameter(leaf, make_parameter(shape, info))

    def forward(self, x_SBF: Tensor) -> Tensor:
        """Return [S, B, H] from [S, B, N*H]."""
        x_SBNH = x_SBF.unflatten(-1, (self.num_streams, -1))
        projected_SBN = _normed_projection(x_SBNH, self.fn, self.eps)
        weights = (projected_SBN * self.scale.to(projected_SBN.dtype) + self.base.to(projected_SBN.dtype)).sigmoid()
        return ((weights + EPS).unsqueeze(-2).to(x_SBF.dtype) @ x_SBNH).squeeze(-2)
