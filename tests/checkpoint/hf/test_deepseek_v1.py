"""DeepSeekMoE-16B, which transformers has no class for: Llama's blocks with DeepSeek-V2's experts are the same model."""

import json

import pytest
import torch
from checkpoint.hf.models import LAYERS, VOCAB, batch, compute_logits, load_ours, run_convert
from checkpoint.hf.test_convert import read_tensors, write_folder

pytest.importorskip("transformers")
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "max_position_embeddings": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}


def make():
    from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, initializer_range=0.2, attn_implementation="eager"))
    config = DeepseekV2Config(**CONFIG | EXPERTS, n_group=None, topk_group=None, topk_method="greedy")
    config._experts_implementation = "eager"
    for layer in model.model.layers[1:]:
        layer.mlp = DeepseekV2Moe(config)
        for param in layer.mlp.parameters():
            torch.nn.init.normal_(param, std=0.2)
    return model


def published(model):
    """Return the tensors under the names of the published folder, experts one by one."""
    tensors = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        prefix, leaf = name.rsplit(".", 1)
        for expert, weight in enumerate(value):
            parts = (
                zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
                if leaf == "gate_up_proj"
                else [(leaf, weight)]
            )
            tensors |= {f"{prefix}.{expert}.{part}.weight": part_weight for part, part_weight in parts}
    return tensors


def test_deepseek_v1_has_the_logits_of_its_parts_and_goes_back(tmp_path):
    model = make()
    config = {"model_type": "deepseek", "moe_layer_freq": 1} | CONFIG | EXPERTS
    write_folder(tmp_path / "hf", published(model), config)
    tokens, _, positions = batch()
    expected = compute_logits(model, tokens)
    with torch.no_grad():
        actual = load_ours(tmp_path / "hf").eval()(tokens, positions)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == run_convert(tmp_path / "ours", tmp_path / "back") == 0
    before, after = read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: written[key] for key in (*EXPERTS, "model_type", "norm_topk_prob")} == EXPERTS | {
        "model_type": "deepseek",
        "norm_topk_prob": False,
    }
