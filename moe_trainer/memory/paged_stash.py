"""Paged stash of expert activations (--moe-paged-stash): between forward and backward only tokens in use are stored.

With a budget for received tokens (moe/receive/budget.py) every MoE layer computes in buffers of the worst case, and
would save tensors of that size: layers x worst case. Instead the tokens in use are copied to pages of a fixed number
of tokens, during the layer's combine, and the buffers serve the next layer. In backward they are copied back during
the combine's gradient (`join_stash`). The tensors of a layer and microbatch are a group with one page table; all groups
of a rank share the pages, so one layer uses what another leaves, and groups may end in any order: pipeline schedules.

The first iteration stores exact copies and measures how many groups are in flight. From then on the memory is fixed:
for each group factor * balanced size tokens, on the device (--moe-paged-stash-buffer-size-factor-cuda) and in pinned
memory (-cpu), whose pages are used when the device's run out. Page tables, free pages and copies are on the device
(ops/paged_copy.py): nothing waits for the host, and CUDA graphs can capture it. Captured copies use addresses of the
memory, so graphs are valid for one `generation`.

With counts on the device a stash without enough pages sets `overflow`, which is read with the flags of the receive
buffers; the iteration is repeated with counts on the host. Then the host knows what fits, the rest is copied exactly,
nothing is lost, and the caller makes all ranks `adopt` the largest sufficient factor: another rank may be the fullest
one next. The memory grows before the next iteration. Megatron-LM repeats without a stash. With counts on the host
nothing is repeated, and the memory of this rank grows.

Shapes: buffers [C, ...] of which the first R tokens are used.
"""

import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.side_stream import SideStream, wait_for
from moe_trainer.ops.paged_copy import TORCH_PAGE_KERNELS, PageKernels, PageMemory, free_pages

logger = logging.getLogger(__name__)

Signature = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape of a token and dtype, for each tensor of a group."""


def round_up_factor(factor: float) -> float:
    """Round a factor of the balanced size up to three decimals, so that the logged one suffices."""
    return math.ceil(factor * 1000) / 1000


class PagePool:
    """Pages for groups of one signature.

    Attributes:
        num_device, num_host: pages.
        free_P: free pages (ops/paged_copy.py).
        memories: of the tensors of a group.
        num_groups, peak_groups: groups in flight.
    """

    def __init__(self, signature: Signature, device: torch.device, page_size: int, kernels: PageKernels):
        self._signature, self._device, self._page_size, self._kernels = signature, device, page_size, kernels
        self.balanced_size = 1
        self.num_groups = self.peak_groups = 0
        self._num_unknown = 0  # groups in flight whose numbers of tokens the host does not know
        self._pages_in_flight = 0  # of the others, wherever they are
        self._peak_pages = 0  # of those that were not in pinned memory, which takes whole groups only
        self._num_used = self._num_pinned = 0
        self.has_overflowed = False
        self.memories: tuple[PageMemory, ...] = ()
        self._allocate(0, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages on the device, without the one that takes what has no page."""
        return sum(memory.device[:-1].numel() * memory.device.element_size() for memory in self.memories)

    @property
    def sufficient_factor(self) -> float:
        """Smallest factor of the device's pages with which everything so far would have fitted."""
        pages_per_group = -(-self._peak_pages // max(1, self.peak_groups))
        return round_up_factor(pages_per_group * self._page_size / self.balanced_size)

    def next_sizes(self, factor_device: float, factor_host: float) -> tuple[int, int]:
        """Return the pages of the next iteration, on the device and on the host."""
        sizes = [
            math.ceil(round(factor * self.balanced_size / self._page_size, 6)) * self.peak_groups
            for factor in (factor_device, factor_host)
        ]
        num_host = max(self.num_host, sizes[1])
        return max(self.num_device, sizes[0], self._peak_pages if self.has_overflowed else 0), num_host

    def begin_iteration(self, factor_device: float, factor_host: float) -> bool:
        """Free all pages; return whether the memory has been replaced by a larger one."""
        num_device, num_host = self.next_sizes(factor_device, factor_host)
        self.num_groups = self._num_unknown = self._pages_in_flight = self._num_used = self._num_pinned = 0
        self.has_overflowed = False
        if (num_device, num_host) == (self.num_device, self.num_host):
            self.free_P.fill_(1)
            return False
        if self.num_device == 0:
            self._peak_pages = 0  # nothing could be pinned yet
        self._allocate(num_device, num_host)
        return True

    def _allocate(self, num_device: int, num_host: int) -> None:
        self.num_device, self.num_host = num_device, num_host
        self.memories = ()  # frees the memory before
        self.free_P = torch.ones(num_device + num_host + 1, dtype=torch.uint8, device=self._device)
        self.memories = tuple(self._allocate_memory(*token) for token in self._signature)

    def _allocate_memory(self, token_shape: torch.Size, dtype: torch.dtype) -> PageMemory:
        def allocate(num_pages: int, **options: Any) -> Tensor:
            return torch.empty(num_pages, self._page_size, *token_shape, dtype=dtype, **options)

        if self._device.type == "cpu":
            return PageMemory(allocate(self.num_device + self.num_host + 1))
        host = None
        if self._kernels.reaches_host and self.num_host:
            host = allocate(self.num_host, pin_memory=True)
        return PageMemory(allocate(self.num_device + 1, device=self._device), host)

    def enter(self, num_pages: int | None, balanced_size: int) -> str:
        """Count a group of a number of pages, None if the host does not know it; return where it is stored.

        Returns:
            "pages", "pinned" for an exact copy in pinned memory, "device" for one on the device.
        """
        self.balanced_size = max(self.balanced_size, balanced_size)
        self.num_groups += 1
        self.peak_groups = max(self.peak_groups, self.num_groups)
        if num_pages is None:
            self._num_unknown += 1
            return "pages"
        self._pages_in_flight += num_pages
        place = self._place(num_pages)
        if place == "pages":
            self._num_used += num_pages
        elif place == "pinned":
            self._num_pinned += num_pages
        self._peak_pages = max(self._peak_pages, self._pages_in_flight - self._num_pinned)
        return place

    def _place(self, num_pages: int) -> str:
        """Return where a group is stored; note an overflow."""
        if num_pages == 0 or self._num_unknown or self.num_device == 0:
            return "device"
        if self._num_used + num_pages <= self.num_device:
            return "pages"
        if self._num_pinned + num_pages <= self.num_host:
            return "pinned"
        self.has_overflowed = True
        return "device"

    def leave(self, num_pages: int | None, place: str) -> None:
        """Undo `enter`."""
        self.num_groups -= 1
        if num_pages is None:
            self._num_unknown -= 1
            return
        self._pages_in_flight -= num_pages
        if place == "pages":
            self._num_used -= num_pages
        elif place == "pinned":
            self._num_pinned -= num_pages


class StashedTensor:
    """A tensor of a group between forward and backward; the node that saved it holds it.

    Attributes:
        shape: [C, ...], as it is stored; `saved_shape` is what the node saved.
        restored: the tensor on the device, as it is stored, after `allocate`.
    """

    restored: Tensor

    def __init__(self, group: "StashGroup", index: int, x: Tensor, saved_shape: torch.Size):
        self._group, self.index = group, index
        self.shape, self.dtype, self.device, self.saved_shape = x.shape, x.dtype, x.device, saved_shape
        self.copy: Tensor | None = None  # if it is not in pages

    def allocate(self) -> None:
        """Allocate the tensor that `restored` is, to be copied back into."""
        self.restored = torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def get(self) -> Tensor:
        """Return the tensor."""
        self._group.finish()
        return self.restored.view(self.saved_shape)


class StashGroup:
    """The tensors that one layer saves for one microbatch: stored when closed, copied back together."""

    def __init__(self, stash: "PagedStash", buffer_size: int, num_used: int | Tensor, balanced_size: int):
        self._stash, self._buffer_size = stash, buffer_size
        self._num_used, self._balanced_size = num_used, balanced_size
        self._tensors: list[weakref.ref[StashedTensor]] = []
        self._sources: list[tuple[StashedTensor, Tensor]] = []  # until they have been copied
        self._pool: PagePool | None = None
        self._num_pages: int | None = None
        self._place = ""
        self._table_M: Tensor | None = None
        self._event: Any = None
        self._is_back = False

    def store(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Store a tensor when the group is closed; return how to fetch it, or None if it is not one of tokens."""
        if x.dim() == 0 or x.shape[0] < max(1, self._buffer_size):
            return None
        return self._add(x, x.detach())

    def library_buffers(
        self, num_tokens: int, is_of_tokens: Callable[[Tensor], bool]
    ) -> Callable[[Tensor], Callable[[], Tensor] | None]:
        """Return a function like `store` for what a library saves, whose shapes need not begin with the tokens.

        Experts by a library save nothing else, so the group takes the library's sizes.

        Args:
            num_tokens: tokens of its buffers; with numbers on the host these are all in use.
            is_of_tokens: whether a tensor holds equally many bytes of every token, in the order of tokens.
        """
        self._buffer_size = num_tokens
        if not isinstance(self._num_used, Tensor):
            self._num_used = num_tokens

        def store(x: Tensor) -> Callable[[], Tensor] | None:
            if not is_of_tokens(x):
                return None
            return self._add(x, x.detach().reshape(num_tokens, -1))

        return store

    def _add(self, x: Tensor, x_C: Tensor) -> Callable[[], Tensor]:
        stored = StashedTensor(self, len(self._sources), x_C, x.shape)
        self._tensors.append(weakref.ref(stored))
        self._sources.append((stored, x_C))
        return stored.get

    def close(self) -> None:
        """Start to copy the stored tensors."""
        if not self._sources:
            return
        page_size = self._stash.page_size
        self._pool = self._stash.get_pool(tuple((x.shape[1:], x.dtype) for _, x in self._sources))
        if not isinstance(self._num_used, Tensor):
            self._num_pages = -(-self._num_used // page_size)
        self._place = self._pool.enter(self._num_pages, self._balanced_size)
        if self._place == "device":
            for stored, x in self._sources:
                stored.copy = x[: self._num_used].clone()
            self._sources.clear()
        else:
            self._event = self._stash.run_copies(partial(self._copy_out, self._pool))

    def _copy_out(self, pool: PagePool) -> None:
        if self._place == "pinned":
            for stored, x in self._sources:
                used = x[: self._num_used]
                stored.copy = torch.empty_like(used, device="cpu", pin_memory=used.is_cuda).copy_(
                    used, non_blocking=True
                )
            return
        kernels, page_size = self._stash.kernels, self._stash.page_size
        if not isinstance(self._num_used, Tensor):
            self._num_used = torch.full((1,), self._num_used, device=pool.free_P.device)
        length = -(-self._buffer_size // page_size) if self._num_pages is None else self._num_pages
        self._table_M = kernels.allocate(pool.free_P, self._num_used, page_size, length, self._stash.overflow)
        for (_, x), memory in zip(self._sources, pool.memories, strict=True):
            kernels.copy_to_pages(x, memory, self._table_M)

    def join(self) -> None:
        """Make the computation wait for the copies, so that the buffers can be used again."""
        self._stash.wait(self._event)
        self._sources.clear()

    def start_back(self) -> None:
        """Start to copy back the tensors that are still referenced, and free the pages."""
        if self._is_back or self._pool is None:
            return
        self.join()
        self._is_back = True
        self._pool.leave(self._num_pages, self._place)
        alive = [stored for reference in self._tensors if (stored := reference()) is not None]
        for stored in alive:  # here, because the computation uses and frees the memory
            stored.allocate()
        self._event = self._stash.run_copies(partial(self._copy_back, self._pool, alive))

    def _copy_back(self, pool: PagePool, alive: list[StashedTensor]) -> None:
        if self._table_M is None:
            for stored in alive:
                assert stored.copy is not None
                stored.restored[: len(stored.copy)].copy_(stored.copy, non_blocking=True)
                stored.restored[len(stored.copy) :].zero_()  # GEMMs may include the padding
            return
        assert isinstance(self._num_used, Tensor), "since _copy_out"
        for stored in alive:
            memory = pool.memories[stored.index]
            self._stash.kernels.copy_from_pages(stored.restored, memory, self._table_M, self._num_used)
        free_pages(pool.free_P, self._table_M)

    def finish(self) -> None:
        """Make the computation wait until the tensors have been copied back."""
        self.start_back()
        self._stash.wait(self._event)
        self._event = None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, group: StashGroup) -> Tensor:
        ctx.group = group
        group.join()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.group.start_back()
        return grad, None


def join_stash(y: Tensor, group: StashGroup | None) -> Tensor:
    """Return y, the output of the layer or captured part that closed the group.

    The computation waits for the group's copies here, and backward starts to copy back.
    """
    return y if group is None else _Join.apply(y, group)


class PagedStash:
    """The stash of a rank.

    Attributes:
        page_size: tokens of a page.
        kernels: the copies.
        overflow: int32 [1] on the device: pages were missing since the last `begin_iteration`.
        generation: number of times that the memory has been replaced.
    """

    def __init__(
        self,
        device: torch.device,
        page_size: int = 64,
        factor_device: float = 1.1,
        factor_host: float = 0.0,
        kernels: PageKernels | None = None,
    ):
        """Create it without pages; the factors are explained at the head of this file."""
        self._device, self.page_size, self.kernels = device, page_size, kernels or TORCH_PAGE_KERNELS
        self._factors = factor_device, factor_host
        self._pools: dict[Signature, PagePool] = {}
        # one stream for all copies and changes of free pages, which are so in order
        self._stream = SideStream()
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_iterations = self.generation = self.num_overflows = 0

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return tuple(self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages on the device."""
        return sum(pool.num_bytes for pool in self.pools)

    @property
    def sufficient_factor(self) -> float:
        """Smallest --moe-paged-stash-buffer-size-factor-cuda with which everything so far would have fitted."""
        return max((pool.sufficient_factor for pool in self.pools), default=0.0)

    @property
    def has_overflowed(self) -> bool:
        """Whether pages were missing in this iteration, as far as the host knows."""
        return any(pool.has_overflowed for pool in self.pools)

    @property
    def is_measuring(self) -> bool:
        """Whether this is the first iteration, which needs counts on the host."""
        return self._num_iterations < 2

    @property
    def will_grow(self) -> bool:
        """Whether `begin_iteration` will replace the memory."""
        return any(pool.next_sizes(*self._factors) != (pool.num_device, pool.num_host) for pool in self.pools)

    def why_host_counts(self) -> str | None:
        """Return why the host needs the numbers of tokens; None if it does not."""
        if self._device.type == "cuda" and self._factors[1] > 0 and not self.kernels.reaches_host:
            return "without the Triton kernel paged-stash it copies pages to the host (--triton-kernels)"
        return None

    def adopt(self, factor_device: float) -> None:
        """Have memory for at least this factor on the device from the next iteration on, whatever this rank needed."""
        self._factors = max(self._factors[0], factor_device), self._factors[1]
        for pool in self.pools:
            pool.has_overflowed = False

    def begin_iteration(self) -> None:
        """Begin an iteration, in which no group of an earlier one is used: all pages are free, and the flag is unset.

        Outside of graphs.
        """
        self._num_iterations += 1
        self.overflow.zero_()
        for pool in self.pools:
            has_overflowed, before = pool.has_overflowed, pool.num_device
            if pool.begin_iteration(*self._factors):
                self.generation += 1
            if has_overflowed:
                self.num_overflows += 1
                logger.warning(
                    "the paged stash was full (%d pages of %d tokens, --moe-paged-stash-buffer-size-factor-cuda %g) "
                    "and grows to %d pages; nothing is lost. A factor of %g would suffice",
                    before,
                    self.page_size,
                    self._factors[0],
                    pool.num_device,
                    pool.sufficient_factor,
                )

    def open(self, buffer_size: int, num_used: int | Tensor, balanced_size: int) -> StashGroup:
        """Return the group of a layer and microbatch.

        Args:
            buffer_size: tensors of at least this many tokens are stashed.
            num_used: tokens in use, which are stored; on the device integer [1].
            balanced_size: unit of the sizes of the memory, in tokens.
        """
        return StashGroup(self, buffer_size, num_used, balanced_size)

    def get_pool(self, signature: Signature) -> PagePool:
        """Return the pages for groups of a signature."""
        if signature not in self._pools:
            self._pools[signature] = PagePool(signature, self._device, self.page_size, self.kernels)
        return self._pools[signature]

    def run_copies(self, copy: Callable[[], None]) -> Any:
        """Run copies after what is on the current stream; return their event, None without CUDA."""
        return self._stream.run(copy, self._device)[1]

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event."""
        wait_for(event, self._device)
