"""Quantized GEMMs of many experts in one call.

Torch's scaled_grouped_mm computed as it is defined, against GEMM by GEMM.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from quantization.test_gemms import make_gemms
from quantization.test_scaled_mm import offset
from torch.nn.functional import ScalingType, SwizzleType

from moe_trainer.ops.expert_mlp import ExpertWeights
from moe_trainer.ops.pointwise import Activation
from moe_trainer.quantization import gemms, scaled_grouped
from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
from moe_trainer.quantization.quantize import QuantizedTensor, quantize
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.quantization.scaled_grouped import (
    ExpertKernels,
    can_use_block_gemms,
    can_use_native_grouped_mm,
    can_use_native_weight_grad,
    native_grouped_mm,
    native_grouped_weight_grad,
)

SIGNATURE = inspect.signature(F.scaled_grouped_mm)
ROWS = (5, 130, 1)


def untile_scales(flat, rows, cols):
    return torch.tensor([[flat[offset(row, col, cols)] for col in range(cols)] for row in range(rows)])


def decode(values, scale, kind):
    if kind == ScalingType.RowWise:
        assert scale.shape == values.shape[:1] and scale.dtype == torch.float32
        return values.float() * scale[:, None]
    cols = values.shape[1] // 32
    return values.float() * untile_scales(scale.float().flatten(), len(values), cols).repeat_interleave(32, 1)


@pytest.fixture
def device(monkeypatch):
    """torch's scaled_grouped_mm, as it is defined for rows in groups."""
    calls = []

    def scaled_grouped_mm(*args, **kwargs):
        bound = SIGNATURE.bind(*args, **kwargs).arguments
        calls.append(bound)
        a, b, kind, ends = bound["mat_a"], bound["mat_b"], bound["scale_recipe_a"], bound["offs"].tolist()
        assert kind == bound["scale_recipe_b"] and bound["offs"].dtype == torch.int32 and ends[-1] == len(a)
        assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.transpose(1, 2).is_contiguous()
        assert bound["output_dtype"] == torch.bfloat16 and a.shape[1] % 16 == b.shape[2] % 16 == 0
        tiled = kind == ScalingType.BlockWise1x32
        assert (
            bound["swizzle_a"]
            == bound["swizzle_b"]
            == (SwizzleType.SWIZZLE_32_4_4 if tiled else SwizzleType.NO_SWIZZLE)
        )
        found, first = [], 0
        for group, (start, end) in enumerate(zip([0, *ends], ends)):
            height = -(-(end - start) // 128) * 128 if tiled else end - start
            scale = bound["scale_a"][first : first + height]
            first += height
            right = decode(b[group].t(), bound["scale_b"][group], kind)
            found.append(decode(a[start:end], scale, kind) @ right.t())
        assert first == len(bound["scale_a"])
        return torch.cat(found).to(torch.bfloat16)

    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)
    return calls


def random(rows, cols, scaling, seed):
    return quantize(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)), scaling)


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_grouped_gemm_equals_separate_gemms(device, name):
    recipe = make_recipe(name)
    a = [random(rows, 256, recipe.x, seed) for seed, rows in enumerate(ROWS)]
    b = [random(144, 256, recipe.weight, 10 + seed) for seed in range(len(ROWS))]
    expected = torch.cat([one.dequantized() @ other.dequantized().t() for one, other in zip(a, b)])
    torch.testing.assert_close(native_grouped_mm(a, b).float(), expected, rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "mxfp8"])
def test_grouped_experts_equal_gemm_per_expert(device, monkeypatch, name):
    generator, activation, found = torch.Generator().manual_seed(0), Activation("silu", gated=True), []
    shapes = {"x": (136, 128), "p": (136,), "w1": (4, 256, 128), "w2": (4, 128, 128), "b1": (4, 256), "b2": (4, 128)}
    drawn = {key: torch.randn(shape, generator=generator).mul_(0.5) for key, shape in shapes.items()}
    asked = []

    def groups(x, outputs, a, b, dtype):
        asked.append((x.shape, outputs))
        return True

    for grouped in (False, True):
        if grouped:
            monkeypatch.setattr(gemms, "can_use_native_grouped_mm", groups)
        v = {key: value.to(torch.bfloat16).requires_grad_() for key, value in drawn.items()}
        y = quantized_expert_mlp(
            v["x"],
            v["p"],
            ExpertWeights(v["w1"], v["w2"], v["b1"], v["b2"]),
            (5, 130, 0, 1),
            activation,
            (make_gemms(name), make_gemms(name)),
        )
        y.float().square().sum().backward()
        found.append([y.detach(), *(value.grad for value in v.values())])
    assert len(device) == 4 and asked == [((5, 128), 256), ((5, 128), 128), ((5, 128), 128), ((5, 256), 128)]
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * one.float().norm()


def test_when_grouped_scaled_gemm_is_used(monkeypatch):
    monkeypatch.setattr(scaled_grouped, "_works", lambda *_: True)
    recipe, blocks = make_recipe("tensorwise", hybrid=True), make_recipe("blockwise")
    mx = make_recipe("mxfp8")

    def on(width, device="cuda"):
        return SimpleNamespace(is_cuda=device == "cuda", shape=(8, width), device=device)

    bf16 = torch.bfloat16
    assert can_use_native_grouped_mm(on(48), 32, recipe.x, recipe.weight, bf16) and can_use_native_grouped_mm(
        on(128), 32, mx.x, mx.weight, bf16
    )
    assert not can_use_native_grouped_mm(on(48, "cpu"), 32, recipe.x, recipe.weight, bf16)
    assert not can_use_native_grouped_mm(on(48), 32, recipe.x, recipe.weight, torch.float16)
    assert not can_use_native_grouped_mm(on(40), 32, recipe.x, recipe.weight, bf16) and not can_use_native_grouped_mm(
        on(48), 40, recipe.x, recipe.weight, bf16
    )
    assert not can_use_native_grouped_mm(on(48), 32, recipe.grad, recipe.weight_t, bf16), "E5M2"
    assert not can_use_native_grouped_mm(on(128), 32, blocks.x, blocks.weight, bf16) and not can_use_native_grouped_mm(
        on(96), 32, mx.x, mx.weight, bf16
    )


@pytest.mark.parametrize(
    ("capability", "name", "works"),
    [
        ((8, 9), "tensorwise", False),
        ((9, 0), "tensorwise", True),
        ((10, 0), "tensorwise", False),
        ((9, 0), "mxfp8", False),
        ((10, 0), "mxfp8", True),
    ],
)
def test_grouped_scaled_gemm_support_by_device(device, monkeypatch, caplog, capability, name, works):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    recipe, cpu, tried = make_recipe(name), torch.device("cpu"), scaled_grouped._works.__wrapped__
    assert tried(cpu, recipe.x, recipe.weight) is works
    if works:
        right = F.scaled_grouped_mm
        monkeypatch.setattr(F, "scaled_grouped_mm", lambda *args, **options: right(*args, **options) * 1.1)
        assert not tried(cpu, recipe.x, recipe.weight) and "gives other numbers" in caplog.text
        monkeypatch.setattr(
            F, "scaled_grouped_mm", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("built without it"))
        )
        assert not tried(cpu, recipe.x, recipe.weight) and "built without it" in caplog.text


GROUPS = (128, 0, 256)


def decode_groups(values, scale, offsets):
    """The columns of each group, whose scales are tiles after those of the group before."""
    found, height, flat = [], -(-len(values) // 128) * 128, scale.float().flatten()
    for start, end in zip([0, *offsets], offsets):
        cols = (end - start) // 32
        scales = untile_scales(flat[start // 32 * height :], len(values), cols) if cols else torch.ones(len(values), 0)
        found.append(values[:, start:end].float() * scales.repeat_interleave(32, 1))
    return found


@pytest.fixture
def weight_grads(monkeypatch):
    """torch's scaled_grouped_mm, as it is defined for columns in groups."""

    def scaled_grouped_mm(*args, **kwargs):
        bound = SIGNATURE.bind(*args, **kwargs).arguments
        a, b, offsets = bound["mat_a"], bound["mat_b"].t(), bound["offs"].tolist()
        assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.is_contiguous()
        assert bound["scale_a"].dtype == torch.float8_e8m0fnu and bound["scale_a"].dim() == bound["scale_b"].dim() == 2
        left, right = (decode_groups(x, bound[key], offsets) for x, key in ((a, "scale_a"), (b, "scale_b")))
        return torch.stack([one @ other.t() for one, other in zip(left, right)]).to(torch.bfloat16)

    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)


def test_native_weight_grads_equal_definition(weight_grads):
    """Also of sizes that tiles do not divide; tokens after the last group, which are NaN, are not read."""
    recipe = make_recipe("mxfp8")
    grad, x = random(144, 512, recipe.grad_t, 1), random(80, 512, recipe.x_t, 2)
    for operand in (grad, x):
        operand.values[:, 384:] = operand.inverse[:, 12:] = torch.nan
    offsets = torch.tensor(GROUPS).cumsum(0).to(torch.int32)
    found = native_grouped_weight_grad(grad.values, grad.inverse, x.values, x.inverse, offsets)
    parts = (operand.dequantized()[:, :384].split(GROUPS, 1) for operand in (grad, x))
    expected = torch.stack([one @ other.t() for one, other in zip(*parts)])
    torch.testing.assert_close(found.float(), expected, rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize(("capability", "works"), [((9, 0), False), ((10, 0), True)])
def test_weight_grad_support_by_device(weight_grads, monkeypatch, caplog, capability, works):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    recipe, cpu, tried = make_recipe("mxfp8"), torch.device("cpu"), scaled_grouped._weight_grads_work.__wrapped__
    assert tried(cpu, recipe.grad_t, recipe.x_t) is works
    if works:
        monkeypatch.setattr(scaled_grouped, "swizzle_e8m0_of_groups", lambda x, _: scaled_grouped.swizzle_e8m0(x))
        assert not tried(cpu, recipe.grad_t, recipe.x_t) and "computed in bf16" in caplog.text


def defined_kernels(factor: float) -> ExpertKernels:
    """GEMMs of blocks as they are defined, times a factor."""
    row, square = make_recipe("blockwise").x, make_recipe("blockwise").weight

    def of_tokens(x, scales, w, w_scales, offsets, dtype):
        numbers, start, found = QuantizedTensor(x, scales, row).dequantized(), 0, []
        for weight, stop in zip(zip(w, w_scales), offsets.tolist()):
            found.append(numbers[start:stop] @ QuantizedTensor(*weight, square).dequantized().t())
            start = stop
        return F.pad(torch.cat(found), (0, 0, 0, len(x) - start), value=torch.nan).to(dtype) * factor

    def over_tokens(grad, scales, x, x_scales, offsets, dtype):
        stops = offsets.tolist()
        grad, x = (QuantizedTensor(*pair, row).dequantized() for pair in ((grad, scales), (x, x_scales)))
        pairs = zip([0, *stops], stops)
        return torch.stack([grad[:, start:stop] @ x[:, start:stop].t() for start, stop in pairs]).to(dtype) * factor

    return ExpertKernels(of_tokens, over_tokens, lambda *_: None)


@pytest.mark.parametrize(("capability", "works"), [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_block_gemm_support_by_device(monkeypatch, caplog, capability, works):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    recipe, cpu, tried = make_recipe("blockwise"), torch.device("cpu"), scaled_grouped._block_gemms_work.__wrapped__
    for a, b in ((recipe.x, recipe.weight), (recipe.grad_t, recipe.x_t)):
        assert tried(cpu, a, b, defined_kernels(1.0)) is works
        assert not tried(cpu, a, b, defined_kernels(1.1))
    assert ("gives other numbers" in caplog.text) is works


def test_when_weight_grads_and_block_gemms_are_used(monkeypatch):
    for name in ("_weight_grads_work", "_block_gemms_work"):
        monkeypatch.setattr(scaled_grouped, name, lambda *_: True)
    mx, blocks, hybrid = make_recipe("mxfp8"), make_recipe("blockwise"), make_recipe("mxfp8", hybrid=True)
    kernels, bf16 = defined_kernels(1.0), torch.bfloat16

    class On(SimpleNamespace):
        __len__ = lambda self: self.shape[0]  # noqa: E731

    def on(rows, cols, is_cuda=True):
        return On(is_cuda=is_cuda, shape=(rows, cols), device="cuda")

    def wgrad(grad, x, recipe=mx, dtype=bf16):
        return can_use_native_weight_grad(grad, x, recipe.grad_t, recipe.x_t, dtype)

    assert wgrad(on(48, 256), on(32, 256))
    assert (
        not wgrad(on(40, 256), on(32, 256)) and not wgrad(on(48, 256), on(40, 256)) and not wgrad(on(48, 8), on(32, 8))
    )
    assert not wgrad(on(48, 256, False), on(32, 256, False)) and not wgrad(
        on(48, 256), on(32, 256), dtype=torch.float16
    )
    assert not wgrad(on(48, 256), on(32, 256), hybrid) and not wgrad(on(48, 256), on(32, 256), blocks)
    x = on(48, 256)
    assert can_use_block_gemms(x, blocks.x, blocks.weight, bf16, kernels)
    assert can_use_block_gemms(x, blocks.grad_t, blocks.x_t, bf16, kernels)
    assert not can_use_block_gemms(x, blocks.x, blocks.weight, torch.float32, kernels)
    assert not can_use_block_gemms(on(48, 256, False), blocks.x, blocks.weight, bf16, kernels)
    assert not can_use_block_gemms(x, mx.x, mx.weight, bf16, kernels)
    e5m2 = make_recipe("blockwise", hybrid=True)
    assert not can_use_block_gemms(x, e5m2.grad, e5m2.weight_t, bf16, kernels)
