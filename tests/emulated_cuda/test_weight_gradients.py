"""Weight gradients of a model in bf16 reach the fp32 main gradient without a rounding to bf16, however many microbatches add to it."""

import itertools

import pytest
import torch
from emulated_cuda import te_package
from emulated_cuda.run import on_device
from torch.nn import Parameter

from moe_trainer.ops.main_grad import MainGradSum
from moe_trainer.parallel.weight_grads import WeightGradQueue

MICROBATCHES, WIDTH, EXPERTS = 16, 64, 3
LITTLE = 2.0**-9  # 1 + LITTLE is 1 in bf16
COUNTS = (2, 0, 2)


def with_main_grad(*shape: int, factor: float = 0.5) -> Parameter:
    """A weight of all experts, whose main gradient an earlier iteration has left."""
    weight = Parameter(torch.full(shape, 1 / WIDTH, dtype=torch.bfloat16, device="cuda"))
    total, betas = torch.full(shape, 7.0, device="cuda"), iter([0.0, *[1.0] * MICROBATCHES])
    weight.main_grad, weight.main_grad_sum = total, lambda operand: MainGradSum(total, next(betas), factor)
    weight.main_grad_sum_dtype = total.dtype
    return weight


def gradient_of_second_linear(run_experts, queue=None) -> list[float]:
    """Main gradients of fc2's experts, all of whose elements must be equal, after microbatches with a small and a large token each.

    run_experts: function of tokens and both weights.
    queue: defers weight gradients, of two microbatches at a time.
    """
    w1, w2 = with_main_grad(EXPERTS, 2 * WIDTH, WIDTH), with_main_grad(EXPERTS, WIDTH, WIDTH)
    taken = []
    if queue is not None:
        queue.active = True
    for _ in range(MICROBATCHES):
        x = torch.ones(sum(COUNTS), WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_()
        y = run_experts(x, w1, w2)
        grad = torch.ones_like(y)
        grad[::2] *= LITTLE
        y.backward(grad)
        if queue is not None:
            taken.append(queue.take())
            if len(taken) == 2:
                taken.pop(0).run()
                taken.pop(0).run()
    assert w1.grad is None and w2.grad is None
    assert all((expert == expert[0, 0]).all() for expert in w2.main_grad)
    return [float(expert[0, 0]) for expert in w2.main_grad]


def rounded_gradients(kind: str) -> list[tuple[str, float]]:
    """Dtype and relative error of the gradients that the library makes of weights that have no main gradient."""
    import transformer_engine.pytorch as library
    from transformer_engine.pytorch import ops  # noqa: F401 - the attribute of the package

    from moe_trainer.layers import te_experts, te_ops

    written, module = [], te_ops if kind == "operations" else te_experts
    give = module.give_main_grads
    module.give_main_grads = lambda *args: written.append(give(*args)) or written[-1]
    x, y_grad = torch.ones(sum(COUNTS), WIDTH, dtype=torch.bfloat16, device="cuda"), 3.0
    w1, w2 = (
        Parameter(torch.full(shape, 1 / WIDTH, dtype=torch.bfloat16, device="cuda"))
        for shape in ((EXPERTS, 2 * WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH))
    )
    if kind == "operations":
        mlp = te_ops.FusedExpertMLP(EXPERTS, (WIDTH, WIDTH, WIDTH), te_experts.LibraryGemms(library))
        y, activation = mlp(x, torch.ones(len(x), device="cuda"), w1, w2, COUNTS), torch.nn.functional.silu(x[0, 0])
    else:
        linear = te_experts.FusedGroupedLinear(EXPERTS, WIDTH, WIDTH, te_experts.LibraryGemms(library))
        y, activation = linear(x, w2, COUNTS), x[0, 0]
    y.backward(torch.full_like(y, y_grad))
    exact = torch.tensor(COUNTS, device="cuda").view(-1, 1, 1) * y_grad * activation.float()
    error = float((w2.grad.float() - exact).abs().max() / exact.max())
    return [(str(sums.dtype), error) for sums in written]


def ours(where: str) -> tuple[list[float], float]:
    """Main gradients, and the activation of every token."""
    from moe_trainer.ops.expert_mlp import ExpertMLPKernels, ExpertWeights, expert_mlp
    from moe_trainer.ops.pointwise import Activation

    options, counts = {}, COUNTS
    options["queue"] = WeightGradQueue() if "deferred" in where else None
    options["allow_grouped"] = "one by one" not in where
    if "kernel" in where:
        from moe_trainer.ops.triton_grouped_gemm import add_weight_grad

        options["kernels"] = ExpertMLPKernels(add_weight_grad=add_weight_grad)
    if "device" in where:
        counts = torch.tensor(COUNTS, device="cuda")
    swiglu, ones = Activation("silu", gated=True), torch.ones(1, dtype=torch.bfloat16)
    found = gradient_of_second_linear(
        lambda x, w1, w2: expert_mlp(x, None, ExpertWeights(w1, w2), counts, swiglu, **options), options["queue"]
    )
    return found, float(torch.nn.functional.silu(ones))


def quantized(recipe: str, where: str) -> tuple[list[float], float]:
    """Main gradients of experts in fp8, one by one or in one call, and the activation of every token."""
    from moe_trainer.ops.expert_mlp import ExpertWeights
    from moe_trainer.ops.pointwise import Activation
    from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
    from moe_trainer.quantization.gemms import QuantizedGemms
    from moe_trainer.quantization.recipe import make_recipe

    gemms = tuple(QuantizedGemms(make_recipe(recipe), name).cuda() for name in ("fc1", "fc2"))
    queue = WeightGradQueue() if "deferred" in where else None
    swiglu = Activation("silu", gated=True)
    activation = torch.nn.functional.silu(torch.ones(1, dtype=torch.bfloat16))
    if recipe == "blockwise":  # scales are powers of two; else every token is the largest one
        activation = activation.to(torch.float8_e4m3fn).float()
    found = gradient_of_second_linear(
        lambda x, w1, w2: quantized_expert_mlp(x, None, ExpertWeights(w1, w2), COUNTS, swiglu, gemms, queue=queue),
        queue,
    )
    return found, float(activation)


def of_one_linear(kind: str, where: str) -> tuple[float, bool]:
    """The main gradient of a linear layer, whose elements must be equal. kind: ours, or the recipe of ours, or the library's."""
    from contextlib import nullcontext

    from moe_trainer.layers.init import Init
    from moe_trainer.layers.linear import ReplicatedLinear
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.quantization.gemms import QuantizedGemms
    from moe_trainer.quantization.recipe import make_recipe

    queue = WeightGradQueue() if "deferred" in where else None
    options = {"name": "linear", "group": ParallelState.single().tp, "init": Init("normal", 0.05)}
    weight = with_main_grad(WIDTH, WIDTH)
    if kind == "library":
        import transformer_engine.pytorch as library

        from moe_trainer.layers.te_layers import FusedReplicatedLinear

        layer = FusedReplicatedLinear(WIDTH, WIDTH, library=library, context=nullcontext, **options)
        layer.fused.weight = weight
    else:
        options["quantize"] = lambda name, **_: QuantizedGemms(make_recipe(kind), name).cuda()
        if kind == "ours":
            options["quantize"] = None
        layer = ReplicatedLinear(WIDTH, WIDTH, queue=queue, **options)
    layer.weight = weight
    for _ in range(MICROBATCHES):
        if queue is not None:
            queue.active = True
        y = layer(torch.ones(2, WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_())
        y.backward(torch.tensor([[LITTLE], [1.0]], dtype=torch.bfloat16, device="cuda").expand(y.shape))
        if queue is not None:
            queue.run()
    assert weight.grad is None
    return float(weight.main_grad[0, 0]), bool((weight.main_grad == weight.main_grad[0, 0]).all())


def of_the_library(kind: str, where: str) -> tuple[list[float], float]:

    import transformer_engine.pytorch as library

    from moe_trainer.layers.te_experts import FusedGroupedLinear, LibraryGemms
    from moe_trainer.layers.te_ops import FusedExpertMLP

    probs, queue = torch.ones(sum(COUNTS), device="cuda"), WeightGradQueue() if "deferred" in where else None
    activation = float(torch.nn.functional.silu(torch.ones(1, dtype=torch.bfloat16)))
    if kind == "operations":
        from transformer_engine.pytorch import ops  # noqa: F401 - the attribute of the package

        mlp = FusedExpertMLP(EXPERTS, (WIDTH, WIDTH, WIDTH), LibraryGemms(library), queue=queue)
        return gradient_of_second_linear(lambda x, w1, w2: mlp(x, probs, w1, w2, COUNTS), queue), activation
    linear = FusedGroupedLinear(EXPERTS, WIDTH, WIDTH, LibraryGemms(library), queue=queue)
    return gradient_of_second_linear(lambda x, _, w2: linear(x, w2, COUNTS), queue), 1.0


def assert_exact(found: list[float], activation: float) -> None:
    exact = 0.5 * MICROBATCHES * (1.0 + LITTLE) * activation
    assert found == [pytest.approx(exact, rel=1e-5), 0.0, pytest.approx(exact, rel=1e-5)]


@pytest.mark.parametrize(
    "where",
    [
        "counts on the host",
        "counts on the host, kernel",
        "counts on the device, kernel",
        "counts on the host, deferred",
        "counts on the device, kernel, deferred",
        "one by one, deferred",
    ],
)
def test_grouped_gemms_lose_no_small_gradient(where):
    if "kernel" in where:
        pytest.importorskip("triton")
    assert_exact(*on_device(ours, where))


@pytest.mark.parametrize("where", ["at once", "deferred"])
@pytest.mark.parametrize("kind", ["linears", "operations"])
def test_transformer_engine_loses_no_small_gradient(kind, where):
    assert_exact(*te_package.on_device(of_the_library, kind, where))


@pytest.mark.parametrize("where", ["at once", "deferred"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_quantized_experts_lose_no_small_gradient(recipe, where):
    assert_exact(*on_device(quantized, recipe, where))


@pytest.mark.parametrize(
    ("kind", "where"),
    [*itertools.product(("ours", "tensorwise", "blockwise"), ("at once", "deferred")), ("library", "at once")],
)
def test_linears_lose_no_small_gradient(kind, where):
    """The library's have no queue: where gradients are deferred ours compute."""
    run = te_package.on_device if kind == "library" else on_device
    assert run(of_one_linear, kind, where) == (pytest.approx(0.5 * MICROBATCHES * (1.0 + LITTLE), rel=1e-5), True)


@pytest.mark.parametrize("kind", ["linears", "operations"])
def test_transformer_engine_writes_bf16_where_nothing_wider_is_kept(kind):
    found = te_package.on_device(rounded_gradients, kind)
    assert {dtype for dtype, _ in found} == {"torch.bfloat16"} and all(error < 2.0**-7 for _, error in found)
