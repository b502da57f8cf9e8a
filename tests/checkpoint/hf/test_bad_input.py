"""Conversion of invalid input (headers, keys, types, paths) and of concurrent or interrupted runs."""

import copy
import errno
import functools
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from bad_input import check_refusal, error_of, safetensors
from checkpoint.hf.models import LAYERS, MODELS, load_ours, make, run_convert
from safetensors.torch import load_file, save_file

from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.hf import import_weights as hf_import
from moe_trainer.checkpoint.hf.config import read_config, write_config
from moe_trainer.checkpoint.hf.conversion_job import (
    ConversionJob,
    PlannedTensor,
    finish_job,
    missing_files,
    open_job,
    write_share,
)
from moe_trainer.checkpoint.hf.encodings import decode_block_fp8
from moe_trainer.checkpoint.hf.families import FAMILIES
from moe_trainer.checkpoint.hf.files import SafetensorsFolder
from moe_trainer.checkpoint.hf.folder import open_hf_model
from moe_trainer.commands import convert

pytest.importorskip("transformers")
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "llama"
    make("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def source(complete, tmp_path):
    return Path(shutil.copytree(complete, tmp_path / "hf"))


@functools.cache
def _config(name):
    return make(name).config.to_dict()


def config_of(name, **changes):
    """Return the values of the config.json of a model, with changes."""
    return copy.deepcopy(_config(name)) | changes


def folder_error(folder, *words):
    """Return the error of opening a folder of safetensors files."""
    return error_of(DamagedError, SafetensorsFolder, folder, words=words)


def write_index(folder, table):
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


def with_header_entry(**values):
    return lambda table: table | {NAME: table[NAME] | values}


HEADS = (
    (lambda table: [1, 2], "not a JSON object"),
    (lambda table: with_header_entry(data_offsets=[float(at) for at in table[NAME]["data_offsets"]])(table), NAME),
    (lambda table: with_header_entry(shape=[float(size) for size in table[NAME]["shape"]])(table), NAME),
    (with_header_entry(shape=[-1, -1]), NAME),
    (lambda table: with_header_entry(data_offsets=table[NAME.replace("up", "gate")]["data_offsets"])(table), "begins at byte"),
    (lambda table: {name: entry for name, entry in table.items() if name != NAME}, "begins at byte"),  # a gap
    (with_header_entry(dtype="Q4"), NAME),
)  # fmt: skip


def test_damaged_safetensors_header_is_named(source):
    content = (source / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for edit, message in HEADS:
        header = edit(json.loads(content[8:end]))
        (source / "model.safetensors").write_bytes(safetensors(header, content[end:]))
        folder_error(source, "model.safetensors is damaged", message)


def test_index_that_does_not_fit_its_folder_is_rejected(source):
    """An index without a table, with paths outside the folder (even if the files there are valid), with tensors in other files."""
    table = dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")
    for wrong in ({}, {"weight_map": {}}, {"weight_map": [1]}):
        write_index(source, wrong)
        folder_error(source, "weight_map must be a table")
    outside = Path(shutil.copy(source / "model.safetensors", source.with_name("model.safetensors")))
    for elsewhere in ("../model.safetensors", str(outside)):
        write_index(source, {"weight_map": dict.fromkeys(table, elsewhere)})
        folder_error(source, "outside its folder")
    for absent, message in (([NAME], NAME), (sorted(table)[:3], f"{sorted(table)[0]} and 2 more")):
        write_index(source, {"weight_map": {name: table[name] for name in table if name not in absent}})
        text = folder_error(source, "model.safetensors, but not listed in ", "index.json")
        assert text.startswith(f"{message}: in ")
    save_file({"other": torch.zeros(2)}, source / "more.safetensors")
    for name, file in ((NAME, "more.safetensors"), ("absent", "model.safetensors")):
        write_index(source, {"weight_map": table | {name: file}})
        assert folder_error(source, " lists it in ").startswith(f"{name}: ")
    (source / "model.safetensors.index.json").unlink()
    save_file({NAME: torch.zeros(2), "other": torch.zeros(2)}, source / "more.safetensors")
    assert folder_error(source).startswith(f"{NAME} is in")


def test_files_that_nothing_reads(source):
    """An adapter next to the model would change what it computes; a file that the index does not list is no part of it."""
    write_index(source, {"weight_map": dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")})
    save_file({"other": torch.zeros(2)}, source / "consolidated.safetensors")
    expected = "consolidated.safetensors is left out: model.safetensors.index.json does not list it"
    assert expected in open_hf_model(source).notes
    (source / "adapter_config.json").write_text("{}")
    error_of(CheckpointError, open_hf_model, source, words=("an adapter next to the model, which would stay unread",))


def test_expert_bias_stays_fp32_with_16_bit_weights(tmp_path):
    make("deepseek_v3").bfloat16().save_pretrained(tmp_path / "hf")
    model = open_hf_model(tmp_path / "hf")
    types = {
        mapping.native.rpartition(".")[2]: (
            model.target_dtype(mapping),
            model.target_dtype(mapping, torch.float16),
            model.make(mapping).dtype,
        )
        for mapping in model.mappings
    }
    assert types == {"weight": (torch.bfloat16, torch.float16, torch.bfloat16), "expert_bias": (torch.float32,) * 3}


CONFIG_VALUES = (
    ("qwen3_moe", (
        ("model_type", []), ("hidden_size", "32"), ("num_experts", "8"), ("num_experts", True), ("vocab_size", None),
        ("num_hidden_layers", 2.5), ("num_hidden_layers", -1), ("num_hidden_layers", 0), ("num_attention_heads", 0),
        ("rms_norm_eps", "x"), ("rms_norm_eps", math.nan), ("initializer_range", -1), ("rope_parameters", []),
        ("rope_parameters", "x"), ("rope_scaling", 2), ("layer_types", ["full_attention"]), ("layer_types", 5),
        ("mlp_only_layers", 5), ("sliding_window", "x"), ("decoder_sparse_step", "x"), ("num_key_value_heads", 1.5),
        ("max_position_embeddings", None),
    )),
    ("qwen3_next", [("linear_num_key_heads", 0)]),
    ("granitemoehybrid", [("mamba_d_head", "8"), ("mamba_d_head", None)]),
    ("nemotron_h", [("time_step_min", "x")]),
    ("mellum", [("mlp_layer_types", ["sparse", "dense"]), ("mlp_layer_types", ["sparse", "dense", "bogus"])]),
    ("deepseek_v32", [("index_n_heads", None)]),
    ("gpt_oss", [("layer_types", ["chunked_attention"] * LAYERS)]),
    ("phimoe", [("attention_bias", "x"), ("num_experts_per_tok", None)]),
    ("llama4_text", (
        ("layer_types", ["sliding_attention"] * LAYERS), ("attn_scale", "x"), ("floor_scale", "x"), ("attention_chunk_size", 2.5),
        ("no_rope_layers", "x"), ("moe_layers", 2),
    )),
)  # fmt: skip


@pytest.mark.parametrize(("name", "rows"), CONFIG_VALUES, ids=lambda value: value if isinstance(value, str) else "")
def test_config_value_of_wrong_type_is_named(name, rows):
    config = config_of(name)
    assert read_config(config)[1]["num_layers"] >= LAYERS
    for key, value in rows:
        changed = config | {key: value} | ({"num_local_experts": value} if key == "num_experts" else {})
        error_of(CheckpointError, read_config, changed, words=["model type" if key == "model_type" else key])


CONFIGS = (
    ("llama", {"rope_parameters": {"rope_theta": 1.5}}, "rope_theta"),
    ("llama", {"rope_parameters": {"original_max_position_embeddings": 4096}}, "--use-rope-scaling"),
    ("llama", {"rope_parameters": {"low_freq_factor": 2.0}}, "--use-rope-scaling"),
    ("llama", {"rope_parameters": {"original_max_position_embeddings": None}, "max_position_embeddings": 4096}, "--use-rope-scaling"),
    ("kimi_k2", {"rope_parameters": {"attention_factor": 1.5}}, "attention_factor of the rotary scaling is 1.5.* 1 is needed"),
    ("phimoe", {"rope_parameters": None, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
     r"longrope \(short_factor, long_factor\) has no flag"),
    # models that only share a type with Ling
    ("bailing_hybrid", {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "BailingMoeV2_5ForCausalLM.* lightning attention"),
    ("bailing_hybrid", {"share_expert_swiglu_limit_list": [0, 7.0, 0]}, "share_expert_swiglu_limit_list"),
    ("bailing_hybrid", {"layer_types": None, "layer_group_size": 2}, "3 layers are not whole groups of layer_group_size 2"),
)  # fmt: skip


def test_configurations_that_no_flag_can_express_are_named():
    for name, changes, pattern in CONFIGS:
        config = config_of(name)
        for key, value in changes.items():
            config[key] = config[key] | value if key == "rope_parameters" and value else value
        with pytest.raises(CheckpointError, match=pattern):
            read_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_settings_without_a_flag_must_have_the_supported_value(name):
    config = config_of(name)
    for key, (usual, *_) in FAMILIES[config["model_type"]].required_values.items():
        with pytest.raises(CheckpointError, match=rf"{key} is '?other than {usual}"):
            read_config(config | {key: f"other than {usual}"})


def test_values_that_other_values_determine_are_read():
    """Layers that follow from an interval or the size of a group; null means the default."""

    def flags_of(name, **changes):
        return read_config(config_of(name, **changes))[1]

    layers = {"layer_types": None, "num_hidden_layers": 8}
    assert flags_of("qwen3_next", **layers)["linear_attention_freq"] == [1, 1, 1, 0] * 2
    assert flags_of("qwen3_next", **layers, full_attention_interval=2)["linear_attention_freq"] == [1, 0] * 4
    assert flags_of("qwen3_moe", rms_norm_eps=None)["layernorm_epsilon"] == 1e-6
    assert flags_of("llama")["rotary_base"] == 500000
    rope = config_of("kimi_k2")["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 0.9}
    flags = flags_of("kimi_k2", rope_parameters=rope)
    assert (flags["mscale"], flags["mscale_all_dim"]) == (0.7, 0.9)
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.138629}  # 0.1 ln 4 + 1
    for changes, length in (
        ({"rope_parameters": rope, "max_position_embeddings": 48}, 48),
        ({"rope_parameters": rope | {"original_max_position_embeddings": 16}}, 16),
        ({"rope_parameters": rope, "original_max_position_embeddings": 24}, 24),
    ):
        assert flags_of("qwen3_moe", **changes)["yarn_original_max_position_embeddings"] == length
    flags = flags_of("nemotron_h", time_step_limit=[0.0, 1e308], norm_eps=1e-5)  # no limit, in a file without Infinity
    assert (flags["mamba_step_size_min"], flags["mamba_step_size_max"]) == (0.6, None)


def test_groups_of_layers_of_ling_are_read_and_written():
    groups = {"layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 6, "layer_group_size": 3}
    config = config_of("bailing_hybrid") | groups | {"expert_swiglu_limit_list": [0] * 6}
    flags = read_config(config)[1]
    assert flags["linear_attention_freq"] == [1, 1, 0] * 2 and flags["moe_layer_freq"] == [0] + [1] * 5
    written = write_config(flags, 96, "bailing_hybrid")[1]
    assert written["layer_group_size"] == 3
    assert written["layer_types"] == (["linear_attention"] * 2 + ["full_attention"]) * 2


def test_layers_that_no_hybrid_type_has_are_named():
    flags = read_config(config_of("nemotron_h"))[1] | {"hybrid_layer_pattern": "ME+-"}
    with pytest.raises(CheckpointError, match="ME[+]-: such a model has the letters"):
        write_config(flags, 96, "nemotron_h")


def test_how_layers_of_a_pattern_become_those_of_a_gpt_type_is_said():
    flags = read_config(config_of("mixtral"))[1]
    for pattern, same in (
        ("*E*E", "--num-layers 2 instead"),
        ("*-*E", "--num-layers 2 --moe-layer-freq [0,1] instead"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"load it with {same}")):
            write_config(flags | {"hybrid_layer_pattern": pattern, "num_layers": 4}, 96)
    with pytest.raises(CheckpointError) as caught:
        write_config(flags | {"hybrid_layer_pattern": "ME*E", "num_layers": 4}, 96)
    assert "load it with" not in str(caught.value)


def test_keys_that_say_what_is_read_have_no_note():
    """Those of published files that transformers does not read are checked; null and keys of generation say nothing."""
    published = {
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 12,
        "swa_rope_theta": 1000,
        "layernorm_epsilon": config_of("mimo_v2_flash")["rms_norm_eps"],
        "add_swa_attention_sink_bias": True,
    }
    config = config_of("mimo_v2_flash", **published)
    assert read_config(config)[2] == []
    for key in published:
        with pytest.raises(CheckpointError, match=f"{key} is .*, and transformers, which does not read it, takes"):
            read_config(config | {key: 7})
    notes = read_config(config_of("qwen3_moe", do_sample=False, bad_words_ids=None, num_beams=1, new_key=1))[2]
    assert notes == ["config.json: the key new_key is not known here and changes nothing"]
    assert read_config(config_of("qwen3_5_moe_text", attn_output_gate=True, mtp_num_hidden_layers=1))[2] == []


def conversion_error(source, capfd, *words, flags=()):
    target = source.with_name("ours")
    shutil.rmtree(target, ignore_errors=True)  # what an earlier conversion has begun
    code, message = run_convert(source, target, *flags), capfd.readouterr().err
    check_refusal(code, message, words)
    assert not (target / "release").exists() and not (target / "latest_checkpointed_iteration.txt").exists()


def test_missing_layers_are_reported_quickly(source, capfd):
    """Without searching for each of them."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12, "layer_types": None}))
    conversion_error(source, capfd, "num_hidden_layers")


EMBEDDING, E4M3 = "model.embed_tokens.weight", torch.float8_e4m3fn
FORMATS = (
    (NAME, lambda old: {NAME: old[NAME].to(torch.int8)}),
    (EMBEDDING, lambda old: {EMBEDDING: old[EMBEDDING].to(torch.int8)}),
    (NAME, lambda old: {NAME: old[NAME] > 0}),
    (NAME, lambda old: {NAME + "_scale_inv": torch.ones(1, 1)}),  # of a weight that has none
    (NAME, lambda old: {NAME: old[NAME].to(E4M3), NAME + "_scale_inv": torch.full((1, 1), math.nan)}),
    (NAME + "_scale_inv", lambda old: {NAME: old[NAME].to(E4M3), NAME + "_scale_inv": torch.ones(2, 1)}),
    (NAME, lambda old: {NAME: old[NAME].to(torch.float8_e5m2)}),  # the other kind, without scales
)


def test_unsupported_numbers_are_named(source, capfd):
    tensors = load_file(source / "model.safetensors")
    for named, edit in FORMATS:
        save_file(tensors | edit(tensors), source / "model.safetensors")
        conversion_error(source, capfd, named)
    norm = {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], 1e6)}
    save_file(tensors | norm, source / "model.safetensors")
    conversion_error(source, capfd, "model.norm.weight", flags=("--dtype", "fp16"))
    assert run_convert(source, source.with_name("other"), "--dtype", "bf16") == 0


def test_tables_of_hash_routing_need_distinct_experts(source, capfd):
    make("deepseek_v4").save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("tid2eid")][:1]
    for row, problem in (([0, 0, 1], "distinct ones are needed"), ([0, 1, 8], "experts are 0 to 7")):
        tensors[name][5] = torch.tensor(row[: tensors[name].shape[1]])
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        conversion_error(source, capfd, name, "the token 5 has the experts", problem)


def test_fp8_blocks_use_their_own_scales():
    """Blocks of 128 x 128, the last ones smaller."""
    value = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    found = decode_block_fp8(value, scales)
    for row, column in ((0, 0), (127, 128), (128, 127), (255, 199), (256, 0), (299, 199)):
        assert found[row, column] == (value[row, column].float() * scales[row // 128, column // 128]).bfloat16()
    assert torch.equal(found[256:], (value[256:].float() * scales[2].repeat_interleave(128)[:200]).bfloat16())
    for shape in ((2, 3), (3, 3), (4, 2), (6,)):
        with pytest.raises(ValueError, match="are needed"):
            decode_block_fp8(value, torch.ones(shape))


def test_nan_mxfp4_scale_is_named(tmp_path):
    blocks, scales = torch.zeros(1, 2, 1, 16, dtype=torch.uint8), torch.tensor([[[127], [255]]], dtype=torch.uint8)
    save_file({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedError, match="experts.down_proj_scales"):
        SafetensorsFolder(tmp_path).read("experts.down_proj")


def test_weights_that_lose_precision_are_logged(source, caplog):
    caplog.set_level("INFO")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {EMBEDDING: tensors[EMBEDDING].bfloat16()}, source / "model.safetensors")
    assert run_convert(source, source.with_name("ours")) == 0
    assert "stored wider than the embedding" in caplog.text and "torch.bfloat16" in caplog.text


def test_invalid_rank_is_rejected(source, capfd, monkeypatch):
    for rank, world in (("3", "2"), ("-1", "2"), ("x", "2"), ("0", "0")):
        monkeypatch.setenv("RANK", rank), monkeypatch.setenv("WORLD_SIZE", world)
        conversion_error(source, capfd, "WORLD_SIZE=0" if world == "0" else f"RANK={rank}")


def test_occupied_target_folders_are_rejected(source, capfd):
    assert run_convert(source, source) == 2
    assert "is the source" in capfd.readouterr().err and not (source / "release").exists()
    run_folder = source.with_name("run")
    run_folder.mkdir()
    (run_folder / "latest_checkpointed_iteration.txt").write_text("12")
    assert run_convert(source, run_folder) == 2
    assert "of iteration 12" in capfd.readouterr().err
    assert [path.name for path in run_folder.iterdir()] == ["latest_checkpointed_iteration.txt"]
    with pytest.raises(SystemExit) as ended:
        run_convert(source, source.with_name("ours"), "--max-shard-size", "inf")
    assert ended.value.code == 2 and "--max-shard-size" in capfd.readouterr().err


def test_missing_tokenizer_folder_is_rejected(source, capfd):
    assert run_convert(source, source.with_name("ours")) == 0
    assert run_convert(source.with_name("ours"), source.with_name("back"), "--tokenizer", source / "nowhere") == 2
    assert "nowhere" in capfd.readouterr().err and not source.with_name("back").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("size", [1, 3000, 100_000])
def test_full_disk_is_reported(size):
    items = [
        PlannedTensor(f"t{number}", torch.float32, (size,), lambda: iter([torch.zeros(size)])) for number in range(8)
    ]
    with pytest.raises(OSError) as caught:
        hf_import._write_entries(Path("/dev/full"), items)
    assert caught.value.errno == errno.ENOSPC


def test_an_interrupted_conversion_is_reported(source, monkeypatch, caplog):
    """The folder is renamed but the tracker is not written yet: the same command writes it."""
    target, tracker = source.with_name("ours"), source.with_name("ours") / "latest_checkpointed_iteration.txt"

    def ended(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hf_import, "write_tracker", ended)
        assert run_convert(source, target) == 130
    assert (target / "release").is_dir() and not tracker.exists()
    made = {path.name: path.stat().st_mtime_ns for path in (target / "release").glob("*.distcp")}
    assert run_convert(source, target) == 0
    assert tracker.read_text() == "release" and made == {
        path.name: path.stat().st_mtime_ns for path in (target / "release").glob("*.distcp")
    }
    assert not list(target.rglob("*conversion.json"))
    load_ours(target)
    assert run_convert(source, target) == 2


def test_another_source_or_dtype_does_not_resume_a_conversion(source, monkeypatch, capfd):
    words = (source, source.with_name("ours"), "--max-shard-size", "0.00005", "--dtype", "bf16")
    with monkeypatch.context() as patched:  # the files of the other rank are missing
        patched.setenv("RANK", "0"), patched.setenv("WORLD_SIZE", "2")
        assert run_convert(*words) == 0
    assert run_convert(*words[:-1], "fp16") == 2  # as many bytes
    assert "belongs to another conversion" in capfd.readouterr().err
    stamp = (source / "model.safetensors").stat().st_mtime_ns
    os.utime(source / "model.safetensors", ns=(stamp, stamp + 10**6))
    assert run_convert(*words) == 2
    assert "its source has changed" in capfd.readouterr().err and not (source.with_name("ours") / "release").exists()
    os.utime(source / "model.safetensors", ns=(stamp, stamp))
    assert run_convert(*words) == 0


def make_job(target, write):
    items = tuple(
        (f"{number}.bin", (PlannedTensor(str(number), torch.float32, (2,), lambda: iter([torch.zeros(2)])),))
        for number in range(3)
    )
    return ConversionJob(
        target, "source", items, write, lambda folder, notes: (folder / "done").write_text(str(sorted(notes)))
    )


def test_truncated_output_file_is_written_again(tmp_path):
    job = make_job(tmp_path / "out", lambda path, items: path.write_bytes(b"whole"))
    open_job(job)
    write_share(job)
    os.truncate(job.folder / "1.bin", 2)
    assert missing_files(job) == ["1.bin"] and not finish_job(job)
    write_share(job)
    assert finish_job(job) and (tmp_path / "out" / "1.bin").read_bytes() == b"whole"


def test_workers_of_two_ranks_write_different_files(tmp_path):
    job = make_job(tmp_path / "out", lambda path, items: path.write_bytes(b"x"))
    open_job(job)
    assert convert._write(job, rank=1, world_size=2, workers=2) == 0
    assert missing_files(job) == ["0.bin", "1.bin"]


def test_concurrent_conversions_to_one_target_leave_it_intact(tmp_path):
    """The slower run finds its file, then its folder, already moved, and ends without an error."""
    fast = make_job(tmp_path / "out", lambda path, items: path.write_bytes(b"x"))

    def overtaken(path, items):
        path.write_bytes(b"x")
        write_share(fast)
        assert finish_job(fast)

    slow = make_job(tmp_path / "out", overtaken)
    open_job(slow)
    open_job(fast)
    write_share(slow)
    assert missing_files(slow) == [] and finish_job(slow)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.bin", "1.bin", "2.bin", "done"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
