"""Two passes take turns in a fixed order; an error on either side is raised and stops the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_trainer.parallel.overlap_threads import BACKWARD, FORWARD, AlternatingExecutor, yield_point
from moe_trainer.parallel.weight_grads import WeightGradQueue


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def make_steps(overlap_executor, side, name, count, log):
    def run():
        for index in range(count):
            log.append(f"{name}{index}")
            overlap_executor.yield_turn(side)
        log.append(f"{name} end")

    return run


@pytest.mark.parametrize(
    "f, b, expected",
    [
        (2, 2, "b0 f0 b1 f1 b_end f_end"),
        (0, 2, "b0 f_end b1 b_end"),
        (3, 0, "b_end f0 f1 f2 f_end"),
        (1, 3, "b0 f0 b1 f_end b2 b_end"),
    ],
)
def test_order_of_turns_is_fixed(executor, f, b, expected):
    overlap_executor, log = AlternatingExecutor(), []
    for _ in range(3):  # the same every time, also when used again
        log.clear()
        overlap_executor.run(
            make_steps(overlap_executor, FORWARD, "f", f, log),
            make_steps(overlap_executor, BACKWARD, "b", b, log),
            executor,
        )
        assert [entry.replace(" ", "_") for entry in log] == expected.split()
    overlap_executor.yield_turn(FORWARD)  # outside of a run: nothing
    overlap_executor.yield_turn(BACKWARD)


def test_error_on_one_side_is_raised_and_stops_the_other(executor):
    overlap_executor, log = AlternatingExecutor(), []

    def fail():
        overlap_executor.yield_turn(FORWARD)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        overlap_executor.run(fail, make_steps(overlap_executor, BACKWARD, "b", 0, log), executor)
    with pytest.raises(KeyError, match="mine"):
        overlap_executor.run(fail, make_steps(overlap_executor, BACKWARD, "b", 5, log), executor)
    assert log[-1] != "b end"

    def fail_backward():
        overlap_executor.yield_turn(BACKWARD)
        raise KeyError("backward")

    log.clear()
    with pytest.raises(KeyError, match="backward"):
        overlap_executor.run(make_steps(overlap_executor, FORWARD, "f", 5, log), fail_backward, executor)
    assert log == ["f0"]


def test_hand_over_is_identity_and_runs_deferred_gradients(executor):
    overlap_executor, queue = AlternatingExecutor(), WeightGradQueue()
    weight = torch.nn.Parameter(torch.ones(2))
    x = torch.randn(3, requires_grad=True)
    y, z = yield_point(overlap_executor, queue, x * 2, x * 3)
    queue.active = True
    queue.defer(weight, lambda: torch.tensor([1.0, 2.0]))
    (y + z).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0)) and weight.grad.tolist() == [1.0, 2.0]
    assert yield_point(None, queue, x)[0] is x
