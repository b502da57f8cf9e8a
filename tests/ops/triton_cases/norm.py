"""RMSNorm in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from moe_trainer.ops.pointwise import rms_norm
from moe_trainer.ops.triton_blocks import sum_partials_kernel
from moe_trainer.ops.triton_norm import rms_norm as triton_rms_norm


@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 17), (300, 12), (3, 5000), (0, 16)])
@pytest.mark.parametrize(
    "gain,dtype",
    [("weight", torch.float32), ("weight", torch.bfloat16), ("zero centered", torch.bfloat16), (None, torch.float64)],
)
def test_rms_norm(shape, gain, dtype):
    x = torch.randn(shape, dtype=dtype)
    weight = None if gain is None else torch.randn(shape[-1], dtype=dtype)
    grad = torch.randn(shape, dtype=dtype)
    results = []
    for function in (triton_rms_norm, rms_norm):
        inputs = [each.clone().requires_grad_() for each in (x, weight) if each is not None]
        y = function(inputs[0], inputs[1] if gain else None, 1e-5, gain == "zero centered")
        y.backward(grad)
        results.append([y, *(each.grad for each in inputs)])
    # the kernel takes epsilon as fp32
    near = {
        torch.float32: {"rtol": 1e-5, "atol": 2e-5},
        torch.float64: {"rtol": 1e-9, "atol": 1e-9},
        torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2},
    }[dtype]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_equal_torch(value):
    x, weight, results = torch.randn(300, 12), torch.randn(12), []
    x[1, 3] = x[299, 0] = value
    for function in (triton_rms_norm, rms_norm):
        leaf, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(leaf, gain, 1e-5)
        y.backward(torch.ones_like(y))
        results.append((y, leaf.grad, gain.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-4, equal_nan=True)


def test_rows_too_long_are_rejected():
    with pytest.raises(ValueError, match="65536"):
        triton_rms_norm(torch.ones(1, 65537), None, 1e-6)


@pytest.mark.parametrize(
    "grad", [torch.randn(4, 2, 8, 3).transpose(2, 3), torch.randn(4, 2, 3, 13)[..., :8]], ids=["transposed", "slice"]
)
def test_rms_norm_of_strided_rows_and_gradients(grad):
    """Heads of a joint query-key-value projection are not contiguous."""
    results = []
    for function in (triton_rms_norm, rms_norm):
        torch.manual_seed(5)
        joint = torch.randn(4, 2, 3, 24, requires_grad=True)
        y = function(joint[..., 8:16], torch.linspace(0.5, 1.5, 8), 1e-6)
        y.backward(grad)
        results.append((y, joint.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers,sums,access", [(4, 3, "store"), (3, 4, "load")])
def test_the_interpreter_refuses_addresses_outside_of_the_tensors(numbers, sums, access):
    """conftest.py adds this check for all cases of this folder."""
    with pytest.raises(InterpreterError, match=f"sum_partials_kernel: a {access}"):
        sum_partials_kernel[(1,)](torch.ones(1, numbers), torch.empty(sums), 1, 4, ROWS=32, BLOCK=32)
