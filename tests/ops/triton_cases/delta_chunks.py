"""Our gated delta rule in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops import gated_delta_rule, triton_delta_chunks, triton_delta_rule
from moe_trainer.ops.gated_delta_rule import Heads

WIDTH = 4


def leaves(length: int, batch: int, heads: Heads, dtype: torch.dtype) -> list[Tensor]:
    """x and the gates as parts of a joint projection, the convolution's weight, and the rates."""
    torch.manual_seed(3)
    channels = sum(heads.channels)
    joint = torch.randn(length, batch, channels + 2 * heads.values + 3, dtype=torch.float64).to(dtype).requires_grad_()
    rest = [
        torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((channels, WIDTH), (heads.values,), (heads.values,))
    ]
    return [joint, *rest]


def run(function, inputs: list[Tensor], heads: Heads, ids: Tensor | None) -> list[Tensor]:
    joint, weight, a_log, dt_bias = inputs = [x.detach().clone().requires_grad_() for x in inputs]
    x, beta, alpha, _ = joint.split([sum(heads.channels), heads.values, heads.values, 3], -1)
    alpha = torch.nn.functional.pad(alpha, (0, 1))[..., :-1]  # strides that are not those of beta
    y = function(x, beta, alpha, weight, a_log, dt_bias, heads, ids)
    torch.manual_seed(4)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y.dtype).transpose(2, 3).contiguous().transpose(2, 3))
    assert all(leaf.grad.dtype == leaf.dtype for leaf in inputs)
    return [y.detach(), *(leaf.grad for leaf in inputs)]


def both(
    length: int, batch: int, heads: Heads, dtype: torch.dtype, ids: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    inputs = leaves(length, batch, heads, dtype)
    return run(triton_delta_rule.gated_delta, inputs, heads, ids), run(gated_delta_rule.gated_delta, inputs, heads, ids)


@pytest.mark.parametrize(
    "length,batch,heads",
    [
        (1, 1, Heads(1, 1, 16, 16)),
        (2, 2, Heads(2, 4, 12, 20)),
        (63, 1, Heads(1, 1, 16, 16)),
        (64, 1, Heads(1, 1, 16, 16)),
        (65, 1, Heads(2, 2, 16, 16)),
        (130, 1, Heads(1, 1, 12, 20)),
    ],
    ids=str,
)
def test_delta_kernel_of_any_length(length, batch, heads):
    torch.testing.assert_close(*both(length, batch, heads, torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [Heads(1, 1, 32, 64), Heads(1, 1, 80, 144), Heads(1, 1, 256, 16)], ids=str)
def test_delta_kernel_of_any_head_width(heads):
    torch.testing.assert_close(*both(70, 1, heads, torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [7, 130])
def test_delta_kernel_in_single_precision(length):
    torch.testing.assert_close(*both(length, 1, Heads(1, 2, 16, 32), torch.float32), rtol=2e-4, atol=2e-5)


def test_delta_kernel_in_half_precision():
    """Operands of GEMMs are rounded (by the interpreter towards zero, which is twice as far)."""
    heads = Heads(1, 1, 32, 32)
    inputs = leaves(130, 1, heads, torch.bfloat16)
    ours = run(triton_delta_rule.gated_delta, inputs, heads, None)
    exact = run(gated_delta_rule.gated_delta, [x.detach().double() for x in inputs], heads, None)
    for found, right in zip(ours, exact, strict=True):
        assert (found - right).norm() <= 3e-2 * right.norm()


@pytest.mark.parametrize(
    "lengths", [[[7, 3, 57, 1, 62], [64, 66]], [[1] * 67, [61, 1, 1, 4]]], ids=["several chunks", "one position each"]
)
def test_delta_kernel_with_documents(lengths):
    ids = torch.stack(
        [torch.arange(len(row), dtype=torch.int32).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    torch.testing.assert_close(*both(ids.shape[1], 2, Heads(1, 1, 16, 16), torch.float64, ids), rtol=1e-9, atol=1e-9)


@triton.jit
def inverse_kernel(system, result, SPLIT: tl.constexpr):
    tl.store(
        triton_delta_chunks._square(result, 0, 64),
        triton_delta_chunks._inverse(tl.load(triton_delta_chunks._square(system, 0, 64)), SPLIT, "ieee"),
    )


@pytest.mark.parametrize("split,near", [(False, 1e-6), (True, 2e-4)])
def test_triangular_inverse_kernel(split, near):
    """By GEMMs of bf16, whose own rounding (0.004) would show, too."""
    torch.manual_seed(5)
    system, result = torch.randn(64, 64).mul(0.3).tril(-1), torch.empty(64, 64)
    inverse_kernel[(1,)](system, result, split)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + system)
    assert (result - exact).norm() <= near * exact.norm()


def test_delta_kernel_with_similar_keys():
    """The triangular system of parallel keys, with beta near one and no decay: powers of the matrix would exceed 10^18."""
    heads = Heads(1, 1, 16, 16)
    inputs = leaves(64, 1, heads, torch.float32)
    with torch.no_grad():
        joint, weight, a_log, _ = inputs
        joint[..., 16:32] = 1.0 + 1e-3 * joint[..., 16:32]  # keys
        joint[..., 48] = 9.0  # beta
        weight[16:32] = torch.tensor([0.0, 0.0, 0.0, 1.0])
        a_log.fill_(-9.0)
    ours, exact = (
        run(function, values, heads, None)
        for function, values in (
            (triton_delta_rule.gated_delta, inputs),
            (gated_delta_rule.gated_delta, [x.detach().double() for x in inputs]),
        )
    )
    for found, right in zip(ours, exact, strict=True):
        assert (found - right).norm() <= 1e-3 * right.norm()


def test_extreme_decay_gives_finite_results():
    heads = Heads(1, 1, 16, 16)
    inputs = leaves(70, 1, heads, torch.float32)
    with torch.no_grad():
        inputs[0][..., 49] += 200.0  # alpha
        inputs[2] += 5.0
    assert all(torch.isfinite(x).all() for x in run(triton_delta_rule.gated_delta, inputs, heads, None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 20, 40, 48, 49], ids=["query", "key", "value", "beta", "alpha"])
def test_delta_kernel_of_numbers_that_are_not_finite_equals_torch(column, value):
    """A position after the first chunk: what torch makes of it is not finite here either, and nothing before it changes."""
    heads = Heads(1, 1, 16, 16)
    inputs = leaves(70, 1, heads, torch.float32)
    with torch.no_grad():
        inputs[0][66, 0, column] = value
    ours, theirs = (
        run(function, inputs, heads, None) for function in (triton_delta_rule.gated_delta, gated_delta_rule.gated_delta)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all() == other.isfinite().all()
    (ours, *_), (theirs, *_) = ours, theirs
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    torch.testing.assert_close(ours[:64], theirs[:64], rtol=2e-4, atol=2e-5)


def test_only_the_inputs_are_saved():
    heads, kept = Heads(1, 2, 16, 16), []
    x, beta, alpha, *rest = (
        torch.randn(shape, requires_grad=True) for shape in ((70, 1, 64), (70, 1, 2), (70, 1, 2), (64, 4), (2,), (2,))
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        triton_delta_rule.gated_delta(x, beta, alpha, *rest, heads)
    assert sum(kept) == sum(each.numel() for each in (x, beta, alpha, *rest))


def test_empty_input_gives_empty_output():
    heads = Heads(1, 2, 16, 16)
    gates = triton_delta_chunks.Gates(*(torch.zeros(0, 1, 2) for _ in range(2)), torch.zeros(2), torch.zeros(2), None)
    assert triton_delta_chunks.forward(torch.zeros(0, 1, 64), gates, heads).shape == (0, 1, 2, 16)
