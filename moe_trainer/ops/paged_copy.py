"""Pages of tokens whose numbers stay on the device: allocation, and copies between a buffer and its pages.

Nothing here waits for the host or has a shape that depends on values, so that CUDA graphs can capture it. A page table
lists the pages of a buffer's tokens, in order. Its length is an upper bound, and entries without a page are P, the
number of pages: plain torch has one more page there, whose contents are not used.

The free pages are one byte each. An allocation takes the first free ones, so pages with low numbers are preferred
(memory/paged_stash.py puts the host's after the device's), and any order of frees is possible.

ops/triton_paged_copy.py has the same functions as kernels, which touch the pages in use only.

Shapes: P pages, page_size tokens each; M entries of a page table; C tokens of a buffer.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PageMemory(NamedTuple):
    """Memory of pages for tokens of one shape and dtype.

    Attributes:
        device: [pages + 1, page_size, ...]; the last one is for table entries without a page.
        host: [pages, page_size, ...], pinned, whose numbers follow; None without. Kernels only.
    """

    device: Tensor
    host: Tensor | None = None


def allocate_pages(free_P: Tensor, num_tokens: Tensor, page_size: int, length: int, overflow: Tensor) -> Tensor:
    """Allocate pages for a number of tokens.

    Args:
        free_P: uint8 [P + 1]; 1 for free pages, updated in place. The last one does not count.
        num_tokens: integer [1] on the device, which may exceed length * page_size.
        page_size: tokens of a page.
        length: M.
        overflow: int32 [1]; set to 1 if there are too few free pages.

    Returns:
        The page table, int64 [M].
    """
    num_pages = free_P.shape[0] - 1
    index_M = torch.arange(length, device=free_P.device)
    needed = (num_tokens + (page_size - 1)).div(page_size, rounding_mode="floor").clamp(max=length)
    num_free_P = free_P[:num_pages].cumsum(0)
    table_M = torch.searchsorted(num_free_P, index_M + 1)  # P if there is none
    table_M = torch.where(index_M < needed, table_M, num_pages)
    overflow.logical_or_(needed > free_P[:num_pages].sum())
    free_P.index_fill_(0, table_M, 0)
    return table_M


def free_pages(free_P: Tensor, table_M: Tensor) -> None:
    """Free the pages of a table."""
    free_P.index_fill_(0, table_M, 1)


def copy_to_pages(x: Tensor, memory: PageMemory, table_M: Tensor) -> None:
    """Copy the tokens of a buffer to its pages. Shapes: x [C, ...]; tokens beyond M pages are left out."""
    pages, page_size = memory.device, memory.device.shape[1]
    num_full = min(x.shape[0] // page_size, table_M.shape[0])
    num_tokens = num_full * page_size
    pages.index_copy_(0, table_M[:num_full], x[:num_tokens].unflatten(0, (num_full, page_size)))
    if num_tokens < x.shape[0] and num_full < table_M.shape[0]:
        last = x[num_tokens : num_tokens + page_size].unsqueeze(0)
        pages[:, : last.shape[1]].index_copy_(0, table_M[num_full : num_full + 1], last)


def copy_from_pages(out: Tensor, memory: PageMemory, table_M: Tensor, num_tokens: Tensor) -> None:
    """Copy tokens back to a buffer; zeros follow. Shapes: out [C, ...], num_tokens integer [1] on the device."""
    pages, page_size = memory.device, memory.device.shape[1]
    tokens = pages.index_select(0, table_M).flatten(0, 1)[: out.shape[0]]
    has_page = (table_M < pages.shape[0] - 1).repeat_interleave(page_size, output_size=len(table_M) * page_size)
    is_used = torch.arange(tokens.shape[0], device=out.device) < num_tokens
    is_used = (is_used & has_page[: tokens.shape[0]]).view(-1, *[1] * (out.dim() - 1))
    out[: tokens.shape[0]] = torch.where(is_used, tokens, torch.zeros((), dtype=out.dtype, device=out.device))
    out[tokens.shape[0] :].zero_()


class PageKernels(NamedTuple):
    """The functions above.

    Attributes:
        reaches_host: the copies write to and read from pinned memory.
    """

    allocate: Callable[[Tensor, Tensor, int, int, Tensor], Tensor]
    copy_to_pages: Callable[[Tensor, PageMemory, Tensor], None]
    copy_from_pages: Callable[[Tensor, PageMemory, Tensor, Tensor], None]
    reaches_host: bool = False


TORCH_PAGE_KERNELS = PageKernels(allocate_pages, copy_to_pages, copy_from_pages)
