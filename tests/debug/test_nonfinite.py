"""The search for the first non-finite value, on small modules."""

import pytest
import torch
from torch import nn

from moe_trainer.debug.nonfinite import (
    BACKWARD,
    FORWARD,
    Chunk,
    Fault,
    NonFiniteTracer,
    first_nonfinite_weight,
    nonfinite_gradients,
)
from moe_trainer.parallel.params import ParamInfo

NAN, INF = float("nan"), float("inf")


class Scale(nn.Module):
    """x * weight, plus injected values."""

    def __init__(self, name):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.info = ParamInfo((f"{name}.weight",))
        self.forward_fault = self.backward_fault = None

    def forward(self, x):
        y = x * self.weight
        if self.forward_fault is not None:
            y = y + self.forward_fault
        return y if self.backward_fault is None else AddInBackward.apply(y, self.backward_fault)


class AddInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.value, None


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.second = Scale(f"{name}.first"), Scale(f"{name}.second")

    def forward(self, x):
        return x + self.second(self.first(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(f"blocks.{index}") for index in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def find_first_nonfinite(model, microbatches=1, change=None, number=0):
    current = [1]
    search = NonFiniteTracer([Chunk(number, model, lambda path: path or "all")], lambda: current[0])
    with search.watching():
        for microbatch in range(1, microbatches + 1):
            current[0] = microbatch
            if change is not None:
                change(microbatch)
            model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    return search.earliest()


@pytest.mark.parametrize("value, kind", [(NAN, "NaN"), (INF, "Inf")])
def test_module_that_produces_the_first_nonfinite_value_is_named(value, kind):
    model = Model()
    model.blocks[0].second.forward_fault = value
    found = find_first_nonfinite(model)
    assert (found.microbatch, found.direction) == (1, FORWARD)
    assert found.text == f"{kind} in the results of blocks.0.second, forward pass of microbatch 1"


def test_backward_names_the_last_module_with_finite_output_gradients():
    model = Model()
    model.blocks[1].first.backward_fault = NAN
    found = find_first_nonfinite(model)
    # its gradients reach the weight and the input alike: both are of this module
    assert found.direction == BACKWARD and "blocks.1.first" in found.what and "reaches" not in found.what
    model = Model()
    for module in model.blocks:
        module.first.weight.requires_grad_(False)
    model.blocks[1].first.backward_fault = NAN
    assert (
        find_first_nonfinite(model).text
        == "NaN in the gradient that blocks.1.first passes on, backward pass of microbatch 1"
    )


def test_first_microbatch_with_a_nonfinite_value_is_named():
    model = Model()

    def change(microbatch):
        model.blocks[1].second.backward_fault = NAN if microbatch == 2 else None
        model.blocks[0].first.forward_fault = NAN if microbatch == 3 else None

    found = find_first_nonfinite(model, 3, change)
    assert found.microbatch == 2 and found.direction == BACKWARD and "blocks.1.second" in found.what


def test_finite_values_are_unchanged_and_hooks_are_removed():
    model, plain = Model(), Model()
    assert find_first_nonfinite(model) is None
    plain(torch.ones(3, 4, requires_grad=True)).sum().backward()
    for (name, watched), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(watched.grad, expected.grad), name
        assert not watched._backward_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_nonfinite_weight_is_named_before_activations():
    model = Model()
    stack = model.blocks[1].second
    stack.weight.info = ParamInfo(tuple(f"experts.{index}" for index in range(4)), kind="expert", stacked=True)
    with torch.no_grad():
        stack.weight[2] = INF
    model.blocks[0].first.forward_fault = NAN
    assert find_first_nonfinite(model).text == "weight experts.2 is Inf before the iteration"
    assert first_nonfinite_weight(Chunk(0, model.blocks[0], str)) is None


def test_nonfinite_rows_name_the_expert_and_padding_rows_are_ignored():
    def search(bad_row):
        module = Scale("experts")
        module.forward_fault = torch.zeros(6, 4)
        module.forward_fault[bad_row] = NAN
        found = NonFiniteTracer(
            [Chunk(0, module, lambda path: "experts")], lambda: 1, lambda module, args: (["e4", "e5", "e6"], [2, 0, 3])
        )
        with found.watching():
            module(torch.ones(6, 4))
        return found.earliest()

    assert search(1).what == "NaN in the results of experts (e4)"
    assert search(2).what == "NaN in the results of experts (e6)"
    assert search(5) is None


def test_ranks_agree_on_the_earliest_fault():
    def fault(microbatch, direction, chunk, position):
        return Fault(microbatch, direction, chunk, position, "")

    forward, backward = fault(1, FORWARD, 3, 9), fault(1, BACKWARD, -3, -9)
    assert min(fault(2, FORWARD, 0, 0), forward) is forward
    assert min(backward, forward) is forward
    assert min(fault(1, FORWARD, 2, 50), forward).chunk == 2, "an earlier stage sends it on"
    assert min(fault(1, BACKWARD, -2, -1), backward) is backward, "in backward the later stage does"
    assert min(fault(0, FORWARD, 7, 7), forward).microbatch == 0, "a weight was there before"
    # position in a model: a child before its parent in both directions
    model = Model()
    model.blocks[1].second.forward_fault = NAN
    child = find_first_nonfinite(model)
    sent = fault(1, FORWARD, 0, 0)
    assert sent < child
    # full searches on two stages
    for attribute, first in (("forward_fault", 0), ("backward_fault", 1)):
        seen = []
        for stage in (0, 1):
            model = Model()
            setattr(model.blocks[0].first, attribute, NAN)
            seen.append(find_first_nonfinite(model, number=stage))
        assert min(seen) is seen[first], attribute


def test_nonfinite_reduced_gradients_are_named():
    class Slot:
        def __init__(self, name):
            self.param = nn.Parameter(torch.ones(2))
            self.param.info = ParamInfo((name,))

    views = [(Slot("a"), torch.ones(2)), (Slot("b"), torch.tensor([1.0, INF])), (Slot("c"), torch.ones(0))]
    assert nonfinite_gradients(views) == ["b"]
