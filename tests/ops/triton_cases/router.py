"""Routing in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.moe import balancing
from moe_trainer.moe.router import score_topk
from moe_trainer.ops import triton_router

SIZES = [(1, 2, 1), (7, 5, 2), (40, 12, 3), (0, 8, 2), (3, 160, 6)]


def both(logits: torch.Tensor, topk: int, **options):
    """(probs, routing, gradient of the logits) of the kernel and of torch, from the same weights of the probabilities."""
    weight = torch.randn_like(logits)
    results = []
    for function in (triton_router.fused_topk, score_topk):
        names = {"use_pre_softmax": "pre_softmax", "expert_bias": "expert_bias_E"} if function is score_topk else {}
        leaf = logits.clone().requires_grad_()
        probs, routing = function(leaf, topk, **{names.get(name, name): value for name, value in options.items()})
        (probs * weight).sum().backward()
        results.append((probs, routing, leaf.grad))
    return results


def agree(logits, topk, **options):
    for ours, theirs in zip(*both(logits, topk, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("tokens,experts,topk", SIZES)
@pytest.mark.parametrize("scaling", [None, 2.5])
def test_scores(tokens, experts, topk, pre_softmax, score, scaling):
    agree(torch.randn(tokens, experts) * 3, topk, score_function=score, use_pre_softmax=pre_softmax, scaling_factor=scaling)


@pytest.mark.parametrize("experts,topk,groups,group_topk", [(12, 2, 4, 2), (15, 4, 3, 2), (24, 8, 8, 4), (6, 2, 2, 1)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups_and_bias(experts, topk, groups, group_topk, score):
    options = {"expert_bias": torch.randn(experts) * 0.2} if score == "sigmoid" else {"use_pre_softmax": True}
    agree(torch.randn(19, experts), topk, score_function=score, num_groups=groups, group_topk=group_topk, **options)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_half_precision_is_scored_in_fp32(score):
    for ours, theirs in zip(*both((torch.randn(33, 24) * 2).bfloat16(), 6, score_function=score, use_pre_softmax=True), strict=True):
        if ours.dtype == torch.bool:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_the_bias_takes_part_in_the_choice_only():
    logits, bias = torch.randn(6, 8), torch.zeros(8)
    bias[3] = 10.0
    probs, routing = triton_router.fused_topk(logits, 2, score_function="sigmoid", expert_bias=bias)
    assert routing[:, 3].all()
    torch.testing.assert_close(probs.sum(1), torch.ones(6))
    plain_probs, plain_routing = triton_router.fused_topk(logits, 2, expert_bias=bias)
    assert torch.equal(plain_routing, score_topk(logits, 2)[1]) and not plain_probs.isnan().any()


def test_every_token_gets_k_different_experts_whatever_the_scores():
    for logits in (torch.zeros(9, 6), torch.full((9, 6), float("nan")), torch.full((9, 6), -60.0)):
        for score in ("softmax", "sigmoid"):
            assert (triton_router.fused_topk(logits, 3, score_function=score)[1].sum(1) <= 3).all()
    assert (triton_router.fused_topk(torch.zeros(9, 6), 3)[1].sum(1) == 3).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("length,sequences,experts,topk", [(6, 1, 5, 2), (300, 3, 10, 3), (1, 2, 8, 1)])
def test_scores_and_counts_of_the_balancing_losses(score, length, sequences, experts, topk):
    logits = torch.randn(length * sequences, experts)
    scores, slope, sums, counts = triton_router.balance(logits, topk, score, sequences)
    expected, expected_slope = balancing.normalised_scores(logits, score)
    chosen = torch.zeros_like(expected).scatter_(1, expected.topk(topk, dim=1)[1], 1.0)
    near = {"rtol": 2e-5, "atol": 1e-6}
    torch.testing.assert_close(scores, expected, **near)
    torch.testing.assert_close(slope, expected_slope, **near)
    torch.testing.assert_close(sums, expected.view(length, sequences, experts).sum(0), **near)
    assert torch.equal(counts, chosen.view(length, sequences, experts).sum(0))
