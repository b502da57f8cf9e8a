"""Latent attention to listed keys against heads with their unchosen keys masked.

Output, all gradients, and the target of the indexer.
"""

import pytest
import torch
from harness import run_ranks

from moe_trainer.layers.absorbed_mla import CompressedKV, gather_latents, latent_attention
from moe_trainer.layers.ring_attention import ring_attention
from moe_trainer.ops import absorbed_mla as module
from moe_trainer.ops.block_attention import BlockMask, Documents, PositionRange
from moe_trainer.ops.sparse_attention import (
    DenseAttentionTarget,
    IndexerOutput,
    LatentAttentionTarget,
    list_selected_keys,
    select_topk_keys,
)
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group, ParallelState

S, B, N, NOPE, ROPE, E, R, TOPK, SCALE = 140, 2, 3, 6, 4, 5, 7, 9, 0.7  # more than two tiles of queries
IDS = torch.stack([(torch.arange(S) >= 37).int() + (torch.arange(S) >= 100).int(), (torch.arange(S) >= 80).int()])
ONE = Group.single("one")


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": (S, B, N, NOPE + ROPE), "latents": (S, B, R + ROPE), "weight": (N * (NOPE + E), R)}
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def make_indexer_output() -> IndexerOutput:
    generator = torch.Generator().manual_seed(8)
    return IndexerOutput(
        *(
            torch.randn(shape, dtype=torch.float64, generator=generator)
            for shape in ((S, B, 4, 8), (S, B, 8), (S, B, 4))
        )
    )


def run_attention(x, chosen):
    latents = gather_latents(x["latents"], x["weight"], N, SCALE, ONE)
    return latent_attention(x["q"], CompressedKV(x["latents"], x["weight"]), latents, chosen, ONE)


def compute_heads(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every head."""
    latent, rotated = x["latents"].split([R, ROPE], dim=-1)
    k_nope, v = (latent @ x["weight"].T).unflatten(-1, (N, -1)).split([NOPE, E], dim=-1)
    return torch.cat([k_nope, rotated.unsqueeze(2).expand(S, B, N, ROPE)], dim=-1), v


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("rows", [1 << 20, 500])
def test_absorbed_attention_equals_masked_heads(documents, dtype, tolerance, rows, monkeypatch):
    monkeypatch.setattr(module, "ROWS", rows)
    x = tensors(dtype)
    block_mask = BlockMask(documents=Documents.of(IDS) if documents else None)
    selection, _ = select_topk_keys(make_indexer_output(), block_mask, (PositionRange(0, S),), TOPK)
    chosen, _ = select_topk_keys(make_indexer_output(), block_mask, (PositionRange(0, S),), TOPK, listed=True)
    assert chosen.dtype == torch.int32 and (chosen[:, 40] < 0).any() == documents and (chosen[:, 0, 1:] < 0).all()
    k, v = compute_heads(x)
    masked = ring_attention(x["q"], k, v, SCALE, BlockMask(documents=block_mask.documents, selection=selection), ONE)
    found = run_attention(x, chosen)
    grad = torch.randn(found.shape, dtype=dtype, generator=torch.Generator().manual_seed(9))
    expected = [masked, *torch.autograd.grad(masked, list(x.values()), grad)]
    for mine, theirs in zip([found, *torch.autograd.grad(found, list(x.values()), grad)], expected, strict=True):
        assert mine.dtype == dtype and (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


def _gradient_of_packed_latents(rank, size):
    """Every query attends to itself and to the first key of its sequence."""
    lengths = (8, 4)
    shard = SequenceShard(ParallelState.create(size, rank, cp=size).cp, lengths)
    x = tensors(torch.float64)
    q, latents = (shard.local(x[name][:12, :1].detach(), 0).requires_grad_() for name in ("q", "latents"))
    places = torch.arange(12, dtype=torch.int32)
    chosen = shard.local(torch.stack([places, places // 8 * 8], 1).unsqueeze(0), 1)
    full = gather_latents(latents, x["weight"], N, SCALE, shard.cp, lengths)
    out = latent_attention(q, CompressedKV(latents, x["weight"]), full, chosen, shard.cp, lengths=lengths)
    out.square().sum().backward()
    return shard.full(latents.grad, 0)


def test_gradients_of_packed_latents_reach_their_positions():
    expected = _gradient_of_packed_latents(0, 1)
    for grad in run_ranks(_gradient_of_packed_latents, 2):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_half_precision_sums_in_fp32():
    """Many queries add to one row: in bf16 the small gradients of later ones would be lost."""
    x = tensors(torch.bfloat16)
    wide = {name: each.detach().double().requires_grad_() for name, each in x.items()}
    chosen, _ = select_topk_keys(make_indexer_output(), BlockMask(), (PositionRange(0, S),), TOPK, listed=True)
    grads = []
    for each in (x, wide):
        out = run_attention(each, chosen)
        grads.append(torch.autograd.grad(out, list(each.values()), torch.ones_like(out)))
    for narrow, exact in zip(*grads, strict=True):
        assert float((narrow.double() - exact).norm()) <= 0.02 * float(exact.norm())


@pytest.mark.parametrize("documents", [False, True])
def test_indexer_target_equals_that_of_full_heads(documents):
    x = {name: each.detach() for name, each in tensors(torch.float64).items()}
    block_mask = BlockMask(documents=Documents.of(IDS) if documents else None)
    k, _ = compute_heads(x)
    of_heads = DenseAttentionTarget(x["q"], k, SCALE, lambda sums: sums, selected_only=True)
    of_latents = LatentAttentionTarget(
        x["q"], gather_latents(x["latents"], x["weight"], N, SCALE, ONE), lambda sums: sums
    )
    _, expected = select_topk_keys(
        make_indexer_output(), block_mask, (PositionRange(0, S),), TOPK, attention_target=of_heads
    )
    _, found = select_topk_keys(
        make_indexer_output(), block_mask, (PositionRange(0, S),), TOPK, attention_target=of_latents, listed=True
    )
    assert float(expected.loss) > 1.0
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=0.0)
    for mine, theirs in zip(found.grads, expected.grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_selected_key_lists_equal_the_bitmap():
    chosen = torch.zeros(1, 3, 6, dtype=torch.bool)
    chosen[0, 0, [1, 4]] = chosen[0, 1, [5]] = True
    assert list_selected_keys(chosen, 3, first=10).tolist() == [[[11, 14, -1], [15, -1, -1], [-1, -1, -1]]]


def test_query_without_keys_gives_zero():
    x = tensors(torch.float64)
    chosen = torch.full((B, S, TOPK), -1, dtype=torch.int32)
    out = run_attention(x, chosen)
    assert not out.any() and all(not grad.any() for grad in torch.autograd.grad(out.sum(), list(x.values())))
