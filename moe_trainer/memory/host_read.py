"""Transfers of integers between host and device that do not wait for all of the device's work.

Token counts decide sizes on the host. On CUDA they are copied through pinned memory on a separate stream, so the host
waits for them alone, and only when it needs them. On a CPU they are computed when they are requested.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.side_stream import SideStream
from moe_trainer.ops.transfer import to_device


class AsyncHostReader:
    """Starts host reads of one dispatcher, on a separate stream."""

    def __init__(self) -> None:
        self._stream = SideStream()

    def start(self, compute: Callable[..., Tensor], *inputs: Tensor, work: Any = None) -> Callable[[], list[int]]:
        """Start to read compute(*inputs).

        Args:
            compute: returns the integers to read.
            *inputs: its arguments.
            work: handle of a collective that writes the inputs. On a CPU the caller must wait for it before it
                requests the values.

        Returns:
            A function that waits for the values and returns them, flattened.
        """
        if not inputs[0].is_cuda:
            return lambda: compute(*inputs).flatten().tolist()
        device = inputs[0].device

        def copy() -> Tensor:
            if work is not None:
                work.wait()
            numbers = compute(*inputs)
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            for x in inputs:
                x.record_stream(torch.cuda.current_stream(device))
            return host

        host, copied = self._stream.run_on_device(copy, device)

        def values() -> list[int]:
            copied.synchronize()
            return host.flatten().tolist()

        return values


def integer_tensor(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy integers of the host to a tensor without waiting."""
    if len(set(numbers)) == 1:  # works while a graph is captured, too
        return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
    return to_device(torch.tensor(numbers, dtype=dtype), device)
