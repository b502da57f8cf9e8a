"""Attention block by block: exact merging in any order, skipped blocks, and fully masked queries."""

import pytest
import torch

from moe_trainer.ops import flash_attention
from moe_trainer.ops.attention import attention
from moe_trainer.ops.block_attention import (
    BlockBackwardInputs,
    BlockMask,
    Documents,
    PositionRange,
    attend,
    attend_backward,
)
from moe_trainer.ops.packed_sequences import PackedSequences


def tensors(queries=12, keys=12, dtype=torch.float64):
    shapes = (2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 5), (2, 4, queries, 5)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def init_output(q, v):
    return torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)


def attend_in_blocks(q, k, v, blocks, block_mask):
    out, lse = init_output(q, v)
    every = PositionRange(0, q.shape[2])
    for keys in blocks:
        attend(
            q, k[:, :, keys.start : keys.stop], v[:, :, keys.start : keys.stop], every, keys, 0.4, block_mask, out, lse
        )
    return out, lse


def softmax(q, k, v, explicit_mask):
    scores = torch.einsum("bgnsd,bgkd->bgnsk", q.unflatten(1, (2, 2)), k) * 0.4
    scores = scores.masked_fill(~explicit_mask[:, None, None], float("-inf"))
    return torch.einsum("bgnsk,bgke->bgnse", scores.softmax(-1), v).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
@pytest.mark.parametrize("left", [-1, 4])
def test_any_order_of_blocks_gives_the_softmax_over_all_keys(order, left):
    q, k, v, _ = tensors()
    blocks = [PositionRange(0, 5), PositionRange(5, 6), PositionRange(6, 12)]
    out, lse = attend_in_blocks(q, k, v, [blocks[number] for number in order], BlockMask(left))
    i = torch.arange(12)
    explicit_mask = (i[:, None] >= i) & ((i >= i[:, None] - left) if left >= 0 else True)
    for ours, expected in zip((out, lse), softmax(q, k, v, explicit_mask[None])):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_very_different_scores_merge_without_overflow():
    q, k, v, _ = tensors()
    k[:, :, :6] *= 10000
    out, lse = attend_in_blocks(q, k, v, [PositionRange(0, 6), PositionRange(6, 12)], BlockMask())
    i = torch.arange(12)
    expected, _ = softmax(q, k, v, (i[:, None] >= i)[None])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert torch.isfinite(lse).all()


def test_fully_masked_query_gives_zero_and_no_gradient():
    """Megatron #1764: NaN under context parallelism when everything is masked."""
    q, k, v, grad = tensors(queries=4, keys=6)
    documents = Documents.of(torch.tensor([[0] * 6 + [1, 1, 2, 2], [0] * 10]))
    queries, keys = PositionRange(6, 10), PositionRange(0, 6)
    out, lse = init_output(q, v)
    attend(q, k, v, queries, keys, 0.4, BlockMask(documents=documents), out, lse)
    assert torch.equal(out[0], torch.zeros_like(out[0])) and (lse[0] == float("-inf")).all()
    assert (out[1] != 0).any() and torch.isfinite(lse[1]).all()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    final = BlockBackwardInputs(grad, out, lse, (grad * out).sum(-1))
    attend_backward(q, k, v, queries, keys, 0.4, BlockMask(documents=documents), final, tuple(grads))
    for x in grads:
        assert torch.equal(x[0], torch.zeros_like(x[0])) and torch.isfinite(x).all() and (x[1] != 0).any()


def test_clip_keeps_only_visible_keys():
    causal, window = BlockMask(), BlockMask(left=2)
    documents = BlockMask(documents=Documents.of(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 2, 2]])))
    assert causal.clip(PositionRange(2, 4), PositionRange(0, 8)) == PositionRange(0, 4)
    assert causal.clip(PositionRange(0, 2), PositionRange(2, 4)) is None
    assert window.clip(PositionRange(4, 6), PositionRange(0, 8)) == PositionRange(2, 6)
    assert window.clip(PositionRange(6, 8), PositionRange(0, 4)) is None
    assert documents.clip(PositionRange(5, 8), PositionRange(0, 8)) == PositionRange(2, 8), (
        "the second sequence's document begins at 2"
    )
    assert documents.clip(PositionRange(6, 8), PositionRange(0, 5)) is None


def test_mask_is_created_only_if_something_is_hidden():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]])
    documents = BlockMask(documents=Documents.of(ids))
    cpu = torch.device("cpu")
    assert BlockMask().hidden(PositionRange(4, 6), PositionRange(0, 4), cpu) is None
    assert BlockMask().hidden(PositionRange(4, 6), PositionRange(4, 6), cpu)[0, 0].tolist() == [
        [False, True],
        [False, False],
    ]
    assert BlockMask(left=3).hidden(PositionRange(4, 6), PositionRange(1, 4), cpu)[0, 0].tolist() == [
        [False] * 3,
        [True, False, False],
    ]
    assert documents.hidden(PositionRange(5, 8), PositionRange(3, 5), cpu) is None, (
        "inside one document in both sequences"
    )
    assert documents.hidden(PositionRange(5, 7), PositionRange(2, 4), cpu)[:, 0].tolist() == [
        [[True, False]] * 2,
        [[False, False]] * 2,
    ]


def test_queries_are_split_at_aligned_document_boundaries():
    size = 3 * flash_attention.CPU_LENGTH
    ids = torch.zeros(2, size, dtype=torch.int64)
    ids[:, 300:] = 1
    assert BlockMask(documents=Documents.of(ids)).split(PositionRange(0, size)) == [
        PositionRange(0, 300),
        PositionRange(300, size),
    ]
    assert BlockMask(documents=Documents.of(ids)).split(PositionRange(400, size)) == [PositionRange(400, size)]
    assert BlockMask(documents=Documents.of(torch.arange(size)[None] // 10)).split(PositionRange(0, size)) == [
        PositionRange(0, size)
    ], "too short"
    ids[1, 310] = 2
    ids[1, 311:] = 3
    assert BlockMask(documents=Documents.of(ids)).split(PositionRange(0, size)) == [PositionRange(0, size)], (
        "borders differ"
    )


@pytest.mark.parametrize("lengths", [(3, 1, 4), (5,), (2, 0, 3), (2, 3, 0), (1, 1, 1)])
def test_borders_of_packed_sequences_follow_from_their_lengths(lengths):
    packed = PackedSequences.of(lengths)
    known, found = Documents.of(packed.ids(), None, lengths), Documents.of(packed.ids())
    assert (known.earliest, known.latest, known.begins) == (found.earliest, found.latest, found.begins)
    assert known.lengths == lengths and torch.equal(known.ids_BS, found.ids_BS)


def test_document_ids_must_not_decrease():
    with pytest.raises(ValueError, match="must not decrease"):
        Documents.of(torch.tensor([[0, 1, 0]]))


def test_blocks_equal_the_attention_of_one_rank_in_fp32():
    q, k, v = (torch.randn(200, 2, heads, width) for heads, width in ((4, 8), (2, 8), (2, 8)))
    out, _ = attend_in_blocks(
        *(x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v)),
        [PositionRange(100, 200), PositionRange(0, 100)],
        BlockMask(),
    )
    torch.testing.assert_close(out.permute(2, 0, 1, 3).flatten(2), attention(q, k, v, 0.4))


LONG = 2 * flash_attention.CPU_LENGTH
BORDERS = torch.zeros(2, LONG, dtype=torch.int64)
BORDERS[0, LONG // 4 :], BORDERS[1, LONG // 4 + 3 :] = 1, 1


@pytest.mark.parametrize(
    ("size", "width"), [(LONG, 3), (LONG // 2, 3), (LONG // 2, 5)], ids=["one block", "four blocks", "wide values"]
)
@pytest.mark.parametrize(
    "block_mask",
    [
        BlockMask(documents=Documents.of(BORDERS)),
        BlockMask(documents=Documents.of(torch.arange(LONG)[None].expand(2, -1) // 100)),
        BlockMask(left=100),
        BlockMask(left=LONG // 2 + 10),
        BlockMask(left=300, documents=Documents.of(BORDERS)),
        BlockMask(),
    ],
    ids=["borders differ", "short documents", "window", "long window", "window and borders", "causal"],
)
def test_long_blocks_follow_the_mask(size, width, block_mask):
    """Only blocks with a plain causal mask may use the flash kernel, forward and backward."""
    q, k, v, grad = tensors(LONG, LONG)
    v, grad = v[..., :width].contiguous(), grad[..., :width].contiguous()
    runs = [PositionRange(start, start + size) for start in range(0, LONG, size)]
    blocks = [(queries, keys) for queries in runs for keys in runs if block_mask.clip(queries, keys) is not None]
    out, lse = init_output(q, v)
    for queries, keys in blocks:
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        attend(
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            queries,
            keys,
            0.4,
            block_mask,
            out[:, :, rows],
            lse[:, :, rows],
        )
    final, grads = BlockBackwardInputs(grad, out, lse, (grad * out).sum(-1)), [torch.zeros_like(x) for x in (q, k, v)]
    for queries, keys in blocks:
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        mine = grads[0][:, :, rows], grads[1][:, :, columns], grads[2][:, :, columns]
        attend_backward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], queries, keys, 0.4, block_mask, final.of(rows), mine
        )

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = softmax(*leaves, explicit_mask(block_mask))
    expected.backward(grad)
    for ours, theirs in zip((out, lse, *grads), (expected, expected_lse, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def explicit_mask(block_mask):
    """The explicit mask, [B, LONG, LONG]."""
    i = torch.arange(LONG)
    seen = (i[:, None] >= i)[None]
    if block_mask.left >= 0:
        seen = seen & (i >= i[:, None] - block_mask.left)
    if block_mask.documents is not None:
        ids_BS = block_mask.documents.ids_BS
        seen = seen & (ids_BS[:, :, None] == ids_BS[:, None])
    return seen
