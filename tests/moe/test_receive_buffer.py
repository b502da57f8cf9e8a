"""A budget for received rows: equal to a layer without it, buffers of constant size, and an overflow that loses no rows."""

from functools import partial

import pytest
import torch
from harness import run_ranks
from moe.layers import HIDDEN, build_layer, build_shard, sections

from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.paged_stash import PagedStash
from moe_trainer.moe.dispatch.base import DispatchState
from moe_trainer.moe.placement.own import OWN_WEIGHTS
from moe_trainer.moe.receive.budget import ReceiveBudget
from moe_trainer.moe.receive.build import build_receive_policy
from moe_trainer.moe.receive.exact import ExactBuffer
from moe_trainer.moe.receive.fixed_buffer import FixedBuffer, StashedBuffer, pad_to_buffer
from moe_trainer.parallel.state import ParallelState

KINDS = {
    "plain": {},
    "grouped": {"moe_grouped_gemm": True},
    "biases": {"add_bias_linear": True},
    "grouped, biases": {"add_bias_linear": True, "moe_grouped_gemm": True, "swiglu": False},
    "shared, sigmoid": {
        "moe_shared_expert_intermediate_size": 20,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
    },
    "probabilities on the input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
}


@pytest.mark.parametrize(
    ("tokens", "factor", "rows"), [(8, 1.0, 16), (8, 1.25, 20), (7, 1.3, 19), (5, 1.1, 11), (10, 1.1, 22)]
)
def test_budget_is_tokens_times_topk_times_factor(tokens, factor, rows):
    assert ReceiveBudget("layer", factor, topk=2).size_for(tokens, num_received=3) == rows
    assert ReceiveBudget("layer", factor, topk=1, etp_size=2).size_for(tokens, num_received=3) == rows


def test_overflow_grows_the_budget_to_the_sufficient_factor():
    budget = ReceiveBudget("layers.3", 1.0, topk=2)
    assert budget.size_for(10, 20) == 20 and budget.factor == 1.0
    assert budget.size_for(10, 23) == 23 and budget.factor == 1.15
    assert ReceiveBudget("again", 1.15, topk=2).size_for(10, 23) == 23, "the factor that was named is enough"
    assert budget.size_for(10, 4) == 23 and budget.factor == 1.15, "the budget stays larger"
    assert budget.size_for(0, 5) == 23, "a rank without tokens has the budget of its largest microbatch"


def test_grown_budget_holds_what_was_received():
    """Rounding the factor must not lose tokens, which small buffers would not show."""
    for received in (9001, 8193, 8200):
        budget = ReceiveBudget("layer", 1.0, topk=2)
        assert budget.size_for(4096, received) >= received
        assert budget.size_for(4096, received) == ReceiveBudget("layer", budget.factor, topk=2).fixed_size(4096)


def test_overflow_of_any_dispatch_is_kept_until_the_reset():
    budget = ReceiveBudget("layer", 1.0, topk=2)
    budget.allocate_flag(torch.device("cpu"))
    for overflow in (1, 0):
        budget.note_overflow(torch.tensor([overflow], dtype=torch.int32))
    assert budget.overflow.tolist() == [1]
    budget.reset()
    assert budget.overflow.tolist() == [0]


def test_tokens_lost_without_a_flag_are_an_error():
    budget = ReceiveBudget("experts", 1.0, 2)
    with pytest.raises(ValueError, match="experts: token counts are on the device, without a flag"):
        budget.note_overflow(torch.zeros(1, dtype=torch.int32))
    budget.allocate_flag(torch.device("cpu"))
    with pytest.raises(ValueError, match="experts: token counts are on the device, without a flag"):
        budget.note_overflow(None)


def test_budget_grows_to_what_a_fixed_buffer_needs():
    layer = build_layer(sections(moe_expert_rank_capacity_factor=1.0))
    layer.receive.budget.allows_device_counts = True
    state = DispatchState(torch.zeros(20, 16).double(), torch.zeros(20).double(), [20] + [0] * 7, None, fixed_size=25)
    layer.receive.run(layer.experts, state, 10, OWN_WEIGHTS)
    assert layer.receive.budget.factor == 1.25


def test_pad_to_buffer_keeps_rows_and_gradients():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    out = pad_to_buffer(x, 5)
    assert torch.equal(out[:3], x) and not out[3:].any()
    (grad,) = torch.autograd.grad(out, x, torch.arange(10, dtype=torch.float64).view(5, 2))
    assert torch.equal(grad, torch.arange(6, dtype=torch.float64).view(3, 2))


def run_passes(layer, x, weight, microbatches=2):
    """Return outputs, input and weight gradients of some microbatches, and the row counts of the experts' inputs."""
    found, sizes, run = [], [], layer.experts.forward

    def watched(x_RH, *rest, **options):
        sizes.append(x_RH.shape[0])
        return run(x_RH, *rest, **options)

    layer.experts.forward = watched
    for index in range(microbatches):
        own = (x * (1 + index)).clone().requires_grad_()
        y = layer(own, PassInputs(grad_scale=0.7))
        (y * weight).sum().backward()
        found += [y.detach(), own.grad]
    return [*found, *(param.grad.clone() for param in layer.parameters())], sizes


def _one_rank(rank, n, sizes, dispatcher, kind, factor, dtype, layout):
    ps = ParallelState.create(n, rank, **layout) if n > 1 else ParallelState.single()
    generator = torch.Generator().manual_seed(rank)
    x, weight = torch.randn(2, sizes[rank], 1, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    results = []
    for changes in ({}, {"moe_expert_rank_capacity_factor": factor}):
        args = sections(moe_token_dispatcher_type=dispatcher, moe_aux_loss_coeff=0.0, **KINDS[kind], **changes)
        layer = build_shard(args, ps, dtype) if n > 1 else build_layer(args, dtype=dtype)
        results.append((*run_passes(layer, x, weight), layer.receive.budgets))
    (plain, rows, none), (ours, budgets, (budget,)) = results
    assert not none
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
    return rows, budgets, budget.factor > factor, args.moe.moe_router_topk


def check(n, sizes, dispatcher, kind, factor, layout, dtype=torch.float32):
    if n > 1:
        found = run_ranks(_one_rank, n, sizes, dispatcher, kind, factor, dtype, layout)
    else:
        found = [_one_rank(0, 1, sizes, dispatcher, kind, factor, dtype, layout)]
    for size, (rows, budgets, overflown, topk) in zip(sizes, found):
        planned = -(-max(size, 1) * topk * layout.get("etp", 1) * int(factor * 100) // 100)
        assert overflown == any(own > planned for own in rows)
        if not overflown:
            assert set(budgets) == {planned}
        assert all(budget >= own for own, budget in zip(rows, budgets))
    return found


one_process = partial(check, 1, (12,), "alltoall", layout={})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_receive_buffer_in_one_process_is_bitwise_equal(kind, dtype):
    one_process(kind=kind, factor=1.5, dtype=dtype)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}, {"etp": 2}], ids=str)
def test_receive_buffer_on_ranks_is_bitwise_equal(layout, dispatcher):
    n = layout.get("ep", 1) * layout.get("etp", 1)
    found = check(n, (12,) * n, dispatcher, "plain", 4.0, layout)
    assert not any(overflown for _, _, overflown, _ in found)


def test_receive_buffer_overflow_loses_no_rows():
    found = check(4, (12, 3, 5, 0), "alltoall", "plain", 0.5, {"ep": 4})
    assert any(overflown for _, _, overflown, _ in found)


@pytest.mark.parametrize("kind", ["grouped, biases", "shared, sigmoid"])
def test_receive_buffer_with_every_layer_kind_on_ranks(kind):
    check(2, (12, 12), "alltoall", kind, 2.0, {"ep": 2})


@pytest.mark.parametrize(
    ("factor", "stash", "kind"),
    [(None, None, ExactBuffer), (1.5, None, FixedBuffer), (1.5, PagedStash(torch.device("cpu")), StashedBuffer)],
)
def test_layers_receive_as_the_flags_say(factor, stash, kind):
    moe = sections(moe_expert_rank_capacity_factor=factor).moe
    policy = build_receive_policy(moe, "experts", 1, ActivationPolicy(stash=stash))
    assert type(policy) is kind and len(policy.budgets) == (factor is not None)
