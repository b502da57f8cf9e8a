"""Hand-written backwards against finite differences, values against plain definitions."""

import pytest
import torch
import torch.nn.functional as F

from moe_trainer.ops.pointwise import KINDS, Activation, layer_norm, rms_norm, swiglu


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
def test_rms_norm_gradients(zero_centered, with_weight):
    weight = rand(7) if with_weight else None
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, zero_centered), (rand(3, 2, 7), weight))


def test_rms_norm_of_a_strided_view_gradients():
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x[..., 1:4, :], w, 1e-5), (rand(2, 5, 6), rand(6)))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_values(zero_centered):
    x, weight = torch.randn(4, 3, 16), torch.randn(16)
    expected = F.rms_norm(x, (16,), weight + 1 if zero_centered else weight, eps=1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, zero_centered), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_bf16_rounds_once():
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    expected = rms_norm(x.float(), weight.float(), 1e-6).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_norms_return_the_weights_dtype_for_an_fp32_residual():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    for y in (rms_norm(x, weight, 1e-5), layer_norm(x, weight, None, 1e-5)):
        assert y.dtype == torch.bfloat16
        grad_x, grad_weight = torch.autograd.grad(y.float().sum(), (x, weight))
        assert grad_x.dtype == torch.float32 and grad_weight.dtype == torch.bfloat16


def test_layer_norm_zero_centered_adds_one_to_the_gain():
    x, weight, bias = torch.randn(5, 8), torch.randn(8), torch.randn(8)
    expected = F.layer_norm(x, (8,), weight + 1, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5, True), expected)


def test_swiglu_gradients():
    assert torch.autograd.gradcheck(swiglu, (rand(4, 3, 10),))
    assert torch.autograd.gradcheck(swiglu, (rand(6, 10), rand(6)))


def test_swiglu_of_an_empty_batch():
    x = torch.randn(0, 8, requires_grad=True)
    y = swiglu(x, torch.randn(0))
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad.shape == (0, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_activation_gradients_with_probabilities(kind, gated):
    act = Activation(kind, gated)
    assert torch.autograd.gradcheck(act, (rand(5, 8), rand(5)))


def test_gated_activation_with_offset_and_clamp():
    x, probs = torch.randn(6, 8) * 5, torch.rand(6)
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1.0) * probs[:, None]
    torch.testing.assert_close(Activation("quick_gelu", True, 1.0, 2.0)(x, probs), expected)


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match="softsign"):
        Activation("softsign")


def test_fp32_probabilities_keep_the_bf16_activation_dtype():
    x, probs = torch.randn(6, 8).bfloat16(), torch.rand(6)
    assert swiglu(x, probs).dtype == torch.bfloat16
    assert Activation("gelu")(x, probs).dtype == torch.bfloat16
