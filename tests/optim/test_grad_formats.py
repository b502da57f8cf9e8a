"""Gradients stored and reduced in bf16: dtypes and rounding of sums, against definitions."""

import pytest
import torch
from harness import run_ranks
from toy import Toy, build_training, compute_loss, train_step

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

BF16 = PrecisionArgs(bf16=True)
NARROW = PrecisionArgs(bf16=True, grad_reduce_in_bf16=True)
AWARE = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}


@pytest.mark.parametrize(
    "dtype, precision, more, expected",
    [
        (torch.bfloat16, BF16, {}, torch.float32),
        (torch.bfloat16, NARROW, {}, torch.bfloat16),
        (torch.bfloat16, BF16, AWARE, torch.bfloat16),
        (torch.bfloat16, NARROW, AWARE, torch.bfloat16),
        (torch.float16, PrecisionArgs(fp16=True, loss_scale=8.0), AWARE, torch.bfloat16),
        (torch.float32, PrecisionArgs(), AWARE, torch.float32),
    ],
)
def test_dtype_of_main_gradients(dtype, precision, more, expected):
    model = Toy(dtype)
    grads, optimizer = build_training(model, precision=precision, **more)
    before = [p.detach().clone() for p in model.parameters()]
    assert train_step(model, grads, optimizer, [0, 1]).updated
    assert {p.main_grad.dtype for p in model.parameters()} == {expected}
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def _gradients(model, seeds):
    """Of every micro-batch, in the model's own format."""
    found = []
    for seed in seeds:
        found.append(torch.autograd.grad(compute_loss(model, seed) / len(seeds), list(model.parameters())))
    return found


@pytest.mark.parametrize(
    "patterns, wide", [([], ()), (["all"], "all"), (["experts.*", "*norm.weight"], ("experts", "norm.weight"))]
)
def test_fp32_accumulation_by_parameter_name(patterns, wide):
    model = Toy(torch.bfloat16)
    grads, _ = build_training(
        model, precision=NARROW, parallel=ParallelArgs(ddp_param_name_patterns_for_fp32_local_accumulation=patterns)
    )
    seeds = range(6)
    parts = _gradients(model, seeds)
    for iteration in range(2):  # the second one must not begin with what the first one left
        grads.zero()
        for seed in seeds:
            (compute_loss(model, seed) / len(seeds)).backward()
        grads.finish()
        for number, (name, param) in enumerate(model.named_parameters()):
            narrow = wide_sum = None
            for part in parts:
                grad = part[number]
                narrow = grad.clone() if narrow is None else narrow + grad
                wide_sum = grad.float() if wide_sum is None else wide_sum + grad.float()
            expected = wide_sum.bfloat16() if wide == "all" or name in wide else narrow
            assert param.main_grad.dtype == torch.bfloat16 and torch.equal(param.main_grad, expected), (name, iteration)


def test_unused_parameter_adds_no_stale_gradient():
    model = Toy(torch.bfloat16)
    grads, _ = build_training(
        model, precision=NARROW, parallel=ParallelArgs(ddp_param_name_patterns_for_fp32_local_accumulation=["all"])
    )
    grads.zero()
    compute_loss(model, 0).backward()
    grads.finish()
    grads.zero()
    model.norm(torch.ones(2, 23, dtype=torch.bfloat16)).sum().backward()
    grads.finish()
    assert not model.first.weight.main_grad.any() and model.norm.bias.main_grad.any()


def _reduced(rank, n, instances, overlap, average):
    """This rank's part of the reduced gradients; the local ones of all ranks; the largest thing sent."""
    ps = ParallelState.create(n, rank, optimizer_instances=instances)
    flags = {
        "use_distributed_optimizer": True,
        "num_distributed_optimizer_instances": instances,
        "ddp_average_in_collective": average,
        "overlap_grad_reduce": overlap,
        "ddp_bucket_size": 300,
        "overlap_param_gather": overlap,
    }
    found = []
    for wide in (False, True):
        model = Toy(torch.bfloat16)
        grads, optimizer = build_training(
            model,
            ps=ps,
            precision=NARROW,
            clip_grad=0.0,
            parallel=ParallelArgs(**flags, ddp_reduce_scatter_with_fp32_accumulation=wide),
        )
        train_step(model, grads, optimizer, [rank], lr=0.0, weight_decay=0.0)
        optimizer.wait_params()
        train_step(model, grads, optimizer, [rank], lr=0.0, weight_decay=0.0)  # by now buckets are launched by hooks
        optimizer.wait_params()
        grads.gather()
        found.append([p.main_grad.clone() for p in model.parameters()])
    model = Toy(torch.bfloat16)
    factor = 1.0 if average else 1.0 / n
    local = torch.autograd.grad(compute_loss(model, rank), list(model.parameters()))
    everyone = collectives.all_gather_object(
        [(grad * factor if factor == 1.0 else (grad.float() * factor).bfloat16()) for grad in local], ps.world
    )
    return found, everyone


@pytest.mark.parametrize(
    "n, instances, overlap, average",
    [(2, 1, False, False), (4, 1, True, False), (4, 1, True, True), (4, 2, True, False)],
)
def test_reduce_scatter_with_sums_in_fp32(n, instances, overlap, average):
    for (plain, wide), everyone in run_ranks(_reduced, n, instances, overlap, average):
        exact, errors = [], {"plain": 0.0, "wide": 0.0}
        for number, (narrow, found) in enumerate(zip(plain, wide)):
            parts = [rank[number].float() for rank in everyone]
            if instances == 1:
                total = torch.stack(parts).sum(0) / (n if average else 1)
                exact.append(torch.equal(found, total.bfloat16()))
            reference = torch.stack([part.double() for part in parts]).sum(0) / (n if average else 1)
            errors["plain"] += (narrow.double() - reference).square().sum().item()
            errors["wide"] += (found.double() - reference).square().sum().item()
        assert all(exact)
        if n // instances > 2:  # a sum of two is rounded once in any case
            assert errors["wide"] < errors["plain"], "sums in bf16 are rounded more than once"
        assert errors["wide"] <= errors["plain"] < 0.05 * reference.numel()


def _reduce_on_three_ranks(rank, n):
    ps = ParallelState.create(n, rank)
    model = Toy(torch.bfloat16)
    grads, _ = build_training(model, ps=ps, precision=BF16)
    grads.zero()
    model.first.bias.sum().backward()
    grads.finish()
    return model.first.bias.main_grad


def test_bf16_gradient_mean_is_scaled_in_fp32():
    """A third of it is not representable in bf16: three rounded thirds would be 1.002 times the gradient."""
    for found in run_ranks(_reduce_on_three_ranks, 3):
        torch.testing.assert_close(found, torch.ones(23), rtol=1e-6, atol=0)
