"""scripts/convert.py: both directions for every family, what it refuses, and that a killed conversion continues."""

import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoint.hf.large_folder import make_folder, measure_peak
from checkpoint.hf.models import (
    MODELS,
    VOCAB,
    batch,
    compute_logits,
    flags_for,
    load_ours,
    make,
    published_names,
    run_convert,
)
from commands import call_main, run
from safetensors.torch import load_file, save_file
from training.tiny import MOCK, TINY

import arguments
from arguments.mechanisms.selections import SELECTING
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import conversion_job, export
from moe_trainer.checkpoint.hf.config import read_config, write_config
from moe_trainer.checkpoint.hf.encodings import decode_block_fp8, decode_fp4
from moe_trainer.checkpoint.hf.families import FAMILIES
from moe_trainer.checkpoint.hf.files import SafetensorsFolder
from moe_trainer.checkpoint.hf.folder import open_hf_model
from moe_trainer.checkpoint.hf.names import duplicated_tensors, tensor_mappings
from moe_trainer.checkpoint.resolve import read_saved_args
from moe_trainer.commands import convert
from moe_trainer.estimate.parameters import count_parameters

transformers = pytest.importorskip("transformers")

SMALL = "0.0001"  # GB: many files
SAME_AS_ANOTHER = (
    "glm4_moe_lite",
    "qwen3_5_moe_text",
    "hy_v3",
    "aria_text",
)  # other families with other sizes or names


def read_tensors(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def write_folder(folder, tensors, config):
    folder.mkdir()
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_conversion_round_trip_of_every_family(name, tmp_path, caplog, record_property):
    caplog.set_level(logging.INFO)
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--max-shard-size", SMALL, "--verify") == 0
    assert (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text() == "release"
    tokens, _, positions = batch()
    expected = compute_logits(theirs, tokens)
    with torch.no_grad():
        actual = load_ours(tmp_path / "ours").eval()(tokens, positions)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()

    named = ["--model-type", name] if name in SAME_AS_ANOTHER else []
    assert run_convert(tmp_path / "ours", tmp_path / "back", "--max-shard-size", SMALL, *named) == 0
    before, after = published_names(name, read_tensors(tmp_path / "hf")), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "{}"
    # mistral4 is not among the automatic classes of transformers
    reader = type(theirs) if name == "mistral4" else transformers.AutoModelForCausalLM
    again, info = reader.from_pretrained(
        tmp_path / "back",
        attn_implementation="eager",
        output_loading_info=True,
        trust_remote_code=(tmp_path / "back" / f"modeling_{name}.py").exists(),
    )
    assert type(again).__name__ == type(theirs).__name__ and not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    torch.testing.assert_close(compute_logits(again, tokens), expected)  # memory of another alignment, other last bits
    difference = float(re.search(r"logits differ by at most (\S+),", caplog.text)[1])
    assert difference < 1e-5 * expected.abs().max() and "MB/s" in caplog.text
    record_property("logits", difference / expected.abs().max().item())
    counts = count_parameters(flags_for(tmp_path / "hf"), padded_vocab_size=VOCAB)
    # the bias of the router of ERNIE and AFMoE is a parameter there and a buffer here, as in all other families
    biases = ("correction_bias", "mlp.expert_bias")
    assert counts.total == sum(p.numel() for key, p in theirs.named_parameters() if not key.endswith(biases))
    record_property("parameters", counts.total)


def hub_like_deepseek(folder, eight_bits=False, name="deepseek_v3"):
    """As DeepSeek-V3 is published: one multi-token-prediction layer with copies of embedding and head. Returns: the model it replaces."""
    theirs = make(name)
    theirs.save_pretrained(folder.with_name("plain"))
    config = json.loads((folder.with_name("plain") / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    tensors = read_tensors(folder.with_name("plain"))
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    for name, value in last.items():
        tensors[name.replace("layers.2.", "layers.3.")] = torch.randn_like(value)
    for leaf, shape in (("enorm", [32]), ("hnorm", [32]), ("eh_proj", [32, 64]), ("shared_head.norm", [32])):
        tensors[f"model.layers.3.{leaf}.weight"] = torch.randn(shape)
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    stored = dict(tensors)
    for name in (
        [
            name
            for name in tensors
            if name.endswith(("_proj.weight", ".wq_b.weight", ".wk.weight")) and "eh_proj" not in name
        ]
        if eight_bits
        else ()
    ):
        scale = tensors[name].abs().max() / 448
        stored[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale.view(1, 1)
        tensors[name] = (stored[name].float() * scale).to(torch.bfloat16)
    write_folder(folder, stored, config)
    return tensors


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_deepseek_mtp_layer_is_converted(name, tmp_path):
    tensors = hub_like_deepseek(tmp_path / "hf", name=name)
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    model = load_ours(tmp_path / "ours")
    layer = model.mtp.layers[0]
    assert torch.equal(layer.eh_proj.weight, tensors["model.layers.3.eh_proj.weight"])
    assert torch.equal(layer.final_layernorm.weight, tensors["model.layers.3.shared_head.norm.weight"])
    assert torch.equal(
        layer.mtp_model_layer.mlp.router.expert_bias, tensors["model.layers.3.mlp.gate.e_score_correction_bias"]
    )
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    after = read_tensors(tmp_path / "back")
    assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_multi_token_prediction_can_be_left_out(tmp_path):
    tensors = hub_like_deepseek(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back", "--drop-mtp", "--verify") == 0
    after = read_tensors(tmp_path / "back")
    assert after.keys() == {name for name in tensors if not name.startswith("model.layers.3.")}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_refusal_names_the_nearest_model_types():
    flags = read_config(make("qwen3_moe").config.to_dict())[1]
    with pytest.raises(CheckpointError) as refusal:
        write_config(flags | {"mtp_num_layers": 1}, VOCAB)
    first, nearest, *others = str(refusal.value).split("\n  ")
    assert f"the nearest 3 of {len(FAMILIES)}" in first and nearest.startswith("qwen3_moe: --mtp-num-layers ")
    assert len(others) == 3 and "--drop-mtp" in others[-1]


@pytest.mark.parametrize("last", ["full_attention", "linear_attention"])
def test_qwen3_next_mtp_layer_is_converted(last, tmp_path):
    """Its layer has the kind of the last decoder layer."""
    make("qwen3_next", layer_types=["linear_attention", "full_attention", last]).save_pretrained(tmp_path / "plain")
    tensors = read_tensors(tmp_path / "plain")
    tensors |= {
        name.replace("model.layers.2.", "mtp.layers.0."): torch.rand_like(value) + 0.5
        for name, value in tensors.items()
        if "layers.2." in name
    }
    for leaf, shape in (
        ("pre_fc_norm_embedding", [32]),
        ("pre_fc_norm_hidden", [32]),
        ("fc", [32, 64]),
        ("norm", [32]),
    ):
        tensors[f"mtp.{leaf}.weight"] = torch.randn(shape)
    write_folder(tmp_path / "hf", tensors, json.loads((tmp_path / "plain" / "config.json").read_text()))
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert torch.equal(
        load_ours(tmp_path / "ours").mtp.layers[0].enorm.weight, tensors["mtp.pre_fc_norm_embedding.weight"]
    )
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    after = read_tensors(tmp_path / "back")
    assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in tensors)


def test_mtp_layer_of_ling_is_converted(tmp_path):
    """With the gate of its latent attention; query latents, which transformers does not build, are converted, too."""
    make("bailing_hybrid", layer_types=["linear_attention"] * 2 + ["full_attention"]).save_pretrained(
        tmp_path / "plain"
    )
    tensors = read_tensors(tmp_path / "plain")
    query = tensors.pop("model.layers.2.attention.q_proj.weight")
    tensors |= {
        "model.layers.2.attention.q_a_proj.weight": torch.randn(20, 32),
        "model.layers.2.attention.q_a_layernorm.weight": torch.randn(20),
        "model.layers.2.attention.q_b_proj.weight": torch.randn(len(query), 20),
    }
    tensors |= {
        name.replace("layers.2.", "layers.3."): torch.rand_like(value) + 0.5
        for name, value in tensors.items()
        if "layers.2." in name
    }
    for leaf, shape in (("enorm", [32]), ("hnorm", [32]), ("eh_proj", [32, 64]), ("final_layernorm", [32])):
        tensors[f"model.layers.3.{leaf}.weight"] = torch.randn(shape)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    write_folder(tmp_path / "hf", tensors, config | {"num_nextn_predict_layers": 1, "q_lora_rank": 20})
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    layer = load_ours(tmp_path / "ours").mtp.layers[0]
    assert torch.equal(
        layer.mtp_model_layer.self_attention.linear_gate.weight, tensors["model.layers.3.attention.g_proj.weight"]
    )
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    after = read_tensors(tmp_path / "back")
    assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_every_mtp_depth_exports_copies_of_embedding_and_head(tied):
    flags = {"num_layers": 3, "mtp_num_layers": 2, "untie_embeddings_and_output_weights": not tied}
    embedding, head = "model.embed_tokens.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"
    repeated = {
        f"model.layers.{layer}.{leaf}": of
        for layer in (3, 4)
        for leaf, of in (("embed_tokens.weight", embedding), ("shared_head.head.weight", head))
    }
    alone = {"lm_head.weight": embedding} if tied else {}
    assert (
        duplicated_tensors(FAMILIES["deepseek_v3"].names, flags) == repeated | alone
        and duplicated_tensors(FAMILIES["qwen3_next"].names, flags) == alone
    )


def test_mtp_layers_are_numbered_after_decoder_layers():
    _, flags, _ = read_config(make("deepseek_v3", num_mtp_layers=2).config.to_dict())
    flags |= {"rows": VOCAB}
    of = {
        mapping.native: [ref.name for ref in mapping.sources]
        for mapping in tensor_mappings(FAMILIES["deepseek_v3"].names, flags)
    }
    assert [of[f"mtp.layers.{depth}.enorm.weight"] for depth in (0, 1)] == [
        ["model.layers.3.enorm.weight"],
        ["model.layers.4.enorm.weight"],
    ]
    layer = "mtp.layers.1.mtp_model_layer."
    assert (
        of[f"{layer}mlp.router.weight"] == ["model.layers.4.mlp.gate.weight"]
        and f"{layer}mlp.linear_fc2.weight" not in of
    )
    dense = {
        mapping.native
        for mapping in tensor_mappings(FAMILIES["deepseek_v3"].names, flags | {"moe_layer_freq": [1, 1, 0]})
    }
    assert f"{layer}mlp.linear_fc2.weight" in dense and f"{layer}mlp.router.weight" not in dense


def test_mtp_layers_without_weights_are_skipped(tmp_path):
    make("deepseek_v3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = open_hf_model(tmp_path)
    assert model.flags["mtp_num_layers"] is None and any(
        "1 multi-token-prediction layers, and the files have none" in note for note in model.notes
    )


def test_embedding_copy_with_other_values_is_rejected(tmp_path, capfd):
    tensors = hub_like_deepseek(tmp_path / "hf")
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "hf" / "model.safetensors")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 2
    assert "model.layers.3.embed_tokens.weight" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_fp8_weights_are_dequantized(name, tmp_path):
    tensors = hub_like_deepseek(tmp_path / "hf", eight_bits=True, name=name)
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    after = read_tensors(tmp_path / "back")
    assert after.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(after[name], value.to(after[name].dtype)), name


def test_fp8_dequantization_with_partial_blocks(tmp_path):
    """Full blocks and partial ones at the end of both dimensions, each with its own scale."""
    value, scales = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    expected = torch.empty(200, 300, dtype=torch.bfloat16)
    for row, column in itertools.product(range(2), range(3)):
        place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        expected[place] = (value[place].float() * scales[row, column]).bfloat16()
    assert torch.equal(decode_block_fp8(value, scales), expected)
    save_file(
        {
            "stack": torch.stack([value.t().contiguous().view(200, 300), value]),
            "stack_scale_inv": torch.stack([scales + 1, scales]),
        },
        tmp_path / "model.safetensors",
    )
    assert torch.equal(SafetensorsFolder(tmp_path).read("stack", 1), expected)
    for wrong in (scales.t(), scales[:1], scales[:, :2]):
        with pytest.raises(ValueError, match=r"\[2, 3\] are needed"):
            decode_block_fp8(value, wrong)


def test_fp8_weights_without_scales_are_rejected(tmp_path, capfd):
    hub_like_deepseek(tmp_path / "hf", eight_bits=True)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    del stored["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 2
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv" in capfd.readouterr().err


def save_mxfp4_gpt_oss(folder):
    """gpt-oss as it is published: experts in MXFP4. Returns: the config, the stored and the dequantized tensors."""
    theirs = make("gpt_oss", hidden_size=64, intermediate_size=96)
    theirs.save_pretrained(folder)
    stored, meant = {}, {}
    for name, value in read_tensors(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = value
            continue
        experts, inputs, outputs = value.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)
        stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
        meant[name] = dequantize_mxfp4_reference(blocks, scales)
    return json.loads((folder / "config.json").read_text()), stored, meant


def dequantize_mxfp4_reference(blocks, scales):
    """Sign, two bits of exponent, one of mantissa; the lower half of a byte comes first. Returns: [expert, input, output]."""
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(3)
    sign, exponent, mantissa = (codes // 8).int(), (codes // 2 % 4).int(), (codes % 2).int()
    size = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))
    values = torch.where(sign == 1, -size, size) * 2.0 ** (scales.int() - 127).unsqueeze(-1)
    return values.flatten(2).transpose(1, 2).to(torch.bfloat16)


def test_fp4_experts_are_dequantized(tmp_path):
    config, stored, meant = save_mxfp4_gpt_oss(tmp_path / "plain")
    write_folder(tmp_path / "hf", stored, config | {"quantization_config": {"quant_method": "mxfp4"}})
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    after = read_tensors(tmp_path / "back")
    assert after.keys() == meant.keys()
    for name, value in meant.items():
        assert torch.equal(after[name], value.to(after[name].dtype)), name


def test_mxfp4_dequantization_equals_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(256, (2, 70, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 70, 3), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)
    found = torch.stack([decode_fp4(block.flatten(1), scale).t() for block, scale in zip(blocks, scales)])
    assert torch.equal(found, expected)
    assert torch.equal(dequantize_mxfp4_reference(blocks, scales), expected)


@pytest.mark.parametrize("what", ["missing", "wrong shape"])
def test_mxfp4_weights_without_scales_are_rejected(what, tmp_path, capfd):
    config, stored, _ = save_mxfp4_gpt_oss(tmp_path / "plain")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = stored.pop(name)
    if what == "wrong shape":
        stored[name] = scales[:, :-1]
    write_folder(tmp_path / "hf", stored, config)
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 2
    assert name in capfd.readouterr().err


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_stacked_experts_are_read(name, tmp_path):
    theirs = make(name)
    write_folder(tmp_path / "hf", theirs.state_dict(), theirs.config.to_dict())
    assert any("gate_up_proj" in key for key in read_tensors(tmp_path / "hf"))
    tokens, _, positions = batch()
    with torch.no_grad():
        actual = load_ours(tmp_path / "hf").eval()(tokens, positions)
    expected = compute_logits(theirs, tokens)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def damage_folder(folder, what):
    """Damage a folder of one file. Returns: the words that the error must contain."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    if what == "missing expert":
        del tensors[name]
    elif what == "extra tensor":
        name = "model.layers.1.mlp.experts.8.up_proj.weight"
        tensors[name] = torch.zeros(24, 32)
    elif what == "wrong shape":
        tensors[name] = tensors[name][:-1].clone()
    elif what == "not finite":
        tensors[name][0, 0] = float("nan")
    if what == "cut off":
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        name = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"][1])
        os.truncate(path, path.stat().st_size - 5)
    elif what == "no table":
        name = "model.safetensors"
        path.write_bytes(b"\xff" * 100)
    else:
        save_file(tensors, path)
    return name


@pytest.mark.parametrize("what", ["missing expert", "extra tensor", "wrong shape", "not finite", "cut off", "no table"])
def test_an_incomplete_source_is_rejected_by_name(what, tmp_path, capfd):
    make("qwen3_moe", mlp_only_layers=[]).save_pretrained(tmp_path / "hf")
    name = damage_folder(tmp_path / "hf", what)
    for workers in ("1", "2"):
        assert run_convert(tmp_path / "hf", tmp_path / "ours", "--workers", workers, "--max-shard-size", SMALL) == 2
        stderr = capfd.readouterr().err
        assert name in stderr and "Traceback" not in stderr
        assert (
            not (tmp_path / "ours" / "release").exists()
            and not (tmp_path / "ours" / "latest_checkpointed_iteration.txt").exists()
        )
        assert not list(tmp_path.rglob("metadata.json")) and not list(tmp_path.rglob(".metadata"))


def test_unused_tensors_can_be_dropped_by_name(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    make("llama").save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--ignore", "^extra") == 0
    assert "extra.weight is left out" in caplog.text


def test_expert_missing_in_checkpoint_is_named(tmp_path, capfd):
    make("mixtral").save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    import pickle

    path = tmp_path / "ours" / "release" / ".metadata"
    index = pickle.loads(path.read_bytes())
    del index.state_dict_metadata["decoder.layers.mlp.router.weight"]
    path.write_bytes(pickle.dumps(index))
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 2
    assert "decoder.layers.0.mlp.router.weight" in capfd.readouterr().err and not (tmp_path / "back").exists()


def test_export_of_weights_as_one_file(tmp_path):
    theirs = make("qwen2")
    theirs.save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "w.safetensors", "--to", "weights", "--dtype", "bf16") == 0
    found = load_file(tmp_path / "w.safetensors")
    model = load_ours(tmp_path / "hf")
    assert found.keys() == {name for param in model.parameters() for name in param.info.names}
    assert torch.equal(
        found["decoder.layers.1.self_attention.linear_qkv.bias"],
        model.decoder.layers[1].self_attention.linear_qkv.bias.to(torch.bfloat16),
    )


def test_convert_given_iteration_with_tokenizer_of_another_folder(tmp_path):
    make("qwen2").save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "tokenizer_class": "Some", "hidden_size": 1})
    )
    (tmp_path / "other" / "special_tokens_map.json").write_text("{}")
    (tmp_path / "ours" / "release").rename(tmp_path / "ours" / "iter_0000002")  # not what the tracker names
    assert (
        run_convert(
            tmp_path / "ours",
            tmp_path / "back",
            "--config",
            tmp_path / "other",
            "--tokenizer",
            tmp_path / "other",
            "--ckpt-step",
            "2",
        )
        == 0
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["tokenizer_class"], config["hidden_size"]) == (
        7,
        None,
        "Some",
        32,
    )
    assert (tmp_path / "back" / "special_tokens_map.json").read_text() == "{}"


@pytest.mark.parametrize(
    "words, named",
    [
        (["--to", "hf"], "--to hf"),
        (["--vocab-size", "3"], "--vocab-size"),
        (["--max-shard-size", "-1"], "--max-shard-size"),
        (["--ignore", "("], "--ignore"),
        (["--to", "weights", "--max-shard-size", "1"], "--max-shard-size does not apply to --to weights"),
        (["--to", "weights", "--verify"], "--verify: a weights file"),
    ],
)
def test_wrong_options_are_refused(words, named, tmp_path, capfd):
    make("llama").save_pretrained(tmp_path / "hf")
    done = call_main(convert.main, [tmp_path / "hf", tmp_path / "ours", *words], capfd)
    assert done.returncode == 2 and named in done.stderr


def test_existing_target_and_changed_source_are_rejected(tmp_path, capfd):
    make("llama").save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 2
    assert "exists already" in capfd.readouterr().err
    (tmp_path / "other" / "release.converting").mkdir(parents=True)
    (tmp_path / "other" / "release.converting" / "conversion.json").write_text("{}")
    assert run_convert(tmp_path / "hf", tmp_path / "other") == 2
    assert "belongs to another conversion" in capfd.readouterr().err


def convert_until_killed(*words):
    """Convert, and be killed when the fourth file has its bytes, and not yet its name: for a forked process."""
    flush_file = conversion_job.flush_file

    def deadly(path):
        if len(list(path.parent.glob(".*.done"))) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        flush_file(path)

    conversion_job.flush_file = deadly
    run_convert(*words)


@pytest.mark.parametrize("to", ["ours", "hf"])
def test_killed_conversion_resumes(to, tmp_path):
    make("qwen3_moe", num_hidden_layers=12, mlp_only_layers=[], hidden_size=64).save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "whole", "--max-shard-size", SMALL) == 0
    source = tmp_path / "hf"
    if to == "hf":
        source = tmp_path / "whole"
        assert run_convert(source, tmp_path / "full_hf", "--max-shard-size", SMALL) == 0
    staging = tmp_path / "out" / "release.converting" if to == "ours" else tmp_path / "out.converting"
    words = (source, tmp_path / "out", "--max-shard-size", SMALL)
    killed = multiprocessing.get_context("fork").Process(target=convert_until_killed, args=words)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    done = {path.name for path in staging.glob(".*.done")}
    assert (
        len(done) == 3
        and list(staging.glob("*.tmp-*"))
        and not list(tmp_path.glob("out/**/metadata.json")) + list(tmp_path.glob("out*/config.json"))
    )
    (staging / "rest.tmp-host-1").write_bytes(b"x")
    kept = {path: path.stat().st_mtime_ns for path in staging.iterdir() if f".{path.name}.done" in done}
    assert run_convert(*words, "--workers", "2") == 0
    final, same = (
        (tmp_path / "out" / "release", tmp_path / "whole" / "release")
        if to == "ours"
        else (tmp_path / "out", tmp_path / "full_hf")
    )
    assert sorted(path.name for path in final.iterdir()) == sorted(path.name for path in same.iterdir())
    assert all((final / path.name).stat().st_mtime_ns == at for path, at in kept.items()), (
        "files that were complete are written again"
    )
    pattern = "__*_0.distcp" if to == "ours" else "*.safetensors"
    for path in final.glob(pattern):
        assert (
            path.read_bytes() == (same / path.name).read_bytes()
            or path.name == f"__{len(list(final.glob(pattern))) - 1}_0.distcp"
        )
    if to == "ours":
        load_ours(tmp_path / "out")


def test_ranks_share_a_conversion(tmp_path, monkeypatch):
    make("mixtral").save_pretrained(tmp_path / "hf")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run_convert(tmp_path / "hf", tmp_path / "ours", "--max-shard-size", SMALL) == 0
        assert (tmp_path / "ours" / "release").exists() == (rank == "1")
    monkeypatch.delenv("WORLD_SIZE"), monkeypatch.delenv("RANK")
    load_ours(tmp_path / "ours")


def test_model_trained_with_parallelism_generates_in_transformers(tmp_path):
    words = [
        *TINY,
        *MOCK,
        "--train-iters",
        "1",
        "--save",
        str(tmp_path / "run"),
        "--save-interval",
        "1",
        "--export-weights",
        str(tmp_path / "w.safetensors"),
    ]
    done = run(
        [*words, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"],
        tmp_path,
        world_size=4,
    )
    assert done.returncode == 0, done.stderr
    assert run_convert(tmp_path / "run", tmp_path / "hf", "--vocab-size", "120", "--verify") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.model_type == "mixtral" and model.config.vocab_size == 120
    exported = load_file(tmp_path / "w.safetensors")
    assert torch.equal(model.model.layers[1].mlp.gate.weight, exported["decoder.layers.1.mlp.router.weight"])
    assert torch.equal(model.lm_head.weight, exported["output_layer.weight"][:120])
    out = model.generate(torch.arange(5).view(1, -1), max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 13) and out.max() < 120


def test_sentencepiece_tokenizer_encodes_alike_in_transformers(tmp_path, caplog):
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [f"def name_{number}(value): return value + {number}" for number in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "code"),  # exports name it as transformers does
        vocab_size=120,
        model_type="bpe",
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    named = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "code.model")]
    done = run(
        [*TINY, *MOCK, "--train-iters", "1", "--save", str(tmp_path / "run"), "--save-interval", "1", *named], tmp_path
    )
    assert done.returncode == 0, done.stderr
    with caplog.at_level("INFO"):
        assert run_convert(tmp_path / "run", tmp_path / "hf", "--verify") == 0  # the run has recorded no --vocab-size
    ours = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "code.model"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (ours.bos_id(), ours.eos_id())
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (generation.bos_token_id, generation.eos_token_id) == (ours.bos_id(), ours.eos_id())
    size = ours.get_piece_size()
    assert config["vocab_size"] == size < 128 and f"{128 - size} rows of padding are left out" in caplog.text
    assert "at iteration 1" in caplog.text
    assert run_convert(tmp_path / "run", tmp_path / "padded", "--keep-vocab-padding") == 0
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] == 128
    assert run_convert(tmp_path / "hf", tmp_path / "back") == 0
    for name, model in (("hf", tmp_path / "hf"), ("back", tmp_path / "back" / "release" / "tokenizer")):
        flags = read_saved_args(tmp_path / name)
        assert (flags["tokenizer_type"], flags["tokenizer_model"]) == (
            "SentencePieceTokenizer",
            str(model / "tokenizer.model"),
        )
    (tmp_path / "hf" / "config.json").write_text(
        '{"model_type": "qwen3_moe"}'
    )  # whose own tokenizer reads the file in another way
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert all(
        theirs(text).input_ids == ours.encode(text) and theirs.decode(ours.encode(text)) == text for text in lines[:9]
    )


def test_padding_of_the_vocabulary_is_known_where_the_embedding_was_made_for_it():
    for flags, stored, tokens, rows in (
        ({"vocab_size": 1001, "make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": 2}, 1002, None, 1001),
        ({"vocab_size": 120, "tokenizer_type": "NullTokenizer"}, 128, None, None),  # higher ids may be trained
        ({"vocab_size": 120, "tokenizer_type": "NullTokenizer"}, 128, 100, None),
        ({"vocab_size": 4096, "make_vocab_size_divisible_by": 128}, 50048, None, None),  # a preset's
        ({"vocab_size": 4096, "make_vocab_size_divisible_by": 128}, 50048, 50000, 50000),
        ({"vocab_size": 151936}, 151936, 151669, 151936),  # published so
        ({}, 128, None, None),
    ):
        assert export.rows_of_vocabulary(flags, stored, tokens) == rows


@pytest.mark.parametrize("is_turned", [False, True])
def test_square_matrix_has_the_order_of_the_layers_other_one(is_turned):
    """Stacks of experts of Qwen3-VL whose hidden size is twice the width of an expert."""
    names, layer = FAMILIES["qwen3_vl_moe_text"].names, "model.layers.0.mlp.experts."
    flags = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_experts": 2, "moe_ffn_hidden_size": 4}
    shapes = {f"{layer}gate_up_proj": (2, 8, 8), f"{layer}down_proj": (2, 8, 4) if is_turned else (2, 4, 8)}
    found = tensor_mappings(
        names, flags | {"swiglu": True, "ffn_hidden_size": 4, "rows": 16}, lambda name: shapes.get(name)
    )
    experts = [mapping for mapping in found if ".local_experts." in mapping.native]
    assert len(experts) == 4
    for mapping in experts:
        value = torch.arange(math.prod(mapping.sources[0].shape)).view(mapping.sources[0].shape)
        ours = mapping.transform.to_native([value], {})
        assert ours.shape == mapping.shape and torch.equal(ours, value if is_turned else value.t())


def test_yarn_max_position_embeddings_is_written():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert export.yarn_length({"max_position_embeddings": 1024, "rope_scaling": scaling}) == {
        "max_position_embeddings": 16384
    }
    assert (
        export.yarn_length({"max_position_embeddings": 16384, "rope_scaling": scaling})
        == {}
        == export.yarn_length({"rope_scaling": None})
    )


def test_verify_refuses_another_model(tmp_path, capsys):
    make("qwen3_moe").save_pretrained(tmp_path / "hf")
    argv = [tmp_path / "hf", tmp_path / "ours", "--verify"]
    assert run_convert(*argv) == 0
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.experts.1.down_proj.weight"] *= 2
    save_file(tensors, path, {"format": "pt"})
    assert convert._verify(convert._parse([*map(str, argv)])) == 1
    assert "are not the same model" in capsys.readouterr().err


def test_verify_takes_experts_of_odd_width(tmp_path):
    """Grouped GEMMs need rows of a multiple of 16 bytes; these are not."""
    make("mixtral", intermediate_size=41).save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0


def test_verify_never_runs_code_of_the_folder(tmp_path):
    """kimi_k2 is unknown to transformers, which would ask for the folder's own classes; it is a DeepSeek-V3."""
    make("kimi_k2").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "evil.KimiConfig", "AutoModelForCausalLM": "evil.KimiForCausalLM"},
    }
    path.write_text(json.dumps(config))
    (tmp_path / "hf" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0
    assert not (tmp_path / "ran").exists()


def test_latent_attention_with_a_hidden_size_that_the_heads_do_not_divide(tmp_path):
    make("deepseek_v3", hidden_size=30).save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0


def test_mscale_without_effect_does_not_prevent_export():
    flags = read_config(make("deepseek_v3").config.to_dict())[1] | {"rope_type": "rope", "mscale_all_dim": 1.0}
    assert write_config(flags | {"rotary_scaling_factor": 1.0}, 96)[0].name == "deepseek_v3"
    with pytest.raises(CheckpointError, match="mscale-all-dim") as error:
        write_config(flags | {"rotary_scaling_factor": 40.0}, 96)
    assert "unsupported operand" not in str(error.value)


def test_mup_models_cannot_be_exported():
    flags = read_config(make("deepseek_v3").config.to_dict())[1]
    with pytest.raises(CheckpointError, match="--use-mup"):
        write_config(flags | {"use_mup": True}, 96)


def test_balancing_that_chooses_experts_cannot_be_exported():
    """No library chooses them by it; a loss of balancing is gone after training."""
    flags = read_config(make("mixtral").config.to_dict())[1]
    assert write_config(flags | {"moe_router_load_balancing_type": "seq_aux_loss"}, 96)[0].name == "mixtral"
    for kind in SELECTING:
        with pytest.raises(CheckpointError, match=f"--moe-router-load-balancing-type .* is '{kind}' here"):
            write_config(flags | {"moe_router_load_balancing_type": kind}, 96)


def test_dropout_defaults_to_the_value_of_the_hf_folder(tmp_path):
    make("mixtral").save_pretrained(tmp_path / "hf")
    record = read_saved_args(tmp_path / "hf")
    argv = [
        "--load",
        str(tmp_path / "hf"),
        "--use-checkpoint-args",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "1",
        "--train-iters",
        "1",
        "--lr",
        "1e-3",
        "--mock-data",
        "--seq-length",
        "32",
        "--eval-iters",
        "0",
    ]
    model = arguments.parse_args(argv, world_size=1, checkpoint=record).model
    assert (model.attention_dropout, model.hidden_dropout) == (0.0, 0.0)
    model = arguments.parse_args([*argv, "--hidden-dropout", "0.2"], world_size=1, checkpoint=record).model
    assert (model.attention_dropout, model.hidden_dropout) == (0.0, 0.2)


def test_training_starts_from_hf_folder_with_any_parallel_sizes(tmp_path):
    theirs = make("qwen3_moe")
    theirs.save_pretrained(tmp_path / "hf")
    words = [
        "--load",
        str(tmp_path / "hf"),
        "--use-checkpoint-args",
        "--seq-length",
        "32",
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "4",
        "--lr",
        "1e-3",
        "--train-iters",
        "1",
        "--mock-data",
        "--eval-iters",
        "0",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--log-interval",
        "1",
        "--transformer-impl",
        "local",
    ]
    losses = []
    for world, mapping in (
        (1, []),
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        (2, ["--pipeline-model-parallel-layout", "Et*1|t*2L"] + ["--pipeline-model-parallel-size", "2"]),
    ):
        done = run([*words, *mapping], tmp_path, world_size=world)
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.split("lm loss: ")[1].split(" ")[0]))
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


def test_unsuitable_model_type_is_rejected_with_the_reason(tmp_path, capfd):
    make("mixtral").save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back", "--model-type", "llama") == 2
    stderr = capfd.readouterr().err
    assert "--num-experts" in stderr and not Path(tmp_path / "back").exists()
    assert VOCAB == 96


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({}, None),
        ({"dsa_indexer_rotate_activation": False}, None),
        ({"dsa_indexer_k_norm_epsilon": 1e-6, "layernorm_epsilon": 1e-5}, None),
        ({"dsa_indexer_k_norm_epsilon": 1e-5}, "--dsa-indexer-k-norm-epsilon"),
        ({"layernorm_epsilon": 1e-5}, "--dsa-indexer-k-norm-epsilon"),
        ({"q_lora_rank": None}, "--q-lora-rank"),
        ({"dsa_indexer_rope_interleaved": True}, "--dsa-indexer-rope-interleaved"),
        ({"dsa_indexer_scoring_relu": False}, "--no-dsa-indexer-scoring-relu"),
        ({"experimental_attention_variant": None}, "--experimental-attention-variant"),
    ],
)
def test_sparse_attention_export_or_its_rejection(changes, refusal):
    flags = arguments.parse_args(["--preset", "deepseek_v3_2_tiny", "--mock-data"]).as_dict() | changes
    if refusal is not None:
        with pytest.raises(CheckpointError, match=refusal):
            write_config(flags, 4096, "deepseek_v32")
        return
    family, config = write_config(flags, 4096)
    assert family.name == config["model_type"] == "deepseek_v32"
    assert (config["index_n_heads"], config["index_head_dim"], config["index_topk"]) == (4, 32, 48)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}, "full_attention"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ({"index_topk": None}, "index_topk"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_sparse_attention_key_is_named(changes, named):
    config = make("deepseek_v32").config.to_dict() | changes
    config = {key: value for key, value in config.items() if key != "index_topk" or value is not None}
    with pytest.raises(CheckpointError, match=named):
        read_config(config)


@pytest.mark.parametrize(
    "name, changes, named",
    [
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "shared", "full"], "layer_types": ["deepseek_sparse_attention"] * 3},
            "indexer_types",
        ),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 2}, "index_topk_freq"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSF"}, "index_topk_pattern"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 2, 3]}, "moe_topk"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2, 2, 2]}, "num_shared_expert"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla"),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "moe", "full_attention"]}, "layer_types"),
        ("granitemoehybrid", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ("granitemoehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("nemotron_h", {"layers_block_type": ["moe", "attn"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MG"}, "hybrid_override_pattern"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.5]}, "time_step_limit"),
        ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_layer_interval": "2"}, "moe_layer_interval"),
    ],
)
def test_unsupported_key_of_a_family_is_named(name, changes, named):
    config = make(name).config.to_dict()
    read_config(config)
    with pytest.raises(CheckpointError, match=named):
        read_config(config | changes)


def test_ernie_without_shared_experts_is_converted(tmp_path):
    theirs = make("ernie4_5_moe", moe_num_shared_experts=0, moe_layer_start_index=1, moe_layer_interval=1)
    theirs.save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    before, after = read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "changes", [{}, {"hybrid_layer_pattern": "ME*E|ME-M*E"}, {"mamba_num_heads": None}], ids=["", "stages", "heads"]
)
def test_stages_and_derived_heads_of_hybrid_models_are_written(changes):
    flags = arguments.parse_args(["--preset", "nemotron_3_tiny", "--mock-data"]).as_dict() | changes
    family, config = write_config(flags, 4096)
    assert family.name == "nemotron_h" and config["hybrid_override_pattern"] == "ME*EME-M*E"
    assert config["mamba_num_heads"] == 8


def test_hybrid_granite_without_experts_and_positions_is_converted(tmp_path):
    make("granitemoehybrid", num_local_experts=0, position_embedding_type=None).save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back", "--verify") == 0
    before, after = read_tensors(tmp_path / "hf"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"hybrid_layer_pattern": "ME*EM-"}, "after each of them experts"),
        ({"hybrid_layer_pattern": "MEM*"}, "after each of them experts"),
        ({"mamba_num_heads": 6}, "multiple of --hidden-size 32"),
        ({"hybrid_layer_pattern": None}, "--hybrid-layer-pattern is needed"),
    ],
)
def test_hybrid_model_that_granite_does_not_express_is_named(changes, named):
    flags = read_config(make("granitemoehybrid").config.to_dict())[1] | {"rows": VOCAB}
    write_config(flags, VOCAB, "granitemoehybrid")
    with pytest.raises(CheckpointError, match=named):
        write_config(flags | changes, VOCAB, "granitemoehybrid")


@pytest.mark.parametrize("pattern", ["M-*M", "E*EM"])
def test_hybrid_models_of_other_layers_are_converted(pattern, tmp_path):
    """Without experts, and with experts that read the hidden state; named by letters, with the usual lower limit of steps."""
    changes = {"layers_block_type": None, "hybrid_override_pattern": pattern, "moe_latent_size": None}
    make("nemotron_h", **changes).save_pretrained(tmp_path / "plain")
    tensors = read_tensors(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text()) | changes | {"time_step_min": 0.001}
    write_folder(tmp_path / "hf", tensors | {"mtp.layers.0.eh_proj.weight": torch.ones(32, 64)}, config)
    notes = " ".join(open_hf_model(tmp_path / "hf").notes)
    assert "--mamba-step-size-min 0.001" in notes and notes.count("the tensors mtp.* are left out") == 1
    assert run_convert(tmp_path / "hf", "--check") == 0
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back", "--verify") == 0
    after = read_tensors(tmp_path / "back")
    assert tensors.keys() == after.keys() and all(torch.equal(tensors[key], after[key]) for key in tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["hybrid_override_pattern"] == pattern and written["num_hidden_layers"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_peak_memory_is_independent_of_model_size(workers, tmp_path):
    make_folder(tmp_path / "hf", 1.5, vocab_size=4096)
    for source, target in (("hf", "ours"), ("ours", "back")):
        peak = measure_peak(
            [str(tmp_path / source), str(tmp_path / target), "--workers", workers, "--max-shard-size", "0.2"]
        )
        assert peak < 0.7e9, f"{peak / 1e9:.2f} GB"


_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
_SECTIONS = {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [2, 2, 2]}


@pytest.mark.parametrize(
    "name, prefix, changes, vision, left_out",
    [
        ("qwen3_5_moe_text", "Qwen3_5Moe", {}, _VISION, "model.visual.*"),
        (
            "qwen3_moe",
            "Qwen3VLMoe",
            {"rope_parameters": _SECTIONS | {"mrope_interleaved": True}},
            _VISION | {"deepstack_visual_indexes": [0]},
            "model.visual.*",
        ),
        (
            "glm4_moe",
            "Glm4vMoe",
            {
                "use_qk_norm": False,
                "rope_parameters": _SECTIONS | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5},
            },
            _VISION,
            "model.visual.*",
        ),
        (
            "aria_text",
            "Aria",
            {},
            {
                "model_type": "idefics3_vision",
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "image_size": 8,
                "patch_size": 4,
            },
            "vision_tower.* and multi_modal_projector.*",
        ),
        (
            "kimi_k2",
            "Kimi_K25",
            {},
            {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
            "vision_tower.* and mm_projector.*",
        ),
        (
            "llama4_text",
            "Llama4",
            {},
            {
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "image_size": 8,
                "patch_size": 2,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
            "vision_model.* and multi_modal_projector.*",
        ),
        *(
            (
                name,
                "Mistral3",
                {},
                {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
                "vision_tower.* and multi_modal_projector.*",
            )
            for name in ("mistral4", "ministral3")
        ),
        *(
            (
                name,
                "InternVL",
                {},
                {
                    "num_hidden_layers": 1,
                    "hidden_size": 16,
                    "num_attention_heads": 2,
                    "intermediate_size": 16,
                    "image_size": [8, 8],
                    "patch_size": [4, 4],
                },
                "vision_tower.* and multi_modal_projector.*",
            )
            for name in ("qwen3_moe", "gpt_oss")
        ),
    ],
)
def test_language_model_of_a_model_that_reads_images(name, prefix, changes, vision, left_out, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    text = make(name, **changes)
    config_class = getattr(transformers, f"{prefix}Config")
    text_config = text.config.to_dict()
    if prefix not in ("Mistral3", "InternVL"):  # whose language model may be of several types
        del text_config["model_type"]
    config = config_class(text_config=text_config, vision_config=vision)
    theirs = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    if name == "llama4_text":
        theirs.language_model.load_state_dict(text.state_dict())
    else:
        theirs.model.language_model.load_state_dict(text.model.state_dict())
        theirs.lm_head.load_state_dict(text.lm_head.state_dict())
    theirs.save_pretrained(tmp_path / "hf")
    # tensors as they are published: transformers saves other names for some of Kimi's, and other stacks of Qwen3-VL's
    stored = {
        key.replace("language_model.model.blocks.", "language_model.model.layers.").replace("model.mm_", "mm_"): (
            value.transpose(1, 2).contiguous() if prefix == "Qwen3VLMoe" and ".experts." in key else value
        )
        for key, value in read_tensors(tmp_path / "hf").items()
    }
    assert any(name.startswith(left_out.split("*")[0]) for name in stored)
    if prefix == "Qwen3VLMoe":
        shutil.copytree(tmp_path / "hf", tmp_path / "saved")
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0
    if prefix == "Qwen3VLMoe":  # as transformers saves it
        assert run_convert(tmp_path / "saved", tmp_path / "theirs") == 0
        for name, tensor in load_ours(tmp_path / "theirs").state_dict().items():
            assert torch.equal(tensor, load_ours(tmp_path / "ours").state_dict()[name])
    assert f"only the language model is read; the tensors {left_out} are left out" in caplog.text
    tokens, _, positions = batch()
    expected = compute_logits(theirs, tokens)
    with torch.no_grad():
        actual = load_ours(tmp_path / "ours").eval()(tokens, positions)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**written, "text_config": 3}))
    assert run_convert(tmp_path / "hf", tmp_path / "again") == 2


@pytest.mark.parametrize(
    "name, kind, table, others",
    [
        ("moonlight", "kimi_vl", "text_config", ["vision_tower.a", "multi_modal_projector.b"]),
        *((name, "internvl_chat", "llm_config", ["vision_model.a", "mlp1.0.b"]) for name in ("qwen3_moe", "gpt_oss")),
    ],
)
def test_language_model_in_a_folder_that_transformers_has_no_class_for(name, kind, table, others, tmp_path):
    text = make(name)
    text.save_pretrained(tmp_path / "text")
    before = read_tensors(tmp_path / "text")
    stored = {f"language_model.{key}": value for key, value in before.items()} | dict.fromkeys(others, torch.ones(3))
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    folder = write_folder(tmp_path / "hf", stored, {"model_type": kind, table: config})
    assert run_convert(folder, tmp_path / "ours", "--verify") == run_convert(tmp_path / "ours", tmp_path / "back") == 0
    after = read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == config["model_type"]


def test_internvl_with_a_language_model_that_is_not_known(tmp_path, capsys):
    config = {"model_type": "internvl_chat", "llm_config": {"model_type": "internlm2"}}
    write_folder(tmp_path / "hf", {"a": torch.ones(3)}, config)
    assert run_convert(tmp_path / "hf", tmp_path / "ours") == 2
    assert "internvl_chat of internlm2" in capsys.readouterr().err


def test_text_model_of_qwen3_omni(tmp_path, caplog):
    """Its thinker, in a folder that also has the layers that read images and sound, and those that speak."""
    caplog.set_level(logging.INFO)
    text = make("qwen3_moe", rope_parameters=_SECTIONS | {"mrope_interleaved": True})
    text.save_pretrained(tmp_path / "text")
    stored = {f"thinker.{key}": value for key, value in read_tensors(tmp_path / "text").items()}
    others = {"thinker.visual.merger.weight", "thinker.audio_tower.proj.bias", "talker.model.norm.weight", "code2wav.a"}
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    # on, by default, in this family; the table around this one decides about the embedding
    table = {key: value for key, value in config.items() if key != "norm_topk_prob"}
    table |= {"num_experts": 8, "tie_word_embeddings": True}
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": table, "tie_word_embeddings": False}}
    write_folder(tmp_path / "hf", stored | dict.fromkeys(others, torch.ones(3)), whole)
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--verify") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "back") == 0
    before, after = read_tensors(tmp_path / "text"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)

    thinker_config = transformers.Qwen3OmniMoeThinkerConfig(text_config=table).text_config
    thinker = transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel(thinker_config)
    thinker.load_state_dict(text.model.state_dict())
    tokens, _, positions = batch()
    with torch.no_grad():
        expected = text.lm_head(thinker.eval()(tokens).last_hidden_state)
        actual = load_ours(tmp_path / "ours").eval()(tokens, positions)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    whole["thinker_config"] = {}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(whole))
    assert run_convert(tmp_path / "hf", tmp_path / "again") == 2
