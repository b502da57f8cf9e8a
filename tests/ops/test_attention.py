"""Attention against the textbook formula."""

import pytest
import torch

from moe_trainer.ops import attention as module
from moe_trainer.ops.attention import attention, sliding_window_mask


@pytest.fixture(params=["blocked", "short blocks", "fused"])
def implementation(request, monkeypatch):
    """Run with each implementation, and with a short last block."""
    monkeypatch.setattr(module, "BLOCKED_MAX_LENGTH", 0 if request.param == "fused" else 512)
    monkeypatch.setattr(module, "QUERY_BLOCK", 4 if request.param == "short blocks" else 64)


def slow_attention(q, k, v, scale, visible):
    """Head by head; q [S, B, N, D], visible [S, S] or [B, 1, S, S]."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbne->sbne", probs, v).flatten(2)


def tensors(groups=2, value_width=8, seq_len=9):
    make = {"dtype": torch.float64, "requires_grad": True}
    return (
        torch.randn(seq_len, 3, 4, 8, **make),
        torch.randn(seq_len, 3, groups, 8, **make),
        torch.randn(seq_len, 3, groups, value_width, **make),
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value_width", [8, 6])
@pytest.mark.parametrize("window", [None, 0, 3])
def test_attention_equals_textbook_formula(implementation, groups, value_width, window):
    q, k, v = tensors(groups, value_width)
    visible = None if window is None else sliding_window_mask(9, window)
    ours = attention(q, k, v, 0.3, visible)
    expected = slow_attention(q, k, v, 0.3, sliding_window_mask(9, -1) if window is None else visible)
    torch.testing.assert_close(ours, expected)
    probe = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * probe).sum(), (q, k, v)), torch.autograd.grad((expected * probe).sum(), (q, k, v))
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_half_precision_stays_near_fp64(implementation, dtype, tolerance):
    wide = tensors(groups=2, seq_len=150)
    narrow = [t.detach().to(dtype).requires_grad_() for t in wide]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    expected = slow_attention(*wide, 0.3, sliding_window_mask(150, -1))
    ours = attention(*narrow, 0.3)
    assert ours.dtype == dtype
    probe = torch.randn_like(ours)
    theirs = torch.autograd.grad((expected * probe).sum(), wide)
    for a, b in zip([ours, *torch.autograd.grad(ours, narrow, probe)], [expected, *theirs]):
        assert (a.double() - b).norm() < tolerance * b.norm()


def test_attention_with_one_mask_per_sequence():
    q, k, v = tensors()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1]])
    visible = (documents[:, :, None] == documents[:, None, :])[:, None] & sliding_window_mask(9, -1)
    torch.testing.assert_close(attention(q, k, v, 0.3, visible), slow_attention(q, k, v, 0.3, visible))


def test_sliding_window_mask():
    assert sliding_window_mask(4, 1).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(sliding_window_mask(4, -1), torch.ones(4, 4).tril().bool())


def test_dropout_follows_the_generator_and_keeps_the_mean():
    q, k, v = (t.detach().float() for t in tensors(seq_len=64))
    v = torch.ones_like(v)
    torch.manual_seed(5)
    first = attention(q, k, v, 0.3, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, attention(q, k, v, 0.3, dropout_p=0.5))
    assert not torch.equal(first, attention(q, k, v, 0.3, dropout_p=0.5))
    assert abs(first.mean().item() - 1.0) < 0.05
