"""Pages of tokens in Triton's interpreter against plain torch. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.ops import paged_copy as plain
from moe_trainer.ops import triton_paged_copy as ours
from moe_trainer.ops.paged_copy import PageMemory


@pytest.mark.parametrize("block", [4, 4096])
def test_allocation_equals_torch(block, monkeypatch):
    """Also with more pages than the program looks at together, too few free ones, and more tokens than a table takes."""
    monkeypatch.setattr(ours, "PAGES", block)
    generator = torch.Generator().manual_seed(0)
    for num_free, num_tokens, length in ((11, 17, 5), (3, 17, 5), (11, 0, 5), (11, 99, 5), (0, 1, 5), (11, 22, 11)):
        free = torch.zeros(12, dtype=torch.uint8)
        free[torch.randperm(11, generator=generator)[:num_free]] = 1
        results = []
        for module in (ours, plain):
            own, overflow = free.clone(), torch.zeros(1, dtype=torch.int32)
            table = module.allocate_pages(own, torch.tensor([num_tokens]), 2, length, overflow)
            results.append((table, own[:-1], overflow))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), (num_free, num_tokens, length)
        assert int(results[0][2]) == (min(-(-num_tokens // 2), length) > num_free)


@pytest.mark.parametrize("block", [16, 8192])
@pytest.mark.parametrize(
    "shape,dtype",
    [((23,), torch.uint8), ((23, 5), torch.bfloat16), ((23, 5), torch.float32), ((16, 2, 3), torch.float32)],
)
def test_copies_equal_torch(dtype, shape, block, monkeypatch):
    """Through 5 pages on the device and 3 on the host, some entries without a page; into buffers of any size."""
    monkeypatch.setattr(ours, "BYTES", block)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    table = torch.tensor([7, 2, 5, 0, 8, 8])  # 8 is none
    for num_tokens in (14, 23):
        all_pages = torch.zeros(9, 4, *shape[1:], dtype=dtype)
        memory = PageMemory(torch.zeros(6, 4, *shape[1:], dtype=dtype), torch.zeros(3, 4, *shape[1:], dtype=dtype))
        plain.copy_to_pages(x, PageMemory(all_pages), table)
        ours.copy_to_pages(x, memory, table)
        assert torch.equal(torch.cat([memory.device[:5], memory.host]), all_pages[:8]), "nothing else is written"
        for rows in (shape[0], 30):
            outs = torch.ones(2, rows, *shape[1:]).to(dtype).unbind(0)
            ours.copy_from_pages(outs[0], memory, table, torch.tensor([num_tokens]))
            plain.copy_from_pages(outs[1], PageMemory(all_pages), table, torch.tensor([num_tokens]))
            assert torch.equal(*outs)
            used = min(num_tokens, 16, shape[0])
            assert torch.equal(outs[0][:used], x[:used]) and not outs[0][used:].any()


def test_copies_without_host_pages():
    x, memory = torch.randn(7, 3), PageMemory(torch.zeros(5, 4, 3))
    ours.copy_to_pages(x[:, :2].T.contiguous().T, PageMemory(torch.zeros(5, 4, 2)), torch.tensor([3, 0]))
    ours.copy_to_pages(x, memory, torch.tensor([3, 0]))
    out = torch.empty(7, 3)
    ours.copy_from_pages(out, memory, torch.tensor([3, 0]), torch.tensor([7]))
    assert torch.equal(out, x)
