"""What the Triton kernels share: block sizes, and the dtype they compute in.

Every kernel of this room computes in fp32 (fp64 for fp64 tensors) and rounds once, where it stores. Offsets of rows are int64:
a batch of tokens times a width passes 2^31 elements easily. Block sizes follow static rules and not an autotuner, so that the first
step of a run costs no search and two runs do the same arithmetic.
"""

import torch
import triton
import triton.language as tl


def wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype a kernel computes in for tensors of this one."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def block_of(size: int, largest: int, smallest: int = 16) -> int:
    """The power of two that covers `size`, within limits."""
    return max(smallest, min(largest, triton.next_power_of_2(max(1, size))))


def warps_of(numel: int) -> int:
    """Warps for a tile of so many elements: about 16 to 32 elements a thread."""
    return 4 if numel <= 4096 else 8 if numel <= 8192 else 16


def rows_contiguous(x: torch.Tensor, width: int) -> torch.Tensor:
    """x as a matrix of rows [*, width] whose elements lie side by side; a view where that is possible."""
    x = x.reshape(-1, width)
    return x if x.stride(1) == 1 or width == 1 else x.contiguous()
