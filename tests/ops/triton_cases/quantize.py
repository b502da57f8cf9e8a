"""Quantisation in Triton's interpreter against the torch definitions, bit for bit. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.quantization import quantize as plain
from moe_trainer.quantization.mxfp8_rowwise import TORCH_ROW_CASTS
from moe_trainer.quantization.quantize import E2M1, E4M3, E5M2, FP32, POWER_OF_TWO, Scaling
from moe_trainer.quantization.triton_quantize import ROW_CASTS, dequantize, quantize, quantize_both

SHAPES = [(1, 1), (3, 128), (5, 131), (130, 257), (0, 64), (37, 32)]


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over many binades, exact zeros, a row of zeros."""
    x = torch.randn(rows, columns) * torch.exp(torch.randn(rows, columns) * 4)
    x[torch.rand(rows, columns) < 0.05] = 0.0
    x[rows // 2 : rows // 2 + 1] = 0.0
    return x


def agree(x: torch.Tensor, scaling: Scaling, scale: torch.Tensor | None = None) -> None:
    data, inverse = quantize(x, scaling, scale)
    expected = plain.quantize(x, scaling, scale)
    assert data.dtype == scaling.fmt.dtype and inverse.shape == expected.inverse.shape
    torch.testing.assert_close(inverse, expected.inverse, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(data.float(), expected.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("fmt", "scales"),
    [(E4M3, POWER_OF_TWO), (E4M3, FP32), (E5M2, POWER_OF_TWO)],
    ids=["e4m3", "e4m3 fp32 scales", "e5m2"],
)
@pytest.mark.parametrize("rows,columns", [(1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_quantization_and_dequantization_equal_definition(shape, rows, columns, fmt, scales):
    scaling = Scaling(fmt, rows, columns, scales)
    agree(x := matrix(*shape), scaling)
    if x.shape[0] > 2:
        x[2, -1] = float("nan")
    data, inverse = quantize(x, scaling)
    exact = plain.quantize(x, scaling).dequantized()
    # Triton's interpreter truncates what bf16 does not hold; with powers of two it holds everything
    for dtype in (torch.float32, torch.bfloat16)[: 1 + (scales == POWER_OF_TWO)]:
        found = dequantize(data, inverse, scaling, dtype)
        torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("fmt", "scale"), [(E4M3, None), (E5M2, 3.7)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_per_tensor_quantization_equals_definition(shape, scale, fmt):
    agree(matrix(*shape), Scaling(fmt), None if scale is None else torch.tensor(scale))


def test_quantization_of_a_transposed_matrix():
    agree(matrix(70, 40).t(), Scaling(E4M3, 1, 32, POWER_OF_TWO))
    agree(matrix(70, 40).t(), Scaling(E4M3))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_rounding_of_every_value_and_midpoint(fmt):
    """All bytes, and around each midpoint the tie and its fp32 neighbours: an unscaled tensor (scale 1)."""
    grid = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(fmt.dtype).float()
    grid = grid[grid.isfinite()].unique()
    middle = (grid[1:] + grid[:-1]) / 2
    away = torch.full((), float("inf"))
    points = torch.cat([grid, middle, torch.nextafter(middle, away), torch.nextafter(middle, -away), grid * 1.3])
    agree(points[None], Scaling(fmt), torch.tensor(1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "scaling", [Scaling(E4M3, 1, 32, POWER_OF_TWO), Scaling(E5M2, 128, 128), Scaling(E4M3)], ids=str
)
def test_nonfinite_values_are_propagated(value, scaling):
    x = matrix(4, 300)
    x[2, 131] = value
    agree(x, scaling)


def test_quantization_of_extreme_values():
    x = torch.tensor([[3e38, -1.0] * 16, [1e-40, 1e-45] * 16, [1e-38, 0.0] * 16])
    for scales in (FP32, POWER_OF_TWO):
        agree(x, Scaling(E4M3, 1, 32, scales))


@pytest.mark.parametrize(
    "scaling",
    [
        Scaling(E2M1, 1, 16),
        Scaling(E4M3, 1, 32, stochastic=True),
        Scaling(E4M3, 1, 32, hadamard=True),
        Scaling(E4M3, 2, 32),
    ],
    ids=str,
)
def test_unsupported_quantization_is_rejected(scaling):
    with pytest.raises(ValueError, match="Triton"):
        quantize(torch.randn(4, 32), scaling)


EXTREMES = torch.tensor([[3e38, -1.0] * 32, [1e-40, -1e-45] * 32, [1e-38, -0.0] * 32, [448.0, -1e-30] * 32])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in (*SHAPES, (7, 384))]
    + [((5, 131), dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
    ids=str,
)
def test_rows_for_communication_equal_definition(shape, dtype):
    x = matrix(*shape).clamp(-6e4, 6e4).to(dtype)
    packed = ROW_CASTS.pack(x)
    assert packed.dtype == torch.uint8 and torch.equal(packed, TORCH_ROW_CASTS.pack(x))
    found = ROW_CASTS.unpack(packed, shape[1], dtype)
    assert found.dtype == dtype and torch.equal(found, TORCH_ROW_CASTS.unpack(packed, shape[1], dtype))
    assert torch.equal(ROW_CASTS.round(x), found)


def test_tables_for_libraries_equal_definition():
    x = matrix(37, 256).bfloat16()
    values, scales = ROW_CASTS.split(x)
    expected = TORCH_ROW_CASTS.split(x)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (37, 2))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip((values, scales), expected))
    assert torch.equal(ROW_CASTS.join(values, scales, x.dtype), TORCH_ROW_CASTS.join(*expected, x.dtype))


def test_rows_of_a_strided_matrix():
    x = matrix(64, 70).t()
    assert torch.equal(ROW_CASTS.pack(x), TORCH_ROW_CASTS.pack(x))


def test_extreme_rows_equal_definition():
    packed = ROW_CASTS.pack(EXTREMES)
    assert torch.equal(packed, TORCH_ROW_CASTS.pack(EXTREMES))
    assert packed[1, -1] == 0, "the inverse of the largest scale, 2^-127, has exponent 0"
    assert torch.equal(ROW_CASTS.unpack(packed, 64, torch.float32), TORCH_ROW_CASTS.unpack(packed, 64, torch.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_rows_are_propagated(value):
    x = matrix(4, 96)
    x[2, 40] = value
    packed = ROW_CASTS.pack(x)
    assert packed[2, 96:].tolist()[1] == 0xFF
    found, expected = (casts.unpack(casts.pack(x), 96, torch.float32) for casts in (ROW_CASTS, TORCH_ROW_CASTS))
    assert found[2, 32:64].isnan().all() and found.isnan().sum() == 32
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_byte_is_dequantized(fmt):
    grid = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(fmt.dtype)
    known = grid[grid.float().isfinite()][None]
    inverse = torch.full((1, -(-known.shape[1] // 32)), 0.5)
    found = dequantize(known, inverse, Scaling(fmt, 1, 32), torch.float32)
    assert torch.equal(found, known.float() / 2) and torch.equal(found.signbit(), known.float().signbit())


@pytest.mark.parametrize(
    ("shape", "is_transposed"),
    [((128, 128), False), ((130, 200), True), ((5, 3), False), ((5, 3), True), ((0, 32), False), ((64, 300), False)],
)
@pytest.mark.parametrize(
    ("block", "scales", "fmt"), [(128, POWER_OF_TWO, E4M3), (32, POWER_OF_TWO, E5M2), (32, FP32, E4M3)]
)
def test_both_directions_of_one_read(shape, block, scales, fmt, is_transposed):
    x = torch.randn(shape) * torch.logspace(-4, 4, shape[1])
    if x.numel() > 100:
        x[3, 2], x[1, 1] = float("inf"), 0.0
    x = x.t() if is_transposed else x
    scaling = Scaling(fmt, 1, block, scales)
    for matrix, found in zip((x, x.t()), quantize_both(x, scaling), strict=True):
        data, inverse = quantize(matrix, scaling)
        assert torch.equal(found.values.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(found.inverse.view(torch.int32), inverse.view(torch.int32))


def test_both_directions_need_blocks_of_rows():
    x = torch.randn(64, 64)
    for scaling in (Scaling(E4M3), Scaling(E4M3, 32, 32, POWER_OF_TWO), Scaling(E4M3, 1, 256), Scaling(E2M1, 1, 16)):
        assert quantize_both(x, scaling) is None
    assert quantize_both(x.double(), Scaling(E4M3, 1, 32, POWER_OF_TWO)) is None
