"""Matrix products of many experts: y[rows of e] = x[rows of e] @ w[e]^T.

Two ways, chosen by the caller: one torch.nn.functional.grouped_mm call, or a loop of plain products. The choice is a static rule,
`prefer_grouped`, from measurements on CPU (scripts/bench_results/experts.md).

These functions have no gradient of their own: the experts' autograd function calls them in forward and backward. Row counts are
host integers; for one call they may be on the device.

Shape letters: R rows sorted by expert, e experts, N output width, K input width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.main_grad import HALF_DTYPES
from moe_trainer.ops.transfer import to_device

# below this many rows per expert a loop spends more time on calls than grouped_mm loses on its kernel
GROUPED_MAX_ROWS = 96


def prefer_grouped(num_rows: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether grouped_mm is the faster way: in bf16 on Hopper and datacenter Blackwell, in fp32 with few rows per expert on a CPU."""
    if device.type == "cuda":
        # on others torch loops over the experts too, after it has waited for the offsets
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    # half precision on CPU: grouped_mm meets new row counts at every step and has code generated for each; see row_bucket
    return dtype == torch.float32 and num_rows <= GROUPED_MAX_ROWS * num_experts


def reads_offsets(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether grouped_mm reads offsets where they are: elsewhere than `prefer_grouped` says, torch's CUDA build waits for them."""
    return device.type != "cuda" or prefer_grouped(0, 1, dtype, device)


def row_bucket(count: int) -> int:
    """The next size of a scale of 16 steps per doubling, multiples of 16: at most 1/16 more (15 more below 256)."""
    step = max(16, (1 << (count.bit_length() - 1)) // 16)
    return -(-count // step) * step


def spans(counts: Sequence[int], x: Tensor | None = None) -> list[tuple[int, int, int, int]]:
    """(expert, first row, row after the last, rows to compute on) of every expert that has rows.

    Rows to compute on: the expert's own, or for half-precision x on CPU a bucket of them.
    """
    in_buckets = x is not None and x.dtype in HALF_DTYPES and x.device.type == "cpu"
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, start, start + count, row_bucket(count) if in_buckets else count))
        start += count
    return found


def row_offsets(counts: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """grouped_mm's offsets: int32, the row after the last of each expert."""
    if isinstance(counts, Tensor):
        return counts.cumsum(0, dtype=torch.int32)
    if len(set(counts)) == 1:  # a graph cannot copy from the host
        return torch.arange(1, len(counts) + 1, dtype=torch.int32, device=device) * counts[0]
    return to_device(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


def grouped_forward(x_RK: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """x @ w^T per expert, one call. Returns y_RN."""
    return F.grouped_mm(x_RK, w_eNK.transpose(1, 2), offs=offsets_e)


def grouped_input_grad(grad_RN: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """grad @ w per expert, one call. Returns grad_RK."""
    return F.grouped_mm(grad_RN, w_eNK, offs=offsets_e)


def grouped_weight_grad(grad_RN: Tensor, x_RK: Tensor, offsets_e: Tensor) -> Tensor:
    """grad^T @ x per expert, one call. Returns grad_eNK; zero for an expert without rows."""
    return F.grouped_mm(grad_RN.t(), x_RK, offs=offsets_e)


class GroupedProducts(NamedTuple):
    """The three products of one linear of all experts, as the functions above do them."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    input_grad: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_grad: Callable[[Tensor, Tensor, Tensor], Tensor]


GROUPED_MM = GroupedProducts(grouped_forward, grouped_input_grad, grouped_weight_grad)
