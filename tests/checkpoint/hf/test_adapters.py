"""Adapters of a checkpoint: merged into a Hugging Face folder, and as an adapter that PEFT loads, with equal logits."""

import json

import pytest
import torch
from checkpoint.hf.models import batch, compute_logits, flags_for, load_ours, make, run_convert
from safetensors.torch import load_file, save_file

from arguments.lora import is_adapter
from moe_trainer.checkpoint.manager import load, save
from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState

transformers = pytest.importorskip("transformers")
LORA = "--lora-dim 3 --lora-alpha 6".split()
TARGETS = {"nemotron_h": "--lora-target-modules in_proj linear_qkv linear_proj linear_fc1 linear_fc2".split()}


def adapted(name, folder, *flags):
    """A model of transformers, and ours with its weights and random adapters, saved: (theirs, ours, checkpoint)."""
    theirs = make(name)
    theirs.save_pretrained(folder / "hf")
    args, ps = flags_for(folder / "hf", *LORA, *(flags or TARGETS.get(name, ()))), ParallelState.single()
    (ours,) = build_chunks(args, ps, theirs.config.get_text_config().vocab_size)
    load(folder / "hf", [ours], None, ps, LoadOptions(args=args.as_dict(), load_optim=False, load_rng=False))
    torch.manual_seed(5)
    for param in ours.parameters():
        if is_adapter(get_param_info(param).names[0]):
            param.data = 0.3 * torch.randn(param.shape)
    record = args.as_dict() | {"padded_vocab_size": theirs.config.get_text_config().vocab_size}
    save(folder / "ours", CheckpointState(iteration=1, args=record), [ours], None, ps, SaveOptions(save_rng=False))
    return theirs, ours.eval(), folder / "ours"


def assert_same_logits(ours, theirs, base):
    tokens, _, positions = batch()
    with torch.no_grad():
        expected = ours(tokens, positions)
    actual = compute_logits(theirs, tokens)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (compute_logits(base, tokens) - expected).abs().max() > 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "nemotron_h",
        "granitemoehybrid",
        "mimo_v2_flash",
    ],
)
def test_adapters_have_the_same_effect_merged_and_in_peft(name, tmp_path):
    peft = pytest.importorskip("peft")
    base, ours, checkpoint = adapted(name, tmp_path)
    assert run_convert(checkpoint, tmp_path / "merged", "--model-type", name) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert_same_logits(ours, merged, base)
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft", "--model-type", name) == 0
    if name == "granitemoehybrid":  # kernels read this weight without its module
        targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_parameters"]
        assert "model.layers.0.mamba.out_proj.weight" in targets
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    state = peft.get_peft_model_state_dict(loaded)
    assert state.keys() == written.keys() and all(torch.equal(state[key], value) for key, value in written.items())
    assert_same_logits(ours, loaded, base)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "nemotron_h",
        "granitemoehybrid",
        "kimi_linear",
    ],
)
def test_an_exported_adapter_is_imported_as_it_was(name, tmp_path):
    _, ours, checkpoint = adapted(name, tmp_path)
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft", "--model-type", name) == 0
    assert run_convert(tmp_path / "hf", tmp_path / "again", "--adapter", tmp_path / "adapter") == 0
    again = load_ours(tmp_path / "again")
    names = dict(ours.named_parameters())
    assert names.keys() == dict(again.named_parameters()).keys() and any("lora" in each for each in names)
    assert all(torch.equal(param, names[path]) for path, param in again.named_parameters())


def test_adapters_that_peft_rejects_are_named_and_can_be_merged(tmp_path, capsys):
    base, ours, checkpoint = adapted("nemotron_h", tmp_path, "--lora-target-modules", "all-linear")
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft") == 2
    assert "model.layers.0.mixer.out_proj.weight: PEFT rejects" in capsys.readouterr().err
    assert run_convert(checkpoint, tmp_path / "merged") == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert_same_logits(ours, merged, base)


PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("name", "modules", "parameters"),
    [
        ("qwen3", ["q_proj", "v_proj", "o_proj", "up_proj"], None),
        ("qwen3_moe", ["q_proj", "k_proj", "v_proj"], PARAMETERS),
        ("mixtral", ["o_proj"], PARAMETERS[1:]),
        ("deepseek_v3", ["q_a_proj", "kv_b_proj"], PARAMETERS[:1]),
    ],
)
def test_an_adapter_of_peft_is_imported_with_equal_logits(name, modules, parameters, tmp_path):
    """Its A differ between the linears that one native linear joins, so that the native rank is larger."""
    peft = pytest.importorskip("peft")
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=modules, target_parameters=parameters, init_lora_weights=False
    )
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--adapter", tmp_path / "adapter") == 0
    assert_same_logits(load_ours(tmp_path / "ours").eval(), model, theirs)


def test_adapters_with_other_settings_are_rejected(tmp_path, capsys):
    _, _, checkpoint = adapted("qwen3", tmp_path)
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft") == 0
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    for setting, value, named in (
        ("use_dora", True, "use_dora"),
        ("use_rslora", True, "use_rslora"),
        ("fan_in_fan_out", True, "fan_in_fan_out"),
        ("bias", "all", "bias"),
        ("rank_pattern", {"q_proj": 5}, "rank_pattern"),
        ("alora_invocation_tokens", [1], "alora_invocation_tokens"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights"),
        ("r", 0, "r is 0"),
        ("r", 5, "with r 5"),
        ("lora_alpha", float("inf"), "lora_alpha inf"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
    ):
        path.write_text(json.dumps(settings | {setting: value}))
        assert run_convert(tmp_path / "hf", tmp_path / "again", "--adapter", tmp_path / "adapter") == 2, setting
        assert named in capsys.readouterr().err and not (tmp_path / "again").exists(), setting


@pytest.mark.parametrize("what", ["missing", "unknown"])
def test_adapters_with_missing_or_unknown_tensors_are_rejected(what, tmp_path, capsys):
    _, _, checkpoint = adapted("qwen3", tmp_path)
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft") == 0
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if ".lora_B." in each)
    if what == "missing":
        del tensors[name]
    else:
        tensors["base_model.model.model.layers.0.extra.lora_A.weight"] = torch.zeros(3, 32)
    save_file(tensors, path)
    assert run_convert(tmp_path / "hf", tmp_path / "again", "--adapter", tmp_path / "adapter") == 2
    message = f"{name} is missing" if what == "missing" else "extra.lora_A.weight: no linear that can have an adapter"
    assert message in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_an_adapter_of_another_base_is_rejected(tmp_path, capsys):
    _, _, checkpoint = adapted("qwen3", tmp_path)
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft") == 0
    make("qwen3", head_dim=16).save_pretrained(tmp_path / "other")
    assert run_convert(tmp_path / "other", tmp_path / "again", "--adapter", tmp_path / "adapter") == 2
    assert "do not fit model.layers.0.self_attn" in capsys.readouterr().err
