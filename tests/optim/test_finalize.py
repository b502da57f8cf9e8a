"""Sums over the ranks of one model replica: partial over tp and etp, tied over the stages; owned parts only."""

import pytest
import torch
from harness import RanksFailedError, run_ranks
from torch import nn

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.buckets import plan_layouts
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState


def _make_module(dtype, **infos):
    """A module with one parameter per name; values: (shape, ParamInfo fields)."""
    module = nn.Module()
    for name, (shape, fields) in infos.items():
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.info = ParamInfo(**{"names": (name,), **fields})
        module.register_parameter(name, param)
    return module


def _grads_after(module, ps, rank, distributed, precision=None, overlap=False, per_token=False):
    """Give every parameter the gradient rank + 1, twice; return the full reduced gradients by name."""
    parallel = ParallelArgs(
        use_distributed_optimizer=distributed, overlap_grad_reduce=overlap, ddp_bucket_size=100 if overlap else None
    )
    grads = DataParallelGrads(
        plan_layouts(module.parameters(), ps, parallel),
        ps,
        parallel,
        precision or PrecisionArgs(),
        per_token_loss=per_token,
    )
    for _ in range(2):  # twice: nothing of the first iteration may be left
        grads.zero()
        sum((param * (rank + 1)).sum() for param in module.parameters()).backward()
        grads.finish()
        finalize_grads(grads, ps)
    if per_token:
        grads.scale(0.5)
    grads.gather()
    result = {}
    for name, param in module.named_parameters():
        assert (param.main_grad == param.main_grad.flatten()[0]).all(), name
        result[name] = param.main_grad.flatten()[0].item()
    return result


def _tensor_parallel(rank, n, distributed, overlap, per_token):
    """4 ranks, tp 2 (ranks 01, 23), dp 2, ep 2 over tp; and the experts' etp 1."""
    ps = ParallelState.create(n, rank, tp=2, ep=2)
    module = _make_module(
        torch.float32,
        cut=((7, 33), {"sharded_dim": 0, "shard_rank": ps.tp.rank, "shard_count": 2}),
        norm=((33,), {"is_grad_partial": True}),
        replicated=((11,), {}),
        router=((4, 33), {"is_grad_partial": True}),
        expert=((5, 19), {"kind": "expert"}),
    )
    return _grads_after(module, ps, rank, distributed, overlap=overlap, per_token=per_token)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("distributed, overlap", [(False, False), (False, True), (True, False), (True, True)])
def test_partial_gradients_are_summed_over_tp(distributed, overlap, per_token):
    """Gradients are 1 .. 4 by rank; means over dp (0 with 2, 1 with 3; or sums times 0.5), so cut ones differ, partial ones agree."""
    for rank, found in enumerate(run_ranks(_tensor_parallel, 4, distributed, overlap, per_token)):
        mine = (1 + 3, 2 + 4)[rank % 2] / 2
        assert found == {"cut": mine, "replicated": mine, "norm": 5.0, "router": 5.0, "expert": mine}, rank


def _expert_tensor_parallel(rank, n, distributed):
    """4 ranks, etp 2 (01, 23), edp 2, tp 1: the experts' partial parameters are summed over etp, the dense ones stay."""
    ps = ParallelState.create(n, rank, etp=2)
    stack = {"names": ("experts.0", "experts.1"), "stacked": True, "kind": "expert", "is_grad_partial": True}
    module = _make_module(
        torch.float32,
        bias=((9,), {"kind": "expert", "is_grad_partial": True}),
        norm=((33,), {}),
        biases=((2, 9), stack),
        fc1=((3, 4), {"kind": "expert", "sharded_dim": 0, "shard_rank": ps.etp.rank, "shard_count": 2}),
    )
    return _grads_after(module, ps, rank, distributed)


@pytest.mark.parametrize("distributed", [False, True])
def test_partial_gradients_of_experts_are_summed_over_etp(distributed):
    """M#1628: etp > 1 with ep 1. Expert gradients: sum over edp, divided by dp 4; a dense one: mean over all four."""
    for rank, found in enumerate(run_ranks(_expert_tensor_parallel, 4, distributed)):
        assert found == {"bias": 10 / 4, "biases": 10 / 4, "norm": 10 / 4, "fc1": (1 + 3, 2 + 4)[rank % 2] / 4}


def _finalize_stages(rank, n, distributed, overlap, dtype):
    """8 ranks or 4, pp 2, tp 2: the stages lay out quite different models around the tied parameters, in another order."""
    ps = ParallelState.create(n, rank, pp=2, tp=2)
    cut = {"sharded_dim": 0, "shard_rank": ps.tp.rank, "shard_count": 2}
    if ps.pp.rank == 0:
        infos = {
            "embedding": ((37, 19), {"tied": True, **cut}),
            "positions": ((5, 19), {"tied": True}),
            "first": ((129,), {"is_grad_partial": True}),
            "more": ((2, 300), cut),
        }
    else:
        infos = {
            "last": ((7, 7), cut),
            "positions": ((5, 19), {"tied": True, "is_replica": True}),
            "norm": ((33,), {"is_grad_partial": True}),
            "embedding": ((37, 19), {"tied": True, "is_replica": True, **cut}),
        }
    precision = PrecisionArgs(bf16=dtype == torch.bfloat16, grad_reduce_in_bf16=dtype == torch.bfloat16)
    return _grads_after(_make_module(dtype, **infos), ps, rank, distributed, precision, overlap)


@pytest.mark.parametrize(
    "distributed, overlap, dtype",
    [
        (False, False, torch.float32),
        (True, False, torch.float32),
        (True, True, torch.float32),
        (True, True, torch.bfloat16),
    ],
)
def test_tied_gradients_are_summed_over_the_stages(distributed, overlap, dtype):
    """8 ranks: stage 0 is ranks 0-3 (tp 01, 23), stage 1 is 4-7; rank r of the first stage is tied to r + 4."""
    for rank, found in enumerate(run_ranks(_finalize_stages, 8, distributed, overlap, dtype)):
        t, stage = rank % 2, rank // 4
        mine = (4 * stage + 1 + t + 4 * stage + 3 + t) / 2  # mean over dp
        other = mine + (-4 if stage else 4)
        both_tp = 4 * stage * 2 + (1 + 3) / 2 + (2 + 4) / 2
        expected = {"embedding": mine + other, "positions": mine + other}
        expected |= {"first": both_tp, "more": mine} if stage == 0 else {"last": mine, "norm": both_tp}
        assert found == expected, rank


def _finalize_different_layouts(rank, n):
    ps = ParallelState.create(n, rank, tp=2)
    return _grads_after(_make_module(torch.float32, norm=((8 + rank,), {"is_grad_partial": True})), ps, rank, False)


def test_disagreement_about_partial_gradients_is_reported():
    with pytest.raises(RanksFailedError, match="summed over tp differ between ranks.*norm"):
        run_ranks(_finalize_different_layouts, 2)


def _collectives(rank, n):
    """Number of collectives that finalize_grads needs once the layouts are known to agree."""
    ps = ParallelState.create(n, rank, tp=2)
    module = _make_module(torch.float32, **{f"norm{i}": ((8 + i,), {"is_grad_partial": True}) for i in range(9)})
    grads = DataParallelGrads(
        plan_layouts(module.parameters(), ps, ParallelArgs()), ps, ParallelArgs(), PrecisionArgs(), per_token_loss=False
    )
    calls, launch = [], collectives.all_reduce
    collectives.all_reduce = lambda *args, **kwargs: (calls.append(1), launch(*args, **kwargs))[1]
    for _ in range(2):
        grads.zero()
        grads.finish()
        calls.clear()
        finalize_grads(grads, ps)
    return len(calls)


def test_finalize_needs_one_collective_per_group():
    assert run_ranks(_collectives, 2) == [1, 1]
