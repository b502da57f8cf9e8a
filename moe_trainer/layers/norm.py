"""RMSNorm and LayerNorm with Megatron's options."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.init import make_parameter
from moe_trainer.ops.pointwise import layer_norm, rms_norm
from moe_trainer.parallel.mappings import copy_to_group, reduce_from_group
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group


class Norm(nn.Module):
    """Normalization over the last dimension, by --normalization, --norm-epsilon and --apply-layernorm-1p."""

    def __init__(
        self,
        size: int,
        model: ModelArgs,
        *,
        name: str,
        partial: bool = False,
        rms_norm: Callable[..., Tensor] = rms_norm,
    ):
        """Create the norm `name`.

        Args:
            partial: it sees a part of the tensor-parallel group's data (local tokens or heads).
            rms_norm: the function, or a kernel with its signature.
        """
        super().__init__()
        self.rms_norm = rms_norm
        self.eps = model.layernorm_epsilon
        self.zero_centered = model.layernorm_zero_centered_gamma
        start = "zeros" if self.zero_centered else "ones"
        self.weight = make_parameter((size,), ParamInfo((f"{name}.weight",), init=start, is_grad_partial=partial))
        self.bias = None
        if model.normalization == "LayerNorm":
            self.bias = make_parameter((size,), ParamInfo((f"{name}.bias",), init="zeros", is_grad_partial=partial))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size]; the result has the dtype of the weight."""
        if self.bias is None:
            return self.rms_norm(x, self.weight, self.eps, self.zero_centered)
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered)

    def extra_repr(self) -> str:
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return f"{kind}, {self.weight.numel()}, eps={self.eps}, zero_centered={self.zero_centered}"


class AllHeadsNorm(nn.Module):
    """RMS normalization over all heads of all tensor-parallel ranks together (--qk-layernorm-all-heads)."""

    def __init__(
        self,
        size: int,
        model: ModelArgs,
        *,
        name: str,
        group: Group,
        rms_norm: Callable[..., Tensor] = rms_norm,
    ):
        """Create the norm `name` of `size` channels, of which this rank has its share.

        Args:
            group: tensor-parallel ranks, which have consecutive heads.
            rms_norm: the function, or a kernel with its signature.
        """
        super().__init__()
        self.group, self.rms_norm, self.size = group, rms_norm, size
        self.eps, self.zero_centered = model.layernorm_epsilon, model.layernorm_zero_centered_gamma
        info = ParamInfo(
            (f"{name}.weight",),
            sharded_dim=0,
            shard_rank=group.rank,
            shard_count=group.size,
            init="zeros" if self.zero_centered else "ones",
        )
        self.weight = make_parameter((size // group.size,), info)

    def forward(self, x_SBND: Tensor) -> Tensor:
        """Normalize the heads [S, B, ..., D] of this rank; the result has the shape of x and the dtype of the weight.

        Communication: the sums of squares [S, B], over the group, in forward and in backward.
        """
        x_SBH = x_SBND.flatten(2)
        if self.group.size == 1:
            return self.rms_norm(x_SBH, self.weight, self.eps, self.zero_centered).view_as(x_SBND)
        wide = x_SBH.to(torch.promote_types(x_SBH.dtype, torch.float32))
        squares_SB1 = copy_to_group(reduce_from_group(wide.square().sum(-1, keepdim=True), self.group), self.group)
        gain_H = self.weight.to(wide.dtype) + 1.0 if self.zero_centered else self.weight.to(wide.dtype)
        y_SBH = wide * torch.rsqrt(squares_SB1 / self.size + self.eps) * gain_H
        return y_SBH.to(self.weight.dtype).view_as(x_SBND)


class L2Norm(nn.Module):
    """RMS normalization without a gain, for --qk-l2-norm."""

    def __init__(self, eps: float, rms_norm: Callable[..., Tensor] = rms_norm):
        super().__init__()
        self.eps, self.rms_norm = eps, rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, None, self.eps)
