"""Sparse attention against its equations written out for full sequences.

Chosen keys, values, the indexer's loss and all gradients.
"""

import pytest
import torch
from torch import Tensor

from moe_trainer.layers.ring_attention import ring_attention
from moe_trainer.ops.attach_loss import attach_gradients
from moe_trainer.ops.block_attention import BlockMask, Documents, PositionRange, Selection
from moe_trainer.ops.hadamard import hadamard_matrix, rotate
from moe_trainer.ops.sparse_attention import DenseAttentionTarget, IndexerOutput, select_topk_keys, topk_mask
from moe_trainer.parallel.state import Group

S, B, N, D, E, HEADS, WIDTH = 140, 2, 3, 6, 5, 4, 8  # more than two blocks of queries
IDS = torch.stack([(torch.arange(S) >= 37).int() + (torch.arange(S) >= 100).int(), (torch.arange(S) >= 80).int()])
SCALE, TOPK = 0.7, 9


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "q": (S, B, N, D),
        "k": (S, B, N, D),
        "v": (S, B, N, E),
        "iq": (S, B, HEADS, WIDTH),
        "ik": (S, B, WIDTH),
        "w": (S, B, HEADS),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def reference_attention(x: dict[str, Tensor], visible_BSK: Tensor, topk: int | None, relu: bool, selected_only: bool):
    """Output and loss, differentiable by autograd."""
    dots = torch.einsum("tbif,sbf->btis", x["iq"], x["ik"])
    scores = torch.einsum("tbi,btis->bts", x["w"], dots.relu() if relu else dots).masked_fill(
        ~visible_BSK, float("-inf")
    )
    chosen = visible_BSK
    if topk is not None:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(visible_BSK).scatter_(-1, order[..., :topk], True) & visible_BSK
    logits = torch.einsum("tbnd,sbnd->bnts", x["q"], x["k"]) * SCALE
    out = torch.einsum("bnts,sbne->tbne", logits.masked_fill(~chosen[:, None], float("-inf")).softmax(-1), x["v"])
    seen = chosen if selected_only else visible_BSK
    summed_attention = logits.detach().masked_fill(~seen[:, None], float("-inf")).softmax(-1).sum(1)
    target = summed_attention / summed_attention.sum(-1, keepdim=True)
    found = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    loss = (target * ((target + 1e-10).log() - (found + 1e-10).log())).sum(-1).mean()
    return out.flatten(2), loss, chosen


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("topk, selected_only", [(TOPK, False), (TOPK, True), (None, False)])
def test_sparse_attention_equals_its_equations(topk, selected_only, documents, relu):
    x = tensors()
    visible = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    if documents:
        visible = visible & (IDS[:, :, None] == IDS[:, None])
    out, loss, chosen = reference_attention(x, visible, topk, relu, selected_only)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(6))
    expected = torch.autograd.grad((out * grad).sum() + 3.0 * loss, list(x.values()))

    block_mask = BlockMask(documents=Documents.of(IDS) if documents else None)
    index = IndexerOutput(x["iq"], x["ik"], x["w"])
    attention_target = DenseAttentionTarget(x["q"].detach(), x["k"].detach(), SCALE, lambda sums: sums, selected_only)
    selection, indexer_loss_grads = select_topk_keys(
        index, block_mask, (PositionRange(0, S),), topk, relu, attention_target
    )
    assert (selection is None) == (topk is None)
    if selection is not None:
        assert torch.equal(selection.of(PositionRange(0, S), PositionRange(0, S)), chosen)
        assert chosen.sum(-1).amax() == topk and (chosen.sum(-1) < topk).any()
    block_mask = BlockMask(documents=block_mask.documents, selection=selection)
    found = ring_attention(x["q"], x["k"], x["v"], SCALE, block_mask, Group.single("one"))
    assert torch.allclose(found, out, rtol=1e-10, atol=1e-10)
    assert torch.allclose(indexer_loss_grads.loss / (S * B), loss, rtol=1e-10)
    pairs = [each for pair in zip(index, indexer_loss_grads.grads) for each in pair]
    found = attach_gradients(found, 3.0 / (S * B), *pairs)
    for name, mine, theirs in zip(x, torch.autograd.grad((found * grad).sum(), list(x.values())), expected):
        assert theirs.abs().max() > 1e-4, f"{name} takes part"
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10), name


def test_half_precision_inputs_are_computed_in_fp32():
    """Score differences and target probabilities of many keys are below the precision of bf16."""
    x = {name: each.detach().bfloat16() for name, each in tensors().items()}
    found = []
    for q, k, iq, ik, w in (
        (x[name] for name in ("q", "k", "iq", "ik", "w")),
        (x[name].float() for name in ("q", "k", "iq", "ik", "w")),
    ):
        found.append(
            select_topk_keys(
                IndexerOutput(iq, ik, w),
                BlockMask(),
                (PositionRange(0, S),),
                TOPK,
                attention_target=DenseAttentionTarget(q, k, SCALE, lambda sums: sums),
            )
        )
    (chosen, indexer_loss_grads), (expected, wide) = found
    assert torch.equal(chosen.bits_BSC, expected.bits_BSC) and torch.equal(indexer_loss_grads.loss, wide.loss)
    assert all(
        actual.dtype == torch.float32 and torch.equal(actual, grad)
        for actual, grad in zip(indexer_loss_grads.grads, wide.grads)
    )


def test_queries_in_two_ranges_equal_one_range():
    """As on a context-parallel rank: its own queries, all keys, and its share of the loss."""
    x = {name: each.detach() for name, each in tensors().items()}
    unsplit, indexer_loss_grads = select_topk_keys(
        IndexerOutput(x["iq"], x["ik"], x["w"]),
        BlockMask(),
        (PositionRange(0, S),),
        TOPK,
        attention_target=DenseAttentionTarget(x["q"], x["k"], SCALE, lambda sums: sums),
    )
    quarter = S // 4
    shares = []
    for chunks in ((0, 3), (1, 2)):
        runs = tuple(PositionRange(number * quarter, (number + 1) * quarter) for number in chunks)
        rows = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        part, share = select_topk_keys(
            IndexerOutput(x["iq"][rows], x["ik"], x["w"][rows]),
            BlockMask(),
            runs,
            TOPK,
            attention_target=DenseAttentionTarget(x["q"][rows], x["k"], SCALE, lambda sums: sums),
        )
        for run in runs:
            assert torch.equal(part.of(run, PositionRange(3, S)), unsplit.of(run, PositionRange(3, S)))
        assert torch.allclose(share.grads.q_SBIF, indexer_loss_grads.grads.q_SBIF[rows])
        shares.append(share)
    assert torch.allclose(sum(share.loss for share in shares), indexer_loss_grads.loss)
    assert torch.allclose(sum(share.grads.k_KBF for share in shares), indexer_loss_grads.grads.k_KBF)


def test_ties_select_the_first_keys():
    scores = torch.tensor(
        [
            [
                [0.0, 2.0, 0.0, 0.0, 1.0, float("-inf")],
                [1.0, 1.0, 1.0, 1.0, 1.0, float("-inf")],
                [5.0, float("-inf"), float("-inf"), float("-inf"), float("-inf"), float("-inf")],
            ]
        ]
    )
    assert topk_mask(scores, 3).int().tolist() == [[[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]]
    assert torch.equal(topk_mask(scores, 6), scores > float("-inf"))


def test_packed_selection_bits_round_trip():
    chosen = torch.rand(2, 5, 19, generator=torch.Generator().manual_seed(1)) < 0.5
    selection = Selection(Selection.pack(chosen), (PositionRange(4, 6), PositionRange(10, 13)))
    assert selection.bits_BSC.shape == (2, 5, 3) and selection.bits_BSC.dtype == torch.uint8
    assert torch.equal(selection.of(PositionRange(4, 6), PositionRange(0, 19)), chosen[:, :2])
    assert torch.equal(selection.of(PositionRange(11, 13), PositionRange(7, 18)), chosen[:, 3:, 7:18])


def test_hadamard_rotation_keeps_products_and_spreads_outliers():
    x, y = torch.randn(3, 64, dtype=torch.float64), torch.randn(3, 64, dtype=torch.float64)
    assert torch.allclose((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1))
    assert torch.allclose(rotate(torch.eye(64)[5]).abs(), torch.full((64,), 1 / 8))
    assert torch.equal(hadamard_matrix(4, torch.float32, torch.device("cpu"))[1], torch.tensor([1.0, -1.0, 1.0, -1.0]))
