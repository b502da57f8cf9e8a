"""Logits of small random models equal those of Hugging Face transformers, feature by feature."""

import pytest
import torch

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.model.weights import load_named_weights
from moe_trainer.parallel.state import ParallelState

transformers = pytest.importorskip("transformers")

SEQ, VOCAB, HIDDEN, LAYERS, HEADS, FFN = 48, 96, 32, 3, 4, 56
COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
ARGV = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size 2 --global-batch-size 2 "
    "--train-iters 1 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
    "--transformer-impl local --mock-data --eval-iters 0 --no-rope-fusion --tokenizer-type NullTokenizer --vocab-size 95"
).split()
LLAMA = "--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --position-embedding-type rope".split()
LATENT = (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --kv-channels 8"
).split()
UNTIED = ["--untie-embeddings-and-output-weights"]
GQA = "--group-query-attention --num-query-groups 2 --kv-channels 8".split()


def grouped_qkv(state, prefix, groups, leaf="weight"):
    """[q..q, k, v] per key-value group, after queries their gates if there are any."""
    keys = (f"{prefix}.{name}_proj.{leaf}" for name in ("q", "gate", "k", "v"))
    return torch.cat([state[key].unflatten(0, (groups, -1)) for key in keys if key in state], 1).flatten(0, 1)


def convert_gpt_oss_experts(out, ours, last, value):
    """[inputs, outputs], gate and up in turns."""
    kind = "bias" if last.endswith("_bias") else "weight"
    leaf = "linear_fc1" if last.startswith("gate_up") else "linear_fc2"
    for expert, tensor in enumerate(value):
        rows = tensor.t() if kind == "weight" else tensor
        if leaf == "linear_fc1":
            rows = torch.cat([rows[::2], rows[1::2]])
        out[f"{ours}.experts.local_experts.{expert}.{leaf}.{kind}"] = rows


def convert_mlp(out, state, ours, name, value):
    """One tensor of a feed-forward network, of experts or of a shared expert."""
    if ".mlp.router." in name:
        out[f"{ours}.router.{name.rpartition('.')[2]}"] = value
        return
    if name.partition(".mlp.")[0] + ".mlp.router.weight" in state:
        convert_gpt_oss_experts(out, ours, name.rpartition(".")[2], value)
        return
    path, _, last = name.partition(".mlp.")[2].removesuffix(".weight").rpartition(".")
    target = f"{ours}.shared_experts" if path.startswith("shared_expert") else ours
    if path.startswith("experts."):  # one by one
        target = f"{ours}.experts.local_experts.{path.removeprefix('experts.')}"
    if path == "experts":
        leaf = "linear_fc1" if last == "gate_up_proj" else "linear_fc2"
        for expert, weight in enumerate(value):
            out[f"{ours}.experts.local_experts.{expert}.{leaf}.weight"] = weight
    elif last in ("gate", "e_score_correction_bias", "expert_bias"):
        out[f"{ours}.router.weight" if last == "gate" else f"{ours}.router.expert_bias"] = value
    elif last == "shared_expert_gate":
        out[f"{ours}.shared_experts.gate_weight"] = value
    elif last == "down_proj":
        out[f"{target}.linear_fc2.weight"] = value
    elif last == "up_proj":
        gate = name.replace("up_proj", "gate_proj")
        out[f"{target}.linear_fc1.weight"] = torch.cat([state[gate], value]) if gate in state else value


def layer_norms(state, layer):
    """Hugging Face's norms of a layer -> Megatron-Core's: post_attention_layernorm has two meanings."""
    norms = {"input_layernorm": "input_layernorm", "post_mlp_layernorm": "post_mlp_layernorm"}
    norms |= {"post_feedforward_layernorm": "post_mlp_layernorm", "pre_mlp_layernorm": "pre_mlp_layernorm"}
    is_after = any(f"{layer}.{name}.weight" in state for name in ("post_feedforward_layernorm", "pre_mlp_layernorm"))
    return norms | {"post_attention_layernorm": "post_self_attn_layernorm" if is_after else "pre_mlp_layernorm"}


def convert(state, groups=None):
    """Hugging Face names -> Megatron-Core names. groups may be a list over layers; None: latent attention."""
    out = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    if "model.norm.bias" in state:
        out["decoder.final_layernorm.bias"] = state["model.norm.bias"]
    if "lm_head.bias" in state:
        out["output_layer.bias"] = state["lm_head.bias"]
    latent = {
        "q_proj": "linear_q_proj",
        "q_a_proj": "linear_q_down_proj",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_b_proj": "linear_kv_up_proj",
        "q_a_layernorm": "q_layernorm",
        "kv_a_layernorm": "kv_layernorm",
        "o_proj": "linear_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    }
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        if groups:
            for leaf in ("weight", "bias"):
                if f"{theirs}.self_attn.q_proj.{leaf}" in state:
                    of_layer = groups[i] if isinstance(groups, list) else groups
                    qkv = grouped_qkv(state, f"{theirs}.self_attn", of_layer, leaf)
                    out[f"{ours}.self_attention.linear_qkv.{leaf}"] = qkv
        norms = layer_norms(state, theirs)
        for name, value in state.items():
            module, _, leaf = name.removeprefix(theirs + ".").rpartition(".")
            parent, _, child = module.rpartition(".")
            if not name.startswith(theirs + "."):
                continue
            if module in norms:
                out[f"{ours}.{norms[module]}.{leaf}"] = value
            elif name.endswith(".sinks"):
                out[f"{ours}.self_attention.core_attention.softmax_offset"] = value
            elif parent == "self_attn.indexer":
                leaves = {"wq_b": "linear_wq_b", "wk": "linear_wk", "weights_proj": "linear_weights_proj"}
                out[f"{ours}.self_attention.core_attention.indexer.{leaves.get(child, child)}.{leaf}"] = value
            elif parent == "self_attn" and child in latent and not (groups and child == "q_proj"):
                out[f"{ours}.self_attention.{latent[child]}.{leaf}"] = value
            elif parent.startswith("mlp") or module.startswith("mlp"):
                convert_mlp(out, state, f"{ours}.mlp", name, value)
    return out


def compare_logits(hf_model, argv, groups=None, tied=False, biases=False):
    # norms and biases start at constants in transformers; random ones would show a swap
    generator = torch.Generator().manual_seed(7)
    for name, param in hf_model.named_parameters():
        if param.dim() == 1 or name.endswith("_bias"):
            param.data += 0.3 * torch.randn(param.shape, generator=generator)
    for name, buffer in hf_model.named_buffers():
        if "correction_bias" in name:
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    args = arguments.parse_args(
        [word for word in ARGV if not (biases and word == "--disable-bias-linear")] + argv, world_size=1
    )
    (model,) = build_chunks(args, ParallelState.single(), VOCAB)
    weights = convert(hf_model.state_dict(), groups)
    if tied:
        del weights["output_layer.weight"]
    load_named_weights([model], weights, ParallelState.single())
    tokens = torch.randint(VOCAB, (2, SEQ))
    positions = torch.arange(SEQ).expand(2, SEQ)
    with torch.no_grad():
        expected = hf_model.eval()(tokens).logits
        ours = model.eval()(tokens, positions)
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "rope, argv",
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, []),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, ["--rotary-seq-len-interpolation-factor", "4"]),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "--use-rope-scaling --rope-scaling-factor 8 --rotary-base 500000".split(),
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 "
            "--yarn-beta-fast 8 --yarn-beta-slow 1 --no-yarn-correction-range-round-to-int".split(),
        ),
    ],
)
def test_llama_with_rope_scaling(rope, argv):
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON, num_key_value_heads=2, rope_parameters=rope, rms_norm_eps=1e-6)
    )
    compare_logits(hf, LLAMA + UNTIED + GQA + argv, groups=2)


def test_qwen2_qkv_bias_and_tied_embeddings():
    hf = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-6)
    )
    compare_logits(hf, LLAMA + GQA + ["--add-qkv-bias"], groups=2, tied=True)


def test_qwen3_qk_norm_and_head_dim():
    hf = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-6)
    )
    compare_logits(hf, LLAMA + UNTIED + GQA + ["--kv-channels", "12", "--qk-layernorm"], groups=2)


def test_mistral_sliding_window():
    hf = transformers.MistralForCausalLM(
        transformers.MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=5, rms_norm_eps=1e-6)
    )
    compare_logits(hf, LLAMA + UNTIED + GQA + ["--window-size", "4,0"], groups=2)


def test_nemotron_zero_centered_norm_partial_rope_squared_relu():
    hf = transformers.NemotronForCausalLM(
        transformers.NemotronConfig(
            **COMMON,
            num_key_value_heads=4,
            head_dim=8,
            norm_eps=1e-5,
            hidden_act="relu2",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
    )
    compare_logits(
        hf,
        "--normalization LayerNorm --norm-epsilon 1e-5 --apply-layernorm-1p --squared-relu --kv-channels 8 "
        "--position-embedding-type rope --rotary-percent 0.5".split()
        + UNTIED,
        groups=4,
    )


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("yarn", [False, True])
def test_deepseek_v3_latent_attention(q_lora_rank, yarn):
    rope, argv = {"rope_type": "default", "rope_theta": 10000.0}, ["--rope-type", "rope"]
    if yarn:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        }
        argv = "--rope-type yarn --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 0.707".split()
    if q_lora_rank:
        argv += ["--q-lora-rank", str(q_lora_rank)]
    hf = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON,
            num_key_value_heads=HEADS,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=LAYERS,
            rope_parameters=rope,
            rms_norm_eps=1e-6,
        )
    )
    compare_logits(hf, LLAMA + UNTIED + LATENT + argv)


MOE = ["--num-experts", "8", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]


def test_mixtral():
    hf = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **COMMON, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-6
        )
    )
    base = hf.config.rope_parameters["rope_theta"]
    compare_logits(
        hf, LLAMA + UNTIED + GQA + MOE + ["--moe-router-topk", "2", "--rotary-base", f"{base:.0f}"], groups=2
    )


@pytest.mark.parametrize("renormalised", [False, True])
def test_qwen2_moe_gates_its_shared_expert(renormalised):
    hf = transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **COMMON,
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            norm_topk_prob=renormalised,
            rms_norm_eps=1e-6,
        )
    )
    compare_logits(
        hf,
        LLAMA
        + UNTIED
        + GQA
        + MOE
        + [
            "--moe-router-topk",
            "3",
            "--moe-ffn-hidden-size",
            "24",
            "--moe-shared-expert-intermediate-size",
            "40",
            "--moe-shared-expert-gate",
            "--add-qkv-bias",
            *([] if renormalised else ["--moe-router-pre-softmax"]),
        ],
        groups=2,
    )


def test_gpt_oss_sinks_windows_biases_and_clamped_swiglu():
    hf = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **COMMON,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=6,
            swiglu_limit=0.7,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 2.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        )
    )
    argv = LLAMA + UNTIED + GQA + MOE
    argv.remove("--swiglu")
    compare_logits(
        hf,
        argv
        + (
            "--moe-router-topk 3 --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.7 --softmax-type learnable "
            "--window-size 5,0 --window-attn-skip-freq 2 --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32 "
            "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 2 --yarn-beta-slow 1 --no-yarn-correction-range-round-to-int"
        ).split(),
        groups=2,
        biases=True,
    )


def test_deepseek_v3_experts():
    hf = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON,
            num_key_value_heads=HEADS,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=1,
            n_routed_experts=8,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            moe_intermediate_size=24,
            routed_scaling_factor=2.5,
            rms_norm_eps=1e-6,
        )
    )
    compare_logits(
        hf,
        LLAMA
        + UNTIED
        + LATENT
        + MOE
        + (
            "--q-lora-rank 20 --rope-type rope --moe-layer-freq [0]+[1]*2 --moe-router-topk 4 --moe-ffn-hidden-size 24 "
            "--moe-shared-expert-intermediate-size 24 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
        ).split(),
    )


@pytest.mark.parametrize("rotation", [[], ["--no-dsa-indexer-rotate-activation"]])
def test_deepseek_v32_sparse_attention_and_indexer(rotation):
    """Each query to 7 of up to 48 keys; theirs leaves the rotation out, which changes no product.

    With few heads many scores were exactly zero, all relus closed, and of equal scores theirs takes any.
    """
    hf = transformers.DeepseekV32ForCausalLM(
        transformers.DeepseekV32Config(
            **COMMON,
            num_key_value_heads=HEADS,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            mlp_layer_types=["dense"] * LAYERS,
            index_n_heads=24,
            index_head_dim=16,
            index_topk=7,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )
    compare_logits(
        hf,
        LLAMA
        + UNTIED
        + LATENT
        + rotation
        + (
            "--q-lora-rank 20 --rope-type rope --experimental-attention-variant dsa --dsa-indexer-n-heads 24 --dsa-indexer-head-dim 16 "
            "--dsa-indexer-topk 7"
        ).split(),
    )
