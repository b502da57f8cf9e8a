"""DeepSeek-V4's attention against transformers, its kernel against a full mask, and every mapping against one process."""

import pytest
import torch
from harness import run_ranks
from torch import nn
from training.layouts import compare, make_argv, make_run, train_one_process, train_ranks
from training.resuming import assert_alike, load_and_save, train_and_save

from arguments import parse_args
from arguments.model import ModelArgs
from arguments.optimizer import OptimizerArgs
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.layers.compressed_attention import CompressedAttention
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.ops.compressed_attention import compressed_attention, pool_windows, select_pooled
from moe_trainer.optim.param_groups import get_param_group
from moe_trainer.parallel.state import ParallelState

KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 6}
SIZES = {
    "hidden_size": 28,
    "num_attention_heads": 6,
    "q_lora_rank": 11,
    "v_head_dim": 10,
    "qk_pos_emb_head_dim": 4,
    "o_groups": 3,
    "o_lora_rank": 5,
    "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 6,
    "dsa_indexer_topk": 3,
}
MODEL = ModelArgs(
    num_layers=3,
    normalization="RMSNorm",
    layernorm_epsilon=1e-6,
    qk_layernorm=True,
    multi_latent_attention=True,
    experimental_attention_variant="dsv4_hybrid",
    csa_compress_ratios=[*KINDS.values()],
    csa_window_size=5,
    csa_compress_rotary_base=40000.0,
    rope_type="yarn",
    rotary_scaling_factor=16.0,
    yarn_original_max_position_embeddings=16,
    dsa_indexer_rotate_activation=False,
    **SIZES,
)
FLAGS = (
    "--experimental-attention-variant dsv4_hybrid --multi-latent-attention --qk-layernorm --csa-compress-ratios [0,4,6,4] "
    "--csa-window-size 5 --q-lora-rank 10 --v-head-dim 12 --qk-pos-emb-head-dim 4 --o-groups 2 --o-lora-rank 6 "
    "--dsa-indexer-n-heads 16 --dsa-indexer-head-dim 8 --dsa-indexer-topk 3 --attention-dropout 0"
)
MAPPINGS = {
    "tensor, sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tensor": "--tensor-model-parallel-size 2",
    "experts": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer",
    "stages": "--pipeline-model-parallel-size 2",
    "full recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective --recompute-modules layernorm core_attn moe",
}


def reference_layer(kind):
    """Return a layer of transformers' attention, its rotary embedding and its configuration."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=28,
        num_attention_heads=6,
        num_hidden_layers=3,
        head_dim=10,
        q_lora_rank=11,
        partial_rotary_factor=0.4,
        layer_types=[*KINDS],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        compress_rope_theta=40000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        sliding_window=5,
        o_groups=3,
        o_lora_rank=5,
        index_n_heads=16,
        index_head_dim=6,
        index_topk=3,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return modeling, modeling.DeepseekV4Attention(config, [*KINDS].index(kind)), config


PAIRS = {
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_norm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_proj.weight": "kv_proj.weight",
    "kv_layernorm.weight": "kv_norm.weight",
    "linear_o_group_proj": "o_a_proj.weight",
    "linear_proj.weight": "o_b_proj.weight",
    "core_attention.attn_sink": "sinks",
    "core_attention.compressor.linear_wkv.weight": "compressor.kv_proj.weight",
    "core_attention.compressor.linear_wgate.weight": "compressor.gate_proj.weight",
    "core_attention.compressor.ape": "compressor.position_bias",
    "core_attention.compressor.norm.weight": "compressor.kv_norm.weight",
    "core_attention.indexer.linear_wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "core_attention.indexer.linear_weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
    "core_attention.indexer.compressor.linear_wkv.weight": "compressor.indexer.kv_proj.weight",
    "core_attention.indexer.compressor.linear_wgate.weight": "compressor.indexer.gate_proj.weight",
    "core_attention.indexer.compressor.ape": "compressor.indexer.position_bias",
    "core_attention.indexer.compressor.norm.weight": "compressor.indexer.kv_norm.weight",
}


@pytest.mark.parametrize("kind", KINDS)
def test_layer_equals_transformers(kind):
    torch.manual_seed(3)
    modeling, reference, config = reference_layer(kind)
    layer = CompressedAttention(
        MODEL, ParallelState.single(), name="a", layer_number=[*KINDS].index(kind) + 1, factory=LOCAL
    )
    ours, theirs = dict(layer.named_parameters()), dict(reference.named_parameters())
    assert {PAIRS[name] for name in ours} == set(theirs)
    with torch.no_grad():
        for name, param in ours.items():
            nn.init.normal_(param, mean=1.0 if "norm" in name else 0.0, std=0.4)
            theirs[PAIRS[name]].copy_(param)
    x_SBH = torch.randn(37, 2, 28, requires_grad=True)
    x_BSH = x_SBH.detach().transpose(0, 1).requires_grad_()
    positions = torch.arange(37).unsqueeze(0)
    rotary = modeling.DeepseekV4RotaryEmbedding(config)
    tables = {name: rotary(x_BSH, position_ids=positions, layer_type=name) for name in ("main", "compress")}
    distance = torch.arange(37).unsqueeze(1) - torch.arange(37)
    mask = torch.zeros(2, 1, 37, 37).masked_fill((distance < 0) | (distance >= 5), float("-inf"))
    expected, _ = reference(x_BSH, tables, positions, mask)
    out = layer(x_SBH, None, None)
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected.transpose(0, 1) * weights).sum().backward()
    torch.testing.assert_close(x_SBH.grad, x_BSH.grad.transpose(0, 1), rtol=1e-3, atol=1e-4)
    for name, param in ours.items():
        if "indexer" in name:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad, theirs[PAIRS[name]].grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("topk", [2, 100])
def test_blocks_equal_one_mask(block, topk):
    torch.manual_seed(0)
    length, ratio, window = 23, 4, 6
    q, kv, pooled = torch.randn(length, 2, 3, 8), torch.randn(length, 2, 8), torch.randn(length // ratio, 2, 8)
    inputs = [x.double().requires_grad_() for x in (q, kv, pooled, torch.randn(3))]
    index = torch.randn(length, 2, 2, 4), torch.randn(length // ratio, 2, 4), torch.randn(length, 2, 2)
    selected = select_pooled(*index, ratio, topk, True, block)
    out = compressed_attention(*inputs, selected, scale=0.3, window=window, ratio=ratio, block=block)
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    near = (key <= query) & (query - key < window)
    past = ((torch.arange(length // ratio) + 1) * ratio <= query + 1).unsqueeze(1).expand(-1, 2, -1)
    if topk == 2:
        scores = torch.einsum("sbif,tbf->sbit", *index[:2]).relu().mul(index[2].unsqueeze(-1)).sum(2)
        best = scores.masked_fill(~past, float("-inf")).topk(2, dim=-1).indices
        past = past & torch.zeros_like(past).scatter(-1, best, True)
        assert past.sum(-1).max() == 2
    else:
        assert selected is None
    mask = torch.cat([near.unsqueeze(1).expand(-1, 2, -1), past], dim=-1)
    keys = torch.cat(inputs[1:3])
    scores = torch.einsum("sbnd,kbd->sbnk", inputs[0], keys).mul(0.3).masked_fill(~mask.unsqueeze(2), float("-inf"))
    sink = inputs[3].view(1, 1, 3, 1).expand(length, 2, -1, -1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    expected = torch.einsum("sbnk,kbd->sbnd", weights, keys)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad((y * q).sum(), inputs) for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_fewer_tokens_than_a_window_have_no_pooled_key():
    assert pool_windows(torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.randn(4, 8), True).shape == (0, 1, 4)
    out = compressed_attention(
        torch.randn(3, 1, 2, 4), kv := torch.randn(3, 1, 4), kv[:0], torch.zeros(2), None, scale=1, window=8, ratio=4
    )
    assert out.isfinite().all()


def make_compressed_argv():
    return [*make_argv("plain"), *FLAGS.split(), "--global-batch-size", "4"]


def test_parameters_and_their_count():
    (chunk,) = make_run(make_compressed_argv(), 0, ParallelState.single(), 1).chunks
    named = {name: param for param in chunk.parameters() for name in param.info.names}
    core = "decoder.layers.1.self_attention.core_attention"
    assert named[f"{core}.compressor.ape"].shape == (4, 24) and named[f"{core}.attn_sink"].tolist() == [0.0] * 4
    assert f"{core}.indexer.compressor.ape" in named
    count = count_parameters(parse_args(make_compressed_argv(), 1), chunk.vocab_size).total
    assert count == sum(param.numel() for param in chunk.parameters())


def test_weight_decay_leaves_indexers_alone():
    """They have no gradient, so plain AdamW does not touch them."""
    (chunk,) = make_run(make_compressed_argv(), 0, ParallelState.single(), 1).chunks
    decayed = {
        param.info.names[0]: get_param_group(param, OptimizerArgs(), False).wd_mult for param in chunk.parameters()
    }
    indexer = {name: factor for name, factor in decayed.items() if ".indexer." in name}
    assert indexer and not any(indexer.values())
    assert decayed["decoder.layers.1.self_attention.core_attention.compressor.linear_wkv.weight"] == 1.0


def test_training_under_every_mapping_equals_one_process():
    base = make_compressed_argv()
    expected = train_one_process(*base)
    results = run_ranks(train_ranks, 2, [[*base, *mapping.split()] for mapping in MAPPINGS.values()])
    for index, name in enumerate(MAPPINGS):
        assert not compare(expected, results[0][index]), name


def test_resumes_under_another_mapping(tmp_path):
    argv = make_compressed_argv()
    steps = run_ranks(train_and_save, 2, [*argv, "--tensor-model-parallel-size", "2"], tmp_path / "a")[1]
    assert_alike(load_and_save(0, 1, argv, tmp_path / "a", tmp_path / "b"), steps)
