"""Blocks by torch's flash kernels against plain softmax."""

import pytest
import torch

from moe_trainer.ops.flash_attention import can_run, flash_block, flash_block_backward


def tensors(heads, groups, value, device="cpu", dtype=torch.float64):
    shapes = (1, heads, 6, 8), (1, groups, 6, 8), (1, groups, 6, value), (1, heads, 6, value)
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, groups, value", [(4, 2, 8), (4, 4, 8), (4, 4, 5)])
def test_flash_block_equals_softmax_and_its_gradients(heads, groups, value, causal):
    q, k, v, grad = tensors(heads, groups, value)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = torch.einsum("bgnsd,bgkd->bgnsk", q.unflatten(1, (groups, -1)), k) * 0.4
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("bgnsk,bgke->bgnse", scores.softmax(-1), v).flatten(1, 2)
    with torch.no_grad():
        out, lse = flash_block(q, k, v, 0.4, causal)
        grads = flash_block_backward(grad, q, k, v, out, lse, 0.4, causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1).flatten(1, 2))
    for ours, theirs in zip(grads, torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(ours, theirs)


def test_short_blocks_do_not_use_the_flash_kernel():
    q, k, v, _ = tensors(4, 2, 8)
    assert not can_run(q, k, v)
    q, k, v = (x.repeat(1, 1, 100, 1) for x in (q, k, v))
    assert can_run(q, k, v)
    assert not can_run(q, k, torch.cat([v, v], -1)), "values wider than keys cannot be padded"


@pytest.mark.parametrize("causal", [False, True])
def test_cuda_flash_operators_accept_the_arguments(causal):
    """On the meta device the CUDA branch runs without CUDA: names, order and shapes."""
    q, k, v, grad = tensors(4, 2, 5, "meta", torch.bfloat16)
    out, lse = flash_block(q, k, v, 0.4, causal)
    assert out.shape == grad.shape and lse.shape == (1, 4, 6) and lse.dtype == torch.float32
    grads = flash_block_backward(grad, q, k, v, out, lse, 0.4, causal)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
