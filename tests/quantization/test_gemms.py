"""Quantized GEMMs against their definitions, GEMM by GEMM; the state of delayed scaling."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from arguments.mechanisms.formats import NAMED_BY_LAYER, QUANTIZED
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.moe.experts import Experts
from moe_trainer.ops.expert_mlp import ActivationFns, ExpertWeights, expert_mlp, get_activation_fns
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel.rng import StochasticRoundingRNG
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
from moe_trainer.quantization.gemms import GRAD, WEIGHT, QuantizedGemms, X
from moe_trainer.quantization.quantize import FP32, POWER_OF_TWO, TWO_LEVEL, quantize
from moe_trainer.quantization.recipe import DelayedScaling, make_recipe

NAMES = tuple(each.key for each in QUANTIZED if not each.is_custom)
BOUND = {each.key: 0.25 for each in NAMED_BY_LAYER if each.flags.bits < 8}  # of a GEMM's norm; 0.08 for 8 bits


def operands(rows=48, inner=160, outer=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((rows, inner), (outer, inner), (rows, outer))]


def make_gemms(name: str, **options) -> QuantizedGemms:
    gemms = QuantizedGemms(make_recipe(name, **options), "layer", StochasticRoundingRNG(1, "layer"))
    if gemms.recipe.delayed is not None:
        gemms.scaling[:, 0] = torch.tensor([64.0, 32.0, 128.0])
    return gemms


def quantize_dequantize(matrix, scaling, scale=None, noise=None):
    return quantize(matrix, scaling, scale, noise).dequantized()


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_quantized_along_the_contracted_dim(name):
    x, w, grad = operands()
    gemms, noise = make_gemms(name, hybrid=name not in BOUND), StochasticRoundingRNG(1, "layer")
    recipe = gemms.recipe
    scales = dict(zip((X, WEIGHT, GRAD), (64.0, 32.0, 128.0))) if name == "delayed" else {}
    scale = {operand: torch.tensor(scales[operand]) if scales else None for operand in (X, WEIGHT, GRAD)}

    def draw(scaling, role):
        return noise.generator(role, x.device) if scaling.stochastic else None

    y = gemms.output(x.view(6, 8, -1), w)
    expected = quantize_dequantize(x, recipe.x, scale[X]) @ quantize_dequantize(w, recipe.weight, scale[WEIGHT]).t()
    torch.testing.assert_close(y.view(48, -1), expected)
    grad_x = gemms.input_grad(grad, w)
    g = quantize_dequantize(grad, recipe.grad, scale[GRAD], draw(recipe.grad, "input"))
    torch.testing.assert_close(grad_x, g @ quantize_dequantize(w.t(), recipe.weight_t, scale[WEIGHT]).t())
    grad_w = gemms.weight_grad(grad, x)
    g = quantize_dequantize(grad.t(), recipe.grad_t, scale[GRAD], draw(recipe.grad_t, "weight"))
    torch.testing.assert_close(grad_w, g @ quantize_dequantize(x.t(), recipe.x_t, scale[X]).t())
    bound = BOUND.get(name, 0.08)
    for found, exact in ((y.view(48, -1), x @ w.t()), (grad_x, grad @ w), (grad_w, grad.t() @ x)):
        error = (found - exact).norm() / exact.norm()
        assert 1e-3 < error < bound, (name, error)


def test_formats_and_scaling_of_every_recipe():
    kinds = {name: make_recipe(name, hybrid=True) for name in NAMES}
    assert {name: (recipe.x.fmt.name, recipe.grad.fmt.name) for name, recipe in kinds.items()} == {
        **dict.fromkeys(NAMES[:4], ("e4m3", "e5m2")),
        **dict.fromkeys(BOUND, ("e2m1", "e2m1")),
    }
    assert make_recipe("mxfp8").grad.fmt.name == "e4m3" and kinds["mxfp8"].alignment == 32
    block = kinds["blockwise"]
    assert (block.x.rows, block.x.cols, block.weight.rows, block.weight.cols, block.alignment) == (1, 128, 128, 128, 16)
    with pytest.raises(ValueError, match="no recipe"):
        make_recipe("fp6")


def test_noise_and_transform_of_nvfp4():
    nv = make_recipe("nvfp4")
    assert nv.alignment == 32
    assert (
        nv.grad.stochastic
        and nv.grad_t.stochastic
        and not nv.x.stochastic
        and not nv.x_t.stochastic
        and not nv.weight.stochastic
    )
    assert (
        nv.grad_t.hadamard
        and nv.x_t.hadamard
        and not nv.grad.hadamard
        and not nv.x.hadamard
        and not nv.weight_t.hadamard
    )


@pytest.mark.parametrize(
    ("name", "rows", "squares"),
    [
        ("delayed", (0, 0, FP32), (0, 0, FP32)),
        ("tensorwise", (0, 0, FP32), (0, 0, FP32)),
        ("blockwise", (1, 128, POWER_OF_TWO), (128, 128, POWER_OF_TWO)),
        ("mxfp8", (1, 32, POWER_OF_TWO), (1, 32, POWER_OF_TWO)),
        ("nvfp4", (1, 16, TWO_LEVEL), (16, 16, TWO_LEVEL)),
    ],
)
def test_elements_that_share_a_scale_in_each_recipe(name, rows, squares):
    """squares: the weight, both ways."""
    recipe = make_recipe(name, hybrid=True)
    for operand in ("x", "weight", "grad", "weight_t", "grad_t", "x_t"):
        scaling = getattr(recipe, operand)
        assert (scaling.rows, scaling.cols, scaling.scales) == (squares if operand.startswith("weight") else rows), (
            operand
        )
    assert (
        recipe.grad.fmt == recipe.grad_t.fmt
        and recipe.x.fmt == recipe.x_t.fmt == recipe.weight.fmt == recipe.weight_t.fmt
    )


def test_square_blocks_quantize_weight_and_transpose_equally():
    _, w, _ = operands(inner=200, outer=150)
    for name in (each.key for each in NAMED_BY_LAYER if each.tokens_per_scale and not each.stored.is_gathered_wide):
        recipe = make_recipe(name)
        assert torch.equal(quantize_dequantize(w, recipe.weight), quantize_dequantize(w.t(), recipe.weight_t).t())


def test_weight_gradient_is_exact_without_fp8_wgrad():
    x, w, grad = operands()
    torch.testing.assert_close(make_gemms("mxfp8", wgrad=False).weight_grad(grad, x), grad.t() @ x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gemm_results_have_the_operand_dtype(dtype):
    x, w, grad = (t.to(dtype) for t in operands())
    gemms = make_gemms("blockwise")
    found = gemms.output(x, w), gemms.input_grad(grad, w), gemms.weight_grad(grad, x)
    assert all(f.dtype == dtype for f in found)


def test_deferred_weight_gradients_equal_immediate_ones():
    x, w, grad = operands()
    now, later = make_gemms(NAMES[-1]), make_gemms(NAMES[-1])
    computes = [later.make_wgrad_fn(grad * microbatch, x) for microbatch in (1, 2)]
    later.input_grad(grad, w)  # draws from another generator
    for microbatch, compute in zip((1, 2), computes):
        assert torch.equal(now.weight_grad(grad * microbatch, x), compute())


def test_delayed_scales_follow_the_maxima_of_finished_iterations():
    gemms = QuantizedGemms(
        make_recipe("delayed", hybrid=True, delayed=DelayedScaling(margin=1, history=2, largest=True)), "layer"
    )
    x, w, grad = operands()
    assert torch.equal(
        gemms.output(x, w),
        quantize_dequantize(x, gemms.recipe.x, torch.tensor(1.0))
        @ quantize_dequantize(w, gemms.recipe.x, torch.tensor(1.0)).t(),
    )
    gemms.output(x * 2, w)
    gemms.input_grad(grad, w)
    gemms.output(x, w)  # as a recomputed pass: the maximum stays
    assert torch.equal(gemms.amax, torch.stack([2 * x.abs().max(), w.abs().max(), grad.abs().max()]))
    amax = gemms.amax.clone()
    gemms.eval()
    gemms.output(x * 100, w)
    assert torch.equal(gemms.amax, amax), "evaluation leaves no trace"
    gemms.advance(gemms.recipe.delayed, amax)
    fmax = torch.tensor([448.0, 448.0, 57344.0])
    torch.testing.assert_close(gemms.scaling[:, 0], fmax / amax / 2)
    assert not gemms.amax.any()
    gemms.advance(gemms.recipe.delayed, torch.tensor([1e-3, 0.0, float("inf")]))
    torch.testing.assert_close(
        gemms.scaling[:, 0], fmax / amax / 2
    )  # the larger of two; zeros; not finite: nothing changes
    assert gemms.scaling[2, 1:].tolist() == [amax[2], 0.0] and gemms.scaling[0, 1:].tolist() == pytest.approx(
        [1e-3, amax[0].item()]
    )
    gemms.advance(gemms.recipe.delayed, torch.tensor([1e-3, 0.0, 4.0]))
    torch.testing.assert_close(gemms.scaling[0, 0], fmax[0] / 1e-3 / 2)


def test_delayed_scaling_with_most_recent_maximum():
    gemms = QuantizedGemms(make_recipe("delayed", delayed=DelayedScaling(history=3)), "layer")
    gemms.advance(gemms.recipe.delayed, torch.tensor([8.0, 8.0, 8.0]))
    gemms.advance(gemms.recipe.delayed, torch.tensor([2.0, 4.0, 0.0]))
    assert gemms.scaling[:, 0].tolist() == [224.0, 112.0, 56.0]


def experts(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    values = {"x": (23, 32), "p": (23,), "w1": (4, 48, 32), "w2": (4, 32, 24), "b1": (4, 48), "b2": (4, 32)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype).mul_(0.5).requires_grad_()
        for name, shape in values.items()
    }, (9, 0, 3, 11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighed", [True, False])
def test_quantized_experts_equal_one_linear_per_expert(name, weighed):
    """Against autograd over one quantized linear per expert and GEMM."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, gemms):
            ctx.save_for_backward(x, w)
            ctx.gemms = gemms
            return gemms.output(x, w)

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return ctx.gemms.input_grad(grad, w), ctx.gemms.weight_grad(grad, x), None

    activation, found = Activation("silu", gated=True), []
    for way in range(2):
        values, counts = experts()
        pair = make_gemms(name), make_gemms(name)
        x, p, w1, w2, b1, b2 = (values[key] for key in ("x", "p", "w1", "w2", "b1", "b2"))
        p = p if weighed else None
        if way == 0:
            y = quantized_expert_mlp(x, p, ExpertWeights(w1, w2, b1, b2), counts, activation, pair)
        else:
            rows, parts = 0, []
            for expert, count in enumerate(counts):
                own = slice(rows, rows + count)
                rows += count
                if count:
                    a = activation(Linear.apply(x[own], w1[expert], pair[0]) + b1[expert])
                    a, bias = (a, b2[expert]) if p is None else (a * p[own, None], p[own, None] * b2[expert])
                    parts.append(Linear.apply(a, w2[expert], pair[1]) + bias)
            y = torch.cat(parts)
        y.square().sum().backward()
        grads = [value.grad for value in values.values() if value.grad is not None]
        found.append([y.detach(), *grads])
    if (
        name in BOUND
    ):  # autograd runs the experts in another order, so the noise is other noise: only the forward is the same
        found = [each[:1] for each in found]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_quantized_experts_are_close_to_exact_ones():
    activation, results = Activation("gelu"), []
    for kind in ("exact", "now", "later"):
        values, counts = experts()
        x, p, w1, w2 = (
            values["x"],
            values["p"],
            values["w1"].detach()[:, :24].contiguous().requires_grad_(),
            values["w2"],
        )
        queue = WeightGradQueue()
        queue.active = kind == "later"
        if kind == "exact":
            y = expert_mlp(x, p, ExpertWeights(w1, w2), counts, activation)
        else:
            y = quantized_expert_mlp(
                x, p, ExpertWeights(w1, w2), counts, activation, (make_gemms("mxfp8"), make_gemms("mxfp8")), queue=queue
            )
        y.square().sum().backward()
        assert (w1.grad is None) == (kind == "later")
        queue.run()
        results.append((y.detach(), x.grad, w1.grad, w2.grad, p.grad))
    for exact, now, later in zip(*results):
        assert torch.equal(now, later)
        assert 1e-3 < (now - exact).norm() / exact.norm() < 0.2
    padded, padded_p = F.pad(x, (0, 0, 0, 5)), F.pad(p, (0, 5))
    y = quantized_expert_mlp(
        padded,
        padded_p,
        ExpertWeights(w1, w2),
        counts,
        activation,
        (make_gemms("mxfp8"), make_gemms("mxfp8")),
        unused=5,
    )
    assert torch.equal(y[:23], results[1][0]), "rows that belong to no expert are not looked at"
    with pytest.raises(ValueError, match="add up to 4"):
        quantized_expert_mlp(x, p, ExpertWeights(w1, w2), (4,), activation, (make_gemms("mxfp8"), make_gemms("mxfp8")))


def test_quantized_experts_use_the_given_activation():
    """Kernels that replace torch (--triton-kernels activation)."""
    activation, called = Activation("silu", gated=True), []
    values, counts = experts()
    plain = get_activation_fns(activation)
    block = ActivationFns(
        lambda *args: (called.append("forward"), plain.forward(*args))[1],
        lambda *args: (called.append("backward"), plain.backward(*args))[1],
    )
    model = ModelArgs(
        num_layers=1,
        hidden_size=values["x"].shape[1],
        ffn_hidden_size=values["w2"].shape[2],
        swiglu=True,
        add_bias_linear=False,
    )
    layer = Experts(
        model,
        MoEArgs(num_experts=len(counts)),
        ParallelState.single(),
        "experts",
        replace(
            LOCAL,
            quantize=lambda *_, **__: make_gemms("mxfp8"),
            kernels=Kernels(activations=((activation, None, block),)),
        ),
    )
    with torch.no_grad():
        layer.linear_fc1.weight.copy_(values["w1"])
        layer.linear_fc2.weight.copy_(values["w2"])
    layer(values["x"], values["p"], counts).square().sum().backward()
    held = sum(count > 0 for count in counts)
    assert called == ["forward"] * held + ["backward"] * held


def test_zero_row_padding_changes_no_result():
    """Native GEMMs need row counts in multiples of 16."""
    x, w, grad = operands(rows=21)
    for name in ("tensorwise", "blockwise", "mxfp8"):
        gemms = make_gemms(name)
        padded_x, padded_grad = (F.pad(t, (0, 0, 0, 11)) for t in (x, grad))
        torch.testing.assert_close(gemms.output(padded_x, w)[:21], gemms.output(x, w))
        torch.testing.assert_close(gemms.weight_grad(padded_grad, padded_x), gemms.weight_grad(grad, x))
