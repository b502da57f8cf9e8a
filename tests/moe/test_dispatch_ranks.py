"""Dispatchers over expert-parallel ranks against the local one on all tokens: outputs and every gradient."""

import pytest
import torch
from harness import run_ranks
from moe.layers import EXPERTS, HIDDEN, build_layer, sections

from moe_trainer.moe.dispatch.allgather import AllGatherDispatcher
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.parallel.state import ParallelState

DISPATCHERS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
KINDS = {
    "plain": {},
    "every expert": {"moe_router_topk": 8},
    "sigmoid, bias, groups, shared": {
        "moe_router_score_function": "sigmoid", "moe_router_topk": 4, "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 20},
    "drops": {"moe_expert_capacity_factor": 0.6},
    "padded": {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True},
    "biases": {"add_bias_linear": True},
    "probabilities on the input": {
        "moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}
# tokens of every rank; capacity depends on a rank's own tokens, so those kinds take the even case
EVEN, UNEVEN, EMPTY, ONE, NONE = (6, 6, 6, 6), (5, 1, 8, 3), (4, 0, 7, 0), (0, 1, 0, 0), (0, 0, 0, 0)


def tokens(sizes, dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, sum(sizes), 1, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return [part.split(list(sizes)) for part in x]


def run_layer(layer, x, weight):
    x = x.clone().requires_grad_()
    y = layer(x, 0.7)
    (y * weight).sum().backward()
    return y.detach(), x.grad


def named_grads(layer):
    grads = {}
    for param in layer.parameters():
        pieces = param.grad.unbind(0) if param.info.stacked else (param.grad,)
        grads.update(zip(param.info.names, pieces))
    return grads


def layer_of_rank(args, ps, dtype):
    """The layer of one rank, with the weights that one process would have."""
    whole, layer = build_layer(args, dtype=dtype), build_layer(args, ps, dtype=dtype)
    first = ps.ep.rank * EXPERTS // ps.ep.size
    with torch.no_grad():
        for mine, all_of_it in zip(layer.parameters(), whole.parameters(), strict=True):
            mine.copy_(all_of_it[first:first + EXPERTS // ps.ep.size] if mine.info.stacked else all_of_it)
        if whole.router.expert_bias is not None:
            layer.router.expert_bias.copy_(whole.router.expert_bias)
    assert {name for param in layer.parameters() for name in param.info.names} < {
        name for param in whole.parameters() for name in param.info.names}
    return layer


def _one_rank(rank, n, ep, kind, dispatcher, sizes, dtype):
    ps = ParallelState.create(n, rank, ep=ep)
    args = sections(moe_token_dispatcher_type=dispatcher, moe_aux_loss_coeff=0.0, **KINDS[kind])
    layer = layer_of_rank(args, ps, dtype)
    assert type(layer.dispatcher) is DISPATCHERS[dispatcher]
    xs, weights = tokens(sizes, dtype)
    y, grad_x = run_layer(layer, xs[rank], weights[rank])
    return y, grad_x, named_grads(layer)


def compare(n, ep, kind, dispatcher, sizes, dtype=torch.float64, tolerance=1e-12):
    sizes = sizes[:n]
    whole = build_layer(sections(moe_aux_loss_coeff=0.0, **KINDS[kind]), dtype=dtype)
    assert type(whole.dispatcher) is LocalDispatcher
    xs, weights = tokens(sizes, dtype)
    # rank by rank through the whole layer, as capacity is a rank's own; its gradients add up
    expected = [run_layer(whole, x, weight) for x, weight in zip(xs, weights)]
    grads = named_grads(whole)
    results = run_ranks(_one_rank, n, ep, kind, dispatcher, sizes, dtype)
    summed = {}
    for (y, grad_x, named), (want_y, want_x) in zip(results, expected):
        torch.testing.assert_close(y, want_y, atol=10 * tolerance, rtol=tolerance)
        torch.testing.assert_close(grad_x, want_x, atol=10 * tolerance, rtol=tolerance)
        for name, grad in named.items():
            summed[name] = summed.get(name, 0) + grad
    assert summed.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(summed[name], grad, atol=100 * tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(kind, dispatcher):
    compare(2, 2, kind, dispatcher, EVEN)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, EMPTY, ONE, NONE])
def test_four_ranks_with_uneven_empty_and_no_tokens_equal_one(sizes, dispatcher):
    compare(4, 4, "plain", dispatcher, sizes)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("kind", ["sigmoid, bias, groups, shared", "padded"])
def test_two_groups_of_two_equal_one(kind, dispatcher):
    compare(4, 2, kind, dispatcher, EVEN)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_single_precision(dispatcher):
    compare(4, 4, "plain", dispatcher, UNEVEN, dtype=torch.float32, tolerance=2e-6)


def _rows(rank, n, dispatcher):
    """What the experts of a rank get, when every value tells where it comes from."""
    ps = ParallelState.create(n, rank, ep=n)
    num_tokens = 3 + rank
    generator = torch.Generator().manual_seed(rank)
    x_TH = (100.0 * rank + torch.arange(num_tokens)).unsqueeze(1).expand(-1, 2).contiguous()
    routing_TE = torch.rand(num_tokens, 6, generator=generator) < 0.5
    routing_TE[:, 3] = False  # an expert that nobody takes
    probs_TE = torch.where(routing_TE, torch.rand(num_tokens, 6, generator=generator), 0.0)
    made = DISPATCHERS[dispatcher](ps)
    # two in flight, ended in the other order
    first, second = made.dispatch(x_TH, probs_TE, routing_TE), made.dispatch(x_TH + 0.5, probs_TE, routing_TE)
    sent_back = made.combine(second.x_RH, second), made.combine(first.x_RH, first)
    counts = routing_TE.sum(1, keepdim=True)
    assert torch.equal(sent_back[0], (x_TH + 0.5) * counts) and torch.equal(sent_back[1], x_TH * counts)
    return x_TH, probs_TE, routing_TE, first.x_RH, first.probs_R, first.tokens_per_expert_e


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("n", [2, 3])
def test_rows_come_by_expert_then_rank_then_token(n, dispatcher):
    results = run_ranks(_rows, n, dispatcher)
    x, probs, routing = (torch.cat([result[part] for result in results]) for part in range(3))
    local = LocalDispatcher().dispatch(x, probs, routing)
    assert torch.equal(torch.cat([result[3] for result in results]), local.x_RH)
    assert torch.equal(torch.cat([result[4] for result in results]), local.probs_R)
    assert sum((result[5] for result in results), []) == local.tokens_per_expert_e


def _exchange(rank, n, dtype):
    x = torch.randn(4, 3).to(dtype).requires_grad_()
    ps = ParallelState.create(n, rank, ep=n)
    probs = torch.tensor([[0.5, 0.0, 0.0, 0.5]] * 4, dtype=torch.float32, requires_grad=True)
    results = []
    for kind in DISPATCHERS.values():
        sent = kind(ps).dispatch(x, probs, probs > 0)
        assert sent.x_RH.dtype == dtype and sent.probs_R.dtype == torch.float32
        y = kind(ps).combine((sent.x_RH * sent.probs_R.unsqueeze(1)).to(dtype), sent)
        assert y.dtype == dtype
        y.float().sum().backward()
        assert x.grad.dtype == dtype and probs.grad.dtype == torch.float32
        results.append((y.detach(), x.grad, probs.grad))
        x.grad = probs.grad = None
    for ours, other in zip(*results):
        assert torch.equal(ours, other)
    assert torch.equal(results[0][0], x)


def test_half_precision_rows_with_fp32_probabilities():
    run_ranks(_exchange, 2, torch.bfloat16)
