"""The MoE layer against the plain reference: output, every gradient, losses, routing."""

import pytest
import torch
from moe.layers import Chunk, build_layer, by_name, collect_metrics, sections
from reference import Balance, moe_layer

from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe.balancing import start_iteration
from moe_trainer.moe.expert_lora import ExpertLoRA
from moe_trainer.parallel.params import ParamInfo, get_param_info

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk": 4}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
ROUTERS = {
    "softmax after top-k": AUX,
    "softmax before top-k": dict(AUX, moe_router_pre_softmax=True),
    "top-1": dict(AUX, moe_router_pre_softmax=True, moe_router_topk=1),
    "every expert": dict(AUX, moe_router_topk=8),
    "scaled": dict(AUX, moe_router_topk_scaling_factor=2.5),
    "softmax groups": dict(AUX, moe_router_num_groups=4, moe_router_group_topk=2),
    "groups by their best expert": dict(
        AUX,
        moe_router_pre_softmax=True,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_group_score_topk=1,
    ),
    "sigmoid": dict(SIGMOID, **AUX),
    "sigmoid top-1": dict(AUX, moe_router_score_function="sigmoid", moe_router_topk=1),
    "sqrtsoftplus": dict(AUX, moe_router_score_function="sqrtsoftplus", moe_router_topk_scaling_factor=1.5),
    "sigmoid bias groups": dict(
        SIGMOID,
        **AUX,
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
    ),
    "sequence loss": dict(SIGMOID, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.3),
    "global loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "all losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.05,
    },
    "all losses, sigmoid": dict(
        SIGMOID,
        moe_router_load_balancing_type=["global_aux_loss", "aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.2, 0.3],
        moe_z_loss_coeff=0.05,
    ),
    "z-loss alone": {"moe_z_loss_coeff": 0.05},
    "no loss": {"moe_router_load_balancing_type": "none"},
    "drops": dict(AUX, moe_expert_capacity_factor=0.8),
    "drops by position": dict(AUX, moe_expert_capacity_factor=0.8, moe_token_drop_policy="position"),
    "padded": dict(AUX, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
    "padded, sigmoid": dict(SIGMOID, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True),
    "ample capacity": {"moe_expert_capacity_factor": 50.0},
}
EXPERT_KINDS = {
    "swiglu": {},
    "gelu": {"swiglu": False},
    "squared relu": {"swiglu": False, "squared_relu": True},
    "swiglu with biases": {"add_bias_linear": True},
    "gelu with biases": {"swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": False},
    "tanh gelu with biases": {"swiglu": False, "add_bias_linear": True},
    "shared": {"moe_shared_expert_intermediate_size": 20},
    "gated shared": {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "latent": {"moe_latent_size": 10},
    "latent, biases, gelu": {"moe_latent_size": 10, "add_bias_linear": True, "swiglu": False},
    "latent, gated shared": {
        "moe_latent_size": 10,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
    },
    "own width": {"moe_ffn_hidden_size": 8},
    "probabilities on the input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 1.5,
    },
}


def prefixed(name):
    return lambda message: f"{name}: {message}"


def compare(args, dtype=torch.float64, tolerance=1e-12, shape=(6, 2), microbatches=2):
    """Two microbatches of one iteration, with gradient scale 0.7."""
    layer = build_layer(args, dtype=dtype)
    params = by_name(layer)
    bias = layer.router.expert_bias
    chunk, earlier, values = Chunk(layer), [], {}
    start_iteration([chunk])
    for index in range(microbatches):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(*shape, 16, generator=generator, dtype=torch.float64).to(dtype)
        weight = torch.randn(*shape, 16, generator=generator, dtype=torch.float64).to(dtype)
        x_ours, x_plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        layer.router.recorder = []
        y = layer(x_ours, PassInputs(grad_scale=0.7))
        (y * weight).sum().backward()
        balance = Balance()
        expected = moe_layer(x_plain, params, "decoder.layers.0.mlp", args, balance, bias, earlier)
        ((expected * weight).sum() + 0.7 * balance.total).backward()
        assert torch.equal(layer.router.recorder[0]["map"], balance.maps["decoder.layers.0.mlp"])
        torch.testing.assert_close(
            layer.router.recorder[0]["probs"],
            balance.probs["decoder.layers.0.mlp"].detach(),
            atol=tolerance,
            rtol=tolerance,
        )
        torch.testing.assert_close(y, expected, atol=tolerance * 10, rtol=tolerance)
        torch.testing.assert_close(x_ours.grad, x_plain.grad, atol=tolerance * 10, rtol=tolerance)
        for (_, name), value in balance.values.items():
            values[name] = values.get(name, 0.0) + value / microbatches
        values["dropped"] = values.get("dropped", 0) + balance.dropped
    for param in layer.parameters():
        for name, grad in zip(param.info.names, param.grad.unbind(0) if param.info.stacked else (param.grad,)):
            expected = params[name].grad
            expected = torch.zeros_like(grad) if expected is None else expected
            torch.testing.assert_close(grad, expected, atol=tolerance * 100, rtol=tolerance, msg=prefixed(name))
    metrics = collect_metrics(args, [layer], microbatches)
    assert metrics.dropped_tokens == values.pop("dropped")
    for name, value in values.items():
        assert metrics.losses[name] == pytest.approx(value, rel=1e-6)
        assert metrics.per_layer[name] == [pytest.approx(value, rel=1e-6), 0.0]
    return metrics


@pytest.mark.parametrize("kind", ROUTERS)
def test_router_variants(kind):
    compare(sections(**ROUTERS[kind]))


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_expert_variants(kind):
    compare(sections(**EXPERT_KINDS[kind]))


@pytest.mark.parametrize("router", ["sigmoid bias groups", "all losses", "drops", "padded"])
@pytest.mark.parametrize("experts", ["gelu with biases", "gated shared", "swiglu with biases"])
def test_router_and_expert_variants_together(router, experts):
    compare(sections(**ROUTERS[router], **EXPERT_KINDS[experts]))


@pytest.mark.parametrize("router", ["softmax after top-k", "sigmoid bias groups", "drops", "padded"])
@pytest.mark.parametrize("experts", ["swiglu", "gelu", "swiglu with biases"])
@pytest.mark.parametrize("grouped", [False, True])
def test_layer_in_single_precision(router, experts, grouped):
    args = sections(moe_grouped_gemm=grouped, **ROUTERS[router], **EXPERT_KINDS[experts])
    compare(args, dtype=torch.float32, tolerance=2e-5)


def test_drops_are_counted():
    assert compare(sections(**ROUTERS["drops"])).dropped_tokens > 0
    assert compare(sections(**ROUTERS["ample capacity"])).dropped_tokens == 0


def test_layer_with_one_token():
    """One token: most experts get nothing, their gradients are zero."""
    compare(sections(**AUX), shape=(1, 1))


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_without_tokens_have_zero_gradients(grouped):
    layer = build_layer(sections(moe_grouped_gemm=grouped), dtype=torch.float32)
    x = torch.randn(1, 1, 16, requires_grad=True)
    layer(x).sum().backward()
    used = layer.experts.linear_fc1.weight.grad.flatten(1).abs().amax(1) > 0
    assert used.sum() == 2
    assert (layer.experts.linear_fc2.weight.grad.flatten(1).abs().amax(1) > 0).equal(used)


def test_metrics_are_reset_by_collecting():
    args = sections(**ROUTERS["all losses"])
    layer = build_layer(args)
    layer(torch.randn(4, 2, 16, dtype=torch.float64))
    first = collect_metrics(args, [layer], 1)
    again = collect_metrics(args, [layer], 1)
    assert min(first.losses.values()) > 0
    assert set(again.losses.values()) == {0.0}


def test_metrics_average_over_moe_layers_only():
    """Layer 2 of 2 is an MoE layer: the mean is over MoE layers, by the index."""
    args = sections(**AUX)
    layer = build_layer(args, layer_number=2)
    layer(torch.randn(4, 2, 16, dtype=torch.float64))
    metrics = collect_metrics(args, [layer], 1)
    dense, moe = metrics.per_layer["load_balancing_loss"]
    assert dense == 0.0 and metrics.losses["load_balancing_loss"] == moe > 0


def test_evaluation_changes_no_state():
    args = sections(
        **ROUTERS["all losses, sigmoid"],
        moe_router_enable_expert_bias=True,
        moe_expert_capacity_factor=0.5,
        moe_input_jitter_eps=0.5,
    )
    layer = build_layer(args).eval()
    x = torch.randn(4, 2, 16, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer(x))  # no jitter
    assert layer.router.loss_sums.eq(0).all() and layer.router.local_tokens_per_expert.eq(0).all()
    assert layer.router.dropped == 0 and layer.router.ga_steps == 0
    y.sum().backward()
    plain = by_name(layer)
    moe_layer(x.detach(), plain, "decoder.layers.0.mlp", args, Balance(), layer.router.expert_bias).sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, plain["decoder.layers.0.mlp.router.weight"].grad)


def test_half_precision_runs_and_is_close():
    """bf16 weights and activations, fp32 router: within bf16's rounding of the fp64 result."""
    args = sections(moe_router_dtype="fp32", **AUX)
    exact = build_layer(args)
    layer = build_layer(args, dtype=torch.bfloat16)
    assert layer.router.loss_sums.dtype == torch.float32
    for param, wanted in zip(layer.parameters(), exact.parameters()):
        wanted.data.copy_(param.data)
    x = torch.randn(8, 2, 16, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert layer.router.weight.grad.dtype == torch.bfloat16
    assert (y.double() - exact(x.double())).norm() < 0.02 * y.double().norm()


def test_adapters_of_sharded_experts_start_like_those_of_whole_ones():
    stds = []
    for columns, ranks in ((8, 1), (4, 2)):
        weight = torch.nn.Parameter(torch.zeros(1, 6, columns))
        weight.info = ParamInfo(
            ("experts.0.linear_fc2.weight",), kind="expert", stacked=True, sharded_dim=1, shard_count=ranks
        )
        stds.append(get_param_info(ExpertLoRA(weight, 2, 1.0, 0.0, None).lora_A.weight).init_std)
    assert stds[0] == stds[1]


def test_parameter_names_and_sharding_info():
    args = sections(
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    layer = build_layer(args, layer_number=2)
    infos = {path: param.info for path, param in layer.named_parameters()}
    assert infos["router.weight"].names == ("decoder.layers.1.mlp.router.weight",)
    fc1, fc2 = infos["experts.linear_fc1.weight"], infos["experts.linear_fc2.weight"]
    assert fc1.names[3] == "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight" and len(fc1.names) == 8
    assert fc1.stacked and fc1.kind == fc2.kind == "expert"
    assert (fc1.init_std, fc2.init_std) == (0.02, pytest.approx(0.01))
    assert infos["shared_experts.gate_weight"].names == ("decoder.layers.1.mlp.shared_experts.gate_weight",)
    assert infos["shared_experts.linear_fc1.weight"].kind == "dense"
    assert [name for name, _ in layer.named_state_buffers()] == ["decoder.layers.1.mlp.router.expert_bias"]
    assert dict(layer.named_parameters())["experts.linear_fc1.weight"].shape == (8, 48, 16)
