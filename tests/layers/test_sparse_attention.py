"""The indexer of sparse attention: the computation of its scores, and the gradients of its loss."""

import pytest
import torch
from training.layouts import make_argv, shallow, train

from arguments import parse_args
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.layers.sparse_attention import (
    INDEXER,
    Indexer,
    SparseAttention,
    indexer_metric,
    iter_sparse_attentions,
    reduce_indexer_loss,
    reset_indexer_loss,
)
from moe_trainer.model.build import build_chunks
from moe_trainer.model.participants import collect_participants
from moe_trainer.ops.block_attention import PositionRange, Selection
from moe_trainer.ops.hadamard import rotate
from moe_trainer.ops.rope import apply_rope, inverse_frequencies, rope_tables
from moe_trainer.ops.sparse_attention import IndexerOutput, topk_mask
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group, ParallelState

DSA = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --seed 2"


def argv(*more):
    return [*shallow(make_argv("deepseek")), *DSA.split(), *more]


def test_indexer_head_weights_are_scaled_by_heads_and_width():
    model = parse_args(argv(), 1).model
    indexer = Indexer(
        model, Group.single("tp"), name="decoder.layers.0.self_attention.core_attention.indexer", layer_number=0
    )
    x_SBH, latent_SBC = torch.randn(6, 2, model.hidden_size), torch.randn(6, 2, model.q_lora_rank)
    with torch.no_grad():
        for param in indexer.parameters():
            param.normal_()
        index = indexer(x_SBH, latent_SBC, None)
        expected = x_SBH @ indexer.linear_weights_proj.weight.T / (4 * 8) ** 0.5
    torch.testing.assert_close(index.weights_SBI, expected)


@pytest.mark.parametrize(
    "more, epsilon, rotated, interleaved, turned",
    [
        ([], 1e-5, True, False, True),
        (["--dsa-indexer-rope-interleaved", "--dsa-indexer-k-norm-epsilon", "0.5"], 0.5, True, True, True),
        (["--no-rope-freq", "2", "--norm-epsilon", "0.25"], 0.25, False, False, True),
        (["--no-dsa-indexer-rotate-activation"], 1e-5, True, False, False),
    ],
)
def test_indexer_normalizes_and_rotates_queries_and_keys(more, epsilon, rotated, interleaved, turned):
    model = parse_args(argv(*more), 1).model
    indexer = Indexer(
        model, Group.single("tp"), name="decoder.layers.1.self_attention.core_attention.indexer", layer_number=2
    )
    x_SBH, latent_SBC = torch.randn(6, 2, model.hidden_size), torch.randn(6, 2, model.q_lora_rank)
    rope = rope_tables(inverse_frequencies(4, 100), torch.arange(6))
    with torch.no_grad():
        for param in indexer.parameters():
            param.normal_()
        index = indexer(x_SBH, latent_SBC, rope)
        k_norm = indexer.k_norm
        q_SBIF = (latent_SBC @ indexer.linear_wq_b.weight.T).unflatten(-1, (4, 8))
        k_SBIF = torch.nn.functional.layer_norm(
            x_SBH @ indexer.linear_wk.weight.T, (8,), k_norm.weight, k_norm.bias, epsilon
        ).unsqueeze(2)
    if rotated:
        q_SBIF, k_SBIF = (apply_rope(each, *rope, interleaved=interleaved) for each in (q_SBIF, k_SBIF))
    if turned:
        q_SBIF, k_SBIF = rotate(q_SBIF), rotate(k_SBIF)
    torch.testing.assert_close(index.q_SBIF, q_SBIF)
    torch.testing.assert_close(index.k_KBF, k_SBIF.squeeze(2))


def attention(*more):
    return SparseAttention(
        parse_args(argv(*more), 1).model,
        ParallelState.single(),
        1,
        name="decoder.layers.0.self_attention.core_attention",
        scale=0.3,
        factory=LOCAL,
    )


@pytest.mark.parametrize("relu", [True, False])
def test_indexer_selects_keys_by_weighted_head_scores(relu):
    layer = attention(*([] if relu else ["--no-dsa-indexer-scoring-relu"]))
    layer.recorder = []
    generator = torch.Generator().manual_seed(3)
    x_SBH, latent_SBC, x_SBND = (
        torch.randn(shape, generator=generator) for shape in ((12, 2, 16), (12, 2, 12), (12, 2, 4, 8))
    )
    with torch.no_grad():
        for param in layer.indexer.parameters():
            param.normal_(generator=generator)
        layer(x_SBND, (x_SBND, x_SBND), None, x_SBH, latent_SBC, None)
        index = layer.indexer(x_SBH, latent_SBC, None)
    dots = torch.einsum("tbif,sbf->btis", index.q_SBIF, index.k_KBF)
    scores_BSK = torch.einsum("tbi,btis->bts", index.weights_SBI, dots.relu() if relu else dots)
    expected = topk_mask(scores_BSK.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), float("-inf")), 5)
    assert torch.equal(
        Selection(layer.recorder[0], (PositionRange(0, 12),)).of(PositionRange(0, 12), PositionRange(0, 12)), expected
    )


def test_an_explicit_mask_is_refused():
    x_SBND = torch.randn(6, 2, 4, 8)
    with pytest.raises(ValueError, match="document ids"):
        attention()(
            x_SBND,
            (x_SBND, x_SBND),
            AttentionMask(mask=torch.ones(2, 1, 6, 6, dtype=torch.bool)),
            torch.randn(6, 2, 16),
            torch.randn(6, 2, 12),
            None,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_indexer_loss_gradients_do_not_underflow_in_fp16(dtype):
    """1e-9 underflows in fp16; multiplied by the loss scale of 2^20 it does not."""
    index = IndexerOutput(
        *(torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((6, 2, 4, 8), (6, 2, 8), (6, 2, 4)))
    )
    grads = IndexerOutput(*(torch.full_like(x, 1e-9, dtype=torch.float32) for x in index))
    y_SBH = attention("--dsa-indexer-loss-coeff", "12")._attach(
        torch.ones(6, 2, 32, requires_grad=True),
        torch.tensor(3.0),
        grads,
        index,
        2.0**20,
        SequenceShard(Group.single("cp")),
        12,
    )
    for actual in torch.autograd.grad(y_SBH.sum(), list(index)):
        torch.testing.assert_close(
            actual.float(), torch.full_like(actual, 1e-9 * 2**20, dtype=torch.float32), rtol=1e-2, atol=0.0
        )


def test_reported_indexer_loss_is_a_mean_and_is_reset():
    args, ps = parse_args(argv("--dsa-indexer-loss-coeff", "1"), 1), ParallelState.single()
    chunks = build_chunks(args, ps, 64)
    layers = list(iter_sparse_attentions(chunks))
    assert len(layers) == 3

    def reported(forget=False):
        for number, layer in enumerate(layers):
            layer.indexer_loss.copy_(torch.tensor([6.0 * number, 2.0]))
        if forget:
            collect_participants(chunks, args, ps, torch.device("cpu")).discard()
        found = []
        for _ in range(2):
            found.append(
                indexer_metric(reduce_indexer_loss(chunks, ps, args.model, torch.device("cpu")).tolist())[
                    "indexer loss"
                ]
            )
            reset_indexer_loss(chunks)
        return found

    assert reported() == [3.0, 0.0]
    assert reported(forget=True) == [0.0, 0.0], "an iteration that is run again"


def test_indexer_loss_trains_only_the_indexers():
    outcomes = [
        train(argv("--clip-grad", "0", *more), 0, ParallelState.single(), steps=1)
        for more in (
            [],
            ["--dsa-indexer-loss-coeff", "1"],
            ["--dsa-indexer-loss-coeff", "1000"],
            ["--dsa-indexer-loss-coeff", "1", "--calculate-per-token-loss"],
        )
    ]
    without, small, large, per_token = (outcome.grads for outcome in outcomes)
    assert outcomes[2].losses[0]["indexer loss"] == pytest.approx(
        1000 * outcomes[1].losses[0]["indexer loss"], rel=1e-5
    )
    names = [name for name in small if INDEXER in name]
    assert names and all(small[name].abs().max() > 0 for name in names if "k_norm.bias" not in name)
    for name, grad in small.items():
        if INDEXER in name:
            # of all 128 queries, divided by the 92 tokens that the loss mask leaves
            torch.testing.assert_close(
                per_token[name], grad * (128 / 92), rtol=1e-4, atol=1e-4 * float(grad.abs().max())
            )
            torch.testing.assert_close(large[name], 1000 * grad, rtol=1e-4, atol=1e-4 * float(large[name].abs().max()))
        else:
            assert torch.equal(grad, without[name]) and torch.equal(large[name], without[name]), name
