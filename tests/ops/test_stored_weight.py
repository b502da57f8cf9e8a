"""A weight cast part by part has the bytes and scales of the whole weight quantised, and products read them."""

import itertools

import pytest
import torch

from moe_trainer.ops.fp8 import QuantizedProducts, make_recipe
from moe_trainer.ops.quantize import amax_of, quantize
from moe_trainer.ops.stored_weight import StoredWeight, can_store

RECIPES = ("delayed", "tensorwise", "blockwise")


def stored(values, recipe, cuts, given=None):
    """Cast in parts that begin at `cuts`."""
    weight = StoredWeight(values.shape, recipe.weight, values.dtype, values.device, lambda: given)
    weight.bind(torch.zeros(values.numel(), dtype=torch.uint8), torch.zeros(weight.num_blocks))
    bounds = [0, *cuts, values.numel()]
    parts = [(values.reshape(-1)[a:b], a) for a, b in itertools.pairwise(bounds)]
    for part, start in parts:
        weight.look_at(part, start)
    weight.settle()
    for part, start in parts:
        weight.cast(part, start)
    return weight


@pytest.mark.parametrize("portion", [1 << 18, 900, 64])
@pytest.mark.parametrize("shape", [(300, 130), (3, 140, 260), (3, 128, 130), (7, 16, 24)])
@pytest.mark.parametrize("name", RECIPES)
def test_parts_give_the_bytes_of_the_whole(name, shape, portion, monkeypatch):
    monkeypatch.setattr("moe_trainer.ops.stored_weight.PORTION_CPU", portion)
    recipe = make_recipe(name)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))
    given = torch.tensor(0.37) if name == "delayed" else None
    numel = values.numel()
    weight = stored(values, recipe, (1, 257, numel // 2 + 3, numel - 5), given)
    matrices = values if values.dim() == 3 else values[None]
    for index, matrix in enumerate(matrices):
        for transposed, scaling in ((False, recipe.weight), (True, recipe.weight_t)):
            expected = quantize(matrix.t() if transposed else matrix, scaling, given)
            found = weight[index].operand(scaling, transposed, torch.float32)
            assert torch.equal(found.dequantized(), expected.dequantized()) and torch.equal(found.inverse, expected.inverse)
        assert weight[index].amax == amax_of(matrix)


def test_fp64_is_rounded_once():
    """1 + 1/16 + a bit lies above the tie between two numbers of E4M3 in fp64, and on it in fp32."""
    values = torch.full((16, 16), 17 / 16 + 2.0**-40, dtype=torch.float64)
    values[0, 0] = 448.0
    weight = stored(values, make_recipe("tensorwise"), ())
    assert weight[0].operand(make_recipe("tensorwise").weight, False, torch.float64).dequantized()[1, 1] == 1.125
    assert stored(values.float(), make_recipe("tensorwise"), ())[0].values_NK[1, 1].float() == 1.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_becomes_nan(name, bad):
    values = torch.ones(256, 256)
    values[3, 3] = bad
    given = torch.tensor(1.0) if name == "delayed" else None
    recipe = make_recipe(name)
    found = stored(values, recipe, (100,), given)[0].operand(recipe.weight, False, torch.float32).dequantized()
    expected = quantize(values, recipe.weight, given).dequantized()
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()


@pytest.mark.parametrize("name", RECIPES)
def test_products_read_the_bytes(name):
    """Same results as quantising the weight, also of what delayed scaling notes; the parameter itself is not looked at."""
    recipe = make_recipe(name)
    generator = torch.Generator().manual_seed(2)
    values, x, grad = (torch.randn(shape, generator=generator) for shape in ((2, 32, 48), (5, 48), (5, 32)))
    plain, kept = QuantizedProducts(recipe, "a"), QuantizedProducts(recipe, "a")
    kept.stored = stored(values, recipe, (7, 1000), kept.weight_scale())
    carrier = kept.stored.carrier(torch.bfloat16)
    assert carrier.shape == values.shape and carrier.isnan().all() and carrier.untyped_storage().nbytes() == 2
    for expert in range(2):
        for method, given in (("output", x), ("input_grad", grad)):
            expected = getattr(plain, method)(given, plain.of_expert(values, expert))
            assert torch.equal(getattr(kept, method)(given, kept.of_expert(carrier, expert)), expected)
    if recipe.delayed is not None:
        assert torch.equal(kept.amax, plain.amax) and kept.amax[1] > 0


def test_a_plain_weight_needs_no_index():
    recipe = make_recipe("blockwise")
    values, x = torch.randn(32, 48), torch.randn(5, 48)
    plain, kept = QuantizedProducts(recipe, "a"), QuantizedProducts(recipe, "a")
    kept.stored = stored(values, recipe, ())
    assert torch.equal(kept.output(x, kept.stored.carrier(torch.float32)), plain.output(x, values))


def test_what_can_be_stored():
    found = {name: can_store(recipe.weight, recipe.weight_t) for name, recipe in
             ((name, make_recipe(name)) for name in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"))}
    assert found == {"delayed": True, "tensorwise": True, "blockwise": True, "mxfp8": False, "nvfp4": False}
