"""Formats of single layers by --te-precision-config-file.

Matching of linears, invalid files, and training.
"""

import logging

import pytest
import torch
import yaml
from harness import run_ranks
from layers.fake_te import install_fake_te
from training.layouts import compare, create_groups, make_argv, train

from arguments import parse_args
from arguments.mechanisms.formats import NAMED_BY_LAYER
from moe_trainer.backends import BackendPolicy
from moe_trainer.layers import layer_factory
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.gemms import QuantizedGemms, UnquantizedExpertGemms
from moe_trainer.quantization.precision_file import PrecisionFile, PrecisionFileError
from moe_trainer.quantization.recipe import make_recipe

DEFAULT = make_recipe("tensorwise")
FEWEST = NAMED_BY_LAYER[-1]


def config(training, evaluation=None):
    found = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training}
    return found if evaluation is None else {**found, "evaluation_recipe": evaluation}


CONFIGS = {
    "mxfp8": config({"fp8_quantization_recipe": "mxfp8"}),
    "bf16": config({}),
    "blockwise": config({"fp8_quantization_recipe": "blockwise", "fp8_format": "hybrid"}),
    "mxfp8_evaluate_bf16": config({"fp8_quantization_recipe": "mxfp8"}, {}),
    "few bits": config({FEWEST.flags.in_precision_file: FEWEST.key}, {"fp8_quantization_recipe": "tensorwise"}),
    "as the flags": config({"override_quantized_autocast": False}),
}


def glob_matcher(pattern, to, enabled=True):
    return {"type": "glob", "pattern": pattern, "config": to, "enabled": enabled}


def write(folder, matchers, configs=CONFIGS):
    path = folder / "precision.yaml"
    path.write_text(
        yaml.safe_dump(
            {"configs": configs, "matchers": {f"m{index}": each for index, each in enumerate(matchers)}},
            sort_keys=False,
        )
    )
    return str(path)


def test_first_enabled_matcher_selects_the_recipe(tmp_path, caplog):
    path = write(
        tmp_path,
        [
            glob_matcher("*.linear_qkv", "mxfp8", enabled=False),
            glob_matcher("*.layers.1.*.linear_qkv", "as the flags"),
            glob_matcher("*.linear_qkv", "bf16"),
            glob_matcher("*.experts.linear_fc2", "few bits"),
            glob_matcher("*", "mxfp8_evaluate_bf16"),
        ],
    )
    with caplog.at_level(logging.INFO):
        file = PrecisionFile.load(path, DEFAULT)
        found = {
            name: file.formats(name, DEFAULT)
            for name in (
                "decoder.layers.0.self_attention.linear_qkv",
                "decoder.layers.1.self_attention.linear_qkv",
                "decoder.layers.3.mlp.experts.linear_fc2",
                "decoder.layers.2.mlp.linear_fc1",
                "decoder.layers.3.mlp.linear_fc1",
            )
        }
    names = [[recipe and recipe.name for recipe in (each.training, each.evaluation)] for each in found.values()]
    assert names == [[None, None], ["tensorwise"] * 2, [FEWEST.key, "tensorwise"], ["mxfp8", None], ["mxfp8", None]]
    assert (
        len(caplog.messages) == 4
        and "decoder.layers.2.mlp.linear_fc1 is the first linear with config 'mxfp8_evaluate_bf16'" in caplog.text
    )


def test_recipes_of_the_file_are_parsed(tmp_path):
    file = PrecisionFile.load(
        write(tmp_path, [glob_matcher("a", "blockwise"), glob_matcher("b", "few bits")]),
        make_recipe("delayed", wgrad=False),
    )
    assert file.formats("a", DEFAULT).training == make_recipe("blockwise", hybrid=True, wgrad=False)
    assert file.formats("b", DEFAULT).training == make_recipe(FEWEST.key, wgrad=False)
    assert file.formats("c", DEFAULT).training is DEFAULT, "no pattern fits"


@pytest.mark.parametrize(
    ("configs", "matchers", "reason"),
    [
        (
            {"x": config({"fp8_quantization_recipe": "delayed"})},
            [],
            "delayed is not run by this version; choose tensorwise, blockwise, mxfp8",
        ),
        (
            {"x": config({"fp8_quantization_recipe": "mxfp8", "fp4_quantization_recipe": "nvfp4"})},
            [],
            "one of fp8_quantization_recipe and",
        ),
        (
            {"x": config({"override_nonquantized_autocast": True})},
            [],
            "override_nonquantized_autocast is not run by this version",
        ),
        (
            {"x": config({"tp_only_amax_red": True})},
            [],
            "tp_only_amax_red is not known; it can have fp4_quantization_recipe",
        ),
        (
            {"x": config({"fp8_quantization_recipe": "mxfp8", "fp8_format": "e5m2"})},
            [],
            "fp8_format must be e4m3 or hybrid",
        ),
        ({"x": config({}, {"fp8_quantization_recipe": "mxfp8"})}, [], "evaluation in fewer bits than training"),
        (
            {"x": config({"override_quantized_autocast": False}, {})},
            [],
            "must be the same in training and in evaluation",
        ),
        ({"x": config({"override_quantized_autocast": "no"})}, [], "must be true or false"),
        ({"x": {"training_recipe": {}}}, [], "config 'x' needs transformer_engine_config_type: TEQuantizationParams"),
        ({"x": {"transformer_engine_config_type": "TEQuantizationParams"}}, [], "config 'x' needs a training_recipe"),
        ({"x": config([])}, [], "config 'x', training_recipe is no table"),
        ({}, [glob_matcher("*", "y")], "matcher 'm0': there is no config 'y'"),
        ({}, [{**glob_matcher("*", "y"), "type": "regex"}], "matcher 'm0' needs type: glob"),
        ({}, [{"type": "glob", "config": "y", "enabled": True}], "matcher 'm0' needs pattern"),
    ],
)
def test_invalid_precision_files_are_rejected(tmp_path, configs, matchers, reason):
    path = write(tmp_path, matchers, configs)
    with pytest.raises(PrecisionFileError, match="--te-precision-config-file .*precision.yaml: ") as error:
        PrecisionFile.load(path, DEFAULT)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "No such file"), ("configs: [", "while parsing"), ("- 1", "the file is no table")]
)
def test_unreadable_precision_files_are_rejected(tmp_path, text, reason):
    path = tmp_path / "file.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PrecisionFileError, match=reason):
        PrecisionFile.load(str(path), DEFAULT)


FP8 = "--fp8-format e4m3 --fp8-recipe tensorwise"


def build_chunk(path, flags=FP8):
    return build_chunks(
        parse_args([*make_argv("deepseek"), *f"{flags} --te-precision-config-file {path}".split()], 1),
        ParallelState.single(),
        64,
    )[0]


def recipe_names(chunk):
    return {module.name: module.recipe.name for module in chunk.modules() if isinstance(module, QuantizedGemms)}


def test_every_layer_gets_the_recipe_of_the_file(tmp_path):
    path = write(
        tmp_path,
        [
            glob_matcher("*.self_attention.*", "bf16"),
            glob_matcher("*.layers.1.mlp.experts.linear_fc1", "mxfp8"),
            glob_matcher("*.layers.1.mlp.experts.linear_fc2", "bf16"),
            glob_matcher("*.layers.2.mlp.experts.*", "bf16"),
        ],
    )
    chunk = build_chunk(path)
    found = recipe_names(chunk)
    assert not any("self_attention" in name for name in found)
    assert {name: recipe for name, recipe in found.items() if ".experts." in name and name.startswith("decoder")} == {
        "decoder.layers.1.mlp.experts.linear_fc1": "mxfp8",
        "decoder.layers.3.mlp.experts.linear_fc1": "tensorwise",
        "decoder.layers.3.mlp.experts.linear_fc2": "tensorwise",
    }
    layers = chunk.decoder.layers
    assert (
        type(layers[1].mlp.experts.quantized[1]) is UnquantizedExpertGemms and layers[2].mlp.experts.quantized is None
    )
    ends = recipe_names(build_chunk(path, f"{FP8} --first-last-layers-bf16 --num-layers-at-start-in-bf16 2"))
    assert not any(name.startswith(("decoder.layers.1.", "decoder.layers.3.")) for name in ends)


def test_precision_file_is_not_read_without_fp8():
    args = parse_args([*make_argv("plain"), "--te-precision-config-file", "missing.yaml"], 1)
    assert build_chunks(args, ParallelState.single(), 64)


def test_weights_stored_in_fp8_have_one_format(tmp_path):
    flags = f"{FP8} --bf16 --fp8-param-gather --use-distributed-optimizer"
    with pytest.raises(ValueError, match="does not go with --fp8-param-gather"):
        build_chunk(write(tmp_path, []), flags)
    assert build_chunk(write(tmp_path, []), f"{FP8} --bf16 --fp8-param-gather --use-torch-fsdp2"), (
        "sharded weights are not kept so"
    )


def test_evaluation_has_its_own_recipe():
    x, w = torch.randn(8, 32), torch.randn(16, 32)
    gemms, blocks = QuantizedGemms(DEFAULT, "layer"), QuantizedGemms(make_recipe("mxfp8"), "layer")
    for evaluation, expected in ((None, x @ w.t()), (make_recipe("mxfp8"), blocks.output(x, w))):
        gemms.evaluation = evaluation
        in_training = gemms.train().output(x, w)
        assert torch.equal(gemms.eval().output(x, w), expected) and not torch.equal(in_training, expected)


def test_bf16_for_all_layers_equals_a_run_without_fp8(tmp_path):
    path = write(tmp_path, [glob_matcher("*", "bf16")])
    plain, ours = (
        train([*make_argv("deepseek"), *flags.split()], 0, ParallelState.single(), 2)
        for flags in ("", f"{FP8} --te-precision-config-file {path}")
    )
    assert [str(difference) for difference in compare(plain, ours)] == []


def one_rank(rank, n, argv):
    return train(argv, rank, create_groups(argv, rank, n), 1)


def test_recipes_on_two_stages_equal_one_process(tmp_path):
    """Names count layers over all stages; formats differ from layer to layer here."""
    path = write(
        tmp_path,
        [
            glob_matcher("*.layers.0.*", "mxfp8"),
            glob_matcher("*.layers.2.*", "bf16"),
            glob_matcher("*.layers.3.*.linear_fc2", "bf16"),
        ],
    )
    argv = [*make_argv("plain"), *f"{FP8} --te-precision-config-file {path}".split()]
    one = train(argv, 0, ParallelState.single(), 1)
    two = run_ranks(one_rank, 2, [*argv, "--pipeline-model-parallel-size", "2"])[0]
    assert [str(difference) for difference in compare(one, two)] == []


def test_layers_with_own_recipe_do_not_use_te(shared, monkeypatch, tmp_path, caplog):
    double = install_fake_te(shared, monkeypatch)
    args = parse_args(
        [
            *make_argv("plain"),
            *f"--transformer-impl transformer_engine --bf16 {FP8} --te-precision-config-file {write(tmp_path, [])}".split(),
        ],
        1,
    )
    with caplog.at_level(logging.INFO):
        factory = layer_factory.select_layer_factory(args, ParallelState.single(), BackendPolicy(cuda=True))
    assert (
        "these layers have several (--te-precision-config-file); using the local layers" in caplog.text
        and factory.name == "transformer_engine"
    )
    assert not double.called()
