"""The experts' autograd function: gradcheck, and loop against grouped."""

import pytest
import torch
from torch.nn import Parameter

from moe_trainer.ops import expert_mlp as module
from moe_trainer.ops import grouped_gemm
from moe_trainer.ops.expert_mlp import ExpertWeights, expert_mlp
from moe_trainer.ops.grouped_linear import grouped_linear
from moe_trainer.ops.main_grad import MainGradSum
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel.weight_grads import WeightGradQueue

ACTIVATIONS = {
    "swiglu": Activation("silu", gated=True),
    "gelu": Activation("gelu"),
    "tanh gelu": Activation("gelu_tanh"),
    "squared relu": Activation("squared_relu"),
    "clamped": Activation("quick_gelu", gated=True, linear_offset=1.0, clamp=0.5),
}
COUNTS = (3, 0, 1, 4)
HIDDEN, FFN = 8, 16


def labelled(name):
    return lambda message: f"{name}: {message}"


def inputs(activation: Activation, dtype=torch.float64, counts=COUNTS, biases=True, probs=True):
    width = FFN * activation.in_per_out

    def tensor(*shape):
        return (torch.randn(*shape, dtype=torch.float64) * 0.5).to(dtype).requires_grad_()

    return {
        "x_RH": tensor(sum(counts), HIDDEN),
        "probs_R": torch.rand(sum(counts), dtype=torch.float64).to(dtype).requires_grad_() if probs else None,
        "w1_eGH": tensor(len(counts), width, HIDDEN),
        "w2_eHF": tensor(len(counts), HIDDEN, FFN),
        "b1_eG": tensor(len(counts), width) if biases else None,
        "b2_eH": tensor(len(counts), HIDDEN) if biases else None,
    }


def call(values: dict, activation: Activation, counts=COUNTS, **options):
    x, probs, *weights = values.values()
    return expert_mlp(x, probs, ExpertWeights(*weights), counts, activation, **options)


def run(values: dict, activation: Activation, counts=COUNTS, grouped=False):
    return call(values, activation, counts, allow_grouped=grouped)


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradcheck(kind, biases, probs):
    activation = ACTIVATIONS[kind]
    values = inputs(activation, biases=biases, probs=probs)
    names = [name for name, value in values.items() if value is not None]

    def function(*tensors):
        return run({**values, **dict(zip(names, tensors))}, activation)

    assert torch.autograd.gradcheck(function, tuple(values[name] for name in names), fast_mode=True)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 5, 0), (1, 1, 1, 1), (300, 0, 40, 2)])
def test_grouped_equals_loop(kind, biases, counts, monkeypatch):
    activation = ACTIVATIONS[kind]
    monkeypatch.setattr(module, "prefer_grouped", lambda *_: True)
    values = inputs(activation, torch.float32, counts, biases)
    names = [name for name, value in values.items() if value is not None]
    grad = torch.randn(sum(counts), HIDDEN)
    results = []
    for grouped in (False, True):
        y = run(values, activation, counts, grouped)
        assert hasattr(y.grad_fn.options, "gemms") == grouped
        results.append([y, *torch.autograd.grad(y, [values[name] for name in names], grad)])
    for name, loop, one_call in zip(["y", *names], *results):
        torch.testing.assert_close(one_call, loop, atol=1e-4, rtol=1e-4, msg=labelled(name))


@pytest.mark.parametrize("grouped", [False, True])
def test_half_precision_is_close(grouped, monkeypatch):
    monkeypatch.setattr(module, "prefer_grouped", lambda *_: True)
    activation = ACTIVATIONS["swiglu"]
    values = inputs(activation, torch.bfloat16, (30, 0, 10, 24))
    values["probs_R"] = values["probs_R"].detach().float().requires_grad_()
    exact = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    y = run(values, activation, (30, 0, 10, 24), grouped)
    expected = run(exact, activation, (30, 0, 10, 24))
    y.float().square().sum().backward()
    expected.square().sum().backward()
    assert y.dtype == torch.bfloat16 and values["probs_R"].grad.dtype == torch.float32
    assert (y - expected).norm() < 0.01 * expected.norm()
    for name, value in values.items():
        assert (value.grad - exact[name].grad).norm() < 0.02 * exact[name].grad.norm(), name


@pytest.mark.parametrize("counts", [(30, 0, 10, 24), (5, 300, 1, 0), (0, 0, 0, 7), (16, 16, 32, 64)])
@pytest.mark.parametrize("biases", [False, True])
def test_padding_rows_do_not_change_results(counts, biases, monkeypatch):
    """Half precision on CPU pads the rows of an expert: the results equal those without padding."""
    activation = ACTIVATIONS["swiglu"]
    values = inputs(activation, torch.bfloat16, counts, biases)
    names = [name for name, value in values.items() if value is not None]
    grad = torch.randn(sum(counts), HIDDEN).bfloat16()
    results = []
    for bucket in (grouped_gemm.token_bucket, lambda count: count):
        monkeypatch.setattr(grouped_gemm, "token_bucket", bucket)
        y = run(values, activation, counts)
        results.append([y, *torch.autograd.grad(y, [values[name] for name in names], grad)])
    for name, ours, exact in zip(["y", *names], *results):
        # the order of a sum may change with the shape, nothing else
        torch.testing.assert_close(ours, exact, atol=1e-2, rtol=1e-2, msg=labelled(name))
        assert (ours - exact).norm() <= 2e-3 * exact.norm(), name


def test_bucket_sizes():
    for count in range(1, 5000):
        size = grouped_gemm.token_bucket(count)
        assert count <= size < count + max(16, count / 16 + 1) and size % 16 == 0
    assert len({grouped_gemm.token_bucket(count) for count in range(256, 4096)}) <= 4 * 16 + 1


def test_frozen_weights_get_no_gradient():
    activation = ACTIVATIONS["swiglu"]
    values = inputs(activation, biases=False)
    values["w1_eGH"] = values["w1_eGH"].detach()
    values["w2_eHF"] = values["w2_eHF"].detach()
    run(values, activation).sum().backward()
    assert values["x_RH"].grad.norm() > 0


def test_expert_mlp_without_rows():
    activation = ACTIVATIONS["swiglu"]
    values = inputs(activation, torch.float32, (0, 0))
    run(values, activation, (0, 0), True).sum().backward()
    assert values["w1_eGH"].grad.eq(0).all() and values["b2_eH"].grad.eq(0).all()


def test_counts_that_do_not_match_the_tokens_are_rejected():
    activation = ACTIVATIONS["swiglu"]
    with pytest.raises(ValueError, match="add up to 7, but there are 8 tokens"):
        run(inputs(activation), activation, (3, 0, 1, 3))


@pytest.mark.parametrize("counts", [(3, 0, 5, 2), (4, 4, 4, 4)])
@pytest.mark.parametrize("grouped", [False, True])
def test_deferred_weight_gradients_are_bitwise_equal(counts, grouped):
    activation = ACTIVATIONS["swiglu"]
    queue = WeightGradQueue()
    grads = []
    for active in (False, True):
        queue.active = active
        torch.manual_seed(0)
        values = inputs(activation, torch.float32, counts)
        for name in ("w1_eGH", "w2_eHF"):
            values[name] = Parameter(values[name].detach())
        y = call(values, activation, counts, allow_grouped=grouped, queue=queue)
        y.square().sum().backward()
        weights = values["w1_eGH"], values["w2_eHF"]
        assert all((weight.grad is None) == active for weight in weights)
        assert values["x_RH"].grad is not None and values["b1_eG"].grad is not None
        queue.run()
        grads.append([values[name].grad for name in sorted(values)])
    for now, later in zip(*grads, strict=True):
        assert torch.equal(now, later)


@pytest.mark.parametrize(
    ("capability", "grouped"), [((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_grouped_gemm_is_used_where_torch_has_a_kernel(capability, grouped, monkeypatch):
    """On other CUDA devices torch waits for the offsets and loops over the experts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_gemm.prefer_grouped(4096, 8, torch.bfloat16, torch.device("cuda", 0)) is grouped
    assert not grouped_gemm.prefer_grouped(4096, 8, torch.float32, torch.device("cuda", 0))


def test_linear_of_many_experts_adds_its_gradient_with_the_kernel():
    calls, counts = [], (3, 0, 1)
    experts = [slice(0, 3), slice(3, 3), slice(3, 4)]
    gemms = grouped_gemm.GroupedGemms(
        lambda x, w, _: torch.cat([x[rows] @ w[e].t() for e, rows in enumerate(experts)]),
        lambda grad, w, _: torch.cat([grad[rows] @ w[e] for e, rows in enumerate(experts)]),
        lambda grad, x, _: pytest.fail("the gradient was rounded"),
    )
    weight = Parameter(torch.randn(3, 16, 8).bfloat16())
    total = MainGradSum(torch.zeros(3, 16, 8), 1.0, 1.0)
    weight.main_grad_sum = lambda operand: total
    y = grouped_linear(
        torch.randn(4, 8).bfloat16(), weight, counts, gemms=gemms, add_weight_grad=lambda *args: calls.append(args)
    )
    y.sum().backward()
    assert len(calls) == 1 and calls[0][3] is total and weight.grad is None
