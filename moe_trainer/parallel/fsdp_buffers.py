"""Persistent communication buffers of fully sharded parameters (--fsdp-double-buffer, --use-nccl-ub).

torch allocates new buffers for every gather and reduction. A pool has two instead, which units use in turn: one is
read while the other is written. torch orders a gather after the copy out of the second gather before it, and the copy
into a reduction's buffer after the second reduction before it.

Units of the most frequent size share the pool (with `takes_largest` all units do, and the buffers have the size of the
largest). Others allocate as torch does, or have two separate buffers (`keeps_others`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_trainer.parallel.state import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BufferOptions:
    """Options of the buffers.

    Attributes:
        takes_largest: --megatron-fsdp-max-pool-double-buffer.
        keeps_others: --fsdp-db-use-persist-buf-on-alloc-fail.
        registers: --use-nccl-ub: the communicator reads and writes the buffers without copies.
        is_symmetric: without --disable-symmetric-registration.
    """

    takes_largest: bool = False
    keeps_others: bool = False
    registers: bool = False
    is_symmetric: bool = True


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def allocate_plain(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate with torch's allocator."""
    return torch.empty(numel, dtype=dtype, device=device)


class RegisteredMemory:
    """Memory that NCCL has allocated and registered with the communicators of some groups."""

    def __init__(self, groups: Sequence[Group], device: torch.device, options: BufferOptions):
        self._options, self._is_registered = options, False
        self._pool: torch.cuda.MemPool | None = None
        handles = {group.handle: None for group in groups if group.handle is not None}
        self._backends: list[Any] = [handle._get_backend(device) for handle in handles] if device.type == "cuda" else []
        if not self._backends or not all(hasattr(backend, "register_mem_pool") for backend in self._backends):
            logger.info("--use-nccl-ub: this rank does not communicate over NCCL, so no buffers are registered")
            self._backends = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer."""
        if not self._backends:
            return allocate_plain(numel, dtype, device)
        if self._pool is None:
            self._pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            return allocate_plain(numel, dtype, device)

    def register(self) -> None:
        """Register the memory, and what is allocated from it later, once. Collective.

        One call for all buffers, after the first iteration: registration takes long, and waits for the device.
        """
        if self._pool is None or self._is_registered:
            return
        self._is_registered = True
        torch.cuda.synchronize()
        for backend in self._backends:
            try:
                backend.register_mem_pool(self._pool, symm=self._options.is_symmetric)
            except TypeError:  # torch without symmetric registration
                backend.register_mem_pool(self._pool)


class BufferPool:
    """Buffers of one kind of collective of some units."""

    def __init__(self, options: BufferOptions, allocate: Allocate):
        self._options, self._allocate = options, allocate
        self._sizes: Counter[int] = Counter()
        self._buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._turns: Counter[tuple[int, torch.dtype]] = Counter()

    def add_unit(self, numel: int) -> None:
        """Announce a unit, before the first buffer is taken."""
        self._sizes[numel] += 1

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer, valid until the second next call for the same pool."""
        size = self._pooled_size()
        is_pooled = numel == size or self._options.takes_largest and numel <= size
        if not is_pooled and not self._options.keeps_others:
            return allocate_plain(numel, dtype, device)
        key = size if is_pooled else numel, dtype
        buffers = self._buffers.setdefault(key, [])
        turn = self._turns[key] % 2
        self._turns[key] += 1
        if len(buffers) == turn:
            buffers.append(self._allocate(key[0], dtype, device))
        return buffers[turn][:numel]

    def _pooled_size(self) -> int:
        if not self._sizes:
            return 0
        if self._options.takes_largest:
            return max(self._sizes)
        return max(self._sizes, key=lambda numel: (self._sizes[numel], numel))
