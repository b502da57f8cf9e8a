"""Clones of hot experts on ranks: outputs and gradients of a layer without them, even loads, clones that are dropped after use."""

import gc
import json

import pytest
import torch
from harness import run_ranks
from moe.layers import HIDDEN, RankGrads, build_shard, sections, total_grads
from moe.test_clone_plan import rank_loads
from moe.test_flex import LIBRARIES, flex_dispatcher

from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.placement.clone_plan import ClonePlan
from moe_trainer.moe.placement.cloned import _FixedExchange
from moe_trainer.ops.expert_mlp import ActivationFns, ExpertMLPKernels
from moe_trainer.ops.grouped_gemm import GroupedGemms, grouped_weight_grad
from moe_trainer.parallel.state import ParallelState

KINDS = {
    "plain": {},
    "top 4": {"moe_router_topk": 4},
    "every expert": {"moe_router_topk": 8},
    "grouped": {"moe_grouped_gemm": True},
    "biases": {"add_bias_linear": True},
    "gelu, biases, grouped": {"add_bias_linear": True, "swiglu": False, "moe_grouped_gemm": True},
    "shared, sigmoid, bias": {
        "moe_shared_expert_intermediate_size": 20,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_enable_expert_bias": True,
    },
    "drops": {"moe_expert_capacity_factor": 1.5},
    "probabilities on the input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
}
EXACT = {f"exact, top {topk}": {"moe_grouped_gemm": True, "moe_router_topk": topk, "swiglu": False} for topk in (2, 5)}
SKEW = {"hot": 3.0, "one": 50.0, "even": 0.0}  # how much the router likes the first experts


def _row_wise_gemm(x_RK, w_eNK, offsets_e, transposed):
    """Grouped GEMM whose rows do not depend on the row count; in a BLAS library the last digits do."""
    out, start = [], 0
    for w_NK, stop in zip(w_eNK, offsets_e.tolist()):
        out += [((w_NK if transposed else w_NK.t()) * x_RK[row]).sum(1) for row in range(start, stop)]
        start = stop
    return torch.stack(out)


def _relu_backward(h, p, grad_a):
    z = h.relu()
    return (
        z * p.unsqueeze(1),
        (grad_a * p.unsqueeze(1)) * (h > 0),
        torch.stack([(g * row).sum() for g, row in zip(grad_a, z)]),
    )


ROW_WISE = GroupedGemms(
    lambda x, w, offsets: _row_wise_gemm(x, w, offsets, True),
    lambda x, w, offsets: _row_wise_gemm(x, w, offsets, False),
    grouped_weight_grad,
)
PLAIN = ActivationFns(lambda h, p: h.relu() * p.unsqueeze(1), _relu_backward)


def skew_router(layer, skew):
    """Make the router prefer the experts of the first rank; with the largest skew all tokens go there."""
    with torch.no_grad():
        layer.router.weight[:, 0] = (
            torch.tensor([3.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0], dtype=layer.router.weight.dtype) * skew
        )


def _passes(layer, ps, x, weight, microbatches):
    found, planned = [], []
    if layer.placement.declaration.is_planned:
        plan = layer.placement.plan

        def watched(routing_TE, on_device):
            routing, known = plan(routing_TE, on_device)
            counts = layer_counts(routing_TE, ps)
            planned.append((counts.view(ps.ep.size, -1).sum(1).tolist(), rank_loads(counts, routing.plan).tolist()))
            return routing, known

        layer.placement.plan = watched
    graphs = []
    for index in range(microbatches):
        own = (x * (1 + 0.5 * index)).clone().requires_grad_()
        graphs.append((own, layer(own, PassInputs(grad_scale=0.7))))
    for own, y in reversed(graphs):  # in another order than forward, as pipelines have it
        (y * weight).sum().backward()
        found += [y.detach(), own.grad]
    return found, planned


def layer_counts(routing_TE, ps):
    counts = routing_TE.sum(0)
    torch.distributed.all_reduce(counts, group=ps.tp_ep.handle)
    return counts


def _one_rank(rank, n, sizes, kind, skew, dispatcher, dtype, layout, slots, exact):
    ps = ParallelState.create(n, rank, **layout)
    generator = torch.Generator().manual_seed(rank)
    x, weight = torch.randn(2, sizes[rank], 1, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    x[..., 0] = x[..., 0].abs() + 0.5  # the feature that the tilted router looks at
    results = []
    for changes in ({}, {"moe_clone_hot_experts": slots}):
        args = sections(
            moe_token_dispatcher_type=dispatcher, moe_aux_loss_coeff=0.0, **(KINDS | EXACT)[kind], **changes
        )
        layer = build_shard(args, ps, dtype)
        skew_router(layer, SKEW[skew])
        if exact:
            layer.experts.kernels = ExpertMLPKernels(PLAIN, ROW_WISE)
        found, planned = _passes(layer, ps, x, weight, 2)
        results.append((found, RankGrads.of(layer, ps)))
    return results, planned


def check(
    n,
    layout,
    kind="plain",
    skew="hot",
    dispatcher="alltoall",
    dtype=torch.float64,
    tolerance=1e-12,
    sizes=None,
    slots=2,
    exact=False,
):
    found = run_ranks(_one_rank, n, sizes or (12,) * n, kind, skew, dispatcher, dtype, layout, slots, exact)
    for ((plain, _), (ours, _)), _ in found:
        for mine, theirs in zip(ours, plain, strict=True):
            if exact:
                assert torch.equal(mine, theirs), "outputs and gradients of tokens are the same bit for bit"
            torch.testing.assert_close(mine, theirs, atol=10 * tolerance, rtol=tolerance)
    plain, ours = (total_grads([results[which][1] for results, _ in found]) for which in (0, 1))
    assert plain.keys() == ours.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(
            ours[name], grad, atol=100 * tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    return [planned for _, planned in found]


def test_cloning_balances_the_loads():
    for planned in check(4, {"ep": 4}, slots=4):
        assert planned and all(
            max(after) < max(before) and max(after) <= -(-sum(before) // 4) for before, after in planned
        )


@pytest.mark.parametrize(("n", "ep"), [(2, 2), (4, 4)])
@pytest.mark.parametrize("topk", [2, 5])
def test_cloning_gives_bitwise_equal_token_results(n, ep, topk):
    """Outputs and input gradients, also if a token's experts have been cloned to other ranks."""
    for planned in check(n, {"ep": ep}, f"exact, top {topk}", dtype=torch.float32, tolerance=3e-6, exact=True):
        assert any(after != before for before, after in planned)


@pytest.mark.parametrize("kind", KINDS)
def test_cloning_of_every_layer_kind_on_two_ranks(kind):
    planned = check(2, {"ep": 2}, kind)
    assert kind == "every expert" or any(after != before for before, after in planned[0]), "something was cloned"


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 2, "etp": 2}, {"ep": 2}], ids=str)
def test_cloning_under_layouts_of_four_ranks(layout, dispatcher):
    check(4, layout, "biases", dispatcher=dispatcher)


def _one_flex_rank(rank, n, recorded, version):
    ps, results = ParallelState.create(n, rank, ep=n), []
    generator = torch.Generator().manual_seed(rank)
    x, weight = torch.randn(2, 12, 1, HIDDEN, generator=generator)
    x[..., 0] = x[..., 0].abs() + 0.5
    for slots in (0, 2):
        args = sections(moe_aux_loss_coeff=0.0, moe_clone_hot_experts=slots)
        layer = build_shard(args, ps, torch.float32)
        attach_dispatcher([layer], flex_dispatcher(recorded, version, ps, moe_clone_hot_experts=slots)[0])
        skew_router(layer, SKEW["hot"])
        results.append((_passes(layer, ps, x, weight, 2)[0], RankGrads.of(layer, ps)))
    return results, int(layer.placement.moved_tokens_2P[0].sum())


@pytest.mark.parametrize("version", LIBRARIES)
def test_cloning_over_libraries(shared, version):
    check_library(json.loads((shared / "reference" / "deep_ep_api.json").read_text()), version)


def check_library(recorded, version):
    found = run_ranks(_one_flex_rank, 2, recorded, version)
    for ((plain, _), (ours, _)), num_cloned in found:
        assert num_cloned > 0
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-6)
    plain, ours = (total_grads([results[which][1] for results, _ in found]) for which in (0, 1))
    torch.testing.assert_close(ours, plain, atol=2e-4, rtol=2e-6)


@pytest.mark.parametrize("skew", SKEW)
def test_cloning_in_single_precision(skew):
    check(4, {"ep": 4}, "top 4", skew, dtype=torch.float32, tolerance=3e-6)


@pytest.mark.parametrize("sizes", [(12, 0, 5, 1), (0, 9, 0, 0), (0, 0, 0, 0)])
def test_cloning_with_empty_ranks_and_unused_experts(sizes):
    check(4, {"ep": 4}, sizes=sizes, skew="one", slots=1)


def test_gradients_of_unused_slots_reach_no_owner():
    """A grouped GEMM of no tokens may leave anything there."""
    plan = ClonePlan(torch.tensor([[1, 0]]), torch.tensor([[3, 0]]), torch.tensor([[4, 0]]))
    exchange = _FixedExchange(ParallelState.single().ep, plan, 2)
    grad = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf]])
    (returned,) = exchange.to_owners([grad], 2)
    assert torch.equal(returned, torch.tensor([[0.0, 0.0], [1.0, 2.0]]))


def _count_clone_bytes(rank, n, recomputes):
    """Experts of stacks with clones between forward and backward, and how often their weights are sent."""
    ps = ParallelState.create(n, rank, ep=2)
    args = sections(moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=0.0, moe_clone_hot_experts=2)
    layer = build_shard(args, ps, torch.float64)
    if recomputes:
        layer.activations = layer.experts.activations = ActivationPolicy(frozenset({"moe"}))
    skew_router(layer, SKEW["hot"])
    x = torch.randn(12, 1, HIDDEN, dtype=torch.float64)
    x[..., 0] = x[..., 0].abs() + 0.5
    x.requires_grad_()
    passes, make = [], layer.placement.weights

    def watched(routing, is_saving):
        passes.append(make(routing, is_saving))
        make_stacks, passes[-1].count = passes[-1].make_stacks, 0

        def counted(weights=passes[-1]):
            weights.count += 1
            return make_stacks()

        passes[-1].make_stacks = counted
        return passes[-1]

    layer.placement.weights = watched
    shape = tuple(layer.experts.linear_fc1.weight.shape[1:])

    def clones():
        gc.collect()
        ours = {id(param) for param in layer.parameters()}
        return sum(
            x.shape[0]
            for x in gc.get_objects()
            if isinstance(x, torch.Tensor)
            and x.dim() == 3
            and id(x) not in ours
            and tuple(x.shape[1:]) == shape
            and x._base is None
        )

    before = clones()
    y = layer.activations.recompute_region("moe", layer, x) if recomputes else layer(x)
    between, sent = clones() - before, passes[0].count
    y.sum().backward()
    layer.zero_grad()
    return between, sent, sum(weights.count for weights in passes), clones() - before, passes[0].num_clones


def test_clones_are_dropped_after_use():
    found = run_ranks(_count_clone_bytes, 2, False)
    assert sum(number for *_, number in found) > 0
    for between, sent, in_all, after, _ in found:
        assert between == 0 and after == 0, "no weights of clones are kept for backward"
        assert (sent, in_all) == (1, 2), "they come for forward and again for backward"


def test_recomputed_layers_send_clones_once_per_pass():
    for between, sent, in_all, after, _ in run_ranks(_count_clone_bytes, 2, True):
        assert (between, sent, in_all, after) == (0, 1, 2, 0), "once in each of the two passes"
