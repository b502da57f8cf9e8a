"""Logits in another format than the weights', full and in chunks: against torch's own GEMMs in that format."""

import pytest
import torch
import torch.nn.functional as F

from moe_trainer.ops import cross_entropy, logit_chunks
from moe_trainer.ops.cross_entropy import linear_cross_entropy, tokens_per_chunk
from moe_trainer.ops.gemms import LMHeadGemms

WIDER = (torch.bfloat16, torch.float32, 1e-6, 6e-3)
NARROWER = (torch.float32, torch.bfloat16, 1e-6, 1e-2)


def _case(weights):
    torch.manual_seed(3)
    return torch.randn(78, 16).to(weights), (torch.randn(24, 16) * 2).to(weights), torch.randint(24, (78,))


@pytest.mark.parametrize("weights, logits, of_loss, of_grads", [WIDER, NARROWER])
@pytest.mark.parametrize("chunked", [False, True])
def test_loss_uses_the_configured_logit_dtype(weights, logits, of_loss, of_grads, chunked, monkeypatch):
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(logit_chunks, "MIN_CHUNK_TOKENS", 10)
    x, weight, labels = _case(weights)
    ours, theirs = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    seen = []

    def softmax(logits_TV, labels_T):
        seen.append((len(logits_TV), logits_TV.dtype))
        return cross_entropy.softmax_in_place(logits_TV, labels_T)

    kernels = cross_entropy.LogitKernels(softmax)
    loss = linear_cross_entropy(*ours, labels, torch.ones(78) if chunked else None, kernels, LMHeadGemms(logits))
    assert {dtype for _, dtype in seen} == {logits} and (len(seen) > 1) == chunked
    wide = theirs[0].float() @ theirs[1].float().t()
    expected = F.cross_entropy(wide.to(logits).float(), labels, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=of_loss, atol=of_loss)
    loss.sum().backward()
    expected.sum().backward()
    for a, b in zip(ours, theirs):
        assert a.grad.dtype == weights and (a.grad - b.grad).float().norm() <= of_grads * b.grad.float().norm()


def test_fp32_logits_of_bf16_weights_are_more_accurate():
    x, weight, labels = _case(torch.bfloat16)
    exact = F.cross_entropy(x.float() @ weight.float().t(), labels, reduction="none")
    error = [
        (linear_cross_entropy(x, weight, labels, gemms=LMHeadGemms(dtype)) - exact).norm()
        for dtype in (None, torch.float32)
    ]
    assert error[0] > 1e-2 and error[1] < 1e-5


def test_chunk_size_depends_on_the_logit_dtype():
    of_bf16, of_fp32 = (
        tokens_per_chunk(10**6, 65536, 4, torch.bfloat16, torch.device("cpu"), logits)
        for logits in (None, torch.float32)
    )
    assert of_fp32 == of_bf16 // 2
