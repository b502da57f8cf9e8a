"""The convolution of a gated DeltaNet layer in Triton's interpreter against the torch version.

Also the layer around a stand-in of flash-linear-attention's rule (tests/ops/test_fla.py has the real one). Run by
tests/ops/test_triton.py.
"""

import functools

import pytest
import torch

from moe_trainer.ops import gated_delta_rule, triton_delta_rule
from moe_trainer.ops.gated_delta_rule import Heads


@pytest.mark.parametrize(
    "length,batch,channels,width,dtype",
    [
        (1, 1, 1, 1, torch.float64),
        (3, 2, 5, 4, torch.bfloat16),
        (70, 2, 67, 4, torch.float32),
        (65, 1, 64, 2, torch.float64),
        (0, 1, 8, 4, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("documents", [False, True])
def test_convolution(length, batch, channels, width, dtype, documents):
    results = []
    # every sequence has its own
    ids = (
        (torch.arange(length, dtype=torch.int32) + 2 * torch.arange(batch, dtype=torch.int32)[:, None]) // 3
        if documents
        else None
    )
    for function in (triton_delta_rule.causal_convolution, gated_delta_rule.causal_convolution):
        torch.manual_seed(1)
        joint, weight = (
            torch.randn(length, batch, channels + 3).to(dtype).requires_grad_(),
            torch.randn(channels, width).to(dtype).requires_grad_(),
        )
        grad = torch.randn(batch, length, channels).to(dtype).transpose(0, 1)
        y = function(joint[..., :channels], weight, ids)  # of a joint projection
        y.backward(grad)
        results.append((y, joint.grad, weight.grad))
    # the torch version rounds every product and sum
    near = {
        torch.float32: {"rtol": 1e-5, "atol": 2e-5},
        torch.float64: {},
        torch.bfloat16: {"rtol": 4e-2, "atol": 0.5},
    }[dtype]
    torch.testing.assert_close(*results, **near)


def stand_in(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **named
):
    """With the signature of chunk_gated_delta_rule, computed by torch."""
    assert (
        scale is None
        and initial_state is None
        and use_qk_l2norm_in_kernel
        and not named
        and g.dtype == beta.dtype == torch.promote_types(q.dtype, torch.float32)
    )
    batch, keys, values = q.shape[0], q.shape[2], v.shape[2]
    state = torch.zeros(batch, keys, values // keys, q.shape[3], v.shape[3], dtype=g.dtype)
    y, _ = gated_delta_rule.delta_rule(*(x.transpose(0, 1).to(g.dtype) for x in (q, k, v, g, beta)), state)
    return y.transpose(0, 1).to(v.dtype), None


@pytest.mark.parametrize("documents", [False, True])
def test_gated_delta_layer_with_external_rule(documents):
    heads, results = Heads(2, 4, 3, 5), []
    ids = torch.arange(9).div(4, rounding_mode="floor").expand(2, 9) if documents else None
    for function in (functools.partial(triton_delta_rule.gated_delta_by, stand_in), gated_delta_rule.gated_delta):
        torch.manual_seed(2)
        leaves = [
            torch.randn(shape, requires_grad=True) for shape in ((9, 2, 32), (9, 2, 4), (9, 2, 4), (32, 4), (4,), (4,))
        ]
        y = function(*leaves, heads, ids)
        y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
