"""Paged stashing of expert activations (--moe-paged-stash): between forward and backward only rows that were used stay.

With a budget for received rows (moe/budget.py) every MoE layer computes in buffers of the worst case, and what it saves for backward
would be as long: layers x worst case. Here the rows that a layer really used are copied, when it saves a buffer, into pages of a
fixed number of rows, and the buffer is let go. It serves the next layer: one worst case for computing, and the pages of the sum of what
was used. In backward a layer's rows come back into buffers, and those of the layer before it start to come back at the same time (as
memory/offload.py does it, whose chain of groups this uses), so that two layers' buffers exist.

A pool holds pages of one row size. Its free list is a ring: pages are taken at one end and given back at the other. It grows by a slab
for every layer that is stashed at the same time as others, of

    factor * even share of rows,

so that what one layer leaves another one can use. --moe-paged-stash-buffer-size-factor-cuda is the factor of the device's pool; when
that is full, pages of the host's pool (-cpu; pinned where there is CUDA) are taken. Megatron-LM repeats the iteration without a stash when
both are full; here the device's pool grows beyond its factor, so that nothing has to be repeated, and the log names the factor that would
have been enough.

On CUDA copies run on a stream for each direction, beside the computation. Pages are given back in the order of the host; the device
follows, because copies out wait for copies back that were started before.

Shapes: buffers [C, ...] of which the first R rows are used.
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

from moe_trainer.memory.offload import Group, Stored, StreamedCopies, streams_of

logger = logging.getLogger(__name__)


class PagePool:
    """Pages for rows of one shape and dtype in one memory.

    page: rows of a page. factor: of a slab, in even shares; 0: there are no pages. users: tensors that have pages now.
    """

    def __init__(self, row: torch.Size, dtype: torch.dtype, device: torch.device, page: int, factor: float, pinned: bool = False):
        self.page, self.factor = page, factor
        self._row, self._options = row, {"dtype": dtype, "device": device, "pin_memory": pinned}
        self._slabs: list[Tensor] = []  # of different sizes, [pages, page, ...]
        self._free: deque[tuple[int, int]] = deque()  # (slab, page in it)
        self._planned = 0  # slabs that came with a user
        self.users = 0

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return sum(slab.shape[0] for slab in self._slabs)

    @property
    def num_used(self) -> int:
        """Pages that hold rows."""
        return self.num_pages - len(self._free)

    def take(self, rows: int, share: int, force: bool = False) -> list[tuple[int, int]] | None:
        """Pages for so many rows, or None. share: rows of an even share. force: grow beyond the factor if need be."""
        wanted = -(-rows // self.page)
        while len(self._free) < wanted and self._planned <= self.users and self.factor > 0:
            self._grow(math.ceil(self.factor * share / self.page))
            self._planned += 1
        if len(self._free) < wanted:
            if not force:
                return None
            self._grow(wanted - len(self._free))
        self.users += 1
        return [self._free.popleft() for _ in range(wanted)]

    def give_back(self, pages: list[tuple[int, int]]) -> None:
        """Pages of one `take` are free again."""
        self._free.extend(pages)
        self.users -= 1

    def _grow(self, pages: int) -> None:
        self._free.extend((len(self._slabs), number) for number in range(pages))
        self._slabs.append(torch.empty(pages, self.page, *self._row, **self._options))

    def views(self, pages: list[tuple[int, int]], rows: int) -> list[tuple[Tensor, int, int]]:
        """The memory of these pages in as few pieces as there are neighbours: (rows of the pool, first, after the last row of x)."""
        pieces: list[list[int]] = []  # slab, first page, pages
        for slab, number in pages:
            if pieces and pieces[-1][0] == slab and sum(pieces[-1][1:]) == number:
                pieces[-1][2] += 1
            else:
                pieces.append([slab, number, 1])
        found, start = [], 0
        for slab, first, count in pieces:
            stop = min(start + count * self.page, rows)
            memory = self._slabs[slab][first:first + count].flatten(0, 1)
            found.append((memory[:stop - start], start, stop))
            start = stop
        return found


class _Stay:
    """Rows in pages of a pool; the pages are given back once, by `leave` or when nobody wants the rows any more."""

    def __init__(self, pool: PagePool, pages: list[tuple[int, int]], x: Tensor, rows: int):
        self.pool, self.pages, self.rows = pool, pages, rows
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.leave = weakref.finalize(self, pool.give_back, pages)
        self.leave.atexit = False

    def views(self) -> list[tuple[Tensor, int, int]]:
        return self.pool.views(self.pages, self.rows)


class PageCopies(StreamedCopies):
    """Copies between buffers and pages; of one layer's buffers, so many rows. Pages may be those of a copy back."""

    follows = True

    def __init__(self, choose: Callable[[Tensor, int, int], tuple[PagePool, list]], rows: int, share: int,
                 streams: tuple[Any, Any] | None):
        super().__init__(streams)
        self._choose, self._rows, self._share = choose, rows, share

    def room(self, x: Tensor) -> _Stay:
        pool, pages = self._choose(x, self._rows, self._share)
        return _Stay(pool, pages, x, self._rows)

    def copy_out(self, room: _Stay, x: Tensor) -> None:
        for memory, start, stop in room.views():
            memory.copy_(x[start:stop], non_blocking=True)

    def copy_back(self, room: _Stay) -> Tensor:
        x = torch.empty(room.shape, dtype=room.dtype, device=room.device)
        for memory, start, stop in room.views():
            x[start:stop].copy_(memory, non_blocking=True)
        x[room.rows:].zero_()  # as they were: products may run over them
        room.leave()
        return x


class PagedStash:
    """The stash of one model chunk. overflows: how often both pools were full."""

    def __init__(self, device: torch.device, page: int = 64, factor_device: float = 1.1, factor_host: float = 0.0):
        """page: rows of a page. factors: sizes of the pools, see the head of this file."""
        self._device, self._page = device, page
        self._factors = {"device": factor_device, "host": factor_host}
        self._pools: dict[tuple, PagePool] = {}
        self._streams = streams_of(device)
        self._last: Group | None = None
        self.overflows = 0
        self._named = 0.0  # the largest factor that the log has named

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """All pools so far."""
        return tuple(self._pools.values())

    def begin_pass(self) -> None:
        """The next forward pass begins: what it stashes has nothing before it."""
        self._last = None

    def open(self, held: int, used: int, share: int) -> Callable[[Tensor], Callable[[], Tensor] | None]:
        """For one layer: what stashes a tensor of `held` rows or more, `used` of them, and returns what brings it back; None: it stays.

        share: rows of an even share, the measure of the pools.
        """
        group = Group(self._last)
        copies = PageCopies(self._choose, used, share, self._streams)

        def store(x: Tensor) -> Callable[[], Tensor] | None:
            if x.dim() == 0 or x.shape[0] < held:
                return None
            stored = Stored(x, group, copies)
            group.add(stored)
            self._last = group
            return functools.partial(Stored.get, stored)

        return store

    def _pool(self, x: Tensor, where: str) -> PagePool:
        key = (where, x.shape[1:], x.dtype)
        if key not in self._pools:
            on_host = where == "host"
            self._pools[key] = PagePool(x.shape[1:], x.dtype, torch.device("cpu") if on_host else self._device, self._page,
                                        self._factors[where], pinned=on_host and self._streams is not None)
        return self._pools[key]

    def _choose(self, x: Tensor, rows: int, share: int) -> tuple[PagePool, list[tuple[int, int]]]:
        """A pool and its pages for so many rows of x."""
        first = self._pool(x, "device")
        pages = first.take(rows, share)
        if pages is not None:
            return first, pages
        if self._factors["host"] > 0:
            second = self._pool(x, "host")
            pages = second.take(rows, share)
            if pages is not None:
                return second, pages
        before = first.num_pages
        pages = first.take(rows, share, force=True)
        self.overflows += 1
        enough = math.ceil(100 * first.num_pages * self._page / (first.users * share)) / 100
        if enough <= self._named:
            return first, pages
        self._named = enough
        logger.warning(
            "the paged stash is full (%d pages of %d rows, --moe-paged-stash-buffer-size-factor-cuda %g): it grows to %d pages, nothing is "
            "lost. A factor of %g would have been enough", before, self._page, self._factors["device"], first.num_pages, enough)
        return first, pages
