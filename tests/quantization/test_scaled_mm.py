"""Native GEMMs of quantized matrices.

Layouts against their definitions, and torch's scaled_mm computed as it is defined.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from arguments.mechanisms.formats import NAMED_BY_LAYER
from moe_trainer.quantization import scaled_mm as module
from moe_trainer.quantization.quantize import E2M1, E4M3, E5M2, QuantizedTensor, Scaling, quantize
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.quantization.scaled_layouts import (
    block128_layout,
    pack_e2m1,
    pad_to_multiple,
    split_two_level,
    swizzle_e8m0,
    swizzle_scales,
)
from moe_trainer.quantization.scaled_mm import BLOCKS, MX, NV, TENSORS, gemm_kind, native_mm

SIGNATURE = inspect.signature(F.scaled_mm)
BLOCK = {
    ScalingType.BlockWise1x16: (1, 16),
    ScalingType.BlockWise1x32: (1, 32),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def offset(row: int, col: int, cols: int) -> int:
    """Where cuBLASLt's documentation puts the scale of a row and a block of columns."""
    tile = (row // 128) * -(-cols // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


@pytest.mark.parametrize("shape", [(128, 4), (200, 5), (3, 1), (256, 16)])
def test_swizzled_scale_layout(shape):
    scales = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
    flat = swizzle_scales(scales)
    for row in range(shape[0]):
        for col in range(shape[1]):
            assert flat[offset(row, col, shape[1])] == scales[row, col]
    assert flat.numel() % 512 == 0 and flat.sum() == scales.sum() + flat.numel() - scales.numel()


def test_e2m1_values_are_packed_in_pairs():
    values = torch.tensor([[*E2M1_VALUES, *(-value for value in E2M1_VALUES)]])
    assert pack_e2m1(values).view(torch.uint8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


@pytest.mark.parametrize("blocks", [(3, 4), (3, 5)])
def test_scales_of_square_blocks_are_by_columns_for_a_transposed_weight(blocks):
    rows, cols = blocks
    scales = torch.arange(float(rows * cols)).view(cols, rows).t()  # those of the weight, transposed
    laid = block128_layout(scales)
    assert laid.shape == (-(-cols // 4) * 4, rows) and laid.stride(0) == 1
    assert torch.equal(laid.t()[:, :cols], scales)


@pytest.mark.parametrize("cols", [1, 16])
def test_two_level_scales_equal_the_definition(cols):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 64, generator=generator) * torch.logspace(-6, 3, 48)[:, None]
    x[5] = 0
    inverse = quantize(x, Scaling(E2M1, cols, 16, "two level")).inverse
    stored, full = split_two_level(inverse)
    assert torch.equal(stored.to(E4M3.dtype).float(), stored) and stored.max() == 448
    torch.testing.assert_close(stored * full, inverse, rtol=1e-6, atol=0)
    assert split_two_level(torch.zeros(2, 2))[0].eq(0).all()


def decoded(values: torch.Tensor, scales: list, kinds: list, swizzles: list) -> torch.Tensor:
    """An operand [R, K] of torch's scaled_mm, by definition."""
    if values.dtype == torch.float4_e2m1fn_x2:
        codes = values.view(torch.uint8)
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
        numbers = table[codes]
    else:
        numbers = values.float()
    for scale, kind, swizzle in zip(scales, kinds, swizzles, strict=True):
        if kind == ScalingType.TensorWise:
            assert scale.numel() == 1 and scale.dtype == torch.float32 and swizzle == SwizzleType.NO_SWIZZLE
            numbers = numbers * scale
            continue
        rows, cols = BLOCK[kind]
        height, width = (
            numbers.shape[0] // rows if rows == 1 else -(-numbers.shape[0] // rows),
            numbers.shape[1] // cols,
        )
        if cols < 128:
            assert swizzle == SwizzleType.SWIZZLE_32_4_4 and scale.is_contiguous()
            assert scale.dtype == (torch.float8_e8m0fnu if cols == 32 else torch.float8_e4m3fn)
            assert scale.numel() == -(-height // 128) * 128 * -(-width // 4) * 4
            flat = scale.float()
            grid = torch.tensor([[flat[offset(row, col, width)] for col in range(width)] for row in range(height)])
        elif rows == 1:
            assert scale.shape == (height, width) and scale.stride(0) == 1 and scale.dtype == torch.float32
            grid = scale
        else:
            assert scale.shape == (-(-width // 4) * 4, height) and scale.stride() == (1, scale.shape[0])
            grid = scale.t()[:, :width]
        numbers = numbers * grid.repeat_interleave(rows, 0)[: len(numbers)].repeat_interleave(cols, 1)
    return numbers


@pytest.fixture
def device(monkeypatch):
    """torch's scaled_mm, as it is defined."""
    calls = []

    def scaled_mm(*args, **kwargs):
        bound = SIGNATURE.bind(*args, **kwargs).arguments
        calls.append(bound)
        a, b = bound["mat_a"], bound["mat_b"]
        assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] == b.shape[0]
        assert a.shape[0] % 16 == a.shape[1] % 16 == b.shape[1] % 16 == 0 and not bound["use_fast_accum"]
        left, right = (
            decoded(x, bound[f"scale_{name}"], bound[f"scale_recipe_{name}"], bound[f"swizzle_{name}"])
            for x, name in ((a, "a"), (b.t(), "b"))
        )
        return (left @ right.t()).to(bound["output_dtype"])

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return calls


def operand(rows, cols, scaling, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return quantize(x, scaling, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(64, 256, 128), (37, 200, 150)])
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("name", [each.key for each in NAMED_BY_LAYER])
def test_scaled_mm_equals_the_definition(device, name, shape, as_bytes):
    recipe, (rows, inner, outer) = make_recipe(name), shape
    pairs = {
        "output": (recipe.x, rows, inner, recipe.weight, outer),
        "of x": (recipe.grad, rows, outer, recipe.weight_t, inner),
        "of the weight": (recipe.grad_t, outer, rows, recipe.x_t, inner),
    }
    for left, m, k, right, n in pairs.values():
        a, b = operand(m, k, left, 0), operand(n, k, right, 1)
        if as_bytes and not left.fmt.is_packed:
            a, b = (QuantizedTensor(x.values.to(x.scaling.fmt.dtype), x.inverse, x.scaling) for x in (a, b))
        torch.testing.assert_close(
            native_mm(a, b, torch.float32), a.dequantized() @ b.dequantized().t(), rtol=1e-5, atol=1e-4
        )
    assert len(device) == 3


def test_gemm_kind_of_every_recipe():
    kinds = {"delayed": TENSORS, "tensorwise": TENSORS, "blockwise": BLOCKS, "mxfp8": MX}
    kinds |= {each.key: NV for each in NAMED_BY_LAYER if each.has_global_scale}
    for name, kind in kinds.items():
        recipe = make_recipe(name)
        found = {
            gemm_kind(recipe.x, recipe.weight),
            gemm_kind(recipe.grad, recipe.weight_t),
            gemm_kind(recipe.grad_t, recipe.x_t),
        }
        assert found == {kind}
    hybrid = make_recipe("blockwise", hybrid=True)
    assert gemm_kind(hybrid.grad, hybrid.weight_t) == gemm_kind(hybrid.x, hybrid.weight) == BLOCKS
    assert gemm_kind(hybrid.grad, hybrid.grad) is None
    assert gemm_kind(make_recipe("tensorwise", hybrid=True).grad, Scaling(E4M3)) == TENSORS
    assert (
        gemm_kind(Scaling(E5M2), Scaling(E5M2)) is None
        and gemm_kind(Scaling(E4M3), Scaling(E4M3, 1, 32, "power of two")) is None
    )
    assert gemm_kind(Scaling(E4M3, 128, 128, "power of two"), Scaling(E4M3, 128, 128, "power of two")) is None
    assert gemm_kind(Scaling(E4M3, 1, 128), Scaling(E4M3, 1, 128)) is None


def test_padding_to_multiple_adds_zeros():
    x = operand(5, 40, Scaling(E2M1, 1, 16, "two level"), 0)
    more = pad_to_multiple(x, 32, 32)
    assert more.values.shape == (32, 64) and more.inverse.shape == (32, 4)
    assert (
        torch.equal(more.dequantized()[:5, :40], x.dequantized())
        and not more.dequantized()[5:].any()
        and not more.dequantized()[:, 40:].any()
    )


@pytest.mark.parametrize(
    ("capability", "name", "works"),
    [
        ((8, 0), "tensorwise", False),
        ((8, 9), "tensorwise", True),
        ((9, 0), "blockwise", True),
        ((10, 0), "blockwise", False),
        ((9, 0), "mxfp8", False),
        ((10, 0), "mxfp8", True),
        ((10, 0), "nvfp4", True),
        ((12, 0), "nvfp4", True),
    ],
)
def test_scaled_mm_support_by_device(device, monkeypatch, capability, name, works):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    recipe = make_recipe(name)
    assert module._works.__wrapped__(torch.device("cpu"), recipe.x, recipe.weight, torch.bfloat16) is works


def test_failing_or_inaccurate_scaled_mm_is_not_used(device, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    recipe = make_recipe("mxfp8")
    monkeypatch.setattr(module, "swizzle_e8m0", lambda scales: swizzle_e8m0(scales.flip(0)))
    assert not module._works.__wrapped__(torch.device("cpu"), recipe.x, recipe.weight, torch.bfloat16)
    monkeypatch.setattr(F, "scaled_mm", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("not on this device")))
    assert not module._works.__wrapped__(torch.device("cpu"), recipe.x, recipe.weight, torch.bfloat16)
    assert "gives other numbers" in caplog.text and "refuses" in caplog.text and "not on this device" in caplog.text
