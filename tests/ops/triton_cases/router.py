"""Routing in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.layers.kernels import Balancing
from moe_trainer.moe import balancing
from moe_trainer.moe.selections.topk import score_topk
from moe_trainer.ops import triton_router
from moe_trainer.parallel.state import ParallelState

SIZES = [(1, 2, 1), (7, 5, 2), (40, 12, 3), (0, 8, 2), (3, 160, 6)]


def run_both(logits: torch.Tensor, topk: int, **options):
    """(probs, routing, gradient of the logits) of the kernel and of torch, for a gradient whose rows have a separate stride."""
    num_tokens, num_experts = logits.shape
    grad = torch.randn(num_tokens, num_experts + 3)[:, :num_experts]
    results = []
    for function in (triton_router.fused_topk, score_topk):
        names = {"use_pre_softmax": "pre_softmax", "expert_bias": "expert_bias_E"} if function is score_topk else {}
        leaf = logits.clone().requires_grad_()
        probs, routing = function(leaf, topk, **{names.get(name, name): value for name, value in options.items()})
        probs.backward(grad.to(probs.dtype))
        results.append((probs, routing, leaf.grad))
    return results


def assert_kernel_equals_torch(logits, topk, **options):
    for ours, theirs in zip(*run_both(logits, topk, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("tokens,experts,topk", SIZES)
@pytest.mark.parametrize("scaling", [None, 2.5])
def test_router_scores_equal_torch(tokens, experts, topk, pre_softmax, score, scaling):
    assert_kernel_equals_torch(
        torch.randn(tokens, experts) * 3,
        topk,
        score_function=score,
        use_pre_softmax=pre_softmax,
        scaling_factor=scaling,
    )


@pytest.mark.parametrize(
    "experts,topk,groups,group_topk,scored",
    [(12, 2, 4, 2, None), (15, 4, 3, 2, None), (24, 8, 8, 4, 1), (6, 2, 2, 1, None), (12, 2, 4, 2, 3)],
)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_groups_and_bias_equal_torch(experts, topk, groups, group_topk, scored, score):
    groups = {"num_groups": groups, "group_topk": group_topk, "group_score_topk": scored}
    options = {"expert_bias": torch.randn(experts) * 0.2} if score == "sigmoid" else {"use_pre_softmax": True}
    assert_kernel_equals_torch(torch.randn(19, experts), topk, score_function=score, **groups, **options)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_half_precision_logits_are_scored_in_fp32(score):
    for ours, theirs in zip(
        *run_both((torch.randn(33, 24) * 2).bfloat16(), 6, score_function=score, use_pre_softmax=True), strict=True
    ):
        if ours.dtype == torch.bool:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_bias_affects_the_selection_only():
    assert_kernel_equals_torch(
        torch.randn(9, 8), 3, score_function="softmax", expert_bias=torch.randn(8) * 0.1, scaling_factor=1.5
    )
    logits, bias = torch.randn(6, 8), torch.zeros(8)
    bias[3] = 10.0
    probs, routing = triton_router.fused_topk(logits, 2, score_function="sigmoid", expert_bias=bias)
    assert routing[:, 3].all()
    torch.testing.assert_close(probs.sum(1), torch.ones(6))


NAN, INF = float("nan"), float("inf")


def with_special(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of 8 tokens and 6 experts, with `value` once in row 1, more often than 3 times in row 3, everywhere in row 4."""
    logits = torch.randn(8, 6, dtype=dtype)
    logits[1, 4] = value
    logits[2, 0], logits[2, 3] = value, NAN
    logits[3, 1:5] = value
    logits[4] = value
    return logits


def selected_logits(logits: torch.Tensor, routing: torch.Tensor) -> list[list[float]]:
    """The logits of each token's experts, with numbers for NaN and infinities: equal where ties are chosen differently."""
    return [sorted(row[chosen].nan_to_num(1e30, 1e20, -1e20).tolist()) for row, chosen in zip(logits, routing)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0])
@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "softmax"},
        {"score_function": "softmax", "use_pre_softmax": True},
        {"score_function": "sigmoid"},
        {"score_function": "sqrtsoftplus"},
        {"score_function": "softmax", "expert_bias": torch.zeros(6)},
        {"score_function": "sigmoid", "expert_bias": torch.zeros(6)},
        {"score_function": "sigmoid", "num_groups": 2, "group_topk": 1},
    ],
    ids=str,
)
def test_every_token_gets_k_experts_whatever_its_logits(options, value, dtype):
    """Those of torch, where a softmax over NaN or infinity does not make all experts equal."""
    logits = with_special(value, dtype)
    (probs, routing, grad), (torch_probs, torch_routing, torch_grad) = run_both(logits, 3, **options)
    assert routing.sum(1).tolist() == torch_routing.sum(1).tolist() == [3] * 8
    if "num_groups" in options:
        assert all(row[:3].all() or row[3:].all() for row in routing)
    by_logits = not options.keys() & {"num_groups"} and (options["score_function"] != "softmax" or len(options) == 1)
    rows = torch.arange(8) if by_logits else logits.isfinite().all(1).nonzero()[:, 0]
    assert selected_logits(logits[rows], routing[rows]) == selected_logits(logits[rows], torch_routing[rows])
    alike = (routing == torch_routing).all(1)
    assert alike[[0, 1, 5, 6, 7]].all() or not by_logits
    near = {"rtol": 2e-5, "atol": 2e-6, "equal_nan": True}
    torch.testing.assert_close(probs[alike], torch_probs[alike], **near)
    torch.testing.assert_close(grad[alike], torch_grad[alike], **near)
    assert (probs[~routing] == 0).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balancing_counts_k_experts_of_every_token_whatever_its_logits(score, value):
    counted = triton_router.count_choices(with_special(value), 3, score, 2)
    assert counted.counts_BE.sum(1).tolist() == [12.0, 12.0]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_z_loss_of_logits_that_are_not_finite_equals_torch(value):
    logits, found = with_special(value), []
    for own in (triton_router.BALANCING, None):
        losses = balancing.balancing_losses(
            logits,
            balancing.LossSettings(3, "softmax", dict.fromkeys(COEFFICIENTS, 0.0), 1e-2),
            num_sequences=2,
            running=None,
            ps=ParallelState.single(),
            kernels=own,
        )
        found.append((losses.values, losses.grad_TE))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


COEFFICIENTS = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss")


@pytest.mark.parametrize(
    "wanted", [(0.1, 0.0, 0.0), (0.0, 0.2, 0.0), (0.0, 0.0, 0.3), (0.1, 0.2, 0.3), (0.0, 0.0, 0.0)]
)
@pytest.mark.parametrize(
    "score,length,sequences,experts,topk,dtype",
    [
        ("softmax", 6, 1, 5, 2, torch.float64),
        ("sigmoid", 300, 3, 10, 3, torch.bfloat16),
        ("sqrtsoftplus", 7, 2, 8, 1, torch.float32),
        ("softmax", 150, 2, 33, 4, torch.float32),
    ],
)
@pytest.mark.parametrize("z_loss_coeff,per_token_loss", [(None, False), (1e-2, True)])
def test_balancing_loss_kernels_equal_torch(
    wanted, score, length, sequences, experts, topk, dtype, z_loss_coeff, per_token_loss
):
    """Losses of all kinds and their gradient are those of moe/balancing.py; the global loss has seen a microbatch before."""
    if not any(wanted) and z_loss_coeff is None:
        return
    # equal logits, of which bf16 makes many, are chosen in another order
    logits = (torch.rand(length * sequences, experts).argsort(1) * 0.125).to(dtype)
    kernels = Balancing(triton_router.count_choices, triton_router.balancing_gradient, triton_router.attach_gradient)
    found = []
    for own in (kernels, None):
        running = (torch.arange(experts, dtype=torch.float32), torch.ones(())) if wanted[2] else None
        losses = balancing.balancing_losses(
            logits,
            balancing.LossSettings(topk, score, dict(zip(COEFFICIENTS, wanted)), z_loss_coeff, per_token_loss),
            num_sequences=sequences,
            running=running,
            ps=ParallelState.single(),
            kernels=own,
        )
        found.append([losses.values, losses.grad_TE, *(running or ())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-5, atol=1e-7, check_dtype=False
        )  # of fp64 logits the kernels give fp32 losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (70, 33), (0, 4)])
@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.5)])
def test_balancing_loss_gradient_is_accumulated(shape, dtype, scale):
    more, grad, results = torch.randn(shape), torch.randn(shape).to(dtype), []
    for attach in (triton_router.attach_gradient, balancing.attach_gradient):
        leaf = torch.zeros(shape, dtype=dtype, requires_grad=True)
        attach(leaf, more, scale).backward(grad)
        results.append(leaf.grad)
    torch.testing.assert_close(
        *results, **({"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2})
    )
