"""Schedules run: gradients of all microbatches equal one process, each reduced once, results in order."""

import contextlib

import pytest
import torch
from harness import run_ranks
from torch import nn
from toy import Toy, build_training, compute_loss

from arguments.mechanisms.schedules import BY_KEY
from moe_trainer.parallel import p2p
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.pipeline.microbatches import MicrobatchCache
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.schedule import Schedule, ScheduleInputs

CPU = torch.device("cpu")
ROWS, WIDTH = 3, 5


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient can wait."""

    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        compute = lambda: grad.t() @ x  # noqa: E731
        if ctx.queue is not None and ctx.queue.active:
            ctx.queue.defer(weight, compute)
            return grad @ weight, None, None
        return grad @ weight, compute(), None


class Chunk(nn.Module):
    """Layer `number` of a chain: a linear layer, a bias (whose gradient never waits) and tanh."""

    def __init__(self, number, queue=None):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64) / 2)
        self.queue = queue

    def forward(self, x):
        return torch.tanh(_Linear.apply(x, self.weight, self.queue) + self.bias)


def input_spec(chunk, microbatch):
    return (ROWS + microbatch % 2, WIDTH), torch.float64


def make_input(microbatch):
    """Microbatches differ in size."""
    shape, dtype = input_spec(0, microbatch)
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(100 + microbatch))


def one_process(num_chunks, m):
    chain = nn.Sequential(*(Chunk(number) for number in range(num_chunks)))
    losses = [chain(make_input(index)).square().mean() for index in range(m)]
    (sum(losses) * 0.25).backward()
    return [(chunk.weight.grad, chunk.bias.grad) for chunk in chain], [loss.item() for loss in losses]


def _run(rank, pp, kind, vpp, m, group_size, overlap):
    ps = ParallelState.create(pp, rank, pp=pp, second_pipeline=overlap)
    used, isend = [], p2p.isend
    p2p.isend = lambda x, group, to: used.append((group, to)) or isend(x, group, to)
    zero_bubble = kind == "zero-bubble"
    queues = {index: WeightGradQueue() for index in range(vpp)} if zero_bubble else {}
    chunks = [Chunk(index * pp + rank, queues.get(index)) for index in range(vpp)]
    kind = ScheduleKind(BY_KEY[kind], vpp, group_size)
    schedule = Schedule(kind, ps.pp, CPU, second=ps.pp_second, overlap=overlap, queues=queues)
    depth, reduced, totals = [0], [], {}

    @contextlib.contextmanager
    def accumulate():
        depth[0] += 1
        yield
        depth[0] -= 1

    def on_grad(param, who):
        if param.grad is not None:  # as the buffer of main gradients does it
            totals[who] = totals.get(who, 0) + param.grad
            param.grad = None
            reduced.extend([who] * (depth[0] == 0))

    for index, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            param.register_post_accumulate_grad_hook(lambda param, who=(index, name): on_grad(param, who))

    def forward_step(index, microbatch, x):
        last = rank == pp - 1 and index == vpp - 1
        y = chunks[index](make_input(microbatch) if x is None else x)
        loss = y.square().mean()
        return (loss, loss.item()) if last else (y, None)

    with torch.no_grad():
        evaluated = schedule.run(ScheduleInputs(forward_step, m, input_spec, forward_only=True))
    losses = schedule.run(ScheduleInputs(forward_step, m, input_spec, grad_scale=0.25, accumulate=accumulate))
    # two ranks: a communicator for what each sends; else one for what goes forward and one for what goes back
    assert [group for group, _ in used] == [
        (ps.pp, ps.pp_second)[rank if pp == 2 else to != (rank + 1) % pp] for _, to in used
    ]
    assert bool(used) == (ps.pp.handle is not ps.pp_second.handle) == (overlap and pp > 1)
    assert losses == evaluated
    assert sorted(reduced) == [(index, name) for index in range(vpp) for name in ("bias", "weight")]
    return [(totals[index, "weight"], totals[index, "bias"]) for index in range(vpp)], losses


@pytest.mark.parametrize(
    "kind, pp, vpp, m, group_size",
    [
        ("1f1b", 1, 1, 3, None),
        ("1f1b", 2, 1, 1, None),
        ("1f1b", 2, 1, 4, None),
        ("1f1b", 4, 1, 3, None),
        ("1f1b", 4, 1, 9, None),
        ("interleaved", 2, 2, 2, None),
        ("interleaved", 2, 3, 6, None),
        ("interleaved", 4, 2, 8, None),
        ("interleaved", 2, 2, 7, 4),
        ("interleaved", 3, 2, 8, 4),
        ("zero-bubble", 1, 1, 2, None),
        ("zero-bubble", 2, 1, 5, None),
        ("zero-bubble", 4, 1, 6, None),
        ("zero-bubble", 2, 2, 4, None),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_pipeline_gradients_equal_one_process(kind, pp, vpp, m, group_size, overlap):
    expected, expected_losses = one_process(pp * vpp, m)
    found = run_ranks(_run, pp, kind, vpp, m, group_size, overlap)
    for rank, (grads, losses) in enumerate(found):
        for index, pair in enumerate(grads):
            torch.testing.assert_close(pair, expected[index * pp + rank], rtol=1e-12, atol=1e-14)
        assert losses == (pytest.approx(expected_losses, rel=1e-12) if rank == pp - 1 else [])


def _outputs_are_freed(rank, pp):
    ps, alive, weakest = ParallelState.create(pp, rank, pp=pp), [], []
    chunk = Chunk(rank)

    def forward_step(index, microbatch, x):
        y = chunk(make_input(microbatch) if x is None else x) + 0  # an addition keeps no tensor for its backward
        alive.append(torch.utils.weak.WeakTensorKeyDictionary())
        alive[-1][y] = True
        weakest.append(sum(len(entry) for entry in alive))
        return (y.square().mean(), None) if rank == pp - 1 else (y, None)

    Schedule(ScheduleKind(), ps.pp, CPU).run(ScheduleInputs(forward_step, 4, input_spec))
    return max(weakest)


def test_output_is_freed_after_it_is_sent():
    assert run_ranks(_outputs_are_freed, 3)[0] == 1


def make_schedule(pairs=False):
    return Schedule(ScheduleKind(pairs=pairs), Group.single("pp"), CPU)


@pytest.mark.parametrize("pairs", [False, True])
def test_one_rank_gradients_equal_the_mean_over_microbatches(pairs):
    model, plain = Toy(), Toy()
    grads, _ = build_training(model)
    grads.zero()

    def forward_step(_, microbatch, x):
        assert x is None
        loss = compute_loss(model, 3 + microbatch)
        return loss, microbatch

    results = make_schedule(pairs).run(
        ScheduleInputs(forward_step, 3, input_spec, grad_scale=1 / 3, accumulate=grads.accumulate)
    )
    grads.finish()
    assert results == [0, 1, 2]
    (sum(compute_loss(plain, seed) for seed in (3, 4, 5)) / 3).backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.main_grad, b.grad, rtol=1e-5, atol=1e-6)
        assert a.grad is None


def test_last_backward_runs_outside_accumulate():
    depth, seen, names = [0], [], []

    @contextlib.contextmanager
    def accumulate():
        depth[0] += 1
        yield
        depth[0] -= 1

    @contextlib.contextmanager
    def timer(name):
        names.append(name)
        yield

    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append((depth[0], grad.item())))
    make_schedule().run(
        ScheduleInputs(lambda *_: (x.sum() * 2, None), 3, input_spec, torch.tensor(0.5), accumulate, timer)
    )
    assert seen == [(1, 1.0), (1, 1.0), (0, 1.0)]
    assert names == ["forward-compute", "backward-compute"] * 3


def test_zero_microbatches_are_rejected():
    with pytest.raises(AssertionError, match="num_microbatches 0"):
        make_schedule().run(ScheduleInputs(lambda *_: None, 0, input_spec))


def test_microbatch_is_kept_until_its_last_chunk():
    read = iter(range(10))
    feed = MicrobatchCache(lambda: next(read), 2)
    assert [feed(index) for index in (0, 1, 0, 2, 1, 2)] == [0, 1, 0, 2, 1, 2]
    assert next(read) == 3 and not feed._cached
