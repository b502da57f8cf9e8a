"""Paged stash of expert activations (--moe-paged-stash): between forward and backward only tokens in use are stored.

With a budget for received tokens (moe/receive_buffer.py) every MoE layer computes in buffers of the worst case, and
would save tensors of that size: layers x worst case. Instead the tokens in use are copied to pages of a fixed number
of tokens when a buffer is saved, and the buffer serves the next layer. In backward a layer's tokens are copied back
to buffers, and those of the layer before it start to come back (memory/offload.py, whose groups this uses), so two
layers' buffers exist.

A pool holds pages of one token shape. Its free list is a ring: pages are taken at one end and freed at the other. It
grows by a slab of factor * balanced size tokens for every layer that is stashed at the same time as others, so one
layer uses what another leaves. --moe-paged-stash-buffer-size-factor-cuda is the factor of the device's pool; when it
is full, pages of the host's pool (-cpu; pinned with CUDA) are used. Megatron-LM repeats the iteration without a stash
when both are full; here the device's pool grows beyond its factor, and the log names the factor that would suffice.

On CUDA copies run on one stream for each direction. Pages are freed in the order of the host; the device follows,
because copies out wait for earlier copies back.

Shapes: buffers [C, ...] of which the first R tokens are used.
"""

import functools
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.offload import OffloadedTensor, OffloadGroup, StreamedCopies, make_copy_streams

logger = logging.getLogger(__name__)


class PagePool:
    """Pages for tokens of one shape and dtype in one memory.

    Attributes:
        page_size: tokens of a page.
        factor: size of a slab, as a multiple of the balanced size; 0 for a pool without pages.
        num_users: tensors that have pages.
    """

    def __init__(
        self,
        token_shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        factor: float,
        pinned: bool = False,
    ):
        self.page_size, self.factor = page_size, factor
        self._token_shape, self._options = token_shape, {"dtype": dtype, "device": device, "pin_memory": pinned}
        self._slabs: list[Tensor] = []  # of different sizes, [pages, page_size, ...]
        self._free: deque[tuple[int, int]] = deque()  # (slab, page in it)
        self._num_slabs = 0  # slabs added for users, without forced growth
        self.num_users = 0

    @property
    def num_pages(self) -> int:
        return sum(slab.shape[0] for slab in self._slabs)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, num_tokens: int, balanced_size: int, force: bool = False) -> list[tuple[int, int]] | None:
        """Allocate pages for tokens; return None if the pool is full, or grow it beyond its factor with `force`."""
        num_pages = -(-num_tokens // self.page_size)
        while len(self._free) < num_pages and self._num_slabs <= self.num_users and self.factor > 0:
            self._grow(math.ceil(self.factor * balanced_size / self.page_size))
            self._num_slabs += 1
        if len(self._free) < num_pages:
            if not force:
                return None
            self._grow(num_pages - len(self._free))
        self.num_users += 1
        return [self._free.popleft() for _ in range(num_pages)]

    def free(self, pages: list[tuple[int, int]]) -> None:
        """Free the pages of one `allocate`."""
        self._free.extend(pages)
        self.num_users -= 1

    def _grow(self, num_pages: int) -> None:
        self._free.extend((len(self._slabs), page) for page in range(num_pages))
        self._slabs.append(torch.empty(num_pages, self.page_size, *self._token_shape, **self._options))

    def views(self, pages: list[tuple[int, int]], num_tokens: int) -> list[tuple[Tensor, int, int]]:
        """Return views of the pages, adjacent ones joined, as (memory, first token, end token)."""
        runs: list[list[int]] = []  # slab, first page, number of pages
        for slab, page in pages:
            if runs and runs[-1][0] == slab and sum(runs[-1][1:]) == page:
                runs[-1][2] += 1
            else:
                runs.append([slab, page, 1])
        views, start = [], 0
        for slab, first, count in runs:
            stop = min(start + count * self.page_size, num_tokens)
            memory = self._slabs[slab][first : first + count].flatten(0, 1)
            views.append((memory[: stop - start], start, stop))
            start = stop
        return views


class PagedTensor:
    """Copy of a tensor's tokens in pages of a pool; `free` or garbage collection frees the pages, once."""

    def __init__(self, pool: PagePool, pages: list[tuple[int, int]], x: Tensor, num_tokens: int):
        self.pool, self.pages, self.num_tokens = pool, pages, num_tokens
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.free = weakref.finalize(self, pool.free, pages)
        self.free.atexit = False

    def views(self) -> list[tuple[Tensor, int, int]]:
        return self.pool.views(self.pages, self.num_tokens)


class PageCopies(StreamedCopies):
    """Copies between one layer's buffers and pages, which may be those of a copy back in flight."""

    waits_for_copies_back = True

    def __init__(
        self,
        allocate_pages: Callable[[Tensor, int, int], tuple[PagePool, list]],
        num_tokens: int,
        balanced_size: int,
        streams: tuple[Any, Any] | None,
    ):
        super().__init__(streams)
        self._allocate_pages, self._num_tokens, self._balanced_size = allocate_pages, num_tokens, balanced_size

    def allocate(self, x: Tensor) -> PagedTensor:
        pool, pages = self._allocate_pages(x, self._num_tokens, self._balanced_size)
        return PagedTensor(pool, pages, x, self._num_tokens)

    def copy_out(self, destination: PagedTensor, x: Tensor) -> None:
        for memory, start, stop in destination.views():
            memory.copy_(x[start:stop], non_blocking=True)

    def copy_back(self, destination: PagedTensor) -> Tensor:
        x = torch.empty(destination.shape, dtype=destination.dtype, device=destination.device)
        for memory, start, stop in destination.views():
            x[start:stop].copy_(memory, non_blocking=True)
        x[destination.num_tokens :].zero_()  # as before, because GEMMs may include the padding
        destination.free()
        return x


class PagedStash:
    """The stash of one model chunk; `num_overflows` counts how often both pools were full."""

    def __init__(self, device: torch.device, page_size: int = 64, factor_device: float = 1.1, factor_host: float = 0.0):
        """Create empty pools with `page_size` tokens per page; the factors are explained at the head of this file."""
        self._device, self._page_size = device, page_size
        self._factors = {"device": factor_device, "host": factor_host}
        self._pools: dict[tuple, PagePool] = {}
        self._streams = make_copy_streams(device)
        self._last: OffloadGroup | None = None
        self.num_overflows = 0
        self._logged_factor = 0.0

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return tuple(self._pools.values())

    def begin_pass(self) -> None:
        """Begin the next forward pass, which starts a new chain of groups."""
        self._last = None

    def open(
        self, buffer_size: int, num_used: int, balanced_size: int
    ) -> Callable[[Tensor], Callable[[], Tensor] | None]:
        """Return the function that stashes one layer's tensors and returns how to fetch them.

        Args:
            buffer_size: tensors of at least this many tokens are stashed.
            num_used: tokens that are copied.
            balanced_size: unit of the pools' sizes.
        """
        group = OffloadGroup(self._last)
        copies = PageCopies(self._allocate_pages, num_used, balanced_size, self._streams)

        def store(x: Tensor) -> Callable[[], Tensor] | None:
            if x.dim() == 0 or x.shape[0] < buffer_size:
                return None
            stored = OffloadedTensor(x, group, copies)
            group.add(stored)
            self._last = group
            return functools.partial(OffloadedTensor.get, stored)

        return store

    def _pool(self, x: Tensor, where: str) -> PagePool:
        key = (where, x.shape[1:], x.dtype)
        if key not in self._pools:
            on_host = where == "host"
            self._pools[key] = PagePool(
                x.shape[1:],
                x.dtype,
                torch.device("cpu") if on_host else self._device,
                self._page_size,
                self._factors[where],
                pinned=on_host and self._streams is not None,
            )
        return self._pools[key]

    def _allocate_pages(self, x: Tensor, num_tokens: int, balanced_size: int) -> tuple[PagePool, list[tuple[int, int]]]:
        """Allocate pages for tokens of x, on the device if there are any, else on the host."""
        device_pool = self._pool(x, "device")
        pages = device_pool.allocate(num_tokens, balanced_size)
        if pages is not None:
            return device_pool, pages
        if self._factors["host"] > 0:
            host_pool = self._pool(x, "host")
            pages = host_pool.allocate(num_tokens, balanced_size)
            if pages is not None:
                return host_pool, pages
        before = device_pool.num_pages
        pages = device_pool.allocate(num_tokens, balanced_size, force=True)
        self.num_overflows += 1
        num_stashed = device_pool.num_pages * self._page_size
        sufficient = math.ceil(100 * num_stashed / (device_pool.num_users * balanced_size)) / 100
        if sufficient <= self._logged_factor:
            return device_pool, pages
        self._logged_factor = sufficient
        logger.warning(
            "the paged stash is full (%d pages of %d tokens, --moe-paged-stash-buffer-size-factor-cuda %g) and grows "
            "to %d pages; nothing is lost. A factor of %g would suffice",
            before,
            self._page_size,
            self._factors["device"],
            device_pool.num_pages,
            sufficient,
        )
        return device_pool, pages
