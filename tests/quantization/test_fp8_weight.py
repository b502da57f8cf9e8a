"""A weight cast part by part has the bytes and scales of the full weight quantized, and GEMMs read them."""

import itertools

import pytest
import torch

from arguments.mechanisms.formats import QUANTIZED
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.mx_weight import MxWeight
from moe_trainer.quantization.quantize import compute_amax, quantize
from moe_trainer.quantization.recipe import make_recipe

STORED_ONCE = {each.key: not each.stored.is_gathered_wide for each in QUANTIZED if each.stored is not None}
RECIPES = tuple(name for name, once in STORED_ONCE.items() if once)


def stored(values, recipe, cuts, scale=None):
    """Cast in parts that begin at `cuts`."""
    kind = recipe.weight_class
    weight = kind(values.shape, recipe.weight, values.dtype, values.device, lambda: scale)
    codes = torch.zeros(values.numel() // kind.elements_per_byte, dtype=torch.uint8)
    weight.bind(codes, torch.zeros(weight.num_blocks))
    bounds = [0, *cuts, values.numel()]
    parts = [(values.reshape(-1)[a:b], a) for a, b in itertools.pairwise(bounds)]
    for part, start in parts:
        weight.update_amax(part, start)
    weight.compute_scales()
    for part, start in parts:
        weight.cast(part, start)
    return weight


@pytest.mark.parametrize("portion", [1 << 18, 900, 64])
@pytest.mark.parametrize("shape", [(300, 130), (3, 140, 260), (3, 128, 130), (7, 16, 24)])
@pytest.mark.parametrize("name", RECIPES)
def test_weight_cast_in_parts_equals_full_cast(name, shape, portion, monkeypatch):
    monkeypatch.setattr("moe_trainer.quantization.stored_weight.PORTION_CPU", portion)
    recipe = make_recipe(name)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))
    scale = torch.tensor(0.37) if name == "delayed" else None
    numel = values.numel()
    weight = stored(values, recipe, (2, 258, numel // 2 + 4, numel - 6), scale)
    matrices = values if values.dim() == 3 else values[None]
    for index, matrix in enumerate(matrices):
        for transposed, scaling in ((False, recipe.weight), (True, recipe.weight_t)):
            expected = quantize(matrix.t() if transposed else matrix, scaling, scale)
            found = weight[index].operand(scaling, transposed, torch.float32)
            assert torch.equal(found.dequantized(), expected.dequantized()) and torch.equal(
                found.inverse, expected.inverse
            )
            assert found.is_packed == (recipe.weight_class.elements_per_byte > 1), (
                "GEMMs of a device take the bytes as they are"
            )
            fp64 = weight[index].operand(scaling, transposed, torch.float64)
            assert fp64.values.dtype == torch.float64 and torch.equal(fp64.values.float(), expected.values)
        assert weight[index].amax == compute_amax(matrix)


def test_fp64_weights_are_rounded_once():
    """1 + 1/16 + a bit is above the tie between two numbers of E4M3 in fp64, and on it in fp32."""
    values = torch.full((16, 16), 17 / 16 + 2.0**-40, dtype=torch.float64)
    values[0, 0] = 448.0
    weight = stored(values, make_recipe("tensorwise"), ())
    assert weight[0].operand(make_recipe("tensorwise").weight, False, torch.float64).dequantized()[1, 1] == 1.125
    assert stored(values.float(), make_recipe("tensorwise"), ())[0].values_NK[1, 1].float() == 1.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_nonfinite_weights_become_nan(name, bad):
    values = torch.ones(256, 256)
    values[3, 3] = bad
    scale = torch.tensor(1.0) if name == "delayed" else None
    recipe = make_recipe(name)
    found = stored(values, recipe, (100,), scale)[0].operand(recipe.weight, False, torch.float32).dequantized()
    expected = quantize(values, recipe.weight, scale).dequantized()
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()


@pytest.mark.parametrize("name", RECIPES)
def test_gemms_read_the_fp8_weight(name):
    """Results and delayed-scaling maxima equal those of quantizing the weight.

    The parameter itself is not looked at.
    """
    recipe = make_recipe(name)
    generator = torch.Generator().manual_seed(2)
    values, x, grad = (torch.randn(shape, generator=generator) for shape in ((2, 32, 48), (5, 48), (5, 32)))
    plain, kept = QuantizedGemms(recipe, "a"), QuantizedGemms(recipe, "a")
    kept.stored_weight = stored(values, recipe, (8, 1000), kept.weight_scale())
    placeholder_param = kept.stored_weight.placeholder_param(torch.bfloat16)
    assert (
        placeholder_param.shape == values.shape
        and placeholder_param.isnan().all()
        and placeholder_param.untyped_storage().nbytes() == 2
    )
    for expert in range(2):
        for method, operand in (("output", x), ("input_grad", grad)):
            torch.manual_seed(3)  # gradients may be rounded stochastically
            expected = getattr(plain, method)(operand, plain.expert_weight(values, expert))
            torch.manual_seed(3)
            assert torch.equal(getattr(kept, method)(operand, kept.expert_weight(placeholder_param, expert)), expected)
    if recipe.delayed is not None:
        assert torch.equal(kept.amax, plain.amax) and kept.amax[1] > 0


@pytest.mark.parametrize("shape", [(2, 33, 48), (64, 70)])
@pytest.mark.parametrize(("dtype", "portion"), [(torch.bfloat16, 1 << 18), (torch.bfloat16, 500), (torch.float64, 1)])
def test_mxfp8_weight_equals_a_quantized_weight_in_both_directions(shape, dtype, portion, monkeypatch):
    monkeypatch.setattr("moe_trainer.quantization.mx_weight.PORTION_CPU", portion)
    recipe, generator = make_recipe("mxfp8"), torch.Generator().manual_seed(4)
    values = (torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))).to(
        dtype
    )
    values.view(-1)[7] = torch.inf
    weight = MxWeight(values.shape, recipe.weight, values.device, quantize)
    weight.cast(values.view(-1))
    plain, kept = QuantizedGemms(recipe, "a"), QuantizedGemms(recipe, "a")
    kept.stored_weight = weight
    for index, matrix in enumerate(values if values.dim() == 3 else values[None]):
        for method, width in (("output", shape[-1]), ("input_grad", shape[-2])):
            rows = torch.randn(5, width, generator=generator).to(dtype)
            found, expected = (getattr(gemms, method)(rows, x) for gemms, x in ((kept, weight[index]), (plain, matrix)))
            assert torch.equal(found, expected) or torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num()) and (index > 0 or found.isnan().any())
    stored_bytes = sum(x.numel() for x in weight.tensors().values())
    assert {x.dtype for x in weight.tensors().values()} == {torch.uint8} and stored_bytes < 2.2 * values.numel()


def test_weight_without_a_part_index():
    recipe = make_recipe("blockwise")
    values, x = torch.randn(32, 48), torch.randn(5, 48)
    plain, kept = QuantizedGemms(recipe, "a"), QuantizedGemms(recipe, "a")
    kept.stored_weight = stored(values, recipe, ())
    assert torch.equal(kept.output(x, kept.stored_weight.placeholder_param(torch.float32)), plain.output(x, values))


def test_which_recipes_can_store_fp8_weights():
    """One set of bytes serves both GEMMs of a weight if the transposed weight has the same scales."""
    found = {}
    for name in STORED_ONCE:
        recipe = make_recipe(name)
        scaling, transposed = recipe.weight, recipe.weight_t
        blocks = {scaling.rows, scaling.cols, transposed.rows, transposed.cols}
        found[name] = scaling.fmt == transposed.fmt and len(blocks) == 1
    assert found == STORED_ONCE and not found["mxfp8"] and found["blockwise"]
