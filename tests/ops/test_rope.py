"""Rotation and frequencies against slow definitions."""

import math

import pytest
import torch

from moe_trainer.ops.rope import (
    apply_rope,
    inverse_frequencies,
    llama3_scaling,
    rope_tables,
    yarn_frequencies,
    yarn_mscale,
)


def slow_rope(x, cos, sin, interleaved, offset):
    """Rotate pair by pair with complex numbers."""
    y, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (offset + 2 * i, offset + 2 * i + 1) if interleaved else (offset + i, offset + half + i)
        turned = torch.complex(x[..., a], x[..., b]) * torch.complex(cos[:, i], sin[:, i])[:, None, None]
        y[..., a], y[..., b] = turned.real, turned.imag
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated, offset", [(8, 0), (4, 0), (4, 4), (2, 3)])
def test_rotation_equals_complex_multiplication(interleaved, rotated, offset):
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in rope_tables(inverse_frequencies(rotated, 100), torch.arange(5)))
    expected = slow_rope(x, cos, sin, interleaved, offset)
    torch.testing.assert_close(apply_rope(x, cos, sin, interleaved, offset), expected)
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cos, sin, interleaved, offset), (x,))


def test_tables_scale_positions_and_amplitude():
    inv_freq = inverse_frequencies(4, 10000)
    cos, sin = rope_tables(inv_freq, torch.arange(8), position_scale=0.25, amplitude=2.0)
    torch.testing.assert_close(cos[4], 2 * inv_freq.cos())
    torch.testing.assert_close(sin[4], 2 * inv_freq.sin())


def test_llama3_scaling_keeps_fast_and_divides_slow_frequencies():
    inv_freq = inverse_frequencies(64, 500000)
    scaled = llama3_scaling(inv_freq, 8.0)
    turns = 8192 * inv_freq / (2 * math.pi)
    assert torch.equal(scaled[turns > 4], inv_freq[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], inv_freq[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    ratio = (scaled / inv_freq)[between]
    assert len(ratio) and (ratio < 1).all() and (ratio > 1 / 8).all()


def test_yarn_without_extension_is_plain_rope():
    torch.testing.assert_close(yarn_frequencies(64, 10000, 1.0, 4096), inverse_frequencies(64, 10000))
    assert yarn_mscale(1.0, 1.0) == 1.0


def test_yarn_with_equal_betas_is_a_step():
    """Kimi K2's setting: both betas are 1, so a frequency is either saved or divided."""
    plain, scaled = inverse_frequencies(64, 50000), yarn_frequencies(64, 50000, 32.0, 4096, 1.0, 1.0, False)
    ratio = scaled / plain
    assert bool(((ratio - 1).abs().lt(1e-5) | (ratio - 1 / 32).abs().lt(1e-5)).all())
    assert ratio[0] == 1 and ratio[-1] < 0.04
