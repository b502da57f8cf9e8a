"""RMSNorm and LayerNorm with Megatron's options."""

from collections.abc import Callable

from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.init import make_parameter
from moe_trainer.ops.pointwise import layer_norm, rms_norm
from moe_trainer.parallel.params import ParamInfo


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


class L2Norm(nn.Module):
    """RMS normalization without a gain, for --qk-l2-norm."""

    def __init__(self, eps: float, rms_norm: Callable[..., Tensor] = rms_norm):
        super().__init__()
        self.eps, self.rms_norm = eps, rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, None, self.eps)
