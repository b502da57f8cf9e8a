"""Formats of the optimizer's state against straightforward definitions."""

import math

import pytest
import torch

from moe_trainer.optim.state_formats import FORMATS, compute_scale, decode, encode, join, split
from moe_trainer.optim.state_storage import StatePlacement, make_storage

CPU = torch.device("cpu")
SCALED = ("fp16", "fp8")


def _wide_range_values(numel=4096, seed=0):
    """Values over some thirty binades, of both signs, some zero."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=random) * torch.exp2(torch.randint(-30, 1, (numel,), generator=random).float())
    return x.masked_fill_(torch.rand(numel, generator=random) < 0.05, 0.0)


def _nearest(x, step_bits, smallest, scale):
    """x rounded to so many significant bits, or to multiples of `smallest * scale` where these are coarser; in fp64."""
    x = x.double()
    exponent = torch.floor(torch.log2(x.abs().clamp(min=1e-300)))
    unit = torch.maximum(torch.exp2(exponent - step_bits + 1), torch.tensor(smallest * scale, dtype=torch.float64))
    return torch.round(x / unit) * unit


@pytest.mark.parametrize("name, bits, smallest", [("fp16", 11, 2.0**-24), ("fp8", 4, 2.0**-9)])
@pytest.mark.parametrize("gain", [1.0, 1e-12, 3e4, 0.7])
def test_scaled_formats_round_to_nearest_under_a_power_of_two(name, bits, smallest, gain):
    x, largest = _wide_range_values() * gain, FORMATS[name].max_magnitude
    stored, scale = encode(x, FORMATS[name])
    scale_value = scale.item()
    assert math.frexp(scale_value)[0] == 0.5, "a power of two"
    assert x.abs().max() / scale_value <= largest < 2 * x.abs().max() / scale_value * (1 + 1e-6)
    assert torch.equal(decode(stored, scale).double(), _nearest(x, bits, smallest, scale_value))


@pytest.mark.parametrize("name", SCALED)
def test_decoded_values_are_encoded_unchanged(name):
    """A resumed run, whose scales are computed again, has the same values."""
    for seed in range(20):
        values = decode(*encode(_wide_range_values(257, seed) * 10.0 ** (seed - 10), FORMATS[name]))
        assert torch.equal(decode(*encode(values, FORMATS[name])), values)


@pytest.mark.parametrize("name", SCALED)
def test_encoding_in_parts_keeps_the_values(name):
    """Parts with their own scales keep the values of the full tensor, or more precision."""
    x = _wide_range_values()
    full = decode(*encode(x, FORMATS[name]))
    parts = torch.cat([decode(*encode(part, FORMATS[name])) for part in full.split(97)])
    assert torch.equal(parts, full)


@pytest.mark.parametrize("name", SCALED)
def test_positive_values_stay_positive(name):
    x = _wide_range_values().abs()
    stored = decode(*encode(x, FORMATS[name], keep_positive=True))
    plain = decode(*encode(x, FORMATS[name]))
    assert (
        torch.equal(stored > 0, x > 0)
        and torch.equal(stored[plain > 0], plain[plain > 0])
        and (plain[x > 0] == 0).any() == (name == "fp8")
    )
    assert torch.equal(decode(*encode(stored, FORMATS[name], keep_positive=True)), stored)


def test_scale_of_extreme_values():
    assert compute_scale(torch.zeros(3), 448.0) == 1.0
    assert compute_scale(torch.tensor([448.0]), 448.0) == 1.0 and compute_scale(torch.tensor([449.0]), 448.0) == 2.0
    for value in (3e38, 1e-38, 1e-45):
        stored, scale = encode(torch.tensor([value, -value]), FORMATS["fp8"])
        assert torch.isfinite(stored.float()).all() and torch.finfo(torch.float32).tiny <= scale.item() < math.inf, (
            "devices flush what is smaller"
        )


def test_every_finite_fp8_number_is_read():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()]
    assert len(every) == 254 and torch.equal(decode(every, torch.ones(())), every.float())


def test_remainder_format_is_lossless():
    x = torch.cat(
        [_wide_range_values(), torch.tensor([1.00390625, -1.00390625, 1.01171875, 3e38, -1e-40, 0.0, -0.0])]
    )  # ties among them
    high, low = split(x)
    assert torch.equal(join(high, low), x) and torch.equal(torch.signbit(join(high, low)), torch.signbit(x))
    assert ((high.float() - x).abs() <= (x.bfloat16().float() - x).abs()).all(), "as near as torch's own rounding"
    apart = high != x.bfloat16()
    assert (x[apart].view(torch.int32) & 0xFFFF == 0x8000).all(), "they part at ties only"


@pytest.mark.parametrize("name", [*FORMATS])
@pytest.mark.parametrize("apart", [False, True])
def test_storage_of_spans_with_gaps(name, apart):
    """Spans with a gap; ranges that begin and end inside of them; loading in fp32."""
    spans = [(10, 40), (48, 112), (112, 130)]
    kept = make_storage(8, 130, FORMATS[name], spans, StatePlacement(CPU, CPU, apart))
    assert kept.num_bytes == 122 * FORMATS[name].bytes + (12 if name in SCALED else 0)
    expected = torch.zeros(130)
    for (start, stop), gain in zip(spans, (1.0, 1e6, 1e-6)):
        opened = kept.load_fp32(start, stop)
        assert (opened.data_ptr() == kept.read_fp32(start, stop).data_ptr()) == (name == "fp32" and not apart)
        opened.copy_(_wide_range_values(stop - start, start) * gain)
        fmt = FORMATS[name]
        expected[start:stop] = decode(*encode(opened, fmt)) if name in SCALED else opened.to(fmt.dtype).float()
        kept.store_fp32(start, stop, opened)
    for start, stop in ((8, 130), (20, 30), (30, 50), (60, 120), (41, 47)):
        assert torch.equal(kept.read_fp32(start, stop), expected[start:stop])
    assert (kept.staged_view(8, 130) is None) == (name != "fp32")
    kept.stage()
    live = kept.staged_view(20, 120)
    assert torch.equal(live, expected[20:120])
    live[5:] = 0.25
    for start, stop, values in kept.unstage():
        kept.store_fp32(start, stop, values)
    after = expected.clone()
    after[25:40], after[48:112], after[112:120] = 0.25, 0.25, 0.25
    assert torch.allclose(kept.read_fp32(10, 40), after[10:40], rtol=0.07) and torch.equal(
        kept.read_fp32(48, 112), after[48:112]
    )


@pytest.mark.parametrize("name", SCALED)
def test_storing_part_of_a_span_is_an_error(name):
    kept = make_storage(0, 20, FORMATS[name], [(0, 20)], StatePlacement(CPU, CPU))
    with pytest.raises(AssertionError, match="no span"):
        kept.store_fp32(0, 10, torch.ones(10))
