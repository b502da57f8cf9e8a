"""Attention of packed sequences by torch's kernels for variable lengths: what they are given, and what comes out.

The kernels need a GPU (tests/gpu/test_varlen_attention.py); a stand-in with torch's documented contract computes here.
"""

import pytest
import torch
from torch.nn.attention import varlen
from training.layouts import MODEL

from arguments import parse_args
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.layers.packed_ring import PackedRing
from moe_trainer.ops import varlen_attention
from moe_trainer.ops.block_attention import BlockMask, Documents
from moe_trainer.ops.packed_sequences import PackedSequences

CPU = torch.device("cpu")
PACKED = PackedSequences.of([3, 8, 1], 4)


def sequence_attention(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """The contract of varlen_attn: each sequence by itself; keys i + window[0] before and window[1] after a query."""
    assert q.dim() == 3 and q.shape[2] == v.shape[2] and cu_q.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max()) and enable_gqa == (q.shape[1] != k.shape[1])
    left, right = window_size
    out = torch.empty_like(q)
    for start, stop in zip(cu_q.tolist(), cu_q[1:].tolist()):
        own = slice(start, stop)
        place = torch.arange(stop - start)
        seen = place[:, None] - place + right >= 0
        if left >= 0:
            seen &= place[:, None] - place <= left
        keys, values = (x[own].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("snd,knd->nsk", q[own], keys) * scale
        out[own] = torch.einsum("nsk,knd->snd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
    return out


def sequence_attention_of_torch_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """The same of an earlier torch, which takes fewer key heads without this argument."""
    enable_gqa = q.shape[1] != k.shape[1]
    return sequence_attention(
        q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=enable_gqa
    )


@pytest.mark.parametrize("attention", [sequence_attention, sequence_attention_of_torch_2_11])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("groups, width", [(4, 8), (2, 8), (4, 6)])
def test_kernels_get_the_sequences(monkeypatch, window, groups, width, attention):
    """The result is that of the blocks that other devices compute, with its gradients."""
    flags = [] if window is None else ["--window-size", f"{window},0"]
    model = parse_args([*MODEL, *flags], 1).model
    core, visible = CoreAttention(model, 1, head_dim=8, scale=0.3), AttentionMask.of(None, None, CPU, PACKED)
    shapes = ((PACKED.num_tokens, 1, 4, 8), (PACKED.num_tokens, 1, groups, 8), (PACKED.num_tokens, 1, groups, width))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    expected = core(*inputs, visible)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    calls = []
    monkeypatch.setattr(varlen_attention, "can_run", lambda q, v: calls.append(q.shape) or True)
    monkeypatch.setattr(varlen, "varlen_attn", attention)
    found = core(*inputs, visible)
    assert calls == [(PACKED.num_tokens, 4, 8)]
    torch.testing.assert_close(found, expected)
    for grad, other in zip(torch.autograd.grad(found.square().sum(), inputs), grads):
        torch.testing.assert_close(grad, other)


def test_chunks_of_a_sequence_end_with_its_padding():
    visible = AttentionMask.of(None, None, CPU, PackedSequences.of([2, 7, 5], 4))
    assert visible.borders.of_chunks(3, CPU).tolist() == [0, 3, 4, 7, 10, 12, 15, 18, 20]


def test_dropout_is_computed_by_blocks(monkeypatch):
    core = CoreAttention(parse_args([*MODEL, "--attention-dropout", "0.1"], 1).model, 1, head_dim=8)
    monkeypatch.setattr(varlen_attention, "can_run", lambda q, v: True)
    for name in ("varlen_attention", "varlen_block"):
        monkeypatch.setattr(varlen_attention, name, lambda *_: pytest.fail("the kernels have none"))
    x = torch.randn(PACKED.num_tokens, 1, 4, 8)
    assert core(x, x, x, AttentionMask.of(None, None, CPU, PACKED)).shape == (PACKED.num_tokens, 1, 32)


@pytest.mark.parametrize(
    ("ranks", "left", "chunk", "by_kernels"), [(2, -1, 0, True), (1, 4, 0, True), (2, 4, 0, False), (1, -1, 4, False)]
)
def test_windows_over_ranks_are_computed_by_blocks(monkeypatch, ranks, left, chunk, by_kernels):
    """They begin at other keys for every rank, as chunks do for every query."""
    monkeypatch.setattr(varlen_attention, "can_run", lambda q, v: True)
    lengths = (4, 8, 4)
    mask = BlockMask(left, Documents.of(PackedSequences.of(lengths).ids(), None, lengths), chunk=chunk)
    x = torch.zeros(sum(lengths) // ranks, 1, 2, 8)
    assert (PackedRing.of(x, x, mask, 1.0, 0, ranks) is not None) == by_kernels


def test_other_tensors_are_not_for_the_kernels():
    x = torch.randn(4, 2, 8, dtype=torch.bfloat16)
    assert not varlen_attention.can_run(x, x), "they need a GPU"
