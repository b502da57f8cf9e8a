"""Model FLOPs against sums done by hand and against a published pair of figures."""

import pytest

import arguments
from moe_trainer.estimate.flops import training_flops


def parse(*flags):
    recipe = (
        "--seq-length 4 --max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-interval 1"
    )
    vocabulary = "--mock-data --tokenizer-type NullTokenizer --vocab-size 10 --position-embedding-type rope"
    return arguments.parse_args([*recipe.split(), *vocabulary.split(), *flags])


def test_flops_of_a_dense_model_without_gate():
    args = parse(*"--num-layers 3 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 32".split())
    attention = 8 * 24 + 8 * 8 + 4 * 8
    assert training_flops(args, 5, 4, 12) == 6 * 5 * 4 * (3 * (attention + 8 * 32 * 2) + 8 * 12)


def test_flops_of_gqa_moe_swiglu_with_a_dense_layer():
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --kv-channels 4 --group-query-attention --num-query-groups 2 --swiglu"
    moe = "--ffn-hidden-size 10 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 6 --moe-layer-freq ([0]+[1])"
    shared = "--moe-shared-expert-intermediate-size 7 --disable-bias-linear"
    args = parse(*flags.split(), *moe.split(), *shared.split())
    attention = 8 * (16 + 8 + 8) + 16 * 8 + 4 * 16
    assert training_flops(args, 1, 4, 16) == 6 * 4 * (2 * attention + 8 * 3 * (10 + 2 * 6 + 7) + 8 * 16)


def test_flops_of_other_heads_in_windows():
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --kv-channels 4 --ffn-hidden-size 10 --swiglu"
    groups = "--group-query-attention --num-query-groups 2 --window-size 2,0 --window-attn-skip-freq 2"
    args = parse(*f"{flags} {groups} --window-num-query-groups 4 --value-channels 2".split())
    full, window = (8 * (4 * 4 + groups * (4 + 2)) + 4 * 2 * 8 + 4 * 4 * (4 + 2) / 2 for groups in (2, 4))
    assert training_flops(args, 1, 4, 16) == 6 * 4 * (full + window + 2 * 8 * 3 * 10 + 8 * 16)


MOE = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --disable-bias-linear --ffn-hidden-size 12 --moe-shared-expert-intermediate-size 7"
CORE = 8 * 24 + 8 * 8 + 4 * 8


def test_flops_of_latent_experts():
    args = parse(*f"{MOE} --swiglu --num-experts 4 --moe-router-topk 2 --moe-latent-size 5".split())
    assert training_flops(args, 1, 4, 16) == 6 * 4 * (CORE + 2 * 12 * 5 * 3 + 2 * 8 * 5 + 7 * 8 * 3 + 8 * 16)


def test_flops_of_gated_delta_nets():
    flags = "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 32 --swiglu --experimental-attention-variant gdn"
    sizes = "--linear-attention-freq 3 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 3 --linear-value-head-dim 5"
    args = parse(*flags.split(), *sizes.split())
    linear = 8 * (6 + 6 + 20 + 20 + 4 + 4) + 4 * (6 + 6 + 20) + 4 * 4 * 5 * 5 + 20 * 8
    assert training_flops(args, 1, 4, 16) == 6 * 4 * (2 * linear + CORE + 3 * 8 * 32 * 3 + 8 * 16)


def test_flops_of_a_frozen_backbone():
    """Frozen weights have two of three GEMMs; attention itself (4 of 32 tokens x 8) and the routed experts have all."""
    words = f"{MOE} --num-experts 4 --moe-router-topk 2".split()
    full, frozen = (training_flops(parse(*words, *more), 1, 4, 16) for more in ([], ["--freeze-backbone"]))
    assert full - frozen == pytest.approx(2 * 4 * (8 * 24 + 8 * 8 + 7 * 8 * 2 + 8 * 16))


@pytest.mark.parametrize("q_lora", [None, 5])
def test_flops_of_mla_with_mtp(q_lora):
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --multi-latent-attention"
    mla = "--kv-lora-rank 6 --qk-head-dim 4 --qk-pos-emb-head-dim 2 --v-head-dim 3 --mtp-num-layers 2"
    args = parse(*flags.split(), *mla.split(), *(["--q-lora-rank", str(q_lora)] if q_lora else []))
    query = q_lora * (8 + 2 * 6 + 1) if q_lora else 8 * 2 * 6
    attention = query + 6 * (8 + 2 * 7 + 1) + 8 * 2 + 2 * 3 * 8 + 4 * 2 * (6 + 3) / 2
    mtp = 2 * (2 * 64 + 3 * 8)
    assert training_flops(args, 1, 4, 16) == 6 * 4 * (3 * (attention + 8 * 16 * 2) + mtp + 8 * 16 * 3)


SPARSE = (
    "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --multi-latent-attention --q-lora-rank 5 --kv-lora-rank 6 "
    "--qk-head-dim 4 --qk-pos-emb-head-dim 2 --v-head-dim 3 --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 4 "
    "--dsa-indexer-loss-coeff 0.1"
)
LATENT = 5 * (8 + 2 * 6 + 1) + 6 * (8 + 2 * 7 + 1) + 8 * 2 + 2 * 3 * 8
INDEXER = 5 * 3 * 4 + 8 * (4 + 3)


@pytest.mark.parametrize("topk", [3, 8, 20])
def test_flops_of_sparse_attention(topk):
    """The keys of every query, one by one."""
    args = parse(*SPARSE.split(), "--dsa-indexer-topk", str(topk))
    for length in (4, 16):
        keys = sum(min(place + 0.5, topk) if place + 1 <= topk else topk for place in range(length)) / length
        attention = LATENT + keys * 2 * (6 + 3) + INDEXER + length * 3 * (4 + 1) / 2
        assert training_flops(args, 1, length, 16) == pytest.approx(
            6 * length * (3 * (attention + 8 * 16 * 2) + 8 * 16), rel=1e-12
        )


def test_flops_of_a_hybrid_model_with_and_without_indexers():
    """Only the layers that have an indexer count it, and attend to what it selects."""
    sizes = SPARSE.replace("--num-layers 3", "").replace("--multi-latent-attention", "")
    sizes = sizes.replace("--experimental-attention-variant dsa", "--dsa-indexer-topk 3")
    mixed, sparse, latent = (
        training_flops(parse(f"--hybrid-layer-pattern={pattern}", *sizes.split()), 1, 16, 16)
        for pattern in ("D++-", "DDD-", "+++-")
    )
    assert mixed == pytest.approx((sparse + 2 * latent) / 3) and sparse != pytest.approx(latent)


def test_flops_of_dsa_indexer_warmup():
    args = parse(*SPARSE.split(), "--dsa-indexer-topk", "3", "--dsa-indexer-warmup")
    rest = 3 * (LATENT + 16 / 2 * 2 * (6 + 3) + 8 * 16 * 2) + 8 * 16
    assert training_flops(args, 1, 16, 16) == pytest.approx(
        6 * 16 * (rest / 3 + 3 * (INDEXER + 16 * 3 * 5 / 2)), rel=1e-12
    )


def test_flops_of_adapters():
    """Frozen weights have no gradients: two of three GEMMs are left, and attention as it was."""
    flags = (
        "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --num-experts 4 --moe-router-topk 2 "
        "--moe-layer-freq [0,1,1] --lora-dim 5 --lora-target-modules linear_qkv linear_fc1"
    )
    args = parse(*flags.split())
    core, attention, dense = 8 * 16, 4 * 8 * 8, 2 * 8 * 16
    frozen = 3 * attention + dense + 2 * 2 * dense + 8 * 32
    adapters = 3 * 5 * (8 + 3 * 8) + (1 + 2 * 2) * 5 * (8 + 16)
    assert training_flops(args, 1, 16, 32) == pytest.approx(
        2 * 16 * (2 * frozen + 3 * (3 * core + adapters)), rel=1e-12
    )


@pytest.mark.parametrize(
    ("name", "vocab", "tflops", "tokens_per_s"),
    [
        ("deepseek_v3", 129280, 857, 3298),
        ("qwen3_235b_a22b", 151936, 974, 6583),
    ],
)
def test_flops_per_token_match_published_throughput(name, vocab, tflops, tokens_per_s):
    """TFLOP/s and tokens/s per GPU reported for one run: their ratio is the count per token (arXiv 2603.07685)."""
    args = arguments.parse_args(["--preset", name, "--mock-data"])
    per_token = training_flops(args, 1, 4096, vocab) / 4096
    assert per_token == pytest.approx(tflops * 1e12 / tokens_per_s, rel=1e-3)


def test_flops_of_a_hybrid_model():
    """Layers count what they have: two Mamba mixers, one attention, one feed-forward layer."""
    args = parse(
        *"--hybrid-layer-pattern M*M- --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 --mamba-num-heads 6 "
        "--mamba-head-dim 2 --mamba-num-groups 3 --mamba-state-dim 5 --position-embedding-type none".split()
    )
    mamba = 8 * (2 * 12 + 2 * 15 + 6) + 12 * 8 + 3.5 * 12 * 5
    attention = 8 * 3 * 8 + 8 * 8 + 8 * 4
    assert training_flops(args, 1, 4, 16) == pytest.approx(6 * 4 * (2 * mamba + attention + 8 * 16 * 2 + 8 * 16))


@pytest.mark.parametrize("experts", ["", "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"])
def test_flops_of_depths_of_a_hybrid_model(experts):
    """Those of the same layers in the decoder, and of each depth its projection, norms and logits."""
    one, inside = ("E", "M*E") if experts else ("-", "M*-")
    with_depths, decoder = (
        training_flops(parse(*f"--hybrid-layer-pattern={pattern} --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 16 "
            f"--mamba-num-heads 8 --mamba-head-dim 2 --position-embedding-type none {experts}".split()), 1, 4, 16)
        for pattern in (f"{one}/{inside}/{inside}", one + 2 * inside)
    )  # fmt: skip
    assert with_depths - decoder == pytest.approx(6 * 4 * 2 * (2 * 8 * 8 + 3 * 8 + 8 * 16))
