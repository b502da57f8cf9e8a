"""Pages of tokens in Triton kernels: one launch to allocate, one for each buffer that is copied.

As ops/paged_copy.py, but programs of pages that are not in use end at once, and pages may be in pinned host memory,
which kernels address directly. Copies move bytes, whatever the dtype.

Shapes: P pages; M entries of a page table; C tokens of a buffer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.paged_copy import PageKernels, PageMemory

PAGES = 4096  # that the one program of an allocation looks at together
BYTES = 8192  # that a program copies


@triton.jit
def allocate_kernel(free, num_tokens, table, overflow, num_pages, page_size, length, PAGES: tl.constexpr):
    """Take the first free pages; entries of the table without one are `num_pages`."""
    needed = tl.minimum((tl.load(num_tokens).to(tl.int64) + page_size - 1) // page_size, length)
    num_free = needed * 0
    for first in range(0, num_pages, PAGES):
        page = first + tl.arange(0, PAGES)
        is_free = tl.load(free + page, mask=page < num_pages, other=0).to(tl.int32)
        index = num_free + tl.cumsum(is_free, 0) - is_free
        taken = (is_free > 0) & (index < needed)
        tl.store(table + index, page.to(tl.int64), mask=taken)
        tl.store(free + page, tl.zeros([PAGES], tl.uint8), mask=taken)
        num_free += tl.sum(is_free, 0)
    for first in range(0, length, PAGES):
        index = first + tl.arange(0, PAGES)
        tl.store(
            table + index,
            tl.zeros([PAGES], tl.int64) + num_pages,
            mask=(index < length) & (index >= tl.minimum(num_free, needed)),
        )
    if num_free < needed:
        tl.store(overflow, 1)


@triton.jit
def copy_out_kernel(x, device, host, table, num_device, num_pages, page_bytes, size, BYTES: tl.constexpr):
    """Copy BYTES of one page's tokens to the page; `size` is that of x."""
    entry = tl.program_id(0).to(tl.int64)
    page = tl.load(table + entry)
    if page < num_pages:
        place = tl.program_id(1).to(tl.int64) * BYTES + tl.arange(0, BYTES)
        source = entry * page_bytes + place
        inside = (place < page_bytes) & (source < size)
        target = device + page * page_bytes + place
        if host is not None:
            target = tl.where(page < num_device, target, host + (page - num_device) * page_bytes + place)
        tl.store(target, tl.load(x + source, mask=inside, other=0), mask=inside)


@triton.jit
def copy_back_kernel(
    out,
    device,
    host,
    table,
    num_tokens,
    num_device,
    num_pages,
    page_bytes,
    token_bytes,
    size,
    length,
    BYTES: tl.constexpr,
):
    """Copy BYTES of one page back, or write zeros where there is no page and after the last token."""
    entry = tl.program_id(0).to(tl.int64)
    page = tl.load(table + entry, mask=entry < length, other=num_pages)
    place = tl.program_id(1).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    target = entry * page_bytes + place
    inside = (place < page_bytes) & (target < size)
    used = inside & (page < num_pages) & (target < tl.load(num_tokens).to(tl.int64) * token_bytes)
    source = device + page * page_bytes + place
    if host is not None:
        source = tl.where(page < num_device, source, host + (page - num_device) * page_bytes + place)
    tl.store(out + target, tl.load(source, mask=used, other=0), mask=inside)


def allocate_pages(free_P: Tensor, num_tokens: Tensor, page_size: int, length: int, overflow: Tensor) -> Tensor:
    """Allocate pages, as paged_copy.allocate_pages."""
    table_M = torch.empty(length, dtype=torch.int64, device=free_P.device)
    allocate_kernel[(1,)](
        free_P, num_tokens, table_M, overflow, free_P.shape[0] - 1, page_size, length, PAGES=PAGES, num_warps=8
    )
    return table_M


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _memory_bytes(memory: PageMemory) -> tuple[Tensor, Tensor | None]:
    return _as_bytes(memory.device), None if memory.host is None else _as_bytes(memory.host)


def _sizes(memory: PageMemory) -> tuple[int, int, int]:
    """Return the pages on the device, the pages in all, and the bytes of a page."""
    num_device = memory.device.shape[0] - 1
    num_pages = num_device + (0 if memory.host is None else memory.host.shape[0])
    return num_device, num_pages, memory.device[0].numel() * memory.device.element_size()


def copy_to_pages(x: Tensor, memory: PageMemory, table_M: Tensor) -> None:
    """Copy a buffer to its pages, as paged_copy.copy_to_pages."""
    num_device, num_pages, page_bytes = _sizes(memory)
    x = _as_bytes(x.contiguous())
    copy_out_kernel[(len(table_M), triton.cdiv(page_bytes, BYTES))](
        x,
        *_memory_bytes(memory),
        table_M,
        num_device,
        num_pages,
        page_bytes,
        x.numel(),
        BYTES=BYTES,
    )


def copy_from_pages(out: Tensor, memory: PageMemory, table_M: Tensor, num_tokens: Tensor) -> None:
    """Copy pages back to a contiguous buffer, as paged_copy.copy_from_pages."""
    num_device, num_pages, page_bytes = _sizes(memory)
    size = out.numel() * out.element_size()
    copy_back_kernel[(triton.cdiv(size, page_bytes), triton.cdiv(page_bytes, BYTES))](
        _as_bytes(out),
        *_memory_bytes(memory),
        table_M,
        num_tokens,
        num_device,
        num_pages,
        page_bytes,
        page_bytes // memory.device.shape[1],
        size,
        len(table_M),
        BYTES=BYTES,
    )


PAGE_KERNELS = PageKernels(allocate_pages, copy_to_pages, copy_from_pages, reaches_host=True)
