"""Quantized folders: the numbers, what is stored under which name, what transformers makes of it, and reading it back."""

import json
import math

import pytest
import torch
from checkpoint.hf.models import batch, load_ours, make, run_convert
from safetensors.torch import load_file, save_file

from moe_trainer.checkpoint import inspect
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import encodings
from moe_trainer.checkpoint.hf.config import read_config
from moe_trainer.checkpoint.hf.encodings import BLOCK_FP8, MXFP4, NVFP4, decode_block_fp8, decode_fp4, encode
from moe_trainer.checkpoint.hf.files import SafetensorsFolder
from moe_trainer.checkpoint.hf.names import tensor_mappings
from moe_trainer.checkpoint.hf.quantized_export import plan_quantization
from moe_trainer.quantization.quantize import expand_scales

ENCODINGS = pytest.mark.parametrize("scaling", [BLOCK_FP8, MXFP4, NVFP4], ids=["fp8", "mxfp4", "nvfp4"])
SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
MORE = {"qwen3_moe": {"head_dim": 64}, "gpt_oss": {"head_dim": 64}, "deepseek_v3": {"q_lora_rank": 128}}
EXPERT = "model.layers.2.mlp.experts.3"


def decode(encoded, scaling):
    if scaling is BLOCK_FP8:
        return decode_block_fp8(encoded.values, encoded.scales)
    return decode_fp4(encoded.values, encoded.scales, None if encoded.factor is None else 1 / encoded.factor)


def sample(rows=200, columns=320):
    """A bf16 weight whose blocks have sizes of several orders, with a block of zeros."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, columns, generator=generator) * 10 ** (2 * torch.rand(rows, 1, generator=generator) - 2)
    weight[:, 32:64] = 0
    return weight.bfloat16()


@ENCODINGS
def test_error_is_at_most_half_a_step(scaling):
    weight = sample()
    encoded = encode(weight, scaling)
    decoded = decode(encoded, scaling).double()
    scales = encoded.scales
    inverse = scales.view(torch.float8_e8m0fnu).float() if scaling is MXFP4 else scales.float()
    step = expand_scales(inverse if encoded.factor is None else inverse / encoded.factor, scaling, weight.shape)
    error = (decoded - weight.double()).abs()
    if scaling is BLOCK_FP8:  # three bits of mantissa, and the smallest step of E4M3
        bound = torch.maximum(weight.double().abs() * 2**-4, step * 2**-10)
    else:  # the largest step of E2M1 is 2, and a largest value of up to 7 becomes 6
        bound = step.double()
    assert (error <= bound * 1.001 + weight.double().abs() * 2**-8).all()
    relative = error.square().sum().sqrt() / weight.double().norm()
    assert math.isclose(relative, (encoded.error / encoded.size) ** 0.5, rel_tol=0.02)
    assert relative < (0.03 if scaling is BLOCK_FP8 else 0.13)


@ENCODINGS
def test_dequantized_weight_has_the_same_bytes(scaling):
    first = encode(sample(), scaling)
    again = encode(decode(first, scaling), scaling)
    for one, other in zip((first.values, first.scales), (again.values, again.scales)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert first.factor is None or torch.equal(first.factor, again.factor)


def test_mxfp4_block_whose_largest_value_is_3_gets_the_finer_grid():
    block = torch.full((1, 32), 0.3)
    block[0, 0] = 3.2  # 3 of the grid up to 6, 6 of the one that is twice as fine
    encoded = encode(block, MXFP4)
    assert encoded.scales.item() == 126 and encoded.values[0, 0] == 7 + 16 * 1
    assert decode(encoded, MXFP4)[0, :2].tolist() == [3, 0.25]


@ENCODINGS
def test_portions_of_rows_change_nothing(scaling, monkeypatch):
    weight = sample(rows=300)
    full = encode(weight, scaling)
    decoded = decode(full, scaling)
    monkeypatch.setattr(encodings, "_PORTION", 1)
    parts = encode(weight, scaling)
    assert torch.equal(parts.values.view(torch.uint8), full.values.view(torch.uint8))
    assert torch.equal(parts.scales.view(torch.uint8), full.scales.view(torch.uint8))
    assert torch.equal(decode(parts, scaling), decoded) and math.isclose(parts.error, full.error)


@ENCODINGS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_rejected(scaling, value):
    weight = sample()
    weight[3, 4] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(weight, scaling)


def decode_by_definition(packed, scales):
    """E2M1: a sign, two bits of exponent, one of mantissa; the lower half of a byte comes first."""
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(1).int()
    exponent, mantissa = codes // 2 % 4, codes % 2
    size = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))
    return torch.where(codes > 7, -size, size) * scales.repeat_interleave(
        32 if scales.shape[1] * 32 == size.shape[1] else 16, 1
    )


def export(folder, name, kind, *more, **changes):
    """Convert a tiny bf16 model to a checkpoint and that to a quantized folder. Returns the tensors of the latter."""
    make(name, **(SIZES | MORE.get(name, {}) | changes)).to(torch.bfloat16).save_pretrained(folder / "hf")
    assert run_convert(folder / "hf", folder / "ours") == 0
    assert run_convert(folder / "ours", folder / "quantized", "--quantize", kind, *more) == 0
    return read_all(folder / "quantized")


def read_all(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_moe", "fp8-block"), ("deepseek_v3", "fp8-block"), ("gpt_oss", "mxfp4")]
)
def test_transformers_computes_the_same_logits(name, kind, tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads fp8 with accelerate")
    caplog.set_level("INFO")
    export(tmp_path, name, kind, "--max-shard-size", "0.0005", "--verify")
    assert len(list((tmp_path / "quantized").glob("*.safetensors"))) > 1
    difference, largest = caplog.text.split("logits differ by at most ")[1].split(", the largest logit is ")
    assert float(difference) < 1e-4 * float(largest.split()[0])
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantized", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_moe", "fp8-block"),
        ("deepseek_v3", "fp8-block"),
        ("gpt_oss", "mxfp4"),
        ("mixtral", "mxfp4"),
        ("deepseek_v3", "nvfp4"),
    ],
)
def test_imported_model_is_exported_with_the_same_bytes(name, kind, tmp_path):
    export(tmp_path, name, kind)
    assert run_convert(tmp_path / "quantized", tmp_path / "again") == 0
    more = ("--quantize", kind, "--max-shard-size", "0.0003", "--workers", "2")
    assert run_convert(tmp_path / "again", tmp_path / "second", *more) == 0
    first, second = read_all(tmp_path / "quantized"), read_all(tmp_path / "second")
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.dtype == second[key].dtype and value.shape == second[key].shape
        assert torch.equal(value.view(torch.uint8), second[key].view(torch.uint8)), key
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("quantized", "second")]
    assert configs[0] == configs[1]


def test_block_fp8_is_stored_as_deepseek_publishes_it(tmp_path):
    tensors = export(tmp_path, "deepseek_v3", "fp8-block", kv_lora_rank=96)
    plain = SafetensorsFolder(tmp_path / "hf")
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
    for name in plain.names:
        if any(part in name for part in kept):
            assert torch.equal(tensors[name], plain.read(name)), name
        else:
            rows, columns = plain.shape(name)
            scales = tensors[name + "_scale_inv"]
            assert tensors[name].dtype == torch.float8_e4m3fn and tensors[name].shape == (rows, columns)
            assert scales.dtype == torch.float32 and scales.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape[0] == 100  # the last of two at once
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    skipped = config.pop("modules_to_not_convert")
    assert sorted(skipped) == ["lm_head", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_fp4_is_stored_as_compressed_tensors_does(kind, tmp_path):
    tensors = export(tmp_path, "qwen3_moe", kind)
    plain, folder = SafetensorsFolder(tmp_path / "hf"), SafetensorsFolder(tmp_path / "quantized")
    size, scale_dtype = (32, torch.uint8) if kind == "mxfp4" else (16, torch.float8_e4m3fn)
    assert folder.encodings == {"MXFP4" if kind == "mxfp4" else "NVFP4": 2 * 8 * 3 + 3}  # experts and a dense layer
    packed, scales = (tensors[f"{EXPERT}.gate_proj.{part}"] for part in ("weight_packed", "weight_scale"))
    assert packed.dtype == torch.uint8 and packed.shape == (128, 64)
    assert scales.dtype == scale_dtype and scales.shape == (128, 128 // size)
    if kind == "mxfp4":
        expected = decode_by_definition(packed, 2.0 ** (scales.int() - 127))
    else:
        factor = tensors[f"{EXPERT}.gate_proj.weight_global_scale"]
        assert factor.dtype == torch.float32 and factor.shape == (1,)
        both = [plain.read(f"{EXPERT}.{part}_proj.weight").float().abs().max() for part in ("gate", "up")]
        assert math.isclose(factor.item(), 448 * 6 / max(both), rel_tol=1e-6) and both[0] != both[1]
        assert torch.equal(factor, tensors[f"{EXPERT}.up_proj.weight_global_scale"])
        expected = decode_by_definition(packed, scales.float() / factor)
    assert torch.equal(folder.read(f"{EXPERT}.gate_proj.weight"), expected.bfloat16())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors[name], plain.read(name))
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == f"{kind}-pack-quantized"
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    assert group["weights"] == {
        "num_bits": 4,
        "type": "float",
        "strategy": "group" if kind == "mxfp4" else "tensor_group",
        "group_size": size,
        "symmetric": True,
        "dynamic": False,
    }
    layers = range(3)
    attention = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in layers for part in "qkvo"]
    routers = [f"model.layers.{layer}.mlp.gate" for layer in (0, 2)]
    assert sorted(config["ignore"]) == sorted([*attention, *routers, "lm_head"])


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_compressed_tensors_decompresses_the_same_weights(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    tensors = export(tmp_path, "qwen3_moe", kind)
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for name in (f"{EXPERT}.down_proj", "model.layers.1.mlp.gate_proj"):
        parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        found = SafetensorsFolder(tmp_path / "quantized").read(f"{name}.weight")
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], found)


def test_gpt_oss_experts_are_stored_as_they_are_published(tmp_path, caplog):
    """The error that is reported is that of all experts of the stacks."""
    caplog.set_level("INFO")
    tensors = export(tmp_path, "gpt_oss", "mxfp4", intermediate_size=96)
    prefix = "model.layers.1.mlp.experts."
    shapes = {
        name.removeprefix(prefix): list(value.shape) for name, value in tensors.items() if name.startswith(prefix)
    }
    assert shapes == {
        "gate_up_proj_blocks": [8, 192, 4, 16],
        "gate_up_proj_scales": [8, 192, 4],
        "gate_up_proj_bias": [8, 192],
        "down_proj_blocks": [8, 128, 3, 16],
        "down_proj_scales": [8, 128, 3],
        "down_proj_bias": [8, 128],
    }
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4" and "model.layers.*.mlp.router" in config["modules_to_not_convert"]
    names = [name for name in read_all(tmp_path / "hf") if name.endswith("experts.down_proj")]
    stored, found = (
        torch.cat([SafetensorsFolder(tmp_path / folder).read(name).float() for name in names])
        for folder in ("hf", "quantized")
    )
    error = ((found - stored).norm() / stored.norm()).item()
    line = next(line for line in caplog.messages if "linear_fc2.weight: " in line)
    assert 0.05 < error < 0.13 and f"error {error:.2%}" in line


def rename_as_modelopt(folder):
    """Give the tensors of an NVFP4 folder of one file ModelOpt's names, with a scale of activations."""
    path = folder / "model.safetensors"
    renamed = {}
    for name, value in load_file(path).items():
        if name.endswith(".weight_packed"):
            renamed[name.replace("weight_packed", "input_scale")] = torch.tensor(0.5)
            name = name.replace("weight_packed", "weight")
        elif name.endswith(".weight_global_scale"):
            name, value = name.replace("weight_global_scale", "weight_scale_2"), (1 / value).view(())
        renamed[name] = value
    save_file(renamed, path)


def test_modelopt_folder_is_read(tmp_path, capsys):
    export(tmp_path, "qwen3_moe", "nvfp4")
    tokens, _, positions = batch()
    with torch.no_grad():
        expected = load_ours(tmp_path / "quantized").eval()(tokens, positions)
        rename_as_modelopt(tmp_path / "quantized")
        assert torch.equal(load_ours(tmp_path / "quantized").eval()(tokens, positions), expected)
        unquantized = load_ours(tmp_path / "ours").eval()(tokens, positions)
    assert not torch.equal(unquantized, expected)
    assert inspect.main(["ls", str(tmp_path / "quantized"), "--match", "router"]) == 0
    out = capsys.readouterr().out
    assert "type qwen3_moe" in out and "51 in NVFP4" in out


def test_blocks_that_transformers_misreads_are_not_compared(tmp_path, capfd):
    """It takes 192 rows in two rows of scales for blocks of 96."""
    export(tmp_path, "qwen3_moe", "fp8-block", hidden_size=192)
    assert run_convert(tmp_path / "ours", tmp_path / "second", "--quantize", "fp8-block", "--verify") == 2
    assert "[192, 256], whose last block of 128 is not full" in capfd.readouterr().err


def test_report_names_size_and_error(tmp_path, caplog):
    caplog.set_level("INFO")
    tensors = export(tmp_path, "qwen3_moe", "mxfp4", "--workers", "2", "--max-shard-size", "0.0002")
    line = next(line for line in caplog.messages if "local_experts.*.linear_fc2.weight" in line)
    assert "16 tensors, error 11." in line  # two layers of eight experts
    size = sum(value.nbytes for value in tensors.values())
    weights = sum(value.numel() for value in read_all(tmp_path / "hf").values())
    assert f"  {size / 1e9:.3f} GB, {8 * size / weights:.2f} bits per weight" in caplog.messages


def mappings_of(name, **changes):
    config = make(name, **(SIZES | MORE.get(name, {}) | changes)).config.to_dict()
    family, flags, _ = read_config(config)
    return family.name, tensor_mappings(family.names, flags | {"rows": flags["vocab_size"]})


def test_prediction_layers_stay_unquantized_in_fp4_only():
    _, mappings = mappings_of("deepseek_v3", num_mtp_layers=1)
    fp8, fp4 = (plan_quantization(kind, "deepseek_v3", mappings) for kind in ("fp8-block", "nvfp4"))
    last = "model.layers.3.mlp.experts.7.down_proj"
    assert last in fp4.config["ignore"] and last not in fp8.config["modules_to_not_convert"]
    for plan in (fp8.config["modules_to_not_convert"], fp4.config["ignore"]):
        assert "model.layers.3.eh_proj" in plan
    assert fp8.natives > fp4.natives and not any("mtp" in native for native in fp4.natives)


def test_indexer_is_quantized_but_its_weights_of_heads():
    _, mappings = mappings_of("deepseek_v32", q_lora_rank=128)
    kept = plan_quantization("fp8-block", "deepseek_v32", mappings).config["modules_to_not_convert"]
    indexer = {name.rpartition(".")[2] for name in kept if ".indexer." in name}
    assert indexer == {"weights_proj"}


def test_parts_without_full_blocks_stay_unquantized():
    """Of query, key and value rows, 96 keys; the second half of a dense MLP's first layer may have any rows."""
    _, mappings = mappings_of("qwen3_moe", head_dim=48)
    plan = plan_quantization("fp8-block", "qwen3_moe", mappings)
    assert len(plan.notes) == 3 and "q_proj.weight has 192 rows" in plan.notes[0]
    assert {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.gate"} <= set(plan.config["modules_to_not_convert"])
    assert "decoder.layers.0.self_attention.linear_proj.weight" in plan.natives
    _, mappings = mappings_of("deepseek_v3", q_lora_rank=96)  # before the keys and values, of 20 rows
    plan = plan_quantization("fp8-block", "deepseek_v3", mappings)
    skipped = {name.rpartition(".")[2] for name in plan.config["modules_to_not_convert"]}
    assert skipped == {"q_a_proj", "gate", "lm_head"}


@pytest.mark.parametrize(
    ("name", "kind", "changes", "words"),
    [
        ("qwen3_moe", "fp8-block", {"moe_intermediate_size": 96}, r"experts\.0\.gate_proj\.weight has 96 rows.*128"),
        ("qwen3_moe", "mxfp4", {"moe_intermediate_size": 48}, r"down_proj\.weight has 48 columns.*32"),
        ("qwen3_moe", "nvfp4", {"hidden_size": 136}, r"gate_proj\.weight has 136 columns.*16"),
        ("llama", "mxfp4", {"hidden_size": 136, "intermediate_size": 56}, "no weight of llama"),
        ("gpt_oss", "nvfp4", {}, "experts in stacks"),
        ("gpt_oss", "mxfp4", {"intermediate_size": 48}, r"down_proj has 48 columns"),
    ],
)
def test_sizes_that_readers_cannot_take_are_rejected(name, kind, changes, words):
    family, mappings = mappings_of(name, **changes)
    with pytest.raises(CheckpointError, match=words):
        plan_quantization(kind, family, mappings)


def test_command_line_is_checked(tmp_path, capfd):
    make("qwen3_moe").save_pretrained(tmp_path / "hf")
    assert run_convert(tmp_path / "hf", tmp_path / "ours", "--quantize", "mxfp4") == 2
    assert "--quantize does not apply to --to ours" in capfd.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        run_convert(tmp_path / "hf", tmp_path / "ours", "--quantize", "nvfp4", "--verify")
    assert stopped.value.code == 2 and "scales of experts in NVFP4" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("weight_scale", None, "are missing"),
        ("weight_scale", lambda value: value[:, :-1].contiguous(), "one scale for 16 of the 128 columns"),
        ("weight_scale", lambda value: value.float(), "E4M3 .NVFP4. or uint8"),
        ("weight_global_scale", None, "is missing"),
        ("weight_global_scale", lambda value: value.repeat(2), "has 2 elements"),
        ("weight_global_scale", lambda value: value * 0, "not finite"),
        ("weight_scale_2", torch.ones_like, "a.weight_scale_2: a.weight is stored in fp4 and read without it"),
        ("weight_zero_point", torch.ones_like, "a.weight_zero_point: a.weight is stored in fp4 and read without"),
    ],
)
def test_damaged_nvfp4_is_named(part, change, words, tmp_path):
    folder = tmp_path / "quantized"
    folder.mkdir()
    encoded = encode(sample(64, 128), NVFP4)
    tensors = {
        "a.weight_packed": encoded.values,
        "a.weight_scale": encoded.scales,
        "a.weight_global_scale": encoded.factor.view(1),
    }
    value = tensors.pop(f"a.{part}", torch.ones(1))
    if change is not None:
        tensors[f"a.{part}"] = change(value)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFolder(folder).read("a.weight")


def to_int4(weight, group):
    """Return the tensors of a weight in int4 and what they mean, by definition, in bf16."""
    groups = weight.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    values = (groups / scales[..., None].float()).round().clamp(-8, 7)
    meaning = (values * scales[..., None].float()).flatten(1).bfloat16()
    codes = (values.flatten(1).long() + 8).unflatten(1, (-1, 8))
    words = (codes * 16 ** torch.arange(8)).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}, meaning


def test_kimi_k2_5_with_experts_in_int4_is_read(tmp_path, capsys):
    """As published: experts in int4, groups of 32, the language model in a folder that reads images."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    make("kimi_k2", **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    tensors, meant = {}, {}
    for name, value in read_all(tmp_path / "plain").items():
        meant[name] = value
        if ".mlp.experts." not in name:
            tensors[f"language_model.{name}"] = value
            continue
        parts, meant[name] = to_int4(value, 32)
        prefix = "language_model." + name.removesuffix("weight")
        tensors |= {prefix + part: each for part, each in parts.items()}
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    for folder, files in (("int4", tensors), ("meant", meant)):
        (tmp_path / folder).mkdir()
        save_file(files, tmp_path / folder / "model.safetensors")
    (tmp_path / "meant" / "config.json").write_text(json.dumps(config))
    (tmp_path / "int4" / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": config | {"model_type": "kimi_k2"}})
    )
    tokens, _, positions = batch()
    with torch.no_grad():
        found, expected, unquantized = (
            load_ours(tmp_path / folder).eval()(tokens, positions) for folder in ("int4", "meant", "plain")
        )
    assert torch.equal(found, expected) and not torch.equal(found, unquantized)
    assert inspect.main(["ls", str(tmp_path / "int4"), "--match", "router"]) == 0
    assert "48 in int4" in capsys.readouterr().out


def test_int4_of_compressed_tensors(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = sample(48, 320)
    parts, _ = to_int4(weight, 32)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=True)
    )
    scales = {"weight_scale": parts["weight_scale"], "weight_zero_point": torch.zeros(48, 10, dtype=torch.int8)}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = compressor.compress({"weight": weight, **scales}, scheme)
    save_file(
        {f"a.{name}": value.contiguous() for name, value in stored.items()},
        tmp_path / "model.safetensors",
    )
    assert torch.equal(SafetensorsFolder(tmp_path).read("a.weight"), compressor.decompress(stored, scheme)["weight"])


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("weight_scale", None, "weight_scale is missing"),
        ("weight_shape", None, "weight_shape is missing"),
        ("weight_shape", lambda value: value // torch.tensor([1, 2]), r"is \[64, 64\].*other widths"),
        ("weight_scale", lambda value: value[:, :-1].contiguous(), "equal groups of the 128 columns"),
        ("weight_scale", lambda value: value[:-1].contiguous(), "equal groups"),
        ("weight_scale", lambda value: value * math.inf, "not finite"),
        ("weight_zero_point", lambda _: torch.zeros(8, 4, dtype=torch.int32), "zero points"),
    ],
)
def test_int4_that_cannot_be_read_is_named(part, change, words, tmp_path):
    parts, _ = to_int4(sample(64, 128), 32)
    value = parts.pop(part, None)
    if change is not None:
        parts[part] = change(value)
    save_file({f"a.{name}": each for name, each in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFolder(tmp_path).read("a.weight")
