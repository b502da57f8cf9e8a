"""--fp8-recipe custom: a function chooses the format of every tensor."""

import pytest
import torch
from training.layouts import assert_equal, make_argv, train

from arguments import ArgumentError, parse_args
from arguments.mechanisms.formats import NAMED_BY_LAYER
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.config import QuantizationConfig, get_recipe
from moe_trainer.quantization.custom_recipe import CustomRecipe, QuantizerFactoryError
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.recipe import make_recipe

HERE = "quantization.test_custom_recipe"
CUSTOM = "--fp8-format e4m3 --fp8-recipe custom --fp8-quantizer-factory"
SMALL = [*make_argv("plain"), "--num-layers", "2", "--num-experts", "4", "--global-batch-size", "4"]


class Float8Quantizer:
    """Stands for a quantizer of TransformerEngine."""


def blockwise(role):
    return "blockwise"


def by_tensor(role):
    return {"input": "mxfp8", "weight": "blockwise", "grad_output": NAMED_BY_LAYER[-1].key}[role.tensor_type]


def by_name(role):
    if role.name.endswith("linear_fc2"):
        return "high_precision"
    return "tensorwise" if role.module_type == "grouped_linear" else "mxfp8"


def partly_high_precision(role):
    return "high_precision" if role.tensor_type == "weight" else "mxfp8"


def unknown_format(role):
    return "int8"


def returns_quantizers(role):
    return Float8Quantizer()


def raises(role):
    raise KeyError(role.name)


def exits(role):
    raise SystemExit(0)


def takes_names_apart(role):
    return "mxfp8" if role.name.split(".")[2].isdigit() else None


def load(function):
    return CustomRecipe.load("--fp8-quantizer-factory", f"{HERE}:{function.__name__}", hybrid=False, wgrad=True)


@pytest.mark.parametrize("name", [each.key for each in NAMED_BY_LAYER])
def test_one_format_for_all_tensors_is_the_recipe_of_that_name(name):
    custom = CustomRecipe("", lambda role: name, hybrid=True, wgrad=True).recipe("decoder.layers.0", False)
    built_in = make_recipe(name, hybrid=True)
    for operand in ("x", "weight", "grad", "weight_t", "grad_t", "x_t"):
        assert getattr(custom, operand) == getattr(built_in, operand), operand


def test_mixed_formats_compute_the_matmul():
    """The weight gradient has a transformed operand only if both are."""
    recipe = load(by_tensor).recipe("decoder.layers.0.linear", False)
    assert (recipe.x.cols, recipe.weight.rows, recipe.grad.cols) == (32, 128, 16)
    assert not recipe.grad_t.hadamard and recipe.grad_t.stochastic
    torch.manual_seed(0)
    gemms, x, weight, grad = (
        QuantizedGemms(recipe, "a"),
        *(torch.randn(shape) for shape in ((64, 48), (32, 48), (64, 32))),
    )
    for found, expected in (
        (gemms.output(x, weight), x @ weight.t()),
        (gemms.input_grad(grad, weight), grad @ weight),
        (gemms.weight_grad(grad, x), grad.t() @ x),
    ):
        assert 0 < (found - expected).norm() < 0.2 * expected.norm()


def test_training_with_a_factory_equals_the_recipe_it_names():
    single = ParallelState.single()
    expected = train([*SMALL, *"--fp8-format e4m3 --fp8-recipe blockwise".split()], 0, single, 1)
    assert_equal(train([*SMALL, *f"{CUSTOM} {HERE}.blockwise".split()], 0, single, 1), expected)


def test_a_factory_chooses_by_name_and_module():
    args = parse_args([*SMALL, *f"{CUSTOM} {HERE}.by_name".split()], 1)
    config = QuantizationConfig.from_args(args.precision, args.model, 1, ParallelState.single())
    assert config.make_gemms("decoder.layers.0.mlp.experts.linear_fc2", is_sharded=True, is_expert=True) is None
    experts = config.make_gemms("decoder.layers.0.mlp.experts.linear_fc1", is_sharded=True, is_expert=True)
    linear = config.make_gemms("decoder.layers.0.self_attention.linear_qkv", is_sharded=True)
    assert experts.recipe.weight.per_tensor and linear.recipe.weight.cols == 32
    assert config.recipe.alignment == 32


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package.function", "module no_such_package cannot be imported (ModuleNotFoundError"),
        (f"{HERE}.no_such_function", f"module {HERE} has no function no_such_function"),
        (f"{HERE}.HERE", f"module {HERE} has no function HERE"),
        ("function", "needs the form package.module.function"),
        (f"{HERE}.partly_high_precision", "a linear in high_precision needs it for all three tensors"),
        (f"{HERE}.unknown_format", "'int8' for input of decoder.layers.0"),
        (f"{HERE}:returns_quantizers", "a Float8Quantizer for input of decoder.layers.0"),
        (f"{HERE}.exits", "failed for TensorRole(module_type='linear', tensor_type='input', name='decoder.layers.0')"),
        (f"{HERE}.raises", "failed for TensorRole(module_type='linear', tensor_type='input', name='decoder.layers.0')"),
    ],
)
def test_mistakes_of_a_factory_are_named(path, said):
    with pytest.raises(QuantizerFactoryError) as caught:
        CustomRecipe.load("--fp8-quantizer-factory", path, hybrid=False, wgrad=True).recipe("decoder.layers.0", False)
    assert str(caught.value).startswith(f"--fp8-quantizer-factory {path}: ") and said in str(caught.value)


def test_a_factory_in_a_script_that_exits_is_no_success(tmp_path, monkeypatch):
    """A rank that exits with code 0 would look like one that has trained."""
    (tmp_path / "script_without_guard.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(QuantizerFactoryError, match=r"cannot be imported \(SystemExit: 0\)"):
        CustomRecipe.load("--fp8-quantizer-factory", "script_without_guard.f", hybrid=False, wgrad=True)


def test_a_factory_is_asked_about_a_linear_that_exists():
    assert load(takes_names_apart).names_formats() and not load(returns_quantizers).names_formats()


def test_a_factory_of_fp4_is_loaded_from_its_flag():
    args = parse_args(
        [*SMALL, *f"--fp4-format e2m1 --fp4-recipe custom --fp4-quantizer-factory {HERE}.by_tensor".split()], 1
    )
    assert get_recipe(args.precision).custom.factory.__name__ == "by_tensor"
    with pytest.raises(ArgumentError, match="--fp4-quantizer-factory"):
        parse_args([*SMALL, *"--fp4-format e2m1 --fp4-recipe custom".split()], 1)
