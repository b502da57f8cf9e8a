"""Pages of tokens: allocation with a device's numbers, copies and frees in any order."""

import random

import torch

from moe_trainer.ops.paged_copy import PageMemory, allocate_pages, copy_from_pages, copy_to_pages, free_pages

PAGES, PAGE, ROWS = 13, 4, 18


def test_buffers_keep_their_tokens_whatever_the_order_of_frees():
    """Against a list of the buffers; pages of the others and too few pages must not change any of them."""
    draw, free, memory = random.Random(0), torch.ones(PAGES + 1, dtype=torch.uint8), torch.empty(PAGES + 1, PAGE, 3)
    live, overflows = [], 0
    for step in range(200):
        if live and draw.random() < 0.5:
            x, used, table, complete = live.pop(draw.randrange(len(live)))
            out = torch.empty(ROWS, 3)
            copy_from_pages(out, PageMemory(memory), table, torch.tensor([used]))
            free_pages(free, table)
            if complete:
                assert torch.equal(out[:used], x[:used]) and not out[used:].any()
        used, overflow = draw.randint(0, ROWS), torch.zeros(1, dtype=torch.int32)
        num_free = int(free[:PAGES].sum())
        table = allocate_pages(free, torch.tensor([used]), PAGE, -(-ROWS // PAGE), overflow)
        needed = -(-used // PAGE)
        assert int(overflow) == (needed > num_free)
        taken = table[table < PAGES].tolist()
        assert len(set(taken)) == len(taken) == min(needed, num_free) == num_free - int(free[:PAGES].sum())
        assert taken == sorted(taken), "the first ones"
        x = torch.full((ROWS, 3), float(step))
        copy_to_pages(x, PageMemory(memory), table)
        live.append((x, used, table, not overflow))
        overflows += int(overflow)
    assert 20 < overflows < 180


def test_a_larger_buffer_gives_and_gets_what_the_table_has():
    memory, table = PageMemory(torch.zeros(4, 4, 2)), torch.tensor([2, 0])
    x = torch.randn(11, 2)
    copy_to_pages(x, memory, table)
    assert torch.equal(memory.device[[2, 0]].flatten(0, 1), x[:8]) and not memory.device[1].any()
    out = torch.ones(11, 2)
    copy_from_pages(out, memory, table, torch.tensor([6]))
    assert torch.equal(out[:6], x[:6]) and not out[6:].any()
