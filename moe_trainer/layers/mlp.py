"""Dense feed-forward network; shared experts are one too."""

from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel.state import Group


def make_activation(model: ModelArgs) -> Activation:
    """Return the activation of all MLPs of the model, experts included.

    --bias-gelu-fusion (on unless linear biases are off) means the tanh form of GELU, as in Megatron-LM's fused kernel.
    """
    if model.swiglu:
        return Activation("silu", True, model.glu_linear_offset, model.activation_func_clamp_value)
    if model.quick_geglu:
        return Activation("quick_gelu", True, model.glu_linear_offset, model.activation_func_clamp_value)
    if model.squared_relu:
        return Activation("squared_relu")
    return Activation("gelu_tanh" if model.bias_gelu_fusion and model.add_bias_linear else "gelu")


class MLP(nn.Module):
    """fc2(activation(fc1(x))). A gated activation reads fc1's output as [gate; up].

    Args:
        name: global name, e.g. "decoder.layers.0.mlp".
        group: shards the inner features, gate and up separately.
        sequence_parallel: see layers/linear.py.
        save_original_input: of fc1, see layers/linear.py.
    """

    def __init__(
        self,
        model: ModelArgs,
        ffn_hidden_size: int,
        *,
        name: str,
        group: Group,
        factory: LayerFactory,
        bias: bool,
        sequence_parallel: bool = False,
        save_original_input: bool = False,
    ):
        super().__init__()
        activation = make_activation(model)
        self.activation = factory.kernels.dense_activation(activation)
        options = {"group": group, "bias": bias, "sequence_parallel": sequence_parallel}
        self.linear_fc1 = factory.column_linear(
            model.hidden_size,
            ffn_hidden_size * activation.in_per_out,
            name=f"{name}.linear_fc1",
            init=hidden_init(model),
            parts=activation.in_per_out,
            save_original_input=save_original_input or "layernorm" in factory.activations.recomputed,
            **options,
        )
        self.linear_fc2 = factory.row_linear(
            ffn_hidden_size, model.hidden_size, name=f"{name}.linear_fc2", init=residual_init(model), **options
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))
