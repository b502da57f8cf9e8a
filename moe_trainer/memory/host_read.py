"""Integers between host and device, without waiting for all that the device has to do.

Counts of tokens decide sizes on the host. On CUDA they travel through pinned memory on a stream of their own, so that the host waits for
them alone, and only when it needs them. On a CPU they are read when they are asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_trainer.ops.transfer import to_device


class HostReads:
    """Starts reads of one dispatcher; it has a stream for them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, compute: Callable[..., Tensor], *inputs: Tensor, work: Any = None) -> Callable[[], list[int]]:
        """Begin to read what `compute` makes of inputs. Returns: what waits for the numbers and gives them, flat.

        work: of a collective that writes inputs. On a CPU the caller must have waited for it before it asks.
        """
        if not inputs[0].is_cuda:
            return lambda: compute(*inputs).flatten().tolist()
        side = self._stream(inputs[0].device)
        side.wait_stream(torch.cuda.current_stream(inputs[0].device))
        with torch.cuda.stream(side):
            if work is not None:
                work.wait()
            numbers = compute(*inputs)
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            for x in inputs:
                x.record_stream(side)
            done = side.record_event()

        def values() -> list[int]:
            done.synchronize()
            return host.flatten().tolist()

        return values

    def _stream(self, device: torch.device) -> "torch.cuda.Stream":
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def integers(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers of the host as a tensor, for which nobody waits."""
    if len(set(numbers)) == 1:  # also while a graph is captured
        return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
    return to_device(torch.tensor(numbers, dtype=dtype), device)
