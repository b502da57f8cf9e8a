"""Activations in Triton's interpreter against the torch versions. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.ops import triton_pointwise
from moe_trainer.ops.expert_mlp import get_activation_fns
from moe_trainer.ops.pointwise import Activation, swiglu

KINDS = {
    "swiglu": Activation("silu", gated=True),
    "gelu": Activation("gelu"),
    "squared_relu": Activation("squared_relu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows,width", [(1, 1), (5, 7), (3, 1030), (2, 4096), (0, 8)])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_kernels_equal_torch(kind, weighed, rows, width, dtype):
    torch_block = get_activation_fns(KINDS[kind])
    forward, backward = getattr(triton_pointwise, kind.upper())
    h = torch.randn(rows, width * KINDS[kind].in_per_out, dtype=dtype) * 3
    p = torch.rand(rows, dtype=dtype) if weighed else None
    wide_grad = torch.randn(rows, width + 3, dtype=dtype)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(forward(h, p), torch_block.forward(h, p), **near)
    ours, theirs = (function(h, p, wide_grad.clone()[:, :width]) for function in (backward, torch_block.backward))
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one, other, **near)
    if weighed:
        torch.testing.assert_close(ours[2], theirs[2], rtol=near["rtol"], atol=near["atol"] * width)
    else:
        assert ours[2] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_kernels_of_numbers_that_are_not_finite_equal_torch(kind, value):
    """In the gate, in the other half, in the gradient and among the probabilities."""
    h, p, grad = torch.randn(5, 8 * KINDS[kind].in_per_out), torch.rand(5), torch.randn(5, 8)
    h[0, 2] = h[1, -1] = p[2] = grad[3, 4] = value
    ours, theirs = getattr(triton_pointwise, kind.upper()), get_activation_fns(KINDS[kind])
    pairs = [(ours.forward(h, p), theirs.forward(h, p))]
    pairs += zip(ours.backward(h, p, grad.clone()), theirs.backward(h, p, grad.clone()), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("weighed", [True, False])
def test_swiglu_kernel_of_three_dimensional_input(weighed):
    """Three dimensions, rows with a stride, a gradient that is not contiguous."""
    results = []
    for function in (triton_pointwise.swiglu, swiglu):
        torch.manual_seed(3)
        full = torch.randn(3, 5, 20, dtype=torch.float64, requires_grad=True)
        probs = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
        y = function(full[..., :14], probs if weighed else None)
        grad = torch.randn(5, 3, 7, dtype=torch.float64).transpose(0, 1)
        y.backward(grad)
        results.append([y, full.grad] + ([probs.grad] if weighed else []))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_fp32_probabilities_of_half_precision_rows_keep_their_dtype():
    h, p = torch.randn(4, 12, dtype=torch.float16), torch.rand(4)
    a, grad_h, grad_p = triton_pointwise.SWIGLU.backward(h, p, torch.randn(4, 6, dtype=torch.float16))
    assert (a.dtype, grad_h.dtype, grad_p.dtype) == (torch.float16, torch.float16, torch.float32)
