"""Linear layers cut over the tensor-parallel group; at group size 1 (all of this issue) they are plain linears.

Weights are [out_features, in_features], as in torch. Column: the output features are cut; row: the input features.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.layers.init import Init, make_parameter
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group


class _Linear(nn.Module):
    sharded_dim = 0

    def __init__(self, in_features: int, out_features: int, *, name: str, group: Group, init: Init, bias: bool = False):
        """name: global name of the layer; its parameters are `<name>.weight` and `<name>.bias`."""
        super().__init__()
        if group.size > 1:
            raise ValueError(f"{name}: a {group.name} group of {group.size} ranks; tensor parallelism is not built yet")
        self.weight = make_parameter((out_features, in_features), ParamInfo(
            (f"{name}.weight",), sharded_dim=self.sharded_dim, init=init.kind, init_std=init.std))
        bias_dim = 0 if self.sharded_dim == 0 else None
        self.bias = make_parameter((out_features,), ParamInfo(
            (f"{name}.bias",), sharded_dim=bias_dim, init="zeros")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, bias={self.bias is not None}"


class ColumnParallelLinear(_Linear):
    """y = x W^T + b with W cut along its output features: every rank gets its part of y."""

    sharded_dim = 0


class RowParallelLinear(_Linear):
    """y = x W^T + b with W cut along its input features: partial results are summed over the group."""

    sharded_dim = 1
