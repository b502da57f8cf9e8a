"""GEMMs of quantised matrices by the device against their definition, on one GPU: that torch's scaled_mm takes our layouts.

What can be shown without one is in tests/quantization/test_scaled_mm.py.
"""

import pytest
import torch

from arguments.mechanisms.formats import NAMED_BY_LAYER
from moe_trainer.quantization.quantize import quantize
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.quantization.scaled_grouped import can_use_native_grouped_mm, native_grouped_mm
from moe_trainer.quantization.scaled_mm import gemm_kind, native_mm, scaled_mm


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 512, 384), (48, 1024, 272)])
@pytest.mark.parametrize("name", [each.key for each in NAMED_BY_LAYER])
def test_scaled_mm_equals_the_dequantized_gemm(name, shape):
    recipe, (rows, inner, outer) = make_recipe(name), shape
    generator = torch.Generator("cuda").manual_seed(0)
    for left, m, k, right, n in (
        (recipe.x, rows, inner, recipe.weight, outer),
        (recipe.grad, rows, outer, recipe.weight_t, inner),
        (recipe.grad_t, outer, rows, recipe.x_t, inner),
    ):
        kind = gemm_kind(left, right)
        if not kind.device <= torch.cuda.get_device_capability() < kind.until:
            pytest.skip(f"GEMMs of kind {kind.name} are for devices from {kind.device} to below {kind.until}")
        a, b = (
            quantize(torch.randn(*size, generator=generator, device="cuda"), scaling, generator=generator)
            for size, scaling in (((m, k), left), ((n, k), right))
        )
        expected = a.dequantized() @ b.dequantized().t()
        found = native_mm(a, b, torch.bfloat16).float()
        assert (found - expected).norm() <= 1e-2 * expected.norm()
        assert scaled_mm(a, b, torch.bfloat16) is not None, "it is used"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_scaled_grouped_mm_equals_the_dequantized_gemms(name):
    recipe, rows = make_recipe(name), (40, 1, 333)
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        [quantize(torch.randn(count, 512, generator=generator, device="cuda"), scaling) for count in counts]
        for counts, scaling in ((rows, recipe.x), ((384,) * 3, recipe.weight))
    )
    if not can_use_native_grouped_mm(torch.empty(1, 512, device="cuda"), 384, recipe.x, recipe.weight, torch.bfloat16):
        pytest.skip(f"this device has no grouped GEMMs of {name}")
    expected = torch.cat([one.dequantized() @ other.dequantized().t() for one, other in zip(a, b)])
    assert (native_grouped_mm(a, b).float() - expected).norm() <= 1e-2 * expected.norm()
