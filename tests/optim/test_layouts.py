"""The optimizer under every dimension: weights, norms and zero counts equal those of one process that holds the full model."""

import contextlib

import pytest
import torch
from harness import run_ranks
from optim.sharded_toy_model import (
    EAGER,
    LAYOUTS,
    MICROBATCHES,
    MODES,
    OVERLAPPED,
    PLAIN,
    ZERO1,
    FullModel,
    ShardedChunk,
    assert_equal,
    one_process,
    train_on_ranks,
    with_flags,
)
from toy import build_training

from arguments.precision import PrecisionArgs
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.optim.optimizer import NonFiniteGradientError
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import PendingGrads

STEPS = 2


def equal_one_process(n, degrees, vpp, modes, instances=1):
    """Returns the gradient norms of every rank. The one process is this one, so that the ranks have its outcome from the start."""
    sizes = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
    one_process(n // (sizes["tp"] * sizes["pp"]), n // (sizes["etp"] * sizes["ep"] * sizes["pp"]), STEPS)
    return run_ranks(_equals_one_process, n, degrees, vpp, modes, instances)


def _equals_one_process(rank, n, degrees, vpp, modes, instances=1):
    ps = ParallelState.create(n, rank, optimizer_instances=instances, **degrees)
    expected, expected_norms, weights = one_process(ps.dp_cp.size, ps.edp.size, STEPS)
    grad_norms = []
    for flags in modes:
        parallel = with_flags(**flags, num_distributed_optimizer_instances=instances)
        outcomes, norms, chunks, *_ = train_on_ranks(ps, parallel, STEPS, vpp=vpp)
        for found, reference in zip(outcomes, expected, strict=True):
            assert found.updated
            assert found.grad_norm == pytest.approx(reference.grad_norm, rel=1e-7), flags
            assert found.num_zeros == reference.num_zeros > 0, flags
        assert norms == pytest.approx(expected_norms, rel=1e-6), flags
        assert_equal(chunks, ps, weights, 1e-6)
        grad_norms.append([outcome.grad_norm for outcome in outcomes])
    return grad_norms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_mode_equals_one_process(layout):
    """With ep 1 and etp 2 the experts' gradients belong to edp, not to the dense ranks (M#1628).

    M#5916: norm and zero count missed or repeated elements where experts are spread otherwise than the rest (EP with TP, ETP != TP).
    """
    n, degrees, vpp = LAYOUTS[layout]
    ranks = equal_one_process(n, degrees, vpp, tuple(MODES.values()))
    assert all(norms == ranks[0] for norms in ranks), "every rank must clip by the same bits"


@pytest.mark.parametrize("degrees", [{}, {"ep": 2}, {"etp": 2}, {"tp": 2}])
def test_instances_of_the_distributed_optimizer_equal_one_process(degrees):
    """Two instances; dp is 4 or 2, edp 4 or 2."""
    modes = (ZERO1, OVERLAPPED, {**OVERLAPPED, "ddp_average_in_collective": True})
    ranks = equal_one_process(4, degrees, 1, modes, 2)
    assert all(norms == ranks[0] for norms in ranks)


def test_instances_under_a_pipeline_with_tied_embeddings():
    equal_one_process(4, {"pp": 2}, 1, (OVERLAPPED,), 2)


def test_bucket_options_with_experts_do_not_change_the_numbers():
    options = (
        {**EAGER, "ddp_average_in_collective": True},
        {**EAGER, "ddp_pad_buckets_for_high_nccl_busbw": True},
        {**OVERLAPPED, "ddp_bucket_size": None, "ddp_num_buckets": 3},
        {**OVERLAPPED, "ddp_pad_buckets_for_high_nccl_busbw": True},
    )
    equal_one_process(4, {"etp": 2, "ep": 2}, 1, options)


@pytest.mark.parametrize(
    "instances, degrees, expected_dense, expected_expert",
    [(1, {"ep": 2}, 4, 2), (1, {"ep": 4}, 4, 1), (2, {"ep": 2}, 2, 1), (1, {"tp": 2, "ep": 2}, 2, 2)],
)
def test_expert_state_is_sharded_over_edp(instances, degrees, expected_dense, expected_expert):
    """A rank holds the moments of 1/dp_cp of its dense elements and of 1/edp of its experts' (of an instance's share)."""

    def held(rank, n):
        ps = ParallelState.create(n, rank, optimizer_instances=instances, **degrees)
        *_, chunks, built, _ = train_on_ranks(ps, with_flags(**ZERO1, num_distributed_optimizer_instances=instances), 1)
        local, kept, allocated, buffers = ({"dense": 0, "expert": 0} for _ in range(4))
        for param in (param for chunk in chunks for param in chunk.parameters()):
            local[param.info.kind] += param.numel()
        for state in built.tensors():
            kept[state.param.info.kind] += state.tensor.numel() if state.state_name == "exp_avg" else 0
        for state in built._shards:
            allocated[state.layout.kind] += sum(block.moments["exp_avg"].flat.numel() for block in state.blocks)
            buffers[state.layout.kind] += state.layout.size
        return local, kept, allocated, buffers

    ranks = run_ranks(held, 4)
    for kind, shards in (("dense", expected_dense), ("expert", expected_expert)):
        assert sum(kept[kind] for _, kept, *_ in ranks) == ranks[0][0][kind] * 4 // shards, kind
        assert all(allocated[kind] * shards == buffers[kind] for *_, allocated, buffers in ranks), kind


def _step_with_overflow(rank, n, degrees, spoiled):
    """One rank's gradient of one kind is infinite."""
    ps, found = ParallelState.create(n, rank, **degrees), []
    precision = PrecisionArgs(fp16=True, initial_loss_scale=2.0**10, hysteresis=1)
    for flags in (PLAIN, ZERO1):
        *_, chunks, built, grads = train_on_ranks(ps, with_flags(**flags), 1, dtype=torch.float16, precision=precision)
        params = [param for chunk in chunks for param in chunk.parameters()]
        before = [param.detach().clone() for param in params]
        built.zero_grad()
        for chunk in reversed(chunks):
            loss = chunk.surrogate(ps, 0, 0, 1.0)
            if rank == n - 1:
                param = next(param for spec, param in chunk.held if spec.name.endswith(spoiled))
                loss = loss + param.float().flatten()[-1] * float("inf")
            loss.backward()
        grads.finish()
        outcome = built.step(0.1, 0.1)
        built.wait_params()
        assert all(map(torch.equal, before, params))
        found.append((outcome.found_inf, built.loss_scale))
    return found


@pytest.mark.parametrize(
    "degrees, spoiled",
    [({"pp": 2, "tp": 2}, "qkv.weight"), ({"ep": 4}, "fc1.weight"), ({"tp": 2, "ep": 2}, "fc2.weight")],
)
def test_overflow_on_one_rank_skips_on_all_and_lowers_one_scale(degrees, spoiled):
    assert run_ranks(_step_with_overflow, 4, degrees, spoiled) == [[(True, 2.0**9)] * 2] * 4


def _step_with_nan(rank, n):
    ps = ParallelState.create(n, rank, tp=2, ep=4)
    *_, chunks, built, grads = train_on_ranks(ps, with_flags(), 1)
    built.zero_grad()
    (chunks[0].surrogate(ps, 0, 0, 1.0) * (float("nan") if rank == 2 else 1.0)).backward()
    grads.finish()
    try:
        built.step(0.1, 0.1)
    except NonFiniteGradientError as error:
        return str(error)


def test_nonfinite_gradient_on_one_rank_stops_all_ranks():
    assert all("gradients are not finite in step 2" in text for text in run_ranks(_step_with_nan, 4))


def test_all_stages_have_equal_param_groups():
    """Parameters with decoupled rate are on the first and last stage only; the saved groups must not depend on the stage."""

    def groups(rank, n):
        ps = ParallelState.create(n, rank, pp=4)
        *_, built, _ = train_on_ranks(ps, with_flags(), 1, decoupled_lr=0.5)
        return built.scalars()["param_groups"]

    ranks = run_ranks(groups, 4)
    assert all(found == ranks[0] for found in ranks)
    assert [(g["wd_mult"], g["is_decoupled_lr"]) for g in ranks[0]] == [(1.0, False), (1.0, True), (0.0, False)]


def test_one_optimizer_step_under_bf16_gradients():
    """--grad-reduce-in-bf16: sums of partial gradients run in bf16 too, and stay within its precision."""

    def step(rank, n):
        ps = ParallelState.create(n, rank, tp=2, etp=2, pp=2)
        precision = PrecisionArgs(bf16=True, grad_reduce_in_bf16=True)
        outcomes, _, chunks, *_ = train_on_ranks(
            ps, with_flags(**OVERLAPPED), 1, dtype=torch.bfloat16, precision=precision
        )
        # a section has lists, which no cache takes
        expected, _, weights = one_process.__wrapped__(
            1, 1, 1, dtype=torch.bfloat16, precision=PrecisionArgs(bf16=True)
        )
        assert outcomes[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-2)
        assert_equal(chunks, ps, weights, 2e-2)

    run_ranks(step, 4)


class _EmptyStage(ShardedChunk):
    """A stage that holds no layers."""

    def __init__(self, ps):
        torch.nn.Module.__init__(self)
        self.held = []


def test_stage_without_parameters_joins_the_collectives():
    """A layout may leave a stage empty: it must still join every collective and know the norm."""

    def step(rank, n):
        ps = ParallelState.create(n, rank, pp=2)
        model = FullModel(torch.float32) if rank == 0 else _EmptyStage(ps)
        grads, built = build_training(model, parallel=with_flags(**OVERLAPPED), ps=ps, count_zeros=True)
        built.zero_grad()
        if rank == 0:
            for microbatch in range(MICROBATCHES):
                model.surrogate(1, 1, 0, microbatch, 1.0).backward()
        grads.finish()
        finalize_grads(grads, ps)
        outcome = built.step(0.05, 0.1)
        return outcome, built.scalars()["param_groups"]

    first, second = run_ranks(step, 2)
    assert first == second
    assert first[0].grad_norm == pytest.approx(one_process(1, 1, 1)[0][0].grad_norm, rel=1e-7)


def _count_launches(rank, n):
    """Return, for each of three iterations, the buckets launched before finish(), by chunk whose backward just ended."""
    ps = ParallelState.create(n, rank, pp=2)
    chunks = [ShardedChunk(ps, chunk * 2 + ps.pp.rank, 4, torch.float32) for chunk in range(2)]
    grads, built = build_training(torch.nn.ModuleList(chunks), parallel=with_flags(**EAGER), ps=ps)
    buckets = sum(len(buffer.layout.buckets) for buffer in grads.buffers)
    history = []
    for step in range(3):
        built.zero_grad()
        counts = []
        for chunk in reversed(chunks):
            for microbatch in range(MICROBATCHES):
                with contextlib.nullcontext() if microbatch else grads.accumulate():
                    chunk.surrogate(ps, step, microbatch, 1.0).backward()
                counts.append(grads._next)
        grads.finish()
        finalize_grads(grads, ps)
        built.step(0.05, 0.1)
        history.append(counts)
    return history, buckets


def test_chunks_reduce_after_their_own_last_microbatch():
    for history, buckets in run_ranks(_count_launches, 4):
        assert history[0] == [0, 0, 0, 0], "the first iteration learns"
        for first_of_last, last_of_last, first_of_first, last_of_first in history[1:]:
            assert first_of_last == 0 < last_of_last == first_of_first < last_of_first == buckets


class _SharedWeight(torch.nn.Module):
    """A weight that two chunks of one rank use, or whose gradient comes in two parts, and one that comes once."""

    def __init__(self):
        super().__init__()
        self.shared, self.plain = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
        for name, param in self.named_parameters():
            param.info = ParamInfo((name,))


def _accumulate_shared_gradient(rank, n, distributed):
    ps = ParallelState.create(n, rank)
    model = _SharedWeight()
    grads, _ = build_training(
        model, parallel=with_flags(overlap_grad_reduce=True, use_distributed_optimizer=distributed), ps=ps
    )
    for _ in range(3):
        grads.zero()
        (model.shared * 1.0 + model.plain).sum().backward()
        pending = PendingGrads()
        pending.wgrad_fns[model.shared] = [lambda: torch.full((8,), 2.0)]
        pending.run()
        launched = grads._next
        grads.finish()
        grads.gather()
    return launched, model.shared.main_grad.tolist(), model.plain.main_grad.tolist()


@pytest.mark.parametrize("distributed", [False, True])
def test_bucket_waits_for_all_gradients_of_a_shared_weight(distributed):
    assert run_ranks(_accumulate_shared_gradient, 2, distributed) == [(1, [3.0] * 8, [1.0] * 8)] * 2
