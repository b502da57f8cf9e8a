"""Clipping only reduces: a gradient below --clip-grad is used unchanged."""

import pytest
import torch
from toy import Toy, build_training, compute_loss, train_step

from moe_trainer.optim.clip import clip_factor, square_sum


def _step(clip_grad):
    model = Toy()
    outcome = train_step(model, *build_training(model, optimizer="sgd", clip_grad=clip_grad), [0], weight_decay=0.0)
    return outcome.grad_norm, [param.detach().clone() for param in model.parameters()]


def test_gradient_below_the_limit_is_unchanged():
    norm, unclipped = _step(0.0)
    for limit in (1.01 * norm, 1e6):
        assert all(torch.equal(a, b) for a, b in zip(_step(limit)[1], unclipped))
    assert not all(torch.equal(a, b) for a, b in zip(_step(0.9 * norm)[1], unclipped))


@pytest.mark.parametrize(
    "norm, limit, factor",
    [
        (0.0, 1.0, 1.0),
        (0.5, 1.0, 1.0),
        (4.0, 1.0, 0.25),
        (4.0, 0.0, 1.0),
        (float("inf"), 1.0, 1.0),
        (float("nan"), 1.0, 1.0),
    ],
)
def test_clip_factor(norm, limit, factor):
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-5)


def test_sgd_without_momentum_is_gradient_descent():
    model, plain = Toy(), Toy()
    grads, optimizer = build_training(model, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0)
    for seed in range(2):
        train_step(model, grads, optimizer, [seed], lr=0.05, weight_decay=0.0)
        plain.zero_grad()
        compute_loss(plain, seed).backward()
        with torch.no_grad():
            for param in plain.parameters():
                param.sub_(0.05 * param.grad)
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def test_norms_of_half_precision_are_summed_in_fp32():
    x = torch.randn(5000).bfloat16()
    assert float(square_sum([x])) == pytest.approx(float(x.double().square().sum()), rel=1e-6)
