"""Permutation in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.moe.selections.finermoe import SlicedPermutation
from moe_trainer.ops import permute as plain
from moe_trainer.ops import triton_permute


def draw_routing(tokens: int, experts: int, share: float, seed: int = 0) -> torch.Tensor:
    """Any number of experts a token; the first expert (of several) gets nothing."""
    routing = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)) < share
    if experts > 1:
        routing[:, 0] = False
    return routing


# a block of tokens is 128 at most: several blocks, the last one not full
MAPS = [(1, 1, 1.0), (5, 3, 0.5), (300, 7, 0.3), (131, 70, 0.1), (9, 4, 0.0), (0, 4, 0.5), (1200, 9, 0.9)]
MAPS += [(2060, 130, 0.02)]  # more blocks than are added up at once
# the interpreter runs a program per row and per token
TRIPS = [(1, 1, 1.0), (5, 3, 0.5), (20, 70, 0.02), (9, 4, 0.0), (0, 4, 0.5), (15, 3, 0.9)]


@pytest.mark.parametrize("tokens,experts,share", MAPS)
def test_permute_map_equals_torch(tokens, experts, share):
    routing = draw_routing(tokens, experts, share)
    ours, theirs = triton_permute.make_permute_map(routing), plain.make_permute_map(routing)
    for name in ("token_R", "cell_R", "row_R", "offsets_T", "counts_E"):
        assert torch.equal(getattr(ours, name).long(), getattr(theirs, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens,experts,share", TRIPS)
def test_permute_and_unpermute_round_trip(tokens, experts, share, dtype):
    """Of 21 columns of wider tensors, both ways."""
    routing = draw_routing(tokens, experts, share, 1)
    x, probs, weight = torch.randn(tokens, 24), torch.rand(tokens, experts), torch.randn(21)
    results = []
    x, weight = x.to(dtype), weight.to(dtype)
    for permutation in (triton_permute.TritonPermutation(), plain.Permutation()):
        x_leaf, probs_leaf = x.clone().requires_grad_(), probs.clone().requires_grad_()
        x_RH, probs_R, routes = permutation.permute(x_leaf[:, :21], probs_leaf, routing)
        wide_RH = torch.nn.functional.pad(x_RH * weight * probs_R.unsqueeze(1).to(dtype), (0, 3))
        y = permutation.unpermute(wide_RH[:, :21], routes)
        (y.square().sum() + probs_R.square().sum()).backward()
        results.append((x_RH, probs_R, y, x_leaf.grad, probs_leaf.grad, routes.counts_E))
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("spare", [0, 13])
def test_permutation_with_an_upper_bound_of_rows(spare):
    """The first rows equal those of a map without a bound; the rest is zero, in forward and backward."""
    tokens, experts = 12, 6
    routing = draw_routing(tokens, experts, 0.4, 2)
    counts = routing.sum(0)
    num_rows = int(counts.sum()) + spare
    routes = triton_permute.make_permute_map(routing, num_rows)
    assert torch.equal(routes.counts_E, counts)
    x, probs = torch.randn(tokens, 5, requires_grad=True), torch.rand(tokens, experts, requires_grad=True)
    x_RH, probs_R = triton_permute.permute_with_probs(x, probs, routes)
    expected, expected_probs = torch.zeros(num_rows, 5), torch.zeros(num_rows)
    start = 0
    for expert in range(experts):
        chosen = routing[:, expert].nonzero().flatten()
        expected[start : start + len(chosen)] = x.detach()[chosen]
        expected_probs[start : start + len(chosen)] = probs.detach()[chosen, expert]
        start += len(chosen)
    assert torch.equal(x_RH, expected) and torch.equal(probs_R, expected_probs)
    # spare rows hold rubbish after an expert with a bias: it must not be read
    y = triton_permute.unpermute(torch.where(routes.token_R[:, None] < 0, 1e6, x_RH), routes)
    torch.testing.assert_close(y, x.detach() * routing.sum(1, keepdim=True))
    grad = torch.randn(num_rows, 5)
    torch.autograd.backward([x_RH, probs_R], [grad, torch.arange(num_rows).float()])
    filled = routes.token_R >= 0
    torch.testing.assert_close(x.grad, torch.zeros_like(x).index_add(0, routes.token_R[filled], grad[filled]))
    torch.testing.assert_close(probs.grad.flatten()[routes.cell_R[filled]], torch.arange(num_rows).float()[filled])
    assert probs.grad.count_nonzero() <= filled.sum()


@pytest.mark.parametrize("spare", [0, 5])
def test_slices_equal_those_of_torch(spare):
    """FineRMoE: rows as wide as a slice, of experts from the third on; spare rows hold rubbish."""
    routing = draw_routing(15, 6, 0.4, 3)
    x, probs = torch.randn(15, 9), torch.rand(15, 6)
    results = []
    for inner, more in ((triton_permute.TritonPermutation(), spare), (plain.Permutation(), 0)):
        permutation = SlicedPermutation(4, 3, first=3, inner=inner)
        leaf = x.clone().requires_grad_()
        num_rows = int(routing.sum()) + more
        x_RH, probs_R, routes = permutation.permute(leaf, probs, routing, num_rows=num_rows)
        y_RW = x_RH[:, :4] * probs_R.unsqueeze(1)
        filled = torch.arange(num_rows) < routing.sum()
        y = permutation.unpermute(torch.where(filled.unsqueeze(1), y_RW, 1e6), routes)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    assert results[0][0].shape == (15, 16)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="8192"):
        triton_permute.make_permute_map(torch.ones(1, 8193, dtype=torch.bool))


def test_row_bound_too_small_is_an_error():
    with pytest.raises(RuntimeError, match="more rows"):
        triton_permute.make_permute_map(
            torch.ones(4, 3, dtype=torch.bool), 10
        )  # of 12: one pair beyond has a row that is not
