"""Quantized experts with counts on the device: one call for all experts gives the bits of one call for each."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from arguments.mechanisms.formats import BY_KEY, QUANTIZED
from moe_trainer.ops.expert_mlp import ExpertWeights
from moe_trainer.ops.grouped_gemm import GROUPED_MM
from moe_trainer.ops.pointwise import Activation
from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
from moe_trainer.quantization.gemms import QuantizedGemms, UnquantizedExpertGemms
from moe_trainer.quantization.grouped import make_token_groups, quantize_tokens
from moe_trainer.quantization.iteration import cached_weight_casts
from moe_trainer.quantization.quantize import quantize
from moe_trainer.quantization.recipe import make_recipe

HIDDEN, FFN, COUNTS = 64, 32, (70, 0, 33, 5)
RECIPES = tuple(each.key for each in QUANTIZED if not each.is_custom)


def make_gemms(name: str, stochastic: bool, wgrad: bool = True) -> nn.ModuleList:
    recipe = make_recipe(name, hybrid=True, wgrad=wgrad)
    if not stochastic:  # noise is drawn for all experts at once, so its bits differ
        recipe = replace(
            recipe, grad=replace(recipe.grad, stochastic=False), grad_t=replace(recipe.grad_t, stochastic=False)
        )
    return nn.ModuleList(QuantizedGemms(recipe, f"fc{index}") for index in (1, 2)).train()


class Padding:
    """Where tokens stand in a buffer with padding of zeros; NaN after the last expert's."""

    def __init__(self, multiple: int):
        self.counts = [-(-count // multiple) * multiple for count in COUNTS]
        starts = [sum(self.counts[:expert]) for expert in range(len(COUNTS))]
        self.row_R = torch.cat([torch.arange(count) + start for count, start in zip(COUNTS, starts)])
        self.size = sum(self.counts) + multiple

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        padded = torch.full((self.size, *x.shape[1:]), torch.nan, dtype=x.dtype)
        padded[: sum(self.counts)] = 0
        padded[self.row_R] = x
        return padded


def run(gemms, dtype: torch.dtype, biases: bool, on_device: bool, device: str = "cpu") -> list[torch.Tensor]:
    """Results and gradients of tokens and weights, and maxima of delayed scaling; on_device: the counts."""
    torch.manual_seed(1)
    shapes = {"w1": (4, 2 * FFN, HIDDEN), "w2": (4, HIDDEN, FFN)} | (
        {"b1": (4, 2 * FFN), "b2": (4, HIDDEN)} if biases else {}
    )
    given = {name: torch.randn(shape, dtype=dtype).to(device).requires_grad_() for name, shape in shapes.items()}
    rows = sum(COUNTS)
    x, p, weight = torch.randn(rows, HIDDEN, dtype=dtype), torch.rand(rows), torch.randn(rows, HIDDEN, dtype=dtype)
    own, counts = slice(None), COUNTS
    if on_device:
        padding = Padding(max(each.token_multiple for each in gemms))
        (x, p, weight), own = (padding.pad(table) for table in (x, p, weight)), padding.row_R
        counts = torch.tensor(padding.counts, device=device)
    x, p = x.to(device).requires_grad_(), p.to(device).requires_grad_()
    y = quantized_expert_mlp(
        x,
        p,
        ExpertWeights(given["w1"], given["w2"], given.get("b1"), given.get("b2")),
        counts,
        Activation("silu", gated=True),
        tuple(gemms),
    )
    y.backward(weight.to(device))
    states = [each.amax.clone() for each in gemms if hasattr(each, "amax")]
    for each in gemms:
        if hasattr(each, "amax"):
            each.amax.zero_()
    return [y.detach()[own], x.grad[own], p.grad[own], *(each.grad for each in given.values()), *states]


def three_gemms(name: str, device: str = "cpu") -> list[torch.Tensor]:
    """Output, gradients of tokens and weights of one linear in bf16, with counts on the device."""
    torch.manual_seed(2)
    linear, padding = make_gemms(name, stochastic=False)[0].to(device), Padding(128)
    weight = torch.randn(4, FFN, HIDDEN, dtype=torch.bfloat16).to(device)
    x, grad = (padding.pad(torch.randn(sum(COUNTS), width)).bfloat16().to(device) for width in (HIDDEN, FFN))
    groups = make_token_groups(torch.tensor(padding.counts, device=device), len(x), GROUPED_MM)
    tokens = linear.grouped_output(x, weight, groups), linear.grouped_input_grad(grad, weight, groups)
    found = [table.float().cpu()[padding.row_R] for table in tokens]
    return [*found, linear.make_grouped_wgrad_fn(grad, x, groups)().float().cpu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_counts_on_device_give_the_same_bits(name, dtype):
    gemms = make_gemms(name, stochastic=False)
    for one, other in zip(*(run(gemms, dtype, False, on_device) for on_device in (False, True)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", RECIPES)
def test_saved_tokens_are_the_operand_in_few_bytes(name, dtype):
    """Also where an expert has a number that is not finite, whose block or tensor is NaN, and after the last expert."""
    gemms, padding = make_gemms(name, stochastic=False)[0], Padding(128)
    x = padding.pad(torch.randn(sum(COUNTS), HIDDEN, dtype=dtype))
    x[3, 5] = torch.inf
    groups = make_token_groups(torch.tensor(padding.counts), len(x), GROUPED_MM)
    expected = quantize_tokens(x, gemms.recipe.x_t, groups, gemms.quantizer, gemms._scale(0), transposed=True)
    saved = gemms.saved_tokens(x, groups)
    found = saved.operand(groups)
    for in_bf16 in (False, True):
        assert torch.equal(found.of_gemm(in_bf16).nan_to_num(), expected.of_gemm(in_bf16).nan_to_num())
        assert torch.equal(found.of_gemm(in_bf16).isnan(), expected.of_gemm(in_bf16).isnan())
    for one, other in ((found.inverse, expected.inverse), (found.factor_e, expected.factor_e)):
        assert (one is None and other is None) or torch.equal(one.nan_to_num(), other.nan_to_num())
    size = sum(table.nbytes for table in saved[:3] if table is not None)
    fmt = BY_KEY[name]
    block = fmt.flags.bits / 8 + (1 / fmt.tokens_per_scale if fmt.tokens_per_scale else 0)
    assert size == x.numel() * block + (0 if name in ("blockwise", "mxfp8") else 4 * len(COUNTS))


@pytest.mark.parametrize("mixed", [False, True])
def test_biases_and_gradients_in_high_precision(mixed):
    gemms = make_gemms("mxfp8", stochastic=False, wgrad=False)
    if mixed:
        gemms[1] = UnquantizedExpertGemms()
    for one, other in zip(*(run(gemms, torch.float32, True, on_device) for on_device in (False, True)), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-6, atol=2e-5)


def test_values_of_an_expert_do_not_scale_another():
    """A row of another expert a thousand times larger leaves all bits of the first expert's results."""
    gemms, results = make_gemms(RECIPES[-1], stochastic=False), []
    w1, w2 = torch.randn(2, 2 * FFN, HIDDEN), torch.randn(2, HIDDEN, FFN)
    x = torch.randn(64, HIDDEN)
    for factor in (1.0, 1e3):
        rows = torch.cat([x[:32], x[32:] * factor])
        counts = torch.tensor([32, 32])
        y = quantized_expert_mlp(
            rows, None, ExpertWeights(w1, w2), counts, Activation("silu", gated=True), tuple(gemms)
        )
        results.append(y)
    assert torch.equal(results[0][:32], results[1][:32]) and not torch.equal(results[0][32:], results[1][32:])


def test_stochastic_rounding_is_close():
    gemms = make_gemms("nvfp4", stochastic=True)
    host, device = (run(gemms, torch.float32, False, on_device) for on_device in (False, True))
    assert torch.equal(host[0], device[0])
    for one, other in zip(host[1:], device[1:], strict=True):
        assert (one - other).norm() < 0.3 * one.norm()


class CountedQuantizer:
    """`quantize` that counts its calls for matrices of these shapes."""

    def __init__(self, *shapes):
        self.shapes, self.calls = shapes, 0

    def __call__(self, matrix, *args):
        self.calls += matrix.shape in self.shapes
        return quantize(matrix, *args)


@pytest.mark.parametrize("name", RECIPES)
def test_cached_weights_are_cast_once(name):
    """Numbers and maxima are those without; what is no parameter, or has changed since, is cast again."""
    found = []
    for keeps in (False, True):
        torch.manual_seed(3)
        gemms = make_gemms(name, stochastic=False)
        counted = CountedQuantizer((2 * FFN, HIDDEN), (HIDDEN, 2 * FFN), (HIDDEN, FFN), (FFN, HIDDEN))
        chunk = nn.Module()
        chunk.quantized, chunk.casts, chunk.caches_experts = tuple(gemms), (), keeps
        weights = [nn.Parameter(torch.randn(3, *shape)) for shape in ((2 * FFN, HIDDEN), (HIDDEN, FFN))]
        results = []
        for each in gemms:
            each.quantizer = counted
        for _ in range(2):
            with cached_weight_casts([chunk], num_microbatches=2):
                for counts in ((128, 0, 128), (128, 128, 0)):
                    x = torch.randn(256, HIDDEN, requires_grad=True)
                    activation, own = Activation("silu", gated=True), tuple(gemms)
                    y = quantized_expert_mlp(x, None, ExpertWeights(*weights), torch.tensor(counts), activation, own)
                    y.backward(torch.randn_like(y))
                    results += [y.detach(), x.grad, *(weight.grad.clone() for weight in weights)]
                with torch.no_grad():
                    copies = [weight * 2 for weight in weights]
                    results.append(
                        quantized_expert_mlp(
                            x, None, ExpertWeights(*copies), torch.tensor(counts), activation, own
                        ).detach()
                    )
            with torch.no_grad():
                for weight in weights:
                    weight += 1
            results += [each.amax.clone() for each in gemms if hasattr(each, "amax")]
        assert all(each.cached_weights is None for each in gemms)
        found.append((results, counted.calls))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    # two linears of three experts: both directions in two microbatches, output of the copies, in two iterations; E2M1
    # has no dtype of one byte, so such casts are not kept
    assert [calls for _, calls in found] == [60, 36 if BY_KEY[name].keeps_expert_casts else 60]


def test_weights_of_a_single_microbatch_are_not_kept():
    """They would only take memory; nor are those of a chunk whose weights come and go."""
    chunk, gemms = nn.Module(), make_gemms("mxfp8", stochastic=False)
    chunk.quantized, chunk.casts = tuple(gemms), ()
    for keeps, num_microbatches in ((True, 1), (False, 2), (True, 2)):
        chunk.caches_experts = keeps
        with cached_weight_casts([chunk], num_microbatches):
            kept = [each.cached_weights for each in gemms]
        assert kept == ([{}, {}] if keeps and num_microbatches > 1 else [None, None])
