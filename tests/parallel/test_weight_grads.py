"""Deferred weight gradients reach `.grad` and the hooks as autograd's own do."""

import pytest
import torch
from torch.nn import Parameter

from moe_trainer.parallel.weight_grads import WeightGradQueue


def make_watched_param(shape):
    seen = []
    param = Parameter(torch.randn(shape))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return param, seen


def test_gradients_are_set_then_added_and_hooks_run_once_a_pass():
    queue, (param, seen) = WeightGradQueue(), make_watched_param(3)
    queue.active = True
    first, second = torch.randn(3), torch.randn(3)
    queue.defer(param, lambda: first)
    queue.defer(param, lambda: second)  # a weight that two layers share
    assert param.grad is None
    queue.run()
    assert torch.equal(param.grad, first + second) and len(seen) == 1
    queue.defer(param, lambda: first)
    queue.run()
    assert torch.equal(param.grad, (first + second) + first) and len(seen) == 2
    queue.run()
    assert len(seen) == 2


def test_deferred_passes_are_separate_and_run_in_any_order():
    queue, (param, seen) = WeightGradQueue(), make_watched_param(2)
    queue.active = True
    queue.defer(param, lambda: torch.tensor([1.0, 2.0]))
    early = queue.take()
    queue.defer(param, lambda: torch.tensor([10.0, 20.0]))
    queue.run()
    assert param.grad.tolist() == [10.0, 20.0]
    early.run()
    assert param.grad.tolist() == [11.0, 22.0] and len(seen) == 2


def test_the_sum_of_a_pass_is_rounded_once():
    queue, (param, _) = WeightGradQueue(), make_watched_param(1)
    param.data = param.data.bfloat16()
    queue.active = True
    for _ in range(3):
        queue.defer(param, lambda: torch.tensor([1 + 2**-8]))  # alone it rounds to 1
    queue.run()
    assert param.grad.item() == 3.015625


def test_inactive_queue_rejects_gradients():
    queue, (param, _) = WeightGradQueue(), make_watched_param(1)
    with pytest.raises(AssertionError, match="active"):
        queue.defer(param, lambda: torch.ones(1))


def test_hooks_run_once_after_gradients_that_are_already_in_the_main_gradient():
    queue, total, seen = WeightGradQueue(), [], []
    param = Parameter(torch.ones(2))
    param.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad, len(total))))
    queue.active = True
    for _ in range(2):
        queue.defer(param, lambda: total.append(1.0))
    queue.run()
    assert seen == [(None, 2)] and param.grad is None
    queue.defer(param, lambda: total.append(1.0))
    queue.defer(param, lambda: torch.ones(2))  # of another layer that shares the weight, which cannot add it by itself
    queue.run()
    assert len(seen) == 2 and param.grad.tolist() == [1.0, 1.0] and len(total) == 3
