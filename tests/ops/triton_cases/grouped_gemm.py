"""Grouped GEMMs in Triton's interpreter against plain ones. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.ops import triton_grouped_gemm, triton_permute
from moe_trainer.ops.grouped_gemm import token_offsets
from moe_trainer.ops.main_grad import MainGradSum

COUNTS = [(1,), (0, 3, 0, 5), (70, 0, 1, 129, 64), (0, 0), (33, 31, 2)]


@pytest.mark.parametrize("width,depth,spare", [(1, 1, 0), (70, 36, 9)])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm_equals_gemm_per_expert(counts, width, depth, spare):
    """spare: unused rows at the end, whose values must not be used."""
    num_rows = sum(counts)
    x, grad = torch.randn(num_rows + spare, depth), torch.randn(num_rows + spare, width)
    x[num_rows:], grad[num_rows:] = float("nan"), float("nan")
    w = torch.randn(len(counts), width, depth)
    offsets = token_offsets(counts, torch.device("cpu"))
    y = triton_grouped_gemm.grouped_forward(x, w, offsets)
    grad_x = triton_grouped_gemm.grouped_input_grad(grad, w, offsets)
    grad_w = triton_grouped_gemm.grouped_weight_grad(grad, x, offsets)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        torch.testing.assert_close(y[rows], x[rows] @ w[expert].t(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad_x[rows], grad[rows] @ w[expert], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad_w[expert], grad[rows].t() @ x[rows], rtol=1e-5, atol=1e-4)
        start += count


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_weight_gradient_is_added_to_an_fp32_sum_without_a_rounding(beta):
    """Of an expert without rows nothing is added, or zeros replace what was there."""
    counts = (70, 0, 33)
    x, grad = torch.randn(sum(counts), 36).bfloat16(), torch.randn(sum(counts), 70).bfloat16()
    total = torch.randn(len(counts), 70, 36)
    exact = torch.stack([g.double().t() @ r.double() for g, r in zip(grad.split(counts), x.split(counts))])
    expected = beta * total.double() + 0.25 * exact
    offsets = token_offsets(counts, torch.device("cpu"))
    triton_grouped_gemm.add_weight_grad(grad, x, offsets, MainGradSum(total, beta, 0.25))
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_with_device_counts_equal_a_loop():
    """Routing, permutation with a bound, GEMMs and the way back from counts that stay on the device, against a loop over experts."""
    tokens, experts, topk = 11, 5, 2
    scores = torch.randn(tokens, experts)
    scores[:, 3] = -10.0  # an expert without rows
    routing = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, scores.topk(topk, 1)[1], True)
    x, probs, w = torch.randn(tokens, 12), torch.rand(tokens, experts), torch.randn(experts, 20, 12)
    routes = triton_permute.make_permute_map(routing, tokens * topk + 7)
    x_RH, probs_R = triton_permute.permute_with_probs(x, probs, routes)
    y = triton_grouped_gemm.grouped_forward(x_RH, w, routes.counts_E.cumsum(0).to(torch.int32))
    y = triton_permute.unpermute(y * probs_R.unsqueeze(1), routes)
    expected = sum((probs * routing)[:, e, None] * (x @ w[e].t()) for e in range(experts))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_grouped_gemm_of_strided_operands():
    counts = (5, 4)
    offsets = token_offsets(counts, torch.device("cpu"))
    w, grad = torch.randn(2, 40, 24).transpose(1, 2), torch.randn(9, 31)[:, :24]
    for x in (torch.randn(40, 9).t(), torch.randn(9, 45)[:, :40]):
        y, grad_w = (
            triton_grouped_gemm.grouped_forward(x, w, offsets),
            triton_grouped_gemm.grouped_weight_grad(grad, x, offsets),
        )
        torch.testing.assert_close(y, torch.cat([x[:5] @ w[0].t(), x[5:] @ w[1].t()]), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            grad_w, torch.stack([grad[:5].t() @ x[:5], grad[5:].t() @ x[5:]]), rtol=1e-5, atol=1e-4
        )
