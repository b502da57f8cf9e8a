"""Low-rank adapters of routed experts: every expert has its own A and B; see layers/lora.py.

The adapters of all local experts are one stacked parameter each, as the weights are. Under expert tensor parallelism
fc1's B and fc2's A are sharded like the weights; the others are replicated, and their gradients summed over the group.

Shape letters: R tokens sorted by expert, e experts, N output width, K input width, r rank of the update.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from arguments.lora import LORA_A, LORA_B
from moe_trainer.layers.dropout import Dropout
from moe_trainer.layers.init import make_parameter
from moe_trainer.layers.lora import lora_init
from moe_trainer.ops.grouped_linear import grouped_linear
from moe_trainer.parallel.params import ParamInfo, get_param_info
from moe_trainer.parallel.rng import ShardRNG


class _AdapterWeight(nn.Module):
    """Stacked weight of one linear of the adapters of all local experts."""

    def __init__(self, shape: tuple[int, ...], info: ParamInfo):
        super().__init__()
        self.weight = make_parameter(shape, info)


class ExpertLoRA(nn.Module):
    """Adapters of one linear of all local experts.

    Args:
        weight: the frozen, stacked weight [e, N, K].
        dim: rank of the update.
        scale: alpha / dim.
        dropout: probability, of the input.
        stream: the chunk's random stream of tensor-parallel shards: the ranks of a tensor-parallel group have different
            tokens or, of the same ones, different outputs.
    """

    def __init__(self, weight: nn.Parameter, dim: int, scale: float, dropout: float, stream: ShardRNG | None):
        super().__init__()
        self.scale, self.dropout = scale, Dropout(dropout, stream)
        info = get_param_info(weight)
        num, rows, columns = weight.shape
        full = columns * (info.shard_count if info.sharded_dim == 1 else 1)
        names = [name.removesuffix(".weight") for name in info.names]
        shard = {
            "sharded_dim": info.sharded_dim,
            "shard_rank": info.shard_rank,
            "shard_count": info.shard_count,
            "parts": info.parts,
        }
        init = lora_init(full)

        def make(leaf: str, shape: tuple[int, int], dimension: int, **options) -> _AdapterWeight:
            # the dimension that the weight is sharded along is that of one of the two; the other one is replicated
            options |= shard if info.sharded_dim == dimension else {"is_grad_partial": info.shard_count > 1}
            leaves = tuple(f"{name}.{leaf}.weight" for name in names)
            return _AdapterWeight((num, *shape), ParamInfo(leaves, kind="expert", stacked=True, **options))

        self.lora_A = make(LORA_A, (dim, columns), 1, init=init.kind, init_std=init.std)
        self.lora_B = make(LORA_B, (rows, dim), 0, init="zeros")


class GroupedLoRALinear(nn.Module):
    """One linear of all local experts with adapters; called like a library's (moe/grouped_experts.py).

    Args:
        lora: the adapters; None if the linear has none.
        options: of ops/grouped_linear.py.
    """

    pad_multiple = 1

    def __init__(self, lora: ExpertLoRA | None, **options: Any):
        super().__init__()
        self.lora, self.options = lora, options

    def forward(self, x_RK: Tensor, weight_eNK: Tensor, counts: Sequence[int]) -> Tensor:
        """Return y_RN."""
        y_RN = grouped_linear(x_RK, weight_eNK, counts, **self.options)
        if self.lora is None:
            return y_RN
        x_RK = self.lora.dropout(x_RK)
        for weight in (self.lora.lora_A.weight, self.lora.lora_B.weight):
            x_RK = grouped_linear(x_RK, weight, counts, **self.options)
        return y_RN + x_RK * self.lora.scale
