"""Hugging Face folders load as they are: logits, loss and gradients of every family equal those of transformers."""

import json
import shutil

import pytest
import torch
from checkpoint.hf.models import (
    MODELS,
    VOCAB,
    batch,
    compute_logits,
    flags_for,
    load_ours,
    make,
    published_names,
    train,
)
from model.test_against_transformers import convert
from safetensors.torch import load_file

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.weight_stream import HFWeights
from moe_trainer.checkpoint.resolve import read_saved_args, resolve_checkpoint
from moe_trainer.model.weights import export_named_weights
from moe_trainer.parallel.state import ParallelState

pytest.importorskip("transformers")

# names of some families -> those that `convert` knows
NAMES = {
    "block_sparse_moe.router.": "mlp.gate.",
    "block_sparse_moe.experts.": "mlp.experts.",
    ".shared_mlp.input_linear.": ".mlp.shared_experts.up_proj.",
    ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
    "mlp.shared_mlp.": "mlp.shared_experts.",
    "mlp.gate.wg.": "mlp.gate.",
    "feed_forward.router.": "mlp.gate.",
    "feed_forward.": "mlp.",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
}


def common_name(name):
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


# keys of models with layers of several kinds: their gradients are compared in tests/model/test_qwen3_next.py and
# test_hybrid.py, or below, their weights in test_convert.py
_KINDS = {"linear_key_head_dim", "layers_block_type", "mamba_n_heads", "hc_mult", "linear_num_heads", "conv_L_cache"}


@pytest.mark.parametrize("name", [name for name in MODELS if not _KINDS & MODELS[name][1].keys()])
def test_hf_folder_gives_transformers_logits_loss_and_gradients(name, tmp_path, caplog, record_property):
    theirs = make(name)
    theirs.save_pretrained(tmp_path, safe_serialization=True)
    ours = load_ours(tmp_path)
    assert "differ" not in caplog.text
    tokens, labels, positions = batch()
    expected = compute_logits(theirs, tokens)
    with torch.no_grad():
        actual = ours.eval()(tokens, positions)
    assert expected.std() > 0.1
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()

    loss = torch.nn.functional.cross_entropy(train(theirs)(tokens).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    mean = ours.train()(tokens, positions, labels).mean()
    assert abs(mean - loss).item() < 1e-5
    mean.backward()
    gradients = {
        # no token chose an expert without a gradient
        common_name(key): torch.zeros_like(param) if param.grad is None and ".experts." in key else param.grad
        for key, param in theirs.named_parameters()
        if not key.endswith(("correction_bias", "expert_bias"))  # ERNIE, AFMoE: parameters that are not trained
    }
    if name in (
        "aria_text",
        "phimoe",
    ):
        gradients = {key.replace(".mlp.router.", ".mlp.gate."): grad for key, grad in gradients.items()}
    for key, grad in gradients.items():
        if name in ("llama4_text", "aria_text") and ".experts." in key:  # inputs x outputs
            gradients[key] = grad.transpose(1, 2)
    if "lm_head.weight" not in gradients:  # tied
        gradients["lm_head.weight"] = gradients["model.embed_tokens.weight"]
    groups = None if "kv_lora_rank" in MODELS[name][1] else [2, 4, 4] if name == "mimo_v2_flash" else 2
    wanted = convert(gradients, groups)
    seen, errors = set(), []
    for param in ours.parameters():
        if ".indexer." in param.info.names[0]:  # without a separate loss it has no gradient, here as there
            assert param.grad is None and all(wanted[key] is None for key in param.info.names)
            seen.update(param.info.names)
            continue
        grads = param.grad.unbind(0) if param.info.stacked else (param.grad,)
        for key, grad in zip(param.info.names, grads, strict=True):
            seen.add(key)
            error, largest = (grad - wanted[key]).abs().max(), wanted[key].abs().max()
            assert error <= 1e-5 * largest + 1e-7, key
            errors.append((error / largest.clamp(min=1e-2)).item())
    assert seen >= set(wanted) - {"output_layer.weight"}
    record_property("gradients", max(errors))


@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid",
        "nemotron_h",
        "deepseek_v4",
        "kimi_linear",
        "lfm2_moe",
        "bailing_hybrid",
    ],
)
def test_gradients_of_hybrid_models_are_converted_to_those_of_transformers(name, tmp_path, record_property):
    """Gradients in the place of weights go through the same conversion."""
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "weights")
    ours = load_ours(tmp_path / "weights")
    tokens, labels, positions = batch()
    torch.nn.functional.cross_entropy(train(theirs)(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    ours.train()(tokens, positions, labels).mean().backward()
    for param in (*theirs.parameters(), *ours.parameters()):
        param.data = torch.zeros_like(param) if param.grad is None else param.grad  # indexers have none
    theirs.save_pretrained(tmp_path / "grads")
    native = export_named_weights([ours], ParallelState.single())
    found = dict(HFWeights(flags_for(tmp_path / "weights").as_dict(), VOCAB, None, torch.float32, name).convert(native))
    expected = published_names(name, load_file(tmp_path / "grads" / "model.safetensors"))
    assert found.keys() == expected.keys()
    errors = []
    for key, grad in expected.items():
        error, largest = (found[key] - grad).abs().max(), grad.abs().max()
        assert error <= 2e-5 * largest + 1e-7, key
        errors.append((error / largest.clamp(min=1e-2)).item())
    record_property("gradients", max(errors))


@pytest.mark.parametrize("name", MODELS)
def test_bf16_logits_are_as_exact_as_those_of_transformers(name, tmp_path, record_property):
    theirs = make(name).bfloat16()
    theirs.save_pretrained(tmp_path)
    tokens, _, positions = batch()
    in_bf16, in_fp32 = compute_logits(theirs, tokens).float(), compute_logits(theirs.float(), tokens)
    ours = load_ours(tmp_path, "--bf16")
    assert {param.dtype for key, param in ours.named_parameters() if "expert_bias" not in key} == {torch.bfloat16}
    with torch.no_grad():
        actual = ours.eval()(tokens, positions).float()
    # medians: where bf16 changes the experts of a token, no bound holds
    ours_error, their_error = (actual - in_fp32).abs().median(), (in_bf16 - in_fp32).abs().median()
    assert ours_error < 2 * their_error
    record_property("bf16", (ours_error / their_error).item())


def test_a_model_without_its_weights_has_flags_to_plan_with(tmp_path):
    """From config.json alone, or with the index of files that are not there."""
    make("qwen3_moe").save_pretrained(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    expected = read_saved_args(tmp_path / "whole")
    assert read_saved_args(tmp_path / "bare") == expected
    with pytest.raises(CheckpointError, match="has the config.json of a Hugging Face model, and no safetensors files"):
        resolve_checkpoint(tmp_path / "bare", None)
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "whole" / "model.safetensors"), "absent.safetensors")}
    (tmp_path / "bare" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_saved_args(tmp_path / "bare") == expected
