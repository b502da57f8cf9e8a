"""GEMMs of many experts: y[tokens of e] = x[tokens of e] @ w[e]^T.

Either one torch.nn.functional.grouped_mm call or a loop; `prefer_grouped` is a static rule measured on CPU
(docs/records/measured_once.md). The functions have no autograd: ops/expert_mlp.py calls them in forward and
backward. Token counts are host integers, or a device tensor for a single call.

Shape letters: R tokens sorted by expert, e experts, N output width, K input width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.main_grad import HALF_DTYPES, MainGradSum
from moe_trainer.ops.transfer import to_device

# below this many tokens per expert a loop spends more time on calls than grouped_mm loses on its kernel
GROUPED_MAX_TOKENS_PER_EXPERT = 96


GROUPED_MM_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has a grouped GEMM in bf16: Hopper and datacenter Blackwell.

On others it loops over the experts, after it has waited for the offsets.
"""


def prefer_grouped(num_rows: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether grouped_mm is faster: bf16 on Hopper and datacenter Blackwell, small fp32 on a CPU."""
    if device.type == "cuda":
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in GROUPED_MM_CAPABILITIES
    # half precision on CPU: grouped_mm meets new row counts at every step and has code generated for each; see
    # token_bucket
    return dtype == torch.float32 and num_rows <= GROUPED_MAX_TOKENS_PER_EXPERT * num_experts


def can_read_offsets_on_device(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether grouped_mm reads offsets on the device; otherwise torch's CUDA build synchronizes."""
    if device.type != "cuda":
        return dtype != torch.float64  # grouped_mm has no fp64
    return prefer_grouped(0, 1, dtype, device)


def token_bucket(count: int) -> int:
    """Round up to a scale of 16 steps per doubling, multiples of 16: at most 1/16 more (15 more below 256)."""
    step = max(16, (1 << (count.bit_length() - 1)) // 16)
    return -(-count // step) * step


def check_token_counts(caller: str, counts: Sequence[int], num_tokens: int) -> None:
    """Raise ValueError unless the tokens per expert add up to the number of tokens."""
    if sum(counts) != num_tokens:
        raise ValueError(f"{caller}: the tokens per expert add up to {sum(counts)}, but there are {num_tokens} tokens")


def expert_ranges(counts: Sequence[int], x: Tensor | None = None) -> list[tuple[int, int, int, int]]:
    """Return (expert, start, stop, tokens to compute on) of every expert that has tokens.

    Tokens to compute on: the expert's own, or a bucket of them for half-precision x on CPU.
    """
    in_buckets = x is not None and x.dtype in HALF_DTYPES and x.device.type == "cpu"
    ranges, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            ranges.append((expert, start, start + count, token_bucket(count) if in_buckets else count))
        start += count
    return ranges


def token_offsets(counts: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return grouped_mm's offsets: int32, the end of each expert's tokens."""
    if isinstance(counts, Tensor):
        return counts.cumsum(0, dtype=torch.int32)
    if len(set(counts)) == 1:  # a graph cannot copy from the host
        return torch.arange(1, len(counts) + 1, dtype=torch.int32, device=device) * counts[0]
    return to_device(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


def grouped_forward(x_RK: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """Return x @ w^T per expert, y_RN, in one call."""
    return F.grouped_mm(x_RK, w_eNK.transpose(1, 2), offs=offsets_e)


def grouped_input_grad(grad_RN: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """Return grad @ w per expert, grad_RK, in one call."""
    return F.grouped_mm(grad_RN, w_eNK, offs=offsets_e)


def grouped_weight_grad(grad_RN: Tensor, x_RK: Tensor, offsets_e: Tensor) -> Tensor:
    """Return grad^T @ x per expert, grad_eNK, in one call; zero for an expert without tokens."""
    return F.grouped_mm(grad_RN.t(), x_RK, offs=offsets_e)


class GroupedGemms(NamedTuple):
    """The three GEMMs of one linear of all experts; see the functions above."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_grad: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor]

    def sum_tokens(self, x_RN: Tensor, offsets_e: Tensor) -> Tensor:
        """Sum each expert's tokens by a GEMM with ones, whose rows have the alignment of grouped GEMMs (16 bytes)."""
        return self.weight_grad(x_RN, x_RN.new_ones(len(x_RN), 8), offsets_e)[..., 0]


GROUPED_MM = GroupedGemms(grouped_forward, grouped_input_grad, grouped_weight_grad)


@dataclass(frozen=True)
class GroupedWeightGrad:
    """The gradient of the weights of all experts, grad_eNK: computed when called, or added to a main gradient.

    Attributes:
        counts: tokens per expert on the host; None if they are on the device only.
        kernel: adds to a main gradient given as fourth argument, else as gemms.weight_grad; None if there is none.
    """

    gemms: GroupedGemms
    grad_RN: Tensor
    x_RK: Tensor
    offsets_e: Tensor
    counts: Sequence[int] | None
    kernel: Callable[[Tensor, Tensor, Tensor, MainGradSum], None] | None

    def __call__(self) -> Tensor:
        """Return the gradient in the dtype of the tokens."""
        return self.gemms.weight_grad(self.grad_RN, self.x_RK, self.offsets_e)

    def add_to(self, total: MainGradSum) -> None:
        """Add the gradient; in an fp32 sum without a rounding to half precision, if `kernel` or `counts` allow it.

        torch's grouped GEMM writes no fp32, so without the kernel there is a GEMM per expert, which needs the counts.
        """
        if total.total.dtype == self.x_RK.dtype:
            total.add_gradient(self())
        elif self.kernel is not None:
            self.kernel(self.grad_RN, self.x_RK, self.offsets_e, total)
        elif self.counts is None:
            total.add_gradient(self())
        else:
            ranges = expert_ranges(self.counts)
            for expert, start, stop, _ in ranges:
                total.slice(expert).add(self.grad_RN[start:stop].t(), self.x_RK[start:stop])
            for expert in set(range(len(self.counts))).difference(expert for expert, *_ in ranges):
                total.slice(expert).clear()
