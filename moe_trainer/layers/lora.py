"""Low-rank adapters (LoRA) of linear layers: y = W x + scale * B A dropout(x), with scale = alpha / dim and W frozen.

An adapter is two linears of layers/linear.py, so it is sharded and communicates as its linear does, with tensors of
`dim` features:

| linear | A | B |
|---|---|---|
| column | replicated, on the local tokens | column |
| row | row | replicated, on the local tokens |
| replicated | replicated | replicated |

B starts from zeros, so the first step computes what the model without adapters does. Adapters are in the model's
format; only the frozen weight may be computed by a library.
Source: LoRA (arXiv 2106.09685); the distribution of A is that of PEFT.
"""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from arguments.lora import LORA_A, LORA_B
from moe_trainer.layers.dropout import Dropout
from moe_trainer.layers.init import Init
from moe_trainer.layers.linear import ColumnParallelLinear, ParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.parallel.mappings import copy_to_group
from moe_trainer.parallel.params import get_param_info, set_param_info
from moe_trainer.parallel.rng import ShardRNG


def lora_init(in_features: int) -> Init:
    """Return the distribution of A: uniform between -1 and 1 over the root of the number of input features."""
    return Init("uniform", 1.0 / math.sqrt(3.0 * in_features))


class LoRA(nn.Module):
    """Adapter of a linear layer.

    Args:
        linear: column, row or replicated linear, whose weight has one name.
        name: its global name; the parameters are `<name>.lora_A.weight` and `<name>.lora_B.weight`.
        dim: rank of the update.
        scale: alpha / dim.
        dropout: probability, of the input.
        stream: the chunk's random stream of tensor-parallel shards.
    """

    def __init__(
        self, linear: ParallelLinear, name: str, dim: int, scale: float, dropout: float, stream: ShardRNG | None
    ):
        super().__init__()
        self.scale = scale
        info = get_param_info(linear.weight)
        out_features, in_features = (
            size * (linear.group.size if info.sharded_dim == dimension else 1)
            for dimension, size in enumerate(linear.weight.shape)
        )
        options: dict[str, Any] = {"group": linear.group, "sequence_parallel": linear.sequence_parallel}
        down: dict[str, Any] = {"name": f"{name}.{LORA_A}", "init": lora_init(in_features), **options}
        up: dict[str, Any] = {"name": f"{name}.{LORA_B}", "init": Init("zeros"), **options}
        is_column, is_row = (isinstance(linear, kind) for kind in (ColumnParallelLinear, RowParallelLinear))
        self.lora_A = (RowParallelLinear if is_row else ReplicatedLinear)(in_features, dim, **down)
        self.lora_B: ParallelLinear
        if is_column:
            self.lora_B = ColumnParallelLinear(dim, out_features, **up)
            # its rows are those of the weight, whose parts are sharded separately
            whole = replace(
                get_param_info(self.lora_B.weight),
                parts=info.parts,
                part_sizes=info.part_sizes,
                part_names=info.part_names,
            )
            set_param_info(self.lora_B.weight, whole)
        else:
            self.lora_B = ReplicatedLinear(dim, out_features, **up)
        is_sharded_input = is_row or linear.sequence_parallel
        self.dropout = Dropout(dropout, stream if is_sharded_input else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the adapter adds to the output of its linear for the input x."""
        return self.lora_B(self.lora_A(self.dropout(x))) * self.scale


def add_lora(linear: ParallelLinear, adapter: LoRA) -> None:
    """Attach an adapter to a linear, of this program or of a library: its output is the sum of both."""
    linear.add_module("lora", adapter)
    linear.register_forward_hook(_add_output)


def _add_output(linear: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y + linear.get_submodule("lora")(inputs[0])


def effective_weight(linear: ParallelLinear) -> Tensor:
    """Return the weight of a column linear with its adapter, if it has one, for what multiplies by it directly.

    Gradients reach the adapter; its dropout is left out.
    """
    adapter = getattr(linear, "lora", None)
    if adapter is None:
        return linear.weight
    down = adapter.lora_A.weight
    if not linear.sequence_parallel:  # with it, gradients of A are summed over the group anyway
        down = copy_to_group(down, linear.group)
    return linear.weight + (adapter.lora_B.weight @ down) * adapter.scale
