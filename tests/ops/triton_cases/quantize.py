"""Quantisation in Triton's interpreter against the torch definitions, bit for bit. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.quantization import quantize as plain
from moe_trainer.quantization.quantize import E2M1, E4M3, E5M2, FP32, POWER_OF_TWO, Scaling
from moe_trainer.quantization.triton_quantize import quantize

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


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scales", [FP32, POWER_OF_TWO])
@pytest.mark.parametrize("rows,columns", [(1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_quantization_equals_definition(shape, rows, columns, scales, fmt):
    agree(matrix(*shape), Scaling(fmt, rows, columns, scales))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [None, 3.7])
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
