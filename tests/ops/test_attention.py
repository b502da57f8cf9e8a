"""Attention against the textbook formula."""

import pytest
import torch

from moe_trainer.ops.attention import attention, sliding_window_mask


def slow_attention(q, k, v, scale, visible):
    """Head by head; q [S, B, N, D], visible [S, S] or [B, 1, S, S]."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbne->sbne", probs, v).flatten(2)


def tensors(groups=2, value_width=8, seq_len=9):
    make = dict(dtype=torch.float64, requires_grad=True)
    return (torch.randn(seq_len, 3, 4, 8, **make), torch.randn(seq_len, 3, groups, 8, **make),
            torch.randn(seq_len, 3, groups, value_width, **make))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value_width", [8, 6])
@pytest.mark.parametrize("window", [None, 0, 3])
def test_values_and_gradients(groups, value_width, window):
    q, k, v = tensors(groups, value_width)
    visible = None if window is None else sliding_window_mask(9, window)
    ours = attention(q, k, v, 0.3, visible)
    expected = slow_attention(q, k, v, 0.3, sliding_window_mask(9, -1) if window is None else visible)
    torch.testing.assert_close(ours, expected)
    probe = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad((ours * probe).sum(), (q, k, v)),
                    torch.autograd.grad((expected * probe).sum(), (q, k, v))):
        torch.testing.assert_close(a, b)


def test_a_mask_per_sequence():
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
