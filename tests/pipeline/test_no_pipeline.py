"""The schedule without pipeline: gradients of all micro-batches, one reduction, results in order."""

import contextlib

import pytest
import torch
from toy import Toy, loss_of, machinery

from moe_trainer.pipeline.no_pipeline import run_microbatches


def _forward_steps(model, seeds):
    remaining = iter(seeds)

    def forward_step():
        seed = next(remaining)
        loss = loss_of(model, seed)
        return loss, (seed, loss.item())
    return forward_step


def test_gradients_equal_the_mean_over_microbatches():
    model, plain = Toy(), Toy()
    grads, _ = machinery(model)
    grads.zero()
    results = run_microbatches(_forward_steps(model, [3, 4, 5]), 3, grad_scale=1 / 3, accumulate=grads.accumulate)
    grads.finish()
    assert [seed for seed, _ in results] == [3, 4, 5]
    (sum(loss_of(plain, seed) for seed in (3, 4, 5)) / 3).backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.main_grad, b.grad, rtol=1e-5, atol=1e-6)
        assert a.grad is None


def test_only_the_last_backward_is_outside_accumulate():
    depth, seen = [0], []

    @contextlib.contextmanager
    def accumulate():
        depth[0] += 1
        yield
        depth[0] -= 1

    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append((depth[0], grad.item())))
    run_microbatches(lambda: (x.sum() * 2, None), 3, grad_scale=torch.tensor(0.5), accumulate=accumulate)
    assert seen == [(1, 1.0), (1, 1.0), (0, 1.0)]


def test_timers_see_every_pass():
    names = []

    @contextlib.contextmanager
    def timer(name):
        names.append(name)
        yield

    x = torch.ones(1, requires_grad=True)
    run_microbatches(lambda: (x.sum(), None), 2, timer=timer)
    assert names == ["forward-compute", "backward-compute"] * 2


def test_zero_microbatches_are_a_mistake():
    with pytest.raises(AssertionError, match="num_microbatches 0"):
        run_microbatches(lambda: None, 0)
