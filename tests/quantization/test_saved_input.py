"""Inputs saved for backward in 8 or 4 bits: the operand of the weight gradient, made earlier."""

import pytest
import torch
from harness import run_ranks
from memory.measure import measure_retained
from torch.nn import Parameter

from arguments.mechanisms.formats import BY_KEY, QUANTIZED
from moe_trainer.layers.init import Init
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear
from moe_trainer.ops.expert_mlp import ExpertWeights
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel.rng import StochasticRoundingRNG
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.quantize import quantize
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.quantization.saved_input import SavedInput

RECIPES = tuple(each.key for each in QUANTIZED if not each.is_custom)
TOKENS, WIDTH = 256, 96


def rows(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return (x * torch.exp2(torch.arange(WIDTH) % 40 - 20.0)).to(dtype)


def make_gemms(recipe: str, name: str = "linear", **_: object) -> QuantizedGemms:
    gemms = QuantizedGemms(make_recipe(recipe, hybrid=True), name, StochasticRoundingRNG(1, name))
    gemms.rounding.begin(0)
    return gemms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_input_is_the_operand_in_few_bytes(recipe, dtype):
    x, scaling = rows(dtype), make_recipe(recipe).x_t
    x[:, 3], x[5, 4] = 0.0, torch.inf
    expected = quantize(x.t(), scaling)
    saved = SavedInput.of(expected)
    found = saved.operand()
    assert found.dequantized().dtype == expected.dequantized().dtype
    torch.testing.assert_close(found.dequantized(), expected.dequantized(), rtol=0, atol=0, equal_nan=True)
    assert found.inverse.dtype == torch.float32 and torch.equal(
        found.inverse.nan_to_num(), expected.inverse.nan_to_num()
    )
    size = sum(table.numel() * table.itemsize for table in saved[:2]) / x.numel()
    fmt = BY_KEY[recipe]
    scale_bytes = (4 if fmt.has_global_scale else 1) / fmt.tokens_per_scale if fmt.tokens_per_scale else 4 / x.numel()
    assert size == fmt.flags.bits / 8 + scale_bytes


def gradients(linear, x: torch.Tensor, saves: bool):
    linear.saves_quantized = saves
    linear.weight.grad = None
    x = x.clone().requires_grad_()
    linear.quantized.rounding.begin(0)
    y = linear(x)
    y.backward(torch.sin(y.detach().float()).to(y.dtype))
    return y.detach(), x.grad, linear.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_gives_the_same_numbers_and_keeps_half_the_bytes(recipe):
    linear = ReplicatedLinear(
        WIDTH, 64, name="linear", group=Group.single("tp"), init=Init("normal", 0.1),
        quantize=lambda name, **_: make_gemms(recipe, name),
    ).bfloat16()  # fmt: skip
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(1))
    for one, other in zip(gradients(linear, rows(), False), gradients(linear, rows(), True), strict=True):
        assert torch.equal(one, other)

    def kept(saves: bool) -> int:
        linear.saves_quantized = saves
        return measure_retained(lambda: linear(rows().requires_grad_() * 1))[0].device

    share = 0.75 / 2 if BY_KEY[recipe].has_global_scale else (1 + 1 / 32) / 2
    assert kept(True) <= kept(False) - (1 - share) * rows().nbytes
    with torch.no_grad():  # nothing is quantized twice where nothing is saved
        assert linear._pass(linear.group, False, linear.overlap).saves_quantized is False


@pytest.mark.parametrize("on_device", [False, True], ids=["counts on host", "counts on device"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_give_the_same_numbers(recipe, on_device):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(3, *shape, generator=generator).bfloat16() for shape in ((64, WIDTH), (WIDTH, 32))]
    counts, results = torch.tensor([128, 0, 128]) if on_device else [100, 0, 156], []
    for saves in (False, True):
        x, probs = (
            rows().requires_grad_(),
            torch.rand(TOKENS, generator=torch.Generator().manual_seed(2)).requires_grad_(),
        )
        w1, w2 = (Parameter(weight) for weight in weights)
        gemms = make_gemms(recipe, "fc1"), make_gemms(recipe, "fc2")
        y = quantized_expert_mlp(
            x, probs, ExpertWeights(w1, w2), counts, Activation("silu", gated=True), gemms, saves_quantized=saves
        )
        values, scales, *_ = y.grad_fn.saved_tensors
        assert (values.dtype == torch.uint8) == saves
        if saves:
            assert values.numel() <= x.numel() * (0.54 if BY_KEY[recipe].flags.bits == 4 else 1)  # tokens are padded
            assert scales is None or scales.nbytes <= x.numel() / (16 if on_device else 3)
        y.backward(torch.sin(y.detach().float()).to(y.dtype))
        results.append((y.detach(), x.grad, probs.grad, w1.grad, w2.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def sharded_gradients(rank: int, n: int, recipe: str, tokens: int) -> list:
    tp = ParallelState.create(n, rank, tp=n).tp
    linear = ColumnParallelLinear(
        WIDTH, 64, name="linear", group=tp, init=Init("normal", 0.1), sequence_parallel=True,
        quantize=lambda name, **_: make_gemms(recipe, name),
    ).bfloat16()  # fmt: skip
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(rank))
    x = rows()[: n * tokens].chunk(n)[rank].unsqueeze(1)
    results = []
    for saves in (False, True):
        results.append(gradients(linear, x, saves))
        y = linear(x.clone().requires_grad_())
        results[-1] += (y.grad_fn.saved_tensors[1].dtype == torch.uint8,)
    return results


@pytest.mark.parametrize(("recipe", "tokens"), [(recipe, 128) for recipe in RECIPES] + [("blockwise", 64)])
def test_sequence_shards_give_the_same_numbers(recipe, tokens):
    """Shards that share a scale with others are saved as they are."""
    for (*plain, _), (*quantized, is_quantized) in run_ranks(sharded_gradients, 2, recipe, tokens):
        assert all(map(torch.equal, plain, quantized))
        assert is_quantized == (not BY_KEY[recipe].has_global_scale and tokens == 128)
