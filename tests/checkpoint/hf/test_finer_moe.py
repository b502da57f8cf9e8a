"""FineRMoE folders: the layout of the published models, and the code that exported folders bring along."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoint.hf.models import VOCAB, batch, compute_logits, load_ours, make, run_convert
from commands import environment
from safetensors.torch import load_file

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.config import read_config, write_config

transformers = pytest.importorskip("transformers")


def compare_with_ours(theirs, folder):
    tokens, _, positions = batch()
    expected = compute_logits(theirs, tokens)
    with torch.no_grad():
        actual = load_ours(folder).eval()(tokens, positions)
    assert expected.std() > 0.1
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {"shared_expert_intermediate_size": 0},
        {"R_I": 2, "R_O": 2, "num_experts": 32, "num_experts_per_tok": 2},
        {"G_O": 1, "R_O": 1, "G_I": 2, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 28},
        {"G_O": 4, "R_O": 1, "num_experts": 16, "mlp_only_layers": []},
        {"tie_word_embeddings": True},
        {"moe_router_enable_expert_bias": True},
        {"moe_concat_proj": True},
    ],
    ids=["noshare", "expanded", "one slice", "four slices", "tied", "expert bias", "concat_proj"],
)
def test_logits_equal_for_every_grid(changes, tmp_path):
    theirs = make("finer_moe", **changes)
    theirs.save_pretrained(tmp_path / "hf")
    compare_with_ours(theirs, tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_zero_expansions_are_the_granularities(tmp_path):
    theirs = make("finer_moe", R_I=4, R_O=2, num_experts=64)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"R_I": 0, "R_O": 0}))
    compare_with_ours(theirs, tmp_path)
    assert type(theirs.config).from_dict(config | {"R_I": 0, "R_O": 0}).R_I == 4


def test_published_config_is_read():
    """As the authors' repository has it (27763b3)."""
    published = {
        "architectures": ["FineRMoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "finer_moe",
        "moe_intermediate_size": 280,
        "norm_topk_prob": False,
        "num_attention_heads": 12,
        "num_experts": 128,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 8960,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "moe_concat_proj": False,
        "R_I": 1,
        "R_O": 2,
        "G_I": 32,
        "G_O": 2,
    }
    _, flags, notes = read_config(published)
    assert not notes
    assert (flags["finermoe_intermediate_granularity"], flags["finermoe_output_granularity"]) == (32, 2)
    assert (flags["rotary_base"], flags["moe_shared_expert_gate"], flags["add_qkv_bias"]) == (1000000, True, True)
    _, written = write_config(flags, 151936)
    kept = published.keys() & written.keys()
    assert len(kept) > 20 and {key: written[key] for key in kept} == {key: published[key] for key in kept}


def test_exported_folder_generates_in_bf16(tmp_path):
    """In a process that knows nothing of this program."""
    make("finer_moe", moe_router_enable_expert_bias=True).save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back", "--dtype", "bf16", "--max-shard-size", "0.0001") == 0
    shutil.rmtree(tmp_path / "hf")
    program = (
        "import sys, torch, transformers as t\n"
        "model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert model.dtype == torch.bfloat16 and 'moe_trainer' not in sys.modules\n"
        "bias = model.model.layers[0].mlp.gate.e_score_correction_bias\n"
        "assert bias.dtype == torch.float32 and bias.count_nonzero() == 24\n"
        "prompt = torch.tensor([[3, 1, 4, 1, 5]])\n"
        "for cached in (True, False):\n"
        "    print(model.float().generate(prompt, max_new_tokens=8, do_sample=False, use_cache=cached).tolist())\n"
        "model(prompt, labels=prompt).loss.backward()\n"
        "model.save_pretrained(sys.argv[2])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "back"), str(tmp_path / "saved")],
        cwd=tmp_path,
        env=environment(HF_MODULES_CACHE=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    cached, plain = found.stdout.strip().splitlines()[-2:]
    assert cached == plain and len(json.loads(plain)[0]) == 13
    assert (tmp_path / "saved" / "modeling_finer_moe.py").is_file()
    load_ours(tmp_path / "saved")


def test_models_that_its_code_cannot_express_are_not_written():
    _, flags, _ = read_config(make("finer_moe").config.to_dict())
    for changes, word in (
        ({"moe_shared_expert_gate": False}, "--moe-shared-expert-gate"),
        ({"add_qkv_bias": False}, "--add-qkv-bias"),
        ({"qk_layernorm": True}, "--qk-layernorm"),
    ):
        with pytest.raises(CheckpointError, match=f"finer_moe: {word}"):
            write_config(flags | changes, VOCAB, "finer_moe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts is 8"),
        ({"num_experts_per_tok": 3}, "multiple of G_O"),
        ({"num_experts_per_tok": 10}, "up to 8"),
        ({"hidden_size": 36, "G_O": 8, "G_I": 1, "num_experts_per_tok": 8}, "hidden_size"),
    ],
)
def test_impossible_configurations_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        make("finer_moe", **changes)
