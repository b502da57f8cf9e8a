"""Single decisions of the router: hand-computed drops, sinkhorn, forced routing, jitter, dtypes, refusals."""

import pytest
import torch
from moe.layers import EXPERTS, build_layer, sections

from arguments.mechanisms.selections import SELECTING
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe.balancing import loss_coefficients
from moe_trainer.moe.receive.capacity import drop_beyond_capacity, expert_capacity
from moe_trainer.moe.selections.scores import _NormalizeSelected
from moe_trainer.moe.selections.sinkhorn import sinkhorn, sinkhorn_topk
from moe_trainer.moe.selections.topk import score_topk

# token x expert; two experts per token
PROBS = torch.tensor(
    [
        [0.6, 0.4, 0.0],
        [0.7, 0.0, 0.3],
        [0.9, 0.0, 0.1],
        [0.2, 0.8, 0.0],
    ]
)
ROUTING = PROBS > 0


def test_capacity_is_rounded_up():
    assert expert_capacity(128, 2, 8, 1.0) == 32
    assert expert_capacity(100, 2, 8, 1.0) == 25
    assert expert_capacity(100, 2, 8, 1.01) == 26
    assert expert_capacity(100, 2, 8, 50.0) == 100  # never more than every token
    assert expert_capacity(100, 2, 8, 0.0) == 0


def test_capacity_keeps_the_largest_probabilities():
    probs, kept = drop_beyond_capacity(PROBS, ROUTING, 2, "probs", pad=False)
    assert kept.tolist() == [[False, True, False], [True, False, True], [True, False, True], [False, True, False]]
    assert torch.equal(probs, PROBS * kept)  # not renormalised


def test_capacity_by_position_keeps_the_first_tokens():
    _, kept = drop_beyond_capacity(PROBS, ROUTING, 2, "position", pad=False)
    assert kept.tolist() == [[True, True, False], [True, False, True], [False, False, True], [False, True, False]]


def test_equal_probabilities_drop_the_later_token():
    probs = torch.full((4, 1), 0.5)
    _, kept = drop_beyond_capacity(probs, probs > 0, 2, "probs", pad=False)
    assert kept.flatten().tolist() == [True, True, False, False]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_to_capacity_uses_zero_probabilities(policy):
    probs, kept = drop_beyond_capacity(PROBS, ROUTING, 3, policy, pad=True)
    assert kept.sum(0).tolist() == [3, 3, 3]
    assert kept[:, 1].tolist() == [True, True, False, True]
    assert probs[1, 1] == 0 and kept[1, 1]


def test_sinkhorn_balances_rows_and_columns():
    plan = sinkhorn(torch.randn(64, 8, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64, dtype=torch.float64), rtol=1e-2, atol=0)
    torch.testing.assert_close(plan.sum(0), torch.full((8,), 1 / 8, dtype=torch.float64), rtol=1e-2, atol=0)


@pytest.mark.parametrize("max_rounds", [3, 1000])
@pytest.mark.parametrize("rounds_per_check", [2, 8, 2000])
def test_sinkhorn_converges_in_the_same_round_for_any_check_interval(rounds_per_check, max_rounds):
    cost_TE = 3 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        sinkhorn(cost_TE, max_rounds=max_rounds, rounds_per_check=rounds_per_check),
        sinkhorn(cost_TE, max_rounds=max_rounds),
    )


def test_sinkhorn_of_two_by_two_in_closed_form():
    """Scaling [[a, 1], [1, 1]] to equal margins: the diagonal gets sqrt(a) / (2 (1 + sqrt(a)))."""
    plan = sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64), tolerance=1e-12)
    root = torch.exp(torch.tensor(1.0, dtype=torch.float64))
    assert plan[0, 0].item() == pytest.approx((root / (2 * (1 + root))).item(), rel=1e-6)
    assert plan[0, 1].item() == pytest.approx((1 / (2 * (1 + root))).item(), rel=1e-6)


def test_sinkhorn_balances_a_skewed_router_in_training_only():
    logits = torch.randn(512, 8) + torch.linspace(3, 0, 8)
    plain = sinkhorn_topk(logits, 1, balance=False)[1].sum(0)
    balanced = sinkhorn_topk(logits, 1, balance=True)[1].sum(0)
    assert plain.max() > 200 and balanced.max() < 100
    assert torch.equal(plain, torch.bincount(logits.argmax(1), minlength=8))


def test_sinkhorn_routing_weights():
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    probs, routing = sinkhorn_topk(logits, 1, balance=True)
    torch.testing.assert_close(probs, torch.sigmoid(logits) * routing)
    probs, routing = sinkhorn_topk(logits, 3, balance=True)
    torch.testing.assert_close(probs, logits.softmax(-1) * routing)
    assert routing.sum(1).eq(3).all()
    probs.sum().backward()
    assert logits.grad.abs().sum() > 0


def test_sinkhorn_layer_trains():
    layer = build_layer(sections(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1))
    layer(torch.randn(8, 2, 16, dtype=torch.float64)).square().sum().backward()
    assert layer.router.weight.grad.norm() > 0
    assert torch.isfinite(layer.router.weight.grad).all()


def test_expert_bias_affects_selection_but_not_weights():
    logits = torch.zeros(1, 4)
    bias = torch.tensor([0.0, 0.1, 0.0, 0.2])
    probs, routing = score_topk(logits, 2, "sigmoid", expert_bias_E=bias)
    assert routing.tolist() == [[False, True, False, True]]
    torch.testing.assert_close(probs, torch.tensor([[0.0, 0.5, 0.0, 0.5]]))


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_expert_bias_is_added_to_shares_of_softmax(pre_softmax):
    shares = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    bias = torch.tensor([0.0, 0.0, 0.15, 0.15])  # added to logits, it would change nothing
    probs, _ = score_topk(shares.log(), 2, pre_softmax=pre_softmax, expert_bias_E=bias)
    expected = torch.tensor([[0.4, 0.0, 0.2, 0.0]])
    torch.testing.assert_close(probs, expected if pre_softmax else expected / 0.6)


def test_group_limit_excludes_experts_of_unselected_groups():
    logits = torch.tensor([[5.0, -5.0, 3.0, 2.9]])  # the best expert is next to the worst
    assert score_topk(logits, 2, num_groups=2, group_topk=1)[1].tolist() == [[False, False, True, True]]
    assert score_topk(logits, 2)[1].tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_router_dtype(dtype):
    args = sections(moe_router_dtype=dtype, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)
    layer = build_layer(args, dtype=torch.bfloat16)
    wide = {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    layer.router.recorder = []
    x = torch.randn(4, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    probs, _ = layer.router(x)
    assert probs.dtype == wide and layer.router.recorder[0]["logits"].dtype == wide
    expected = x.detach().to(wide).flatten(0, 1) @ layer.router.weight.detach().to(wide).t()
    assert torch.equal(layer.router.recorder[0]["logits"], expected)
    (probs**2).sum().backward()
    reference_x = x.detach().to(wide).requires_grad_()
    reference_w = layer.router.weight.detach().to(wide).requires_grad_()
    layer.router.recorder = None
    wide_layer = build_layer(args, dtype=wide)
    wide_layer.router.weight = torch.nn.Parameter(reference_w.detach())
    probs, _ = wide_layer.router(reference_x)
    (probs**2).sum().backward()
    assert x.grad.dtype == layer.router.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, reference_x.grad.bfloat16())
    torch.testing.assert_close(layer.router.weight.grad, wide_layer.router.weight.grad.bfloat16())


@pytest.mark.parametrize(("score", "pre_softmax"), [("sigmoid", False), ("sqrtsoftplus", False), ("softmax", True)])
def test_bf16_logits_are_scored_in_fp32_and_rounded_at_the_end(score, pre_softmax):
    """As in Megatron-Core since 0.18: scores that bf16 cannot tell apart still choose by their logits (--moe-router-dtype is not given)."""
    logits = torch.tensor([[4.0, 4.0625, 4.125, 4.1875, -3.0, -3.0625, 4.03125, 0.0]], dtype=torch.bfloat16)
    options = {"score_function": score, "pre_softmax": pre_softmax, "scaling_factor": 2.5}
    probs, routing = score_topk(logits, 3, **options)
    exact, _ = score_topk(logits.float(), 3, **options)
    assert routing.nonzero()[:, 1].tolist() == [1, 2, 3]
    assert torch.equal(probs, exact.bfloat16())
    if score == "sigmoid":
        bias = torch.zeros(8).index_fill(
            0, torch.tensor(6), 1e-3
        )  # lifts expert 6 over expert 1; bf16 sums would not show it
        assert score_topk(logits, 3, expert_bias_E=bias, **options)[1].nonzero()[:, 1].tolist() == [2, 3, 6]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_of_a_gpu_have_the_gradients_of_a_cpu(score):
    """A GPU normalizes over all experts instead of gathering the selected ones."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    probs, routing = score_topk(logits, 3, score_function=score, scaling_factor=2.5)
    scores = logits.sigmoid().detach() if score == "sigmoid" else None
    other = _NormalizeSelected.apply(logits, scores, routing, 2.5)
    torch.testing.assert_close(other, probs)
    grads = [torch.autograd.grad(result.square().sum(), logits) for result in (other, probs)]
    torch.testing.assert_close(*grads)


def test_forced_balance_is_random_and_still_differentiable():
    layer = build_layer(sections(moe_router_force_load_balancing=True, moe_router_topk=2))
    x = torch.ones(256, 4, 16, dtype=torch.float64)  # equal tokens: the true router would send all to the same experts
    _, routing = layer.router(x)
    assert routing.sum(0).min() > 1024 * 2 / EXPERTS * 0.8
    layer(x).square().sum().backward()
    assert layer.router.weight.grad.norm() > 0


def test_forced_bias_is_random_or_fixed():
    x = torch.zeros(8, 1, 16, dtype=torch.float64)  # logits are zero: what remains is the bias

    def logits(layer):
        layer.router.recorder = []
        layer.router(x)
        return layer.router.recorder[0]["logits"][0]

    varying = build_layer(sections(moe_router_force_biased=3.0))
    assert not torch.equal(logits(varying), logits(varying))
    fixed = build_layer(sections(moe_router_force_biased=-3.0))
    assert torch.equal(logits(fixed), logits(fixed))
    assert torch.equal(logits(fixed), logits(build_layer(sections(moe_router_force_biased=-3.0))))
    other = build_layer(sections(moe_router_force_biased=-3.0), layer_number=2)
    assert not torch.equal(logits(fixed), logits(other))
    assert 0.5 < logits(fixed).std() < 6


def test_input_jitter_stays_in_its_range():
    layer = build_layer(sections(moe_input_jitter_eps=0.1))
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = 1.0
    x = torch.ones(100, 4, 16, dtype=torch.float64)
    layer.router.recorder = []
    layer.router(x)
    seen = layer.router.recorder[0]["logits"][:, 0]
    assert 0.9 <= seen.min() < 0.92 and 1.08 < seen.max() <= 1.1


def test_gradient_scale_may_be_a_tensor():
    grads = []
    for scale in (0.25, torch.tensor(0.25)):
        layer = build_layer(sections(moe_aux_loss_coeff=1.0))
        x = torch.linspace(-1, 1, 128, dtype=torch.float64).view(4, 2, 16)
        probs, _ = layer.router(x, PassInputs(grad_scale=scale))
        (probs * 0).sum().backward()
        grads.append(layer.router.weight.grad)
    assert torch.equal(*grads) and grads[0].norm() > 0


def test_per_token_loss_multiplies_by_the_token_count():
    grads = []
    for per_token in (False, True):
        args = sections(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, calculate_per_token_loss=per_token)
        layer = build_layer(args)
        x = torch.linspace(-1, 1, 128, dtype=torch.float64).view(4, 2, 16)
        probs, _ = layer.router(x)
        (probs * 0).sum().backward()
        grads.append(layer.router.weight.grad)
    torch.testing.assert_close(grads[1], grads[0] * 8)


@pytest.mark.parametrize(
    "changes, named",
    [
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": 0.1},
            "--moe-aux-loss-coeff",
        ),
        *(({"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}, kind) for kind in SELECTING),
    ],
)
def test_errors_name_the_flag(changes, named):
    with pytest.raises(ValueError, match=named):
        loss_coefficients(sections(**changes).moe)


@pytest.mark.parametrize("score, bias", [("softmax", False), ("sigmoid", True)])
def test_given_experts_take_the_routers_probabilities(score, bias):
    """Losses count what the router would choose, and the expert bias what was given; a fused kernel is left out."""
    flags = {"moe_router_score_function": score, "moe_router_enable_expert_bias": bias, "moe_aux_loss_coeff": 0.1}
    layer = build_layer(sections(moe_enable_routing_replay=True, **flags))
    router, x = layer.router, torch.randn(6, 1, 16, dtype=torch.float64)
    router.loss_sums.zero_()
    own_probs, own_routing = router(x)
    losses = router.loss_sums.clone()
    given = torch.tensor([[7, 0], [1, 2], [-1, -1], [6, 5], [0, 4], [3, 2]])
    router.use_kernels(None if score == "softmax" else pytest.fail, None)
    router.given_TK = given
    if bias:
        router.local_tokens_per_expert.zero_()
    router.loss_sums.zero_()
    probs, routing = router(x)
    assert torch.equal(router.loss_sums, losses)
    assert torch.equal(probs[2], own_probs[2]) and torch.equal(routing[2], own_routing[2])
    logits = x.flatten(0, 1) @ router.weight.t()
    for token, experts in enumerate(given.tolist()):
        if token != 2:
            scores = logits[token, experts].exp() if score == "softmax" else logits[token, experts].sigmoid()
            assert routing[token].nonzero().flatten().tolist() == sorted(experts)
            torch.testing.assert_close(probs[token, experts], scores / scores.sum())
    if bias:
        assert torch.equal(router.local_tokens_per_expert, routing.sum(0).float())
    probs.square().sum().backward()
    assert router.weight.grad.norm() > 0


SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}


@pytest.mark.parametrize(("flags", "kind", "by_kernel"), [
    ({}, "TopKSelection", True),
    ({"moe_router_enable_expert_bias": True}, "TopKSelection", True),
    ({"moe_router_score_function": "sigmoid"}, "TopKSelection", True),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "TopKSelection", True),
    ({"moe_router_sparsemixer_jitter": 0.1}, "SparseMixerSelection", False),
    ({"moe_enable_routing_replay": True}, "ReplaySelection", True),
    (SINKHORN, "SinkhornSelection", False),
    ({"moe_n_hash_layers": 1, **SINKHORN}, "HashSelection", False),
    ({"moe_n_hash_layers": 1, "moe_router_force_load_balancing": True}, "ForcedSelection", False),
])  # fmt: skip
def test_flags_choose_one_selection_and_a_kernel_replaces_only_top_k(flags, kind, by_kernel):
    router = build_layer(sections(**flags)).router
    router.selection.make_tables(10, torch.device("cpu"))
    assert type(router.selection).__name__ == kind
    called, inputs = [], PassInputs(token_ids_T=torch.zeros(6, dtype=torch.long))
    x = torch.randn(6, 1, 16, dtype=torch.float64)
    plain = router(x, inputs)

    def kernel(logits_TE, **options):
        called.append(options)
        return plain

    router.use_kernels(kernel, None)
    again = router(x, inputs)
    assert bool(called) == by_kernel
    if "moe_router_force_load_balancing" not in flags:
        assert all(torch.equal(*pair) for pair in zip(again, plain))
    router.use_kernels(None, None)
    router(x, inputs)
    assert len(called) == by_kernel
