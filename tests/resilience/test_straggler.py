"""Straggler detection: its rule, a slow rank in a real run, a balanced run, and the HTTP switch."""

import os
import socket
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from commands import read_metrics, run
from harness import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training.forked import pretrain
from training.tiny import MOCK, TINY

from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.resilience import phase_timer
from moe_trainer.resilience.http_toggle import HttpToggle
from moe_trainer.resilience.phase_timer import PARTS, WAITING, CudaEventPhaseTimer, WallClockPhaseTimer
from moe_trainer.resilience.straggler import StragglerDetector, find_stragglers

JOB = [*TINY, *MOCK, "--global-batch-size", "8"]
EXPERTS = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()


def make_phase_times(*own, part="backward", base=1.0):
    """Phase times of ranks with given compute times: `base` in forward, the rest in `part`, then waiting for the slowest rank."""
    made = []
    for seconds in own:
        row = dict.fromkeys(PARTS, 0.0)
        row["forward"], row[WAITING] = base, max(own) - seconds
        row[part] += seconds - base
        made.append([row[name] for name in PARTS])
    return made


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ([2.0, 2.0, 2.0, 2.0], []),
        ([2.0, 2.3], []),  # below the ratio
        ([2.0, 2.5], [1]),
        ([2.0, 2.1, 1.9, 2.0, 3.0, 2.05], [4]),
        ([2.0, 3.0, 1.2, 2.6, 1.6, 2.2], []),  # an uneven group: everybody is far from the median
        ([2.0, 2.1, 1.9, 2.0, 4.0, 3.0, 2.05, 1.95], [4, 5]),
        ([5.0], []),  # no rank to compare with
    ],
)
def test_stragglers_are_ranks_far_above_the_median(own, slow):
    assert sorted(each.rank for each in find_stragglers(make_phase_times(*own), [0] * len(own))) == slow


def test_stragglers_are_compared_within_their_pipeline_stage():
    own = [2.0, 2.1, 6.0, 6.1]
    assert find_stragglers(make_phase_times(*own), [0, 0, 1, 1]) == []
    assert [each.rank for each in find_stragglers(make_phase_times(*own), [0, 0, 0, 0])] != []
    assert find_stragglers(make_phase_times(2.0, 9.0), [0, 1]) == []
    assert (
        find_stragglers(make_phase_times(2.0, 2.8, 20.0, 20.0), [0, 0, 1, 1]) == []
    )  # it waits for the other stage all the same
    assert [each.rank for each in find_stragglers(make_phase_times(2.0, 3.2, 20.0, 20.0), [0, 0, 1, 1])] == [1]


def test_straggler_report_names_the_slowest_phase():
    (slow,) = find_stragglers(
        make_phase_times(2.0, 2.0, 2.0)[:2] + make_phase_times(4.0, part="data", base=1.5), [0, 0, 0]
    )
    assert (slow.rank, slow.part, slow.ratio, slow.num_peers) == (2, "data", 2.0, 2)
    assert slow.excess_s == pytest.approx(2.5)


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run_fake_iteration(watch, clock):
    """An iteration: 1 s of data, 4 of forward with 2 of waiting inside, 3 after it, 8 in the optimizer."""
    for begin, seconds in (
        (watch.start, 0),
        (lambda: watch.enter("forward-backward"), 0),
        (lambda: watch.enter("batch-generator"), 1),
        (lambda: watch.enter("forward-compute"), 2),
        (watch.wait, 2),
        (watch.end_wait, 2),
        (lambda: watch.enter("forward-backward"), 3),
        (lambda: watch.enter("optimizer"), 0),
        (lambda: watch.enter("optimizer-inner-step"), 8),
        (lambda: watch.enter("optimizer"), 0),
    ):
        begin()
        clock.now += seconds
    watch.stop()
    clock.now += 100.0  # a validation, which counts for no part


EXPECTED = {
    "data": 1.0,
    "forward": 4.0,
    "backward": 0.0,
    "gradients": 0.0,
    "optimizer": 8.0,
    "other": 3.0,
    "waiting": 2.0,
}


def test_wall_clock_timer_splits_the_iteration_into_phases():
    clock = Clock()
    watch = WallClockPhaseTimer(clock)
    run_fake_iteration(watch, clock)
    assert watch.pop_totals() == EXPECTED
    assert sum(watch.pop_totals().values()) == 0.0


class Event:
    """As torch.cuda.Event: its time is available only when the stream has passed it."""

    def __init__(self, clock, made):
        self.clock, self.done = clock, False
        made.append(self)

    def record(self):
        self.moment, self.done = self.clock.now, False

    def synchronize(self):
        self.done = True

    def elapsed_time(self, end):
        return (end.moment - self.moment) * 1e3


def test_cuda_event_timer_gives_the_same_phases_and_reuses_events():
    clock, made = Clock(), []
    watch = CudaEventPhaseTimer(lambda: Event(clock, made), lambda: False)
    for _ in range(3):
        run_fake_iteration(watch, clock)
    assert watch.pop_totals() == pytest.approx({name: 3 * seconds for name, seconds in EXPECTED.items()})
    count = len(made)
    for _ in range(5):
        run_fake_iteration(watch, clock)
    watch.pop_totals()
    assert len(made) <= 2 * count  # events are used again


def test_no_events_are_recorded_during_graph_capture():
    clock, made = Clock(), []
    watch = CudaEventPhaseTimer(lambda: Event(clock, made), lambda: True)
    run_fake_iteration(watch, clock)
    assert made == []


def wait_in_every_way(rank, n):
    """Rank 1 is late in every kind of collective: it counts as compute time of rank 1 and as waiting of rank 0."""
    ps = ParallelState.create(n, rank)
    watch = WallClockPhaseTimer()
    ps.trace.observer = watch
    collectives.barrier(ps.world)
    watch.start()
    for way in range(3):
        if rank == 1:
            time.sleep(0.3)
        if way == 0:
            collectives.all_reduce(torch.ones(1), ps.world)
        elif way == 1:
            work = collectives.all_reduce(torch.ones(1), ps.world, async_op=True)
            work.wait()
        else:
            collectives.barrier(ps.world)
    watch.stop()
    return watch.pop_totals()


def test_waiting_in_collectives_is_no_compute_time():
    early, late = run_ranks(wait_in_every_way, 2)
    assert early[WAITING] > 0.75 and early[WAITING] > 2 * early["other"]  # each way counts
    assert late["other"] > 0.9 > late[WAITING]


def slow_down_rank(monkeypatch, victim, seconds):
    """Let a rank sleep in the forward of its routers."""
    forward = TopKRouter.forward

    def slow(self, *args, **kwargs):
        if os.environ["RANK"] == str(victim):
            time.sleep(seconds)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TopKRouter, "forward", slow)


def test_slow_rank_is_reported_and_logged(tmp_path, monkeypatch):
    slow_down_rank(monkeypatch, 1, 0.1)
    flags = (
        "--train-iters 6 --log-interval 2 --log-straggler --straggler-minmax-count 2 --tensorboard-dir board".split()
    )
    done = run([*JOB, *EXPERTS, *flags, "--metrics-file", "metrics.jsonl"], tmp_path, 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("straggler:")]
    assert len(lines) == 4, lines  # of three intervals, in the second and the third
    assert (
        lines[0].startswith(f"straggler: rank 1 ({os.uname().nodename}): compute time ")
        and "largest excess: forward (+" in lines[0]
    )
    assert float(lines[0].split()[8]) > 1.5
    assert lines[1].index("slowest: rank 1 ") < lines[1].index(", rank 0 ") < lines[1].index("fastest: rank 0 ")
    found = [
        record["own_time_ms"]["stragglers"]
        for record in read_metrics(tmp_path / "metrics.jsonl")
        if "own_time_ms" in record
    ]
    assert found == [[], [1], [1]]
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]["own_time_ms"]
    assert last["min"] < last["median"] < last["max"] and last["max"] > 4 * 100  # two microbatches of two layers
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name in ("min", "median", "max"):
        scalar = events.Scalars(f"own-time-{name}")[-1]
        assert scalar.step == 6 and scalar.value == pytest.approx(last[name] / 1e3)


def test_balanced_run_has_no_stragglers(tmp_path, monkeypatch):
    """Every read of the clock advances it by a millisecond, and all ranks read it equally often."""
    ticks = []

    def clock():
        ticks.append(1)
        return len(ticks) / 1e3

    monkeypatch.setattr(phase_timer.WallClockPhaseTimer.__init__, "__defaults__", (clock,))
    records, _ = pretrain([*JOB, "--train-iters", "4", "--log-straggler"], tmp_path, 2)
    assert [record["own_time_ms"]["stragglers"] for record in records] == [[]] * 4
    assert all(record["own_time_ms"]["min"] == record["own_time_ms"]["max"] > 0.0 for record in records)


def test_compute_times_are_not_logged_without_log_straggler(tmp_path):
    records, _ = pretrain([*JOB, "--train-iters", "1"], tmp_path, 2)
    assert "own_time_ms" not in records[0]


def ask(port):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).read().decode()


def toggle_over_http(rank, n):
    """Off at the start; on when rank 0 is asked; off when it is asked again. All ranks follow together."""
    ps = ParallelState.create(n, rank)
    switch = HttpToggle("straggler detection", 0, False) if rank == 0 else None
    watch = StragglerDetector(ps, torch.device("cpu"), 1, False, switch)
    seen = []
    for iteration in range(1, 5):
        watch.start()
        collectives.all_reduce(torch.ones(1), ps.world)
        watch.stop()
        if rank == 0 and iteration in (1, 3):
            seen.append(ask(switch.port))
        seen.append((watch.on, watch.report(iteration) is not None))
    watch.close()
    return seen


def report_intervals(rank, n):
    """Intervals of two iterations, in which rank 1 works 3 s and rank 0 1 s an iteration; switched off in the third, on again in the fourth."""
    ps, clock = ParallelState.create(n, rank), Clock()
    socket.gethostname = lambda: f"host{rank}"
    phase_timer.WallClockPhaseTimer.__init__.__defaults__ = (clock,)
    switch = SimpleNamespace(on=True, close=lambda: None) if rank == 0 else None
    watch, found = StragglerDetector(ps, torch.device("cpu"), 1, True, switch), []
    for interval in range(1, 7):
        if switch is not None:
            switch.on = interval != 3
        for _ in range(2):
            watch.start()
            clock.now += 1.0 + 2.0 * rank
            watch.stop()
        times = watch.report(2 * interval)
        found.append(None if times is None else (times, watch.lines(times)))
    return found


def test_straggler_times_are_per_iteration():
    first, last = run_ranks(report_intervals, 2)
    assert first == [None] * 6
    (start, _), (named, lines) = last[:2]
    assert (start.low_s, start.high_s, start.stragglers) == (1.0, 3.0, ())
    assert [(slow.rank, slow.compute_s, slow.median_s, slow.ratio) for slow in named.stragglers] == [(1, 3.0, 1.0, 3.0)]
    assert lines[0].startswith(
        "straggler: rank 1 (host1): compute time 3000.0 ms/iteration, 3.00 times the other rank (1000.0 ms); "
    )
    # an interval without a measurement does not count as one in which the rank was slow
    assert [each and [slow.rank for slow in each[0].stragglers] for each in last] == [[], [1], [], None, [], [1]]


def test_straggler_detection_is_toggled_over_http():
    first, last = run_ranks(toggle_over_http, 2)
    assert last == [(False, False), (True, True), (True, True), (False, False)]
    assert first == [
        "straggler detection is on\n",
        (False, False),
        (True, False),
        "straggler detection is off\n",
        (True, False),
        (False, False),
    ]


def test_other_http_paths_do_not_toggle_detection():
    switch = HttpToggle("straggler detection", 0, True)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{switch.port}/favicon.ico", timeout=10)
    assert switch.on
    switch.close()


def test_occupied_control_port_does_not_end_the_run(caplog):
    taken = HttpToggle("straggler detection", 0, True)
    second = HttpToggle("straggler detection", taken.port, True)
    assert second.port is None and second.on
    assert f"cannot open control port {taken.port}" in caplog.text
    taken.close()
    second.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--log-straggler", "--straggler-ctrlr-port", "65536"], "--straggler-ctrlr-port"),
        (["--check-weight-hash-across-dp-replicas-interval", "0"], "--check-weight-hash-across-dp-replicas-interval"),
    ],
)
def test_invalid_straggler_and_weight_hash_flags_are_refused(tmp_path, flags, message):
    done = run([*JOB, "--train-iters", "1", *flags], tmp_path)
    assert done.returncode == 2 and message in done.stderr
