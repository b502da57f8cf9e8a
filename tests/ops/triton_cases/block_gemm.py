"""Grouped GEMMs of E4M3 operands in Triton's interpreter against the definition. Run by tests/ops/test_triton.py."""

import pytest
import torch
from torch import nn

from moe_trainer.ops.expert_mlp import ExpertWeights
from moe_trainer.ops.grouped_gemm import token_offsets
from moe_trainer.ops.pointwise import Activation
from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, QuantizedTensor, Scaling, quantize
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.quantization.triton_block_gemm import EXPERT_KERNELS, block_grouped_mm, block_grouped_weight_grad

ROW, SQUARE = Scaling(E4M3, 1, 128, POWER_OF_TWO), Scaling(E4M3, 128, 128, POWER_OF_TWO)
COUNTS = (128, 0, 256)


def to_bytes(x: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.values.to(E4M3.dtype), x.inverse


@pytest.mark.parametrize("width,depth", [(256, 256), (144, 200)])
@pytest.mark.parametrize("spare", [0, 70])
def test_block_gemms_equal_definition(width, depth, spare):
    """spare: unused tokens at the end, whose values must not be used."""
    tokens, offsets = sum(COUNTS), token_offsets(COUNTS, torch.device("cpu"))
    x, grad = torch.randn(tokens + spare, depth), torch.randn(tokens + spare, width)
    x *= torch.logspace(-3, 3, len(x))[:, None]  # so that every block has another scale
    x[tokens:] = grad[tokens:] = float("nan")
    weights = [quantize(torch.randn(width, depth) * 10**expert, SQUARE) for expert in range(len(COUNTS))]
    of_tokens = quantize(x, ROW)
    stacks = (torch.stack(tables) for tables in zip(*map(to_bytes, weights)))
    y = block_grouped_mm(*to_bytes(of_tokens), *stacks, offsets, torch.float32)
    of_grad, of_x = quantize(grad.t(), ROW), quantize(x.t(), ROW)
    grad_w = block_grouped_weight_grad(*to_bytes(of_grad), *to_bytes(of_x), offsets, torch.float32)
    start = 0
    for expert, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        expected = of_tokens.dequantized()[rows] @ weights[expert].dequantized().t()
        torch.testing.assert_close(
            y[rows], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().amax()) if count else 0
        )
        expected = of_grad.dequantized()[:, rows] @ of_x.dequantized()[:, rows].t()
        torch.testing.assert_close(grad_w[expert], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().amax()))
        start += count


def test_block_with_a_number_that_is_not_finite():
    """It makes a row of the output and a row of the weight gradient NaN, and no other expert's."""
    offsets = token_offsets((128, 128), torch.device("cpu"))
    x, grad, w = torch.randn(256, 128), torch.randn(256, 128), torch.randn(128, 128)
    x[3, 5] = grad[3, 7] = float("inf")
    weights = [torch.stack([table] * 2) for table in to_bytes(quantize(w, SQUARE))]
    y = block_grouped_mm(*to_bytes(quantize(x, ROW)), *weights, offsets, torch.bfloat16)
    assert y[3].isnan().all() and y[torch.arange(256) != 3].isfinite().all()
    operands = *to_bytes(quantize(grad.t(), ROW)), *to_bytes(quantize(x.t(), ROW))
    grad_w = block_grouped_weight_grad(*operands, offsets, torch.bfloat16)
    assert grad_w[0, 7].isnan().all() and grad_w[0, :, 5].isnan().all() and grad_w[1].isfinite().all()


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_experts_with_operands_of_one_read_have_the_same_bits(name, hybrid):
    """Tokens and both gradients, of which one read makes two operands; without weight gradients it makes none."""
    recipe, calls, found, of_tokens = make_recipe(name, hybrid=hybrid), [], [], []

    def quantizer(x, *args):
        if 300 in x.shape:
            of_tokens.append(tuple(x.shape))
        return quantize(x, *args)

    def counted(x, scaling):
        calls.append(tuple(x.shape))
        return EXPERT_KERNELS.quantize_both(x, scaling)

    for kernels in (None, EXPERT_KERNELS._replace(quantize_both=counted)):
        for needs in (True, False):
            torch.manual_seed(0)
            of_tokens.clear()
            gemms = tuple(QuantizedGemms(recipe, fc, None, quantizer, kernels) for fc in ("fc1", "fc2"))
            x = torch.randn(300, 64, requires_grad=True)
            weights = [nn.Parameter(torch.randn(3, *shape), requires_grad=needs) for shape in ((64, 64), (64, 32))]
            counts = torch.tensor([128, 0, 128])
            y = quantized_expert_mlp(x, None, ExpertWeights(*weights), counts, Activation("silu", gated=True), gemms)[
                :256
            ]
            y.backward(torch.randn_like(y))
            # activations, in both directions, are of two reads
            assert kernels is None or len(of_tokens) == (2 if needs else 4)
            found.append([y.detach(), x.grad[:256], *(weight.grad for weight in weights if needs)])
    assert calls == [(300, 64), (300, 64), (300, 64)]
    for one, other in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert torch.equal(one, other)
