"""Mapping files of Hugging Face families: what is rejected with which line, and a family that is not built in."""

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoint.hf import models
from checkpoint.hf.models import VOCAB, batch, compute_logits, run_convert

import arguments
import moe_trainer
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import families as built_in
from moe_trainer.checkpoint.hf.converters.registry import CONVERTERS
from moe_trainer.checkpoint.hf.families import FAMILIES, families_with
from moe_trainer.checkpoint.hf.mapping_file import KEYS, SECTIONS
from moe_trainer.checkpoint.hf.names import duplicated_tensors, model_sizes, tensor_mappings
from moe_trainer.checkpoint.hf.transforms import TRANSFORMS
from moe_trainer.checkpoint.manager import load, read_saved_args
from moe_trainer.checkpoint.options import LoadOptions
from moe_trainer.checkpoint.resolve import saved_padded_vocab_size
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.stream_weights import WeightStream

ROOT = Path(moe_trainer.__file__).parents[1]
ENDS = ("packed", "scale", "shape")
PAGE = (ROOT / "docs" / "add_a_family.md").read_text(encoding="utf-8")
HY_V3 = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
    "router_scaling_factor": 2.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}


MAPPING = """
model_type: hy_v3
class_prefix: HYV3
like: glm4_moe

config:
  num_experts: num_experts
  n_routed_experts: null
  router_scaling_factor: {flag: moe_router_topk_scaling_factor, default: 2.826}
  routed_scaling_factor: null
  attention_bias: null
  use_qk_norm: null

converters: [rope, tied, grouped, listed_dense, num_shared]

flags:
  qk_layernorm: true

required:
  attention_bias: [false]
  mlp_bias: [false]
  norm_topk_prob: null

ignored: [num_shared_experts, enable_moe_fp32_combine]

defaults:
  head_dim: 128
  initializer_range: 0.006
  rope_theta: 11158840.0
  num_shared_experts: 1
  n_shared_experts: null
  first_k_dense_replace: null
  partial_rotary_factor: null

tensors:
  moe:
    mlp.router.weight: mlp.router.gate.weight X H
    mlp.router.expert_bias: mlp.expert_bias X
    mlp.shared_experts.linear_fc1.weight:
      hf: mlp.shared_mlp.gate_proj.weight S H, mlp.shared_mlp.up_proj.weight S H
      transform: halves
    mlp.shared_experts.linear_fc2.weight: mlp.shared_mlp.down_proj.weight H S
  mtp: null
"""


@pytest.fixture(scope="module")
def mapping(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapping") / "hy_v3.yaml"
    path.write_text(MAPPING)
    return path


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A small random model with experts, and its folder."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, "hy_v3", ("HYV3", HY_V3))
        model = models.make("hy_v3")
    folder = tmp_path_factory.mktemp("hf") / "hy_v3"
    model.save_pretrained(folder)
    return model, folder


def test_every_file_of_the_package_is_a_family():
    files = Path(built_in.__file__).with_name("families").glob("*")
    assert sorted(path.name for path in files) == sorted(f"{name}.yaml" for name in built_in.NAMES)
    assert list(FAMILIES) == list(built_in.NAMES)


def test_family_of_the_manual_converts_both_ways(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    sizes = {"num_key_value_heads": 2, "head_dim": 12, "hidden_act": "relu2"}
    monkeypatch.setitem(models.MODELS, "nemotron", ("Nemotron", sizes))
    model = models.make("nemotron")
    model.save_pretrained(tmp_path / "original")
    mapping = tmp_path / "nemotron.yaml"
    mapping.write_text(re.search(r"```yaml\n(model_type: nemotron\n.*?)```", PAGE, re.DOTALL)[1])
    assert "nemotron" not in FAMILIES
    assert run_convert(tmp_path / "original", tmp_path / "ours") == 2
    assert "--hf-mapping" in capsys.readouterr().err
    given = ("--hf-mapping", mapping)
    assert run_convert(tmp_path / "original", "--check", *given) == 0
    assert run_convert(tmp_path / "original", tmp_path / "ours", *given, "--verify") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "hf", *given, "--verify") == 0
    _assert_equal_models(type(model).from_pretrained(tmp_path / "hf", dtype=model.dtype), model)


def test_family_with_experts_converts_both_ways(hf, mapping, tmp_path):
    model, folder = hf
    assert run_convert(folder, tmp_path / "ours", "--hf-mapping", mapping, "--verify") == 0
    assert run_convert(tmp_path / "ours", tmp_path / "hf", "--hf-mapping", mapping, "--verify") == 0
    written = type(model).from_pretrained(tmp_path / "hf", dtype=model.dtype)
    _assert_equal_models(written, model)
    for key in ("router_scaling_factor", "num_shared_experts", "mlp_layer_types", "head_dim"):
        assert getattr(written.config, key) == getattr(model.config, key), key


def _assert_equal_models(written, model):
    tokens_BS, _, _ = batch()
    assert (compute_logits(written, tokens_BS) - compute_logits(model, tokens_BS)).abs().max() < 1e-4
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in written.state_dict().items())


def test_folder_of_another_family_loads_with_its_mapping_file(hf, mapping):
    """As --load FOLDER --use-checkpoint-args --hf-mapping FILE does."""
    model, folder = hf
    flag = ["--hf-mapping", str(mapping)]
    source = arguments.find_checkpoint_args_source(["--load", str(folder), "--use-checkpoint-args", *flag])
    assert source.hf_mapping == str(mapping)
    args = models.flags_for(folder, *flag, hf_mapping=source.hf_mapping)
    (own,) = build_chunks(args, ParallelState.single(), VOCAB)
    assert WeightStream(args, [own], ParallelState.single(), VOCAB).config["model_type"] == "hy_v3"
    assert saved_padded_vocab_size(folder, None, mapping) == VOCAB
    ps = ParallelState.single()
    (ours,) = build_chunks(args, ps, VOCAB)
    load(folder, [ours], None, ps, LoadOptions.from_args(args))
    tokens_BS, _, positions_BS = batch()
    difference = (ours.eval()(tokens_BS, positions_BS)[..., :VOCAB] - compute_logits(model, tokens_BS)).abs().max()
    assert difference < 1e-4


MISTAKES = {
    "not a table": ("- a\n", "line 1: the file must be a table"),
    "no YAML": ("model_type: [\n", "is not YAML"),
    "nothing": ("# only a comment\n", "is empty"),
    "no type": ("like: llama\n", "line 1: model_type is missing"),
    "unknown key": ("model_type: a\nlike: llama\nflag:\n  swiglu: true\n", "line 3: the file: 'flag' is unknown (perhaps flags)"),
    "key twice": ("model_type: a\nlike: llama\nlike: qwen3\n", "line 3: the file: like is in line 2 already"),
    "braces of a native tensor": (
        "model_type: a\nlike: llama\ntensors:\n  layer:\n    mlp.{x}.weight: a.weight H\n",
        "line 5: mlp.{x}.weight: only {e}, the expert, may be in braces",
    ),
    "brace of a prefix": (
        "model_type: a\nlike: llama\ntensors:\n  layer_prefix: model.{l}.{.\n",
        "line 4: layer_prefix 'model.{l}.{.': a name that ends with a dot",
    ),
    "unknown parent": ("model_type: a\nlike: lama\n", "line 2: like: lama is no built-in family"),
    "unknown flag": (
        "model_type: a\nlike: llama\nflags:\n  qk_layer_norm: true\n",
        "line 4: the flag 'qk_layer_norm' is unknown (perhaps qk_layernorm",
    ),
    "spelled flag": (
        "model_type: a\nlike: llama\nconfig:\n  n: --num-experts\n",
        "line 4: the flag '--num-experts' is unknown (perhaps num_experts); write it without dashes",
    ),
    "value of a flag": (
        "model_type: a\nlike: llama\nflags:\n  normalization: rms\n",
        "line 4: normalization is 'rms', and one of LayerNorm, RMSNorm is needed",
    ),
    "type of a flag": ("model_type: a\nlike: llama\nflags:\n  swiglu: 1\n", "line 4: swiglu is 1, and true or false"),
    "switch for a number": ("model_type: a\nlike: llama\nflags:\n  num_experts: true\n", "a whole number is needed"),
    "two keys of a flag": (
        "model_type: a\nlike: qwen3_moe\nconfig:\n  n_experts: num_experts\n",
        "line 3: config: num_experts and n_experts both become the flag num_experts; remove one of them (num_experts: null)",
    ),
    "nothing to remove": ("model_type: a\nlike: llama\nflags:\n  num_experts: null\n", "line 4: num_experts: null removes"),
    "unknown converter": (
        "model_type: a\nlike: llama\nconverters: [rope, group]\n",
        "line 3: converters: 'group' is unknown (perhaps grouped); there are",
    ),
    "required without list": ("model_type: a\nlike: llama\nrequired:\n  act: silu\n", "line 4: required: act is 'silu', and a list"),
    "unknown section": ("model_type: a\nlike: llama\ntensors:\n  experts: {}\n", "line 4: tensors: 'experts' is unknown"),
    "unknown transform": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight:\n      hf: a H F\n"
        "      transform: transpose\n",
        "line 7: mlp.linear_fc2.weight: transform: 'transpose' is unknown (perhaps transposed)",
    ),
    "number of tensors": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight: a H F, b H F\n",
        "line 5: mlp.linear_fc2.weight: 2 tensors in 'a H F, b H F', and the transform same takes 1",
    ),
    "number of native tensors": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    a.weight & b.weight: c H F\n",
        "line 5: a.weight & b.weight: 2 native tensors, and the transform same makes 1",
    ),
    "no layout": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight: mlp.down_proj.weight\n",
        "line 5: mlp.linear_fc2.weight: 'mlp.down_proj.weight' is not a tensor with its layout",
    ),
    "no source": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight:\n      transform: halves\n",
        "line 6: mlp.linear_fc2.weight: hf is missing",
    ),
    "expert without number": (
        "model_type: a\nlike: qwen3_moe\ntensors:\n  moe:\n    mlp.experts.local_experts.{e}.linear_fc2.weight: a.b H E\n",
        "line 5: mlp.experts.local_experts.{e}.linear_fc2.weight: 'a.b H E' has neither {e} nor",
    ),
    "number without expert": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight: mlp.{e}.down H F\n",
        "line 5: mlp.linear_fc2.weight: mlp.{e}.down is of one expert",
    ),
    "other braces": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight: mlp.{l}.down H F\n",
        "line 5: mlp.linear_fc2.weight: mlp.{l}.down: only {e}",
    ),
    "two rules of a tensor": (
        "model_type: a\nlike: llama\ntensors:\n  layer:\n    input_layernorm.weight: norm H\n    pre_mlp_layernorm.weight: norm H\n",
        "line 6: the tensor norm is read by pre_mlp_layernorm.weight and by input_layernorm.weight (",
    ),
    "unknown condition": (
        "model_type: a\nlike: llama\ntensors:\n  dense:\n    mlp.linear_fc2.weight: {hf: a H F, if: not use_moe}\n",
        "line 5: the flag 'use_moe' is unknown",
    ),
    "prefix": ("model_type: a\nlike: llama\ntensors:\n  layer_prefix: layers.\n", "line 4: layer_prefix 'layers.': a name"),
    "alone": ("model_type: a\nconfig:\n  n_layer: num_layers\n", "line 1: config has no key for the flag hidden_size"),
    "no layers": (
        "model_type: a\nlike: llama\ntensors:\n  layer: null\n", "line 1: tensors has no layer; every family needs it"
    ),
    "text part": ("model_type: a\nlike: llama\ntext_parts:\n  b: {prefix: c.}\n", "line 4: text_parts: b needs prefix"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_in_a_file_is_named_with_its_line(what, tmp_path):
    text, message = MISTAKES[what]
    path = tmp_path / "family.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        families_with(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_mistake_ends_with_exit_code_2(hf, tmp_path, capsys):
    path = tmp_path / "family.yaml"
    path.write_text("model_type: hy_v3\nlike: lama\n")
    for given in (path, tmp_path / "absent.yaml"):
        assert run_convert(hf[1], tmp_path / "ours", "--hf-mapping", given) == 2
        error = capsys.readouterr().err
        assert error.startswith("convert.py: ") and given.name in error and "Traceback" not in error
    with pytest.raises(SystemExit) as caught:
        run_convert(hf[1])
    assert caught.value.code == 2


def test_small_numbers_are_numbers(tmp_path):
    """In YAML 1.1, 1e-5 is text."""
    path = tmp_path / "family.yaml"
    path.write_text("model_type: a\nlike: llama\ndefaults:\n  rms_norm_eps: 1e-5\n  factor: -2E3\n")
    assert dict(families_with(path)["a"].defaults) == {"rms_norm_eps": 1e-5, "factor": -2000.0}


@pytest.mark.parametrize(
    "like, keys, expected",
    [
        ("mixtral", {}, {"rotary_base": 1000000}),
        ("gpt_oss", {}, {"rotary_scaling_factor": 32.0}),
        ("ministral3", {}, {"rotary_scaling_factor": 16.0, "attn_temperature_tuning": "mistral4"}),
        ("hunyuan_v1_moe", {"rope_scaling": {"type": "dynamic", "alpha": 2.0}}, {"rotary_base": 22082}),
        ("qwen3_moe", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, {"window_size": (4095, 0)}),
    ],
)
def test_like_takes_over_what_missing_keys_mean(like, keys, expected, tmp_path):
    from moe_trainer.checkpoint.hf.config import read_config

    path = tmp_path / "family.yaml"
    path.write_text(f"model_type: a\nlike: {like}\n")
    config = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "head_dim": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "moe_topk": 2, "moe_intermediate_size": 24, **keys}
    flags = read_config({**config, "model_type": "a"}, families=families_with(path))[1]
    assert flags == read_config({**config, "model_type": like})[1]
    assert {dest: flags[dest] for dest in expected} == expected


def test_renamed_keys_of_config_are_read_and_written(tmp_path):
    from moe_trainer.checkpoint.hf.config import read_config, write_config

    path = tmp_path / "family.yaml"
    path.write_text("model_type: a\nlike: llama\nrename:\n  n_layer: num_hidden_layers\n  n_kv: num_key_value_heads\n")
    config = {"model_type": "a", "n_layer": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config |= {"n_kv": 2, "vocab_size": 96, "max_position_embeddings": 64}
    _, flags, _ = read_config(config, families=families_with(path))
    assert (flags["num_layers"], flags["num_query_groups"]) == (2, 2)
    _, written = write_config(flags, 96, "a", families_with(path))
    assert (written["n_layer"], written["n_kv"]) == (2, 2) and "num_hidden_layers" not in written


def test_names_outside_layers_and_conditions_follow_the_file(tmp_path):
    path = tmp_path / "family.yaml"
    path.write_text(
        "model_type: a\nlike: llama\ntensors:\n  layer_prefix: trunk.{l}.\n"
        "  model:\n    embedding.word_embeddings.weight: wte V H\n"
        "  head:\n    output_layer.weight: {hf: out V H, if: untie_embeddings_and_output_weights}\n"
        "  dense:\n    mlp.linear_fc2.weight: [{hf: down H F, if: swiglu}, {hf: down_t F H, transform: transposed, if: not swiglu}]\n"
    )  # fmt: skip
    names = families_with(path)["a"].names
    flags = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "rows": 9, "ffn_hidden_size": 6}
    for swiglu, source in ((True, "down"), (False, "down_t")):
        of = {each.native: each for each in tensor_mappings(names, flags | {"swiglu": swiglu})}
        assert of["embedding.word_embeddings.weight"].sources[0].name == "wte" and "output_layer.weight" not in of
        last = of["decoder.layers.1.mlp.linear_fc2.weight"]
        assert last.sources[0].name == f"trunk.1.{source}" and last.shape == (8, 6)
    assert duplicated_tensors(names, flags) == {"out": "wte"}


def _checked(folder, mapping, capsys, caplog):
    caplog.clear()
    caplog.set_level("INFO")
    code = run_convert(folder, "--check", "--hf-mapping", mapping)
    return code, [record.getMessage() for record in caplog.records]


def test_check_lists_what_does_not_fit(hf, mapping, tmp_path, capsys, caplog):
    changed = tmp_path / "changed.yaml"
    text = mapping.read_text()
    for old, new in (
        ("mlp.router.gate.weight X H", "mlp.gate.weight X H"),
        ("mlp.shared_mlp.down_proj.weight H S", "mlp.shared_mlp.down_proj.weight S H"),
        ("    mlp.router.expert_bias: mlp.expert_bias X\n", "    mlp.router.expert_bia: mlp.expert_bias X\n    mlp.router.expert_bias: null\n"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    changed.write_text(text)
    code, lines = _checked(hf[1], changed, capsys, caplog)
    shown = "\n".join(lines)
    assert code == 1
    assert (
        "missing: model.layers.*.mlp.gate.weight (2 tensors, such as model.layers.1.mlp.gate.weight) [8, 32]" in shown
    )
    assert re.search(
        r"unexpected: model.layers.\*.mlp.router.gate.weight \(2 tensors.*\[8, 32\]: no rule reads it", shown
    )
    assert re.search(
        r"shape: model.layers.\*.mlp.shared_mlp.down_proj.weight .* is \[32, 48\], and .*changed.yaml, line \d+ makes \[48, 32\]",
        shown,
    )
    assert "native: no rule of hy_v3 makes decoder.layers.*.mlp.router.expert_bias" in shown
    assert "perhaps decoder.layers.*.mlp.router.expert_bias" in shown
    assert lines[-1].endswith("problems")


def test_check_needs_only_config_and_index(hf, mapping, tmp_path, capsys, caplog):
    from safetensors import safe_open

    with safe_open(hf[1] / "model.safetensors", "pt") as file:
        names = list(file.keys())
    (tmp_path / "config.json").write_text((hf[1] / "config.json").read_text())
    index = tmp_path / "model.safetensors.index.json"
    scales = [f"{name}_scale_inv" for name in names if "o_proj" in name]
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, *scales], "model-00001-of-00001.safetensors")}))
    for source in (tmp_path, index):
        code, lines = _checked(source, mapping, capsys, caplog)
        assert code == 0 and lines[-1].endswith("names compared: all fit") and "shapes are not" in "\n".join(lines)
    # a tied head that is there, and experts in fp4
    others = [name for name in names if ".mlp.experts." not in name]
    stacks = [
        f"model.layers.{layer}.mlp.experts.{matrix}_proj{end}"
        for layer in (1, 2)
        for matrix in ("gate_up", "down")
        for end in ("_blocks", "_scales")
    ]
    config = json.loads((hf[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*others, *stacks], "model.safetensors")}))
    assert _checked(tmp_path, mapping, capsys, caplog)[0] == 0
    # experts in packed integers
    parts = {name.replace("weight", f"weight_{end}") for name in names if ".mlp.experts." in name for end in ENDS}
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*others, *sorted(parts)], "model.safetensors")}))
    assert parts and _checked(tmp_path, mapping, capsys, caplog)[0] == 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = dict.fromkeys([*names[1:], "model.layers.0.extra"], "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": table}))
    code, lines = _checked(tmp_path, mapping, capsys, caplog)
    assert code == 1 and any(line.startswith(f"missing: {names[0]} ") for line in lines)
    assert any(line.startswith("unexpected: model.layers.0.extra: no rule reads it") for line in lines)
    index.unlink()
    assert _checked(tmp_path, mapping, capsys, caplog)[0] == 2


def test_unknown_layout_symbol_names_the_line(hf, mapping, tmp_path):
    changed = tmp_path / "changed.yaml"
    changed.write_text(mapping.read_text().replace("mlp.expert_bias X", "mlp.expert_bias LK"))
    with pytest.raises(
        CheckpointError, match=r"changed.yaml, line \d+: mlp.expert_bias has the layout symbol LK, which"
    ):
        read_saved_args(hf[1], hf_mapping=changed)


def _table(heading):
    """Return the names in the first column of the manual's table under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_manual_lists_the_whole_vocabulary():
    assert sorted(_table("Keys of a file")) == sorted(KEYS)
    assert sorted(_table("Converters")) == sorted(CONVERTERS)
    assert sorted(_table("Transforms")) == sorted(name.lower() for name in TRANSFORMS)
    assert sorted(_table("Sections")) == sorted(SECTIONS)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "rows": 9, "num_experts": 2}
    latent = {
        "multi_latent_attention": True,
        "qk_head_dim": 2,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 2,
        "kv_lora_rank": 2,
    }
    sparse = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 2}
    linear = (
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
    )
    symbols = set(model_sizes(sizes | latent | sparse | {"experimental_attention_variant": "dsa"}))
    symbols |= set(model_sizes(sizes | dict.fromkeys(linear.split(), 2) | {"experimental_attention_variant": "gdn"}))
    compressed = dict.fromkeys(("o_groups", "o_lora_rank", "num_residual_streams", "moe_router_topk"), 2)
    symbols |= set(model_sizes(sizes | latent | compressed | {"experimental_attention_variant": "dsv4_hybrid"}))
    symbols |= {"CR", "CW", "CI"}  # which differ between layers
    mamba = {"mamba_head_dim": 2, "mamba_num_groups": 2, "mamba_state_dim": 2}
    symbols |= set(model_sizes(sizes | mamba | {"hybrid_layer_pattern": "M|*/M"}))
    assert sorted(_table("Layouts")) == sorted(symbol for symbol in symbols if symbol.isupper())
