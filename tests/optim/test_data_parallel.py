"""Data-parallel training against one process that sees all the data, in every mode of reduction."""

import itertools

import pytest
import torch
from harness import run_ranks
from torch import nn
from toy import Toy, build_training, compute_loss, train_step

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.distributed_optimizer import ParamGather
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

STEPS = 4
# (overlapped reduction, distributed optimizer, overlapped gather)
MODES = ((False, False, False), (True, False, False), (False, True, False), (True, True, False), (True, True, True))


def _parallel(overlap, distributed, gather, **more):
    return ParallelArgs(
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        overlap_param_gather=gather,
        **{"ddp_bucket_size": 400 if overlap else None, **more},
    )


def _train(rank, n, mode, dtype=torch.float32, kind="adam", break_reduction=False, clip_grad=1.0, **more):
    """Train on this rank's share: micro-batches rank, rank + n of 2n a step. Returns norms, weights, gathered state."""
    if break_reduction:
        collectives.all_reduce = lambda x, group, op="sum", async_op=False: (
            collectives.CompletedWork() if async_op else x
        )
    ps = ParallelState.create(n, rank)
    model = Toy(dtype)
    precision = PrecisionArgs(bf16=dtype == torch.bfloat16, grad_reduce_in_bf16=more.pop("grad_reduce_in_bf16", False))
    grads, optimizer = build_training(
        model, parallel=_parallel(*mode, **more), precision=precision, ps=ps, optimizer=kind, clip_grad=clip_grad
    )
    norms = []
    for step in range(STEPS):
        seeds = [2 * n * step + rank, 2 * n * step + rank + n]
        norms.append(train_step(model, grads, optimizer, seeds, lr=0.05).grad_norm)
    optimizer.wait_params()
    owned = sum(
        state.stop - state.start for state in optimizer.tensors() if state.state_name in ("exp_avg", "momentum_buffer")
    )
    return norms, [p.detach().clone() for p in model.parameters()], owned


def _one_process(n, dtype=torch.float32, kind="adam"):
    model = Toy(dtype)
    grads, optimizer = build_training(model, precision=PrecisionArgs(bf16=dtype == torch.bfloat16), optimizer=kind)
    norms = []
    for step in range(STEPS):
        # the same micro-batches, rank by rank
        seeds = [2 * n * step + rank + n * index for rank in range(n) for index in range(2)]
        norms.append(train_step(model, grads, optimizer, seeds, lr=0.05).grad_norm)
    return norms, [p.detach().clone() for p in model.parameters()], sum(p.numel() for p in model.parameters())


def _assert_close(result, reference, tolerance):
    assert result[0] == pytest.approx(reference[0], rel=tolerance)
    for a, b in zip(result[1], reference[1]):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_every_mode_equals_one_process(n, kind):
    reference = _one_process(n, kind=kind)
    for mode in MODES:
        ranks = run_ranks(_train, n, mode, torch.float32, kind)
        for other in ranks[1:]:
            assert other[0] == ranks[0][0] and all(torch.equal(a, b) for a, b in zip(other[1], ranks[0][1]))
        _assert_close(ranks[0], reference, 2e-6)
        total = sum(owned for *_, owned in ranks)
        assert total == reference[2] * (1 if mode[1] else n)  # ZeRO-1 keeps each moment once


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_modes_agree_bitwise_on_two_ranks(kind):
    """A sum of two gradients has one order. The norm's sum does not, so there is no clipping here."""
    results = {
        mode: run_ranks(lambda rank, n, mode=mode: _train(rank, n, mode, kind=kind, clip_grad=0.0), 2)[0]
        for mode in MODES
    }
    for mode, other in itertools.combinations(MODES, 2):
        assert results[mode][0] == pytest.approx(results[other][0], rel=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(results[mode][1], results[other][1])), (mode, other)


def test_comparison_detects_a_missing_reduction():
    reference = _one_process(2)
    result = run_ranks(lambda rank, n: _train(rank, n, MODES[0], break_reduction=True), 2)[0]
    with pytest.raises(AssertionError):
        _assert_close(result, reference, 1e-3)


@pytest.mark.parametrize("mode", [MODES[1], MODES[4]])
def test_bf16_training_is_close_to_one_process(mode):
    reference = _one_process(2, torch.bfloat16)
    for result in run_ranks(_train, 2, mode, torch.bfloat16):
        assert result[0] == pytest.approx(reference[0], rel=2e-3)
        for a, b in zip(result[1], reference[1]):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "more",
    [
        {"ddp_average_in_collective": True},
        {"ddp_bucket_size": None, "ddp_num_buckets": 5},
        {"ddp_pad_buckets_for_high_nccl_busbw": True},
    ],
)
@pytest.mark.parametrize("mode", [MODES[1], MODES[3]])
def test_bucket_and_overlap_options_change_no_result(mode, more):
    reference = _one_process(2)
    for result in run_ranks(lambda rank, n: _train(rank, n, mode, **more), 2):
        _assert_close(result, reference, 2e-6)


def test_reducing_in_bf16_is_close():
    reference = _one_process(2, torch.bfloat16)
    for result in run_ranks(lambda rank, n: _train(rank, n, MODES[3], torch.bfloat16, grad_reduce_in_bf16=True), 2):
        assert result[0] == pytest.approx(reference[0], rel=2e-2)


def _launched_by_hooks(rank, n):
    ps = ParallelState.create(n, rank)
    model = Toy()
    grads, _ = build_training(model, parallel=_parallel(True, False, False), ps=ps)
    counts = []
    launch = collectives.all_reduce
    collectives.all_reduce = lambda *args, **kwargs: (counts.append(1), launch(*args, **kwargs))[1]
    history = []
    for _ in range(2):
        grads.zero()
        counts.clear()
        with grads.accumulate():
            compute_loss(model, 0).backward()
        within = len(counts)
        compute_loss(model, 1).backward()
        after_backward = len(counts)
        grads.finish()
        history.append((within, after_backward, len(counts)))
    return history, sum(len(buffer.layout.buckets) for buffer in grads.buffers)


def test_overlap_launches_during_the_last_backward_only():
    """The first iteration learns how often every hook runs, and overlaps nothing."""
    history, buckets = run_ranks(_launched_by_hooks, 2)[0]
    assert buckets > 2
    assert history == [(0, 0, buckets), (0, buckets, buckets)]


class Branches(nn.Module):
    """Two branches; a rank may use only one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
        for name, param in self.named_parameters():
            nn.init.eye_(param)
            param.info = ParamInfo((name,))


def _different_branches(rank, n, distributed):
    ps = ParallelState.create(n, rank)
    model = Branches()
    grads, _ = build_training(model, parallel=_parallel(True, distributed, False, ddp_bucket_size=1), ps=ps)
    for _ in range(2):  # the second iteration must not see the first one's gradients
        grads.zero()
        x = torch.ones(1, 8)
        (model.c(model.a(x)) if rank == 0 else model.b(x)).sum().backward()
        grads.finish()
        grads.gather()
    return [p.main_grad.sum().item() for p in model.parameters()]


@pytest.mark.parametrize("distributed", [False, True])
def test_ranks_with_different_unused_parameters_stay_equal(distributed):
    assert run_ranks(_different_branches, 2, distributed) == [[32.0, 32.0, 32.0]] * 2


def _expert_gradient(rank, n, average):
    ps = ParallelState.create(n, rank, ep=2)
    model = nn.Linear(4, 4, bias=False)
    model.weight.info = ParamInfo((f"experts.{ps.ep.rank}.weight",), kind="expert")
    grads, _ = build_training(model, parallel=ParallelArgs(ddp_average_in_collective=average), ps=ps)
    (model.weight * (rank + 1.0)).sum().backward()
    grads.finish()
    return model.weight.main_grad[0, 0].item()


@pytest.mark.parametrize("average", [False, True])
def test_expert_gradients_are_summed_over_edp_and_divided_by_dp(average):
    """4 ranks, ep 2: expert 0 lives on ranks 0 and 2, expert 1 on 1 and 3; dp is 4."""
    assert run_ranks(_expert_gradient, 4, average) == [(1 + 3) / 4, (2 + 4) / 4] * 2


def _per_token(rank, n, distributed):
    ps = ParallelState.create(n, rank)
    model = Toy()
    grads, _ = build_training(model, parallel=_parallel(False, distributed, False), ps=ps, per_token_loss=True)
    grads.zero()
    rows = 8 if rank == 0 else 3
    (compute_loss(model, rank, rows) * rows).backward()
    grads.finish()
    grads.scale(1 / collectives.all_reduce(torch.tensor(float(rows)), ps.dp_cp).item())
    grads.gather()
    return [p.main_grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("distributed", [False, True])
def test_per_token_loss_divides_by_the_tokens_of_all_ranks(distributed):
    plain = Toy()
    ((compute_loss(plain, 0, 8) * 8 + compute_loss(plain, 1, 3) * 3) / 11).backward()
    for result in run_ranks(_per_token, 2, distributed):
        for param, main_grad in zip(plain.parameters(), result):
            torch.testing.assert_close(main_grad, param.grad, rtol=1e-5, atol=2e-6)


class Holder(nn.Module):
    """Owns a weight that its parent reads without calling it."""

    def __init__(self, name):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.weight.info = ParamInfo((name,))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.first.weight.info = ParamInfo(("first",))
        self.holder = Holder("holder")
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight.info = ParamInfo(("last",))
        self.seen = []
        self.gather: ParamGather | None = None

    def forward(self, x):
        for module in (self.first, self.last):
            self.seen.append(self.gather.pending if self.gather else 0)
            x = module(x) @ self.holder.weight
        self.seen.append(self.gather.pending if self.gather else 0)
        return x


def _record_gather_waits(rank, n):
    ps = ParallelState.create(n, rank)
    model = Nested()
    grads, optimizer = build_training(model, parallel=_parallel(True, True, True, ddp_bucket_size=1), ps=ps)
    model.gather = optimizer._gather
    history = []
    for _ in range(2):
        model.seen.clear()
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        grads.finish()
        history.append(list(model.seen))
        optimizer.step(0.1, 0.0)
    pending = model.gather.pending
    optimizer.wait_params()
    return history, pending, model.gather.pending


def test_gather_waits_module_by_module():
    """Three buckets: the root waits for the holder it reads directly, then each linear for its own."""
    history, pending, after = run_ranks(_record_gather_waits, 2)[0]
    assert history == [[0, 0, 0], [2, 1, 0]]
    assert (pending, after) == (3, 0)


def test_buffers_are_free_before_the_first_gradient():
    """Until then the memory may have another use (optim/mx_params.py); later microbatches ask no more."""
    model = Toy()
    grads, optimizer = build_training(model)
    for _ in range(2):
        calls = []
        grads.before_accumulation = lambda calls=calls: calls.append({float(x) for x in grads.buffers[0].flat.unique()})
        for buffer in grads.buffers:
            buffer.flat.fill_(7.0)
        train_step(model, grads, optimizer, [0, 1])
        assert calls == [{7.0}]


def _save_and_resume(rank, n, mode, dtype):
    """Save after two steps, load into a fresh optimizer, two more: bitwise the same as four in a row."""
    ps = ParallelState.create(n, rank)

    def fresh():
        model = Toy(dtype)
        precision = PrecisionArgs(bf16=dtype == torch.bfloat16)
        return model, *build_training(model, parallel=_parallel(*mode), precision=precision, ps=ps)

    straight, first, second = fresh(), fresh(), fresh()
    for step in range(4):
        train_step(*straight, [2 * step + rank])
    for step in range(2):
        train_step(*first, [2 * step + rank])
    first[2].wait_params()
    with torch.no_grad():
        for a, b in zip(second[0].parameters(), first[0].parameters()):
            a.copy_(b)
    for a, b in zip(second[2].tensors(), first[2].tensors(), strict=True):
        a.tensor.copy_(b.tensor)
    second[2].load_scalars(first[2].scalars())
    second[2].after_load(params_changed=True, state_loaded=True)
    for step in range(2, 4):
        train_step(*second, [2 * step + rank])
    for optimizer in (straight[2], second[2]):
        optimizer.wait_params()
    assert all(torch.equal(a, b) for a, b in zip(straight[0].parameters(), second[0].parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [MODES[0], MODES[4]])
def test_resume_is_bitwise_equal(mode, dtype):
    run_ranks(_save_and_resume, 2, mode, dtype)
