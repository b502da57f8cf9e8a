"""Rotary embedding in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.ops.rope import apply_rope, inverse_frequencies, rope_tables
from moe_trainer.ops.triton_rope import apply_rope as triton_apply_rope


@pytest.mark.parametrize("interleaved,dtype", [(True, torch.float32), (False, torch.float64)])
@pytest.mark.parametrize(
    "shape,rotated,offset",
    [
        ((5, 2, 3, 8), 8, 0),
        ((7, 1, 1, 12), 6, 0),
        ((4, 3, 5, 19), 10, 9),
        ((3, 2, 70, 96), 32, 64),
        ((6, 1, 2, 11), 4, 3),
        ((0, 2, 2, 8), 8, 0),
    ],
)
def test_rotation(shape, rotated, offset, interleaved, dtype):
    cos, sin = rope_tables(inverse_frequencies(rotated, 10000.0), torch.arange(shape[0]) * 7)
    x, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    results = []
    for function in (triton_apply_rope, apply_rope):
        inputs = x.clone().requires_grad_()
        y = function(inputs, cos, sin, interleaved, offset)
        y.backward(grad)
        results.append((y, inputs.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_rope_of_queries_from_a_fused_projection():
    cos, sin = rope_tables(inverse_frequencies(4, 10000.0), torch.arange(6))
    results = []
    for function in (triton_apply_rope, apply_rope):
        torch.manual_seed(7)
        joint = torch.randn(6, 2, 3, 24, requires_grad=True)
        y = function(joint[..., 8:16], cos, sin, True, 4)
        y.backward(torch.randn(6, 3, 2, 8).transpose(1, 2))
        results.append((y, joint.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert results[0][0].is_contiguous()
