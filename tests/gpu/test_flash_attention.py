"""Blocks by CUDA's flash kernels against those of the CPU."""

import pytest
import torch
from ops.test_flash_attention import tensors

from moe_trainer.ops.flash_attention import can_run, flash_block, flash_block_backward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, groups, value", [(4, 2, 8), (4, 4, 5)])
def test_cuda_flash_attention_equals_the_cpu_kernels(heads, groups, value, causal):
    q, k, v, grad = (x.repeat(1, 1, 64, 1) for x in tensors(heads, groups, value, "cuda", torch.bfloat16))
    assert can_run(q, k, v)
    out, lse = flash_block(q, k, v, 0.4, causal)
    grads = flash_block_backward(grad, q, k, v, out, lse, 0.4, causal)
    q, k, v, grad = (x.cpu().double() for x in (q, k, v, grad))
    expected, expected_lse = flash_block(q, k, v, 0.4, causal)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(grads, flash_block_backward(grad, q, k, v, expected, expected_lse, 0.4, causal)):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=5e-2, atol=5e-2)
