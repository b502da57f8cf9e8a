"""Matrix products of many experts: y[rows of e] = x[rows of e] @ w[e]^T.

Two ways, chosen by the caller: one torch.nn.functional.grouped_mm call, or a loop of plain products. The choice is a static rule,
`prefer_grouped`, from measurements on CPU (scripts/bench_results/experts.md).

These functions have no gradient of their own: the experts' autograd function calls them in forward and backward. Row counts are
host integers.

Shape letters: R rows sorted by expert, e experts, N output width, K input width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# below this many rows per expert a loop spends more time on calls than grouped_mm loses on its kernel
GROUPED_MAX_ROWS = 160


def prefer_grouped(num_rows: int, num_experts: int, dtype: torch.dtype, is_cuda: bool) -> bool:
    """Whether grouped_mm is the faster way: always on a GPU, for few rows per expert on a CPU."""
    if dtype not in GROUPED_DTYPES:
        return False
    if is_cuda:
        return dtype == torch.bfloat16
    return num_rows <= GROUPED_MAX_ROWS * num_experts


def spans(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, row after the last) of every expert that has rows."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, start, start + count))
        start += count
    return found


def row_offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    """grouped_mm's offsets: int32, the row after the last of each expert."""
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def grouped_forward(x_RK: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """x @ w^T per expert, one call. Returns y_RN."""
    return F.grouped_mm(x_RK, w_eNK.transpose(1, 2), offs=offsets_e)


def grouped_input_grad(grad_RN: Tensor, w_eNK: Tensor, offsets_e: Tensor) -> Tensor:
    """grad @ w per expert, one call. Returns grad_RK."""
    return F.grouped_mm(grad_RN, w_eNK, offs=offsets_e)


def grouped_weight_grad(grad_RN: Tensor, x_RK: Tensor, offsets_e: Tensor) -> Tensor:
    """grad^T @ x per expert, one call. Returns grad_eNK; zero for an expert without rows."""
    return F.grouped_mm(grad_RN.t(), x_RK, offs=offsets_e)
