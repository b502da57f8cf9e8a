"""Rounding and scales against tables of codes and definitions written out block by block."""

import math
import struct

import pytest
import torch

from moe_trainer.quantization.quantize import (
    E2M1,
    E4M3,
    E5M2,
    FP32,
    POWER_OF_TWO,
    TWO_LEVEL,
    Scaling,
    block_amax,
    compute_amax,
    compute_scale,
    floor_power_of_two,
    hadamard,
    quantize,
    round_nearest,
    round_stochastic,
)

FORMATS = {"e4m3": (E4M3, 4, 3, 7), "e5m2": (E5M2, 5, 2, 15), "e2m1": (E2M1, 2, 1, 1)}


def table(name: str) -> list[tuple[float, int]]:
    """Every finite number of a format with its code, from the bits: exponent 0 is subnormal.

    E4m3 has one NaN, e5m2 infinities.
    """
    _, exponent_bits, mantissa_bits, bias = FORMATS[name]
    found = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        sign, exponent = code >> (exponent_bits + mantissa_bits), code >> mantissa_bits & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        last = exponent == (1 << exponent_bits) - 1
        if (name == "e5m2" and last) or (name == "e4m3" and last and mantissa == 7):
            continue
        size = (
            mantissa * 2.0 ** (1 - bias - mantissa_bits)
            if exponent == 0
            else (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        )
        found.append((-size if sign else size, code))
    return found


def nearest(x: float, name: str) -> float:
    """Return the nearest number of the table, with ties to the even code."""
    entries = table(name)
    distance = min(abs(x - value) for value, _ in entries)
    return next(value for value, code in sorted(entries, key=lambda entry: entry[1] & 1) if abs(x - value) == distance)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_to_nearest_even_for_every_value(name):
    fmt = FORMATS[name][0]
    numbers = sorted({value for value, _ in table(name)})
    assert numbers[-1] == fmt.max
    middles = [(a + b) / 2 for a, b in zip(numbers, numbers[1:])]
    points = [
        *numbers,
        *middles,
        *(math.nextafter(m, math.inf) for m in middles),
        *(math.nextafter(m, -math.inf) for m in middles),
        1e-9,
        1e9,
        -1e9,
    ]
    expected = torch.tensor([nearest(point, name) for point in points], dtype=torch.float64)
    torch.testing.assert_close(round_nearest(torch.tensor(points, dtype=torch.float64), fmt), expected, rtol=0, atol=0)
    single = [struct.unpack("f", struct.pack("f", point))[0] for point in points]
    expected = torch.tensor([nearest(point, name) for point in single])
    torch.testing.assert_close(round_nearest(torch.tensor(single), fmt), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_is_unbiased(name):
    fmt, generator = FORMATS[name][0], torch.Generator().manual_seed(0)
    numbers = sorted({value for value, _ in table(name)})
    for low, high in list(zip(numbers, numbers[1:]))[:: max(1, len(numbers) // 12)]:
        x = torch.full((4000,), low + 0.3 * (high - low), dtype=torch.float64)
        rounded = round_stochastic(x, fmt, generator)
        assert set(rounded.tolist()) == {low, high}
        assert abs(rounded.mean().item() - x[0].item()) < 0.05 * (high - low)
    exact = torch.tensor(numbers)
    assert (
        torch.equal(round_stochastic(exact, fmt, generator), exact)
        and round_stochastic(torch.tensor([1e9]), fmt, generator) == fmt.max
    )


def test_stochastic_rounding_uses_its_generator():
    x = torch.randn(64)
    first, again, other = (round_stochastic(x, E2M1, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("name", FORMATS)
def test_maximum_noise_keeps_representable_values(name, monkeypatch):
    """6 of E2M1 is three steps: 3 + (1 - 2^-24) is 4 in fp32, which would make it 8."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2.0**-24))
    numbers = torch.tensor(sorted(value for value, _ in table(name)))
    assert torch.equal(round_stochastic(numbers, FORMATS[name][0], None), numbers)
    between = torch.tensor([0.3, -0.3]) * FORMATS[name][0].max
    rounded = round_stochastic(between, FORMATS[name][0], None)
    assert (rounded > between).all() and torch.equal(rounded, round_nearest(rounded, FORMATS[name][0])), (
        "up, to a neighbour"
    )


def test_floor_power_of_two():
    x = torch.tensor([1.0, 1.5, 2.0, 3.999, 0.7, 1e-40, 3e38, float("nan")])
    found = floor_power_of_two(x)
    assert (
        found[:5].tolist() == [1.0, 1.0, 2.0, 2.0, 0.5]
        and found[5] == 2.0**-127
        and found[6] == 2.0**127
        and found[7].isnan()
    )


def test_scales_of_zero_and_nonfinite_maxima():
    scale = compute_scale(torch.tensor([0.0, 448.0, 1e-42, float("inf"), float("nan")]), E4M3)
    assert scale[:2].tolist() == [1.0, 1.0] and torch.isfinite(scale[2]) and scale[3].isnan() and scale[4].isnan()
    assert compute_amax(torch.zeros(0, 4)) == 0


def blocks(x: torch.Tensor, rows: int, cols: int):
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            yield slice(i, i + rows), slice(j, j + cols)


SCALINGS = {
    "tensor": Scaling(E4M3), "tensor e5m2": Scaling(E5M2), "1 x 128": Scaling(E4M3, 1, 128, POWER_OF_TWO), "128 x 128": Scaling(E4M3, 128, 128, POWER_OF_TWO),
    "128 x 128 fp32": Scaling(E4M3, 128, 128, FP32), "1 x 32": Scaling(E5M2, 1, 32, POWER_OF_TWO),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("shape", [(5, 300), (130, 64), (1, 7), (256, 128)])
def test_every_block_has_its_own_scale(name, shape):
    scaling = SCALINGS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 4, shape[1])
    found = quantize(x, scaling).dequantized()
    rows, cols = (scaling.rows or shape[0]), (scaling.cols or shape[1])
    for i, j in blocks(x, rows, cols):
        part = x[i, j]
        scale = torch.tensor(scaling.fmt.max) / part.abs().max()
        if scaling.scales == POWER_OF_TWO:
            scale = torch.tensor(2.0 ** math.floor(math.log2(scale.item())))
            assert (part * scale).abs().max() > scaling.fmt.max / 2
        expected = (part * scale).clamp(-scaling.fmt.max, scaling.fmt.max).to(scaling.fmt.dtype).float() * (1.0 / scale)
        torch.testing.assert_close(found[i, j], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "cols"), [(1, 16), (16, 16)])
def test_two_level_scales(rows, cols):
    """E2M1 elements, an E4M3 scale a block, one fp32 scale a tensor."""
    scaling = Scaling(E2M1, rows, cols, TWO_LEVEL)
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 2, 40)
    found = quantize(x, scaling)
    tensor_scale = torch.tensor(6.0 * 448.0) / x.abs().max()
    grid = {value for value, _ in table("e2m1")}
    assert set(found.values.flatten().tolist()) <= grid
    for number, (i, j) in enumerate(blocks(x, rows, cols)):
        stored = (x[i, j].abs().max() / 6.0 * tensor_scale).to(torch.float8_e4m3fn).float()
        inverse = stored / tensor_scale
        expected = (
            torch.tensor([[nearest(v, "e2m1") for v in row] for row in (x[i, j] * (1.0 / inverse)).tolist()]) * inverse
        )
        torch.testing.assert_close(found.dequantized()[i, j], expected, rtol=2e-7, atol=0)
        torch.testing.assert_close(found.inverse.flatten()[number], inverse, rtol=2e-7, atol=0)
    assert not quantize(torch.zeros(16, 16), scaling).dequantized().any()
    tiny = torch.cat([torch.full((1, 16), 1e-9), torch.ones(1, 16)])
    assert quantize(tiny, Scaling(E2M1, 1, 16, TWO_LEVEL)).dequantized().tolist() == [[0.0] * 16, [1.0] * 16]


@pytest.mark.parametrize("scaling", [*SCALINGS.values(), Scaling(E2M1, 1, 16, TWO_LEVEL)], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e-38, 1e-40, 1e-44])
def test_smallest_values_are_rounded_or_flushed_to_zero(scaling, size):
    """With zeros, and with a block that is small compared to the others."""
    x = torch.zeros(2, 40)
    x[0, 0], x[1, 0], x[1, 20] = size, size / 3, size * 1e-4
    found = quantize(x, scaling).dequantized()
    assert found.isfinite().all() and ((found - x).abs() <= 0.2 * size + 2e-38).all() and not found[x == 0].any()


@pytest.mark.parametrize("scaling", [*SCALINGS.values(), Scaling(E2M1, 1, 16, TWO_LEVEL)], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nonfinite_values_are_propagated(scaling, bad):
    x = torch.ones(4, 40)
    x[1, 3] = bad
    assert quantize(x, scaling).dequantized()[1, 3].isnan()
    assert scaling.rows or quantize(x, scaling, scale=torch.tensor(2.0)).dequantized()[1, 3].isnan()


def test_a_given_scale_saturates():
    found = quantize(torch.tensor([[1.0, 300.0, -300.0]]), Scaling(E4M3), scale=torch.tensor(2.0)).dequantized()
    assert found.tolist() == [[1.0, 224.0, -224.0]]


def test_the_hadamard_transform_is_orthogonal_and_cancels_in_products():
    x, y = torch.randn(5, 40, dtype=torch.float64), torch.randn(3, 40, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x) @ hadamard(y).t(), x @ y.t())
    matrix = hadamard(torch.eye(16, dtype=torch.float64))
    assert set(matrix.abs().flatten().tolist()) == {0.25}
    spike = torch.zeros(1, 16, dtype=torch.float64)
    spike[0, 5] = 16.0
    assert hadamard(spike).abs().max() == 4.0, "an outlier is spread over its block"


def test_random_signs_are_applied_before_hadamard():
    """TransformerEngine's fixed signs, on the elements that are mixed: what has them becomes one spike.

    Signs after it would change no rounding.
    """
    signs = torch.tensor([[1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]], dtype=torch.float64)
    assert hadamard(signs).tolist() == [[4.0, *[0.0] * 15]]


def test_block_amax_with_partial_blocks():
    x = torch.arange(15.0).view(3, 5) - 7
    assert block_amax(x, 2, 3).tolist() == [[7.0, 4.0], [5.0, 7.0]]
