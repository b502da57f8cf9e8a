"""Mappings between layouts over a group: forward and gradient equal the same arithmetic on full tensors in one process.

Oracle: the loss is a sum over ranks of <own weight, output> where the consumer is each rank's own, and one <weight, output>
where it is replicated; its gradient with respect to the full input follows by autograd on full tensors.
"""

import pytest
import torch
from harness import run_ranks

from moe_trainer.parallel import mappings
from moe_trainer.parallel.state import Group, ParallelState

ROWS, BATCH, COLUMNS = 8, 3, 12
ROWS_CUT, COLUMNS_CUT, WHOLE = "rows", "columns", "whole"
# name: (state of the input, partial input, state of the output, each rank has a separate consumer)
MAPPINGS = {
    "copy_to_group": (WHOLE, False, WHOLE, True),
    "reduce_from_group": (WHOLE, True, WHOLE, False),
    "gather_rows_from_group": (ROWS_CUT, False, WHOLE, True),
    "gather_rows_replicated": (ROWS_CUT, False, WHOLE, False),
    "scatter_rows_to_group": (WHOLE, False, ROWS_CUT, False),
    "reduce_scatter_rows_to_group": (WHOLE, True, ROWS_CUT, False),
    "gather_last_dim": (COLUMNS_CUT, False, WHOLE, True),
    "gather_last_dim_replicated": (COLUMNS_CUT, False, WHOLE, False),
    "columns_to_rows": (COLUMNS_CUT, False, ROWS_CUT, False),
}


def _cut(x, state, rank, n):
    if state == WHOLE:
        return x
    return x.chunk(n, dim=0 if state == ROWS_CUT else -1)[rank].contiguous()


def _inputs(n, dtype):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-8, 8, (3, n, ROWS, BATCH, COLUMNS), generator=generator).to(dtype)


def _work(rank, n, dtype):
    group = ParallelState.create(n, rank, tp=n).tp
    first, shares, weights = _inputs(n, dtype)
    report = {}
    for name, (before, partial, after, own) in MAPPINGS.items():
        full_tensor = shares[rank] if partial else first[0]
        x = _cut(full_tensor, before, rank, n).clone().requires_grad_()
        y = getattr(mappings, name)(x, group)
        weight = weights[rank] if own else _cut(weights[0], after, rank, n)
        original, coming = x.detach().clone(), weight.clone()
        y.backward(coming)
        assert torch.equal(x, original), f"{name} wrote into its input"
        assert torch.equal(coming, weight), f"{name} wrote into the gradient, which others may read"
        report[name] = y.detach(), x.grad
    return report


@pytest.mark.parametrize(("n", "dtype"), [(2, torch.float64), (4, torch.float32), (2, torch.bfloat16)])
def test_mappings_equal_full_tensors(n, dtype):
    first, shares, weights = _inputs(n, dtype)
    reports = run_ranks(_work, n, dtype)
    for name, (before, partial, after, own) in MAPPINGS.items():
        full_tensor = shares.sum(0) if partial else first[0]
        grad = weights.sum(0) if own else weights[0]
        for rank, report in enumerate(reports):
            y, x_grad = report[name]
            assert torch.equal(y, _cut(full_tensor, after, rank, n)), f"{name}: output of rank {rank}"
            assert torch.equal(x_grad, _cut(grad, before, rank, n)), f"{name}: gradient of rank {rank}"


@pytest.mark.parametrize("name", MAPPINGS)
def test_mappings_in_a_group_of_one_return_the_input(name):
    x = torch.randn(3, 2)
    assert getattr(mappings, name)(x, Group.single("tp")) is x


def _not_contiguous(rank, n):
    group = ParallelState.create(n, rank, tp=n).tp
    x = torch.arange(24.0).view(6, 4).t().requires_grad_()  # [4, 6], transposed
    mappings.reduce_from_group(x, group).t().contiguous().sum().backward()
    y = mappings.copy_to_group(x, group)
    (y + y).t().sum().backward()
    return x.grad


def test_inputs_and_gradients_need_not_be_contiguous():
    for grad in run_ranks(_not_contiguous, 2):
        assert torch.equal(grad, torch.full((4, 6), 5.0))


def _uneven(rank, n):
    group = ParallelState.create(n, rank, tp=n).tp
    for name in ("scatter_rows_to_group", "reduce_scatter_rows_to_group", "columns_to_rows"):
        with pytest.raises(ValueError, match="3 rows do not divide evenly over the 2 ranks of tp"):
            getattr(mappings, name)(torch.ones(3, 2), group)


def test_rows_that_do_not_divide_are_refused():
    run_ranks(_uneven, 2)
