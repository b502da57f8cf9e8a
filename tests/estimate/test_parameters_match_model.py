"""The counts from flags equal the parameters of the model that the same flags build."""

import pytest

import arguments
import model_zoo
from arguments.vocabulary import padded_vocab_size_from_flags
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState


def count_built_parameters(args):
    """Return (parameters outside multi-token prediction, parameters inside) of the model built without storage."""
    (chunk,) = build_chunks(args, ParallelState.single(), padded_vocab_size_from_flags(args), device="meta")
    sizes = {True: 0, False: 0}
    for name, parameter in chunk.named_parameters():
        sizes[name.startswith("mtp.")] += parameter.numel()
    return sizes[False], sizes[True]


@pytest.mark.parametrize("name", model_zoo.names())
def test_estimated_parameters_of_every_preset_equal_the_model(name):
    args = arguments.parse_args(["--preset", name, "--mock-data"])
    counts = count_parameters(args)
    assert count_built_parameters(args) == (counts.total, counts.mtp)


BASE = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --eval-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"
)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --untie-embeddings-and-output-weights",
        "--disable-bias-linear --add-qkv-bias --normalization RMSNorm",
        "--group-query-attention --num-query-groups 2 --kv-channels 10 --qk-layernorm",
        "--group-query-attention --num-query-groups 2 --kv-channels 10 --attention-output-gate --add-qkv-bias",
        "--softmax-type learnable --position-embedding-type rope --mtp-num-layers 1",
        "--softmax-type off-by-one",
        "--group-query-attention --num-query-groups 2 --window-size 4,0 --window-attn-skip-freq [0,1,1] --window-num-query-groups 4 "
        "--window-softmax-type learnable --value-channels 5 --add-qkv-bias --position-embedding-type rope --mtp-num-layers 1 --lora-dim 3",
        "--swiglu --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 6 "
        "--linear-key-head-dim 5 --linear-value-head-dim 7 --linear-conv-kernel-dim 3 --position-embedding-type rope --mtp-num-layers 1",
        "--swiglu --experimental-attention-variant gdn --linear-attention-freq [1,0,0] --normalization RMSNorm",
        "--swiglu --experimental-attention-variant kda --linear-attention-freq [1,0,1] --normalization RMSNorm --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 5 --linear-value-head-dim 7 --kda-gate-rank 3 --lora-dim 3",
        "--experimental-attention-variant short_conv --linear-attention-freq [1,0,1] --linear-conv-kernel-dim 3 --num-experts 4 --lora-dim 3",
        "--swiglu --experimental-attention-variant kda --linear-attention-freq [1,0,0] --linear-num-key-heads 2 --linear-key-head-dim 5",
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 20 --moe-layer-freq ([0]+[1]*2) --disable-bias-linear",
        "--num-experts 4 --moe-layer-freq 2 --moe-grouped-gemm --swiglu --disable-bias-linear",
        "--num-experts 4 --moe-layer-freq 2",
        "--disable-bias-linear --add-attention-output-bias --add-output-layer-bias",
        "--num-experts 4 --moe-layer-freq 2 --swiglu --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate --mtp-num-layers 1 "
        "--group-query-attention --num-query-groups 2 --attention-output-gate --disable-bias-linear --lora-dim 3 --position-embedding-type rope",
        "--swiglu --experimental-attention-variant gdn --linear-attention-freq [1,0,0] --lora-dim 3 --num-experts 4 "
        "--lora-target-modules linear_qkv *.layers.1.*fc1 out_proj",
        "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion --lora-dim 3 "
        "--head-wise-attn-gate",
        "--hybrid-layer-pattern M*E- --add-attention-output-bias --position-embedding-type none --num-experts 4 --mamba-num-heads 4 --mamba-head-dim 6 "
        "--mamba-num-groups 2 --mamba-state-dim 5 --disable-bias-linear --lora-dim 3",
        "--hybrid-layer-pattern GE+- --num-experts 4 --swiglu --q-lora-rank 12 --kv-lora-rank 10 --position-embedding-type rope "
        "--no-rope-fusion --qk-layernorm --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 5 "
        "--linear-value-head-dim 7 --disable-bias-linear --lora-dim 3",
        "--hybrid-layer-pattern +E/GE --num-experts 4 --swiglu --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 5 --linear-value-head-dim 7 --disable-bias-linear",
        "--hybrid-layer-pattern MDE/D- --num-experts 4 --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion "
        "--disable-bias-linear --mamba-num-heads 4 --mamba-head-dim 6 --mamba-num-groups 2 --mamba-state-dim 5 "
        "--dsa-indexer-n-heads 3 --dsa-indexer-head-dim 64 --dsa-indexer-topk 3",
        "--hybrid-layer-pattern DG+E/D+ --num-experts 4 --swiglu --q-lora-rank 12 --kv-lora-rank 10 --position-embedding-type rope "
        "--no-rope-fusion --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 5 --linear-value-head-dim 7 "
        "--disable-bias-linear --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 64 --dsa-indexer-topk 3",
        "--hybrid-layer-pattern ME- --enable-hyper-connections --position-embedding-type none --num-experts 4 --mamba-num-heads 4 "
        "--mamba-head-dim 6 --mamba-num-groups 2 --mamba-state-dim 5 --disable-bias-linear",
        "--hybrid-layer-pattern=*E*- --post-self-attn-layernorm --post-mlp-layernorm --num-experts 4 --disable-bias-linear",
        "--hybrid-layer-pattern M-/*ME/*ME --position-embedding-type none --num-experts 4 --mamba-num-heads 4 --mamba-head-dim 6 "
        "--mamba-num-groups 2 --mamba-state-dim 5 --disable-bias-linear",
        "--num-experts 4 --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate --disable-bias-linear",
        "--num-experts 4 --moe-latent-size 10 --moe-shared-expert-intermediate-size 12 --disable-bias-linear --swiglu",
        "--num-experts 4 --moe-latent-size 10 --moe-layer-freq 2 --position-embedding-type rope --mtp-num-layers 1",
        "--multi-latent-attention --qk-layernorm --q-lora-rank 12 --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion",
        "--multi-latent-attention --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion --disable-bias-linear",
        "--multi-latent-attention --qk-layernorm --q-lora-rank 12 --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion "
        "--normalization RMSNorm --mtp-num-layers 1 --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 64 "
        "--dsa-indexer-topk 3",
        "--multi-latent-attention --kv-lora-rank 10 --position-embedding-type rope --no-rope-fusion --experimental-attention-variant dsa "
        "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 66 --dsa-indexer-topk 3 --no-dsa-indexer-rotate-activation",
        "--position-embedding-type rope --mtp-num-layers 2 --num-experts 4 --moe-layer-freq 2 --disable-bias-linear",
        "--position-embedding-type rope --mtp-num-layers 3 --mtp-use-repeated-layer",
        "--position-embedding-type none --mtp-num-layers 1 --qk-layernorm",
    ],
)
def test_estimated_parameters_of_every_layer_kind_equal_the_model(flags):
    check_parameters(flags)


def check_parameters(flags):
    args = arguments.parse_args(BASE.split() + flags.split())
    counts = count_parameters(args)
    assert count_built_parameters(args) == (counts.total, counts.mtp)
