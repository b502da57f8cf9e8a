"""Permutation to expert order and back, with any number of rows per token."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_trainer.ops.permute import (
    dense_to_topk,
    make_permute_map,
    permute,
    permute_probs,
    sort_by_expert,
    topk_to_dense,
    unpermute,
)

T, E, H = 7, 5, 4


def random_map(kind: str) -> torch.Tensor:
    if kind == "top-2":
        return torch.zeros(T, E, dtype=torch.bool).scatter_(1, torch.rand(T, E).topk(2)[1], True)
    if kind == "ragged":
        routing = torch.rand(T, E) < 0.4
        routing[2] = False  # a token nothing takes
        routing[:, 3] = False  # an expert without tokens
        return routing
    return torch.full((T, E), kind == "all")


@pytest.mark.parametrize("kind", ["top-2", "ragged", "all", "nothing"])
def test_permutation_order_and_round_trip(kind):
    routing = random_map(kind)
    routes = make_permute_map(routing)
    expected = [(e, t) for e in range(E) for t in range(T) if routing[t, e]]
    assert routes.token_R.tolist() == [t for _, t in expected]
    assert routes.counts_E.tolist() == routing.sum(0).tolist()
    x = torch.randn(T, H, dtype=torch.float64)
    rows = permute(x, routes)
    assert torch.equal(rows, x[[t for _, t in expected]])
    torch.testing.assert_close(unpermute(rows, routes), x * routing.sum(1, keepdim=True))
    probs = torch.rand(T, E)
    assert permute_probs(probs, routes).tolist() == [probs[t, e].item() for e, t in expected]


@pytest.mark.parametrize("kind", ["top-2", "ragged", "all", "nothing"])
def test_permutation_gradients(kind):
    routes = make_permute_map(random_map(kind))
    rows = len(routes.token_R)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    y = torch.randn(rows, H, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(T, E, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: permute(v, routes), x)
    assert torch.autograd.gradcheck(lambda v: permute_probs(v, routes), probs)
    if rows:
        assert torch.autograd.gradcheck(lambda v: unpermute(v, routes), y)


def test_half_precision_sums_in_fp32():
    routes = make_permute_map(torch.ones(1, 8, dtype=torch.bool))
    rows = torch.tensor([256.0] + [1.0] * 7, dtype=torch.bfloat16).unsqueeze(1).repeat(1, 8)
    assert unpermute(rows, routes).tolist() == [[264.0] * 8]  # adding ones to 256 in bf16 would stay at 256


class _SortLog(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in ("sort", "argsort"):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_permutation_sorts_int32_keys():
    routing = torch.rand(7, 5) < 0.5
    with _SortLog() as seen:
        routes = sort_by_expert(make_permute_map(routing), torch.arange(5).flip(0))
    assert seen.dtypes == [torch.int32] * 2
    # a token's rows, in the order of the experts of its columns from the last to the first
    assert routes.token_R[routes.row_R].tolist() == sorted(routes.token_R.tolist())
    assert all(
        routes.cell_R[routes.row_R[start:stop]].tolist()
        == sorted(routes.cell_R[routes.row_R[start:stop]].tolist(), reverse=True)
        for start, stop in zip(routes.offsets_T.tolist(), routes.offsets_T.tolist()[1:])
    )


def test_unused_topk_slots_have_zero_weight():
    """Slots of tokens with fewer than K experts are -1; an exchange may multiply by their weights."""
    routing_TV = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    probs_TV = (torch.arange(12.0).view(3, 4) + 1).requires_grad_()  # not zero where there is no route either
    idx_TK, weights_TK = dense_to_topk(probs_TV, routing_TV, 3)
    assert idx_TK.tolist() == [[1, 3, -1], [-1, -1, -1], [0, -1, -1]]
    assert weights_TK.tolist() == [[2.0, 4.0, 0.0], [0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]
    weights_TK.sum().backward()
    assert torch.equal(probs_TV.grad, routing_TV.float())


def test_weights_of_unused_topk_slots_are_ignored():
    weights_NK = torch.tensor([[2.0, float("nan")], [float("inf"), 7.0]], requires_grad=True)
    probs_NE, routing_NE = topk_to_dense(torch.tensor([[1, -1], [-1, -1]]), weights_NK, 3)
    assert routing_NE.tolist() == [[False, True, False], [False] * 3] and probs_NE.tolist() == [
        [0.0, 2.0, 0.0],
        [0.0] * 3,
    ]
    probs_NE.sum().backward()
    assert weights_NK.grad.tolist() == [[1.0, 0.0], [0.0, 0.0]]
