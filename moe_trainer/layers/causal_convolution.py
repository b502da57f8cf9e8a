"""Parameters of the causal convolutions over positions: of gated DeltaNet, Mamba-2 and gated short convolutions."""

from typing import Any

from torch import nn

from moe_trainer.layers.init import make_parameter
from moe_trainer.parallel.params import ParamInfo


class CausalConvolution(nn.Module):
    """The weight [C / tp, 1, width] of a convolution of each channel, and its bias, in torch's layout."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        part_names: tuple[str, ...],
        width: int,
        *,
        name: str,
        sharding: dict[str, Any],
        bias: bool = False,
    ):
        """Create the convolution of all channels in `sizes`, one number per part; `sharding`: see ParamInfo.

        Without `part_names` there is one part.
        """
        super().__init__()
        count = sum(sizes) // sharding["shard_count"]
        # torch's default for a convolution: uniform, up to 1 / sqrt(inputs of an output)
        options: dict[str, Any] = {"init": "uniform", "init_std": (3 * width) ** -0.5, **sharding}
        if part_names:
            options |= {"parts": len(sizes), "part_sizes": sizes, "part_names": part_names}
        self.weight = make_parameter((count, 1, width), ParamInfo((f"{name}.weight",), **options))
        if bias:
            self.bias = make_parameter((count,), ParamInfo((f"{name}.bias",), **options))
