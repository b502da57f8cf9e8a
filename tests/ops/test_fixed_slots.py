"""Slots of fixed size: every token comes back, padding is zeros, and what does not fit is reported."""

import pytest
import torch

from moe_trainer.ops.fixed_slots import (
    buffer_to_slots,
    compact_slots,
    fill_slots,
    make_slot_map,
    slots_to_buffer,
    sum_slots,
)


def route(num_tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(topk, 1)[1]
    routing = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    routing[:, 1] = False  # an expert without tokens, and tokens with fewer experts
    return routing


@pytest.mark.parametrize(
    ("num_slots", "experts", "size", "multiple"), [(1, 4, 32, 4), (2, 3, 20, 1), (4, 2, 12, 1), (2, 1, 11, 1)]
)
def test_tokens_return_from_slots_and_buffer(num_slots, experts, size, multiple):
    routing = route(11, num_slots * experts, 2 if num_slots * experts > 2 else 1)
    x, probs = torch.randn(11, 3).requires_grad_(), torch.rand(routing.shape).requires_grad_()
    slots = make_slot_map(routing, num_slots, size, multiple)
    assert not slots.overflow and torch.equal(
        slots.counts_Se.flatten(), (routing.sum(0) + multiple - 1) // multiple * multiple
    )
    x_NH, probs_N = fill_slots(x, probs, slots)
    order = compact_slots(slots.counts_Se, size, 4)
    x_CH, probs_C = slots_to_buffer(order, x_NH, probs_N)
    rows = torch.cat([x_NH.view(num_slots, size, 3)[slot] for slot in range(num_slots)])
    assert torch.equal(rows, x_NH) and x_CH.shape[0] % 4 == 0
    sums, expert = [], 0
    for count in order.counts_e.tolist():  # each expert's rows are together
        sums.append(x_CH[expert : expert + count].sum(0))
        expert += count
    by_expert = torch.stack([x[routing[:, column]].sum(0) for column in range(routing.shape[1])])
    torch.testing.assert_close(torch.stack(sums), by_expert.view(num_slots, experts, 3).sum(0))
    assert not x_CH[expert:].any() and not probs_C[expert:].any()
    y = sum_slots(buffer_to_slots(order, x_CH * probs_C.unsqueeze(1)), slots)
    torch.testing.assert_close(y, x * (probs * routing).sum(1, keepdim=True))
    y.sum().backward()
    torch.testing.assert_close(x.grad, (probs * routing).sum(1, keepdim=True).expand(-1, 3))
    torch.testing.assert_close(probs.grad, routing * x.sum(1, keepdim=True))


def test_unused_rows_have_no_gradient():
    """Experts with biases add the gradients of padding rows, and quantized formats scale blocks of rows together."""
    slots = make_slot_map(route(11, 6, 2), 2, 20)
    order = compact_slots(slots.counts_Se, 20, 4)
    y_CH = torch.randn(len(order.is_used_C), 3, requires_grad=True)
    (buffer_to_slots(order, y_CH) + 1).square().sum().backward()
    assert not order.is_used_C.all() and order.is_used_C.any()
    assert not y_CH.grad[~order.is_used_C].any() and y_CH.grad[order.is_used_C].all(1).all()


def test_tokens_that_do_not_fit_are_reported():
    routing = torch.ones(4, 2, dtype=torch.bool)
    for size, left_out in ((3, 1), (4, 0)):
        slots = make_slot_map(routing, 2, size)
        assert slots.overflow.tolist() == [left_out] and slots.counts_Se.tolist() == [[size], [size]]
        order = compact_slots(slots.counts_Se, size)  # all indices stay valid
        x_CH, _ = slots_to_buffer(order, *fill_slots(torch.randn(4, 3), torch.rand(4, 2), slots))
        assert sum_slots(buffer_to_slots(order, x_CH), slots).shape == (4, 3)
