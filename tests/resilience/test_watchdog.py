"""The watchdog alone: forked ranks, a GPU that never finishes, and what is reported about the peers."""

import gc
import io
import os
import signal
import sys
import threading
import time
from contextlib import redirect_stderr, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fault_injection.ranks import reserved_port
from harness import RanksFailedError, run_ranks

from moe_trainer.exit_codes import ExitCode
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.trace import CommunicationError, Trace
from moe_trainer.resilience.heartbeat import HeartbeatStore, RankStatus
from moe_trainer.resilience.watchdog import Watchdog, describe_peers

TIMEOUT = 2.0


def work(rank, n, folder, port, fault):
    """Run two groups of two ranks; a fault hits the last rank in the second of its collectives."""
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0, timeout=timedelta(seconds=30))
    ps = ParallelState.create(n, rank, ep=2)
    dist.barrier()  # later arrivals count as late from here on
    ps.set_timeout(timedelta(seconds=TIMEOUT))
    x = torch.ones(4)
    try:
        with Watchdog(ps.trace, n, HeartbeatStore(store, rank), TIMEOUT):
            ps.trace.phase = "forward-backward"
            for number in range(3):
                if number == 1 and rank == n - 1:
                    fault(ps)
                collectives.all_reduce(x, ps.ep)
                collectives.all_reduce(x, ps.world)
    except CommunicationError as error:
        (folder / f"{rank}").write_text(str(error))
    # The harness stops all ranks soon after the first failure; the slower ones need time to write their messages.
    limit = time.monotonic() + 40
    while not all((folder / str(other)).exists() for other in range(n - 1)) and time.monotonic() < limit:
        time.sleep(0.02)


def kill(ps):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(ps):
    time.sleep(8)


def raise_error(ps):
    raise ValueError("a mistake\nof two lines")


def enter_another_group(ps):
    collectives.all_reduce(torch.ones(4), ps.edp)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (kill, "rank 3: no heartbeat (killed, stopped, or node lost); last seen: "),
        (sleep, "rank 3: running, not blocked in a collective: now "),
        (raise_error, "rank 3: exited: ValueError: a mistake"),
        (enter_another_group, "all_reduce number 1 of group edp (ranks 1 3)"),
    ],
)
def test_every_peer_names_the_faulty_rank(tmp_path, fault, message):
    with reserved_port() as port:
        begin = time.monotonic()
        try:
            run_ranks(work, 4, tmp_path, port, fault, timeout=60.0)
        except RanksFailedError as failure:
            print(failure)  # ranks that raise or die fail their job; the test reads what the peers wrote
        assert time.monotonic() - begin < 40
    printed = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"0", "1", "2"} <= set(printed)
    assert (
        printed["2"].startswith("all_reduce number 2 of group ep (ranks 2 3) in work (") or fault is enter_another_group
    )
    for rank in "012":
        first, *others = printed[rank].splitlines()
        assert ", forward-backward: failed after" in first, first
        assert message in printed[rank], printed[rank]
        if fault is not enter_another_group:
            assert message in others[0], "the culprit comes first"


def test_stuck_gpu_collective_ends_the_process(capsys):
    class Stuck:
        def query(self):
            return False

    codes, ended = [], threading.Event()
    trace = Trace(5)
    call = trace.begin("reduce_scatter", "dp_cp", (1, 5))
    call.event = Stuck()
    with Watchdog(trace, 8, None, 0.5, end=lambda code: (codes.append(code), ended.set())) as watchdog:
        watchdog.on_failure = lambda error, is_first: codes.append(type(error))
        assert ended.wait(10)
    assert codes == [CommunicationError, ExitCode.COMMUNICATION_FAILED] and call.elapsed_s() < 5
    printed = capsys.readouterr().err
    assert (
        "rank 5: reduce_scatter number 1 of group dp_cp (ranks 1 5) in test_stuck_gpu_collective_ends" in printed
        and "not done after" in printed
    )


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_termination_of_all_but_a_lost_rank_is_a_failure(monkeypatch, capsys, lost):
    """Launchers terminate the others when a rank crashes; after `scancel` all ranks are terminated."""
    monkeypatch.setattr("moe_trainer.resilience.watchdog._TERMINATED_WAIT_S", 300.0 if lost is None else 0.0)
    store, reported = dist.HashStore(), []
    ranks = [Watchdog(Trace(rank), 3, HeartbeatStore(store, rank), 60.0) for rank in range(3) if rank != lost]
    for rank in ranks:
        rank.on_failure = lambda error, is_first: reported.append(error)
    threads = [threading.Thread(target=rank.report_signal, args=(SystemExit(143),)) for rank in ranks]
    for thread in threads:
        thread.start()
        if lost is not None:
            thread.join()
    for thread in threads:
        thread.join()
    (error,) = reported  # of the last rank
    if lost is None:
        assert error.args == SystemExit(143).args and capsys.readouterr().err == ""
    else:
        assert isinstance(error, CommunicationError) and f"no word from rank {lost}" in capsys.readouterr().err


def test_queued_gpu_collectives_are_not_stuck():
    class Done:
        def __init__(self, at):
            self.at = at

        def query(self):
            return time.monotonic() > self.at

    codes, trace, begin = [], Trace(), time.monotonic()
    for number in range(8):  # queued at once, finished one after the other, the last one long after the timeout
        trace.begin("all_reduce", "dp", (0, 1)).event = Done(begin + 0.25 * number)
    with Watchdog(trace, 2, None, 0.6, end=codes.append):
        time.sleep(2.2)
    assert codes == [] and trace.oldest() is None


@pytest.mark.parametrize(("ranks", "period"), [(8, 0.5), (250, 0.5), (10_000, 20.0)])
def test_watchdog_period_grows_with_the_number_of_ranks(ranks, period):
    assert Watchdog(Trace(), ranks, None, 30.0).period == period


def test_calls_within_the_timeout_do_not_end_the_process():
    trace, codes = Trace(), []
    with Watchdog(trace, 2, None, 0.5, end=codes.append):
        for _ in range(10):
            call = trace.begin("all_reduce", "dp", (0, 1))
            time.sleep(0.1)
            call.end()
    assert codes == []


def test_waiting_rank_is_ended_after_another_rank_failed(tmp_path, capsys):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    other = HeartbeatStore(store, 1)
    codes, ended, trace = [], threading.Event(), Trace(0)
    trace.begin("all_reduce", "dp", (0, 1))
    with Watchdog(
        trace, 2, HeartbeatStore(store, 0), 15.0, end=lambda code: (codes.append(code), ended.set())
    ) as watchdog:
        assert watchdog.grace == 2.0
        time.sleep(0.5)
        assert not codes
        other.publish_exit(RankStatus(1, "ended", "", "MemoryError: no more", 0.0))
        assert ended.wait(20)
    printed = capsys.readouterr().err
    assert (
        codes == [ExitCode.COMMUNICATION_FAILED]
        and "and another rank has failed" in printed
        and "rank 1: exited: MemoryError: no more" in printed
    )


def raise_or_wait(rank, n, port):
    """Rank 0 hosts the store and raises; rank 1 waits in a call that nothing else ends. Return what rank 1 prints."""
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0, timeout=timedelta(seconds=30))
    trace, ended, printed = Trace(rank), threading.Event(), io.StringIO()
    with (
        suppress(ValueError),
        redirect_stderr(printed),
        Watchdog(trace, n, HeartbeatStore(store, rank), 12.0, end=lambda code: ended.set()),
    ):
        if rank == 0:
            raise ValueError("a mistake")
        trace.begin("recv", "pp", (0, 1))
        assert ended.wait(20)
    return printed.getvalue()


def test_the_store_host_stays_until_the_store_is_read():
    with reserved_port() as port:
        _, printed = run_ranks(raise_or_wait, 2, port)
    assert "and another rank has failed" in printed and "rank 0: exited: ValueError: a mistake" in printed, printed


def test_peers_are_classified_and_grouped():
    site = "all_to_all number 7 of group ep (ranks 0 1) in dispatch (a.py:1)"
    before = {
        1: RankStatus(4, "waits", "mine", site, 1.0),
        2: RankStatus(4, "runs", "", "now in f (b.py:2)", 9.0),
        3: RankStatus(4, "waits", "other", "barrier number 1", 3.0),
        4: RankStatus(4, "runs", "", "now in g", 9.0),
        5: RankStatus(9, "ended", "", "KeyError: 'x'", 0.0),
        7: RankStatus(4, "waits", "mine", site, 1.0),
    }
    after = {
        **before,
        **{
            rank: RankStatus(5, status.state, status.call, status.text, status.seconds)
            for rank, status in before.items()
            if rank != 4
        },
    }
    lines = describe_peers("mine", [1, 2, 3, 4, 5, 6, 7], before, after).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "  rank 5",
        "  rank 4",
        "  rank 6",
        "  rank 2",
        "  rank 3",
        "  ranks 1 7",
    ]
    assert (
        "exited: KeyError" in lines[0]
        and "no heartbeat" in lines[1]
        and "no status (never sent a heartbeat)" in lines[2]
    )
    assert (
        "not blocked in a collective: now in f (b.py:2), 9.0 s ago" in lines[3]
        and "waiting in a different call for 3.0 s: barrier" in lines[4]
    )
    assert lines[5].endswith("waiting in the same call")


def test_watchdog_of_a_large_job_reads_few_statuses(tmp_path, monkeypatch):
    monkeypatch.setattr(Watchdog, "_wait_for_peers_to_read", lambda self, is_interrupted: None)  # there are none
    store = dist.FileStore(str(tmp_path / "store"), 1000)
    for rank in range(1, 300):
        HeartbeatStore(store, rank).post(RankStatus(1, "waits", "", "somewhere", 1.0))
    printed = []
    for rank, others in ((0, ()), (999, range(1, 20))):
        for other in others:
            HeartbeatStore(store, other).publish_exit(
                RankStatus(1, "failed", "", "barrier number 1 of group world", 0.0)
            )
        trace = Trace(rank)
        trace.failed = trace.begin("all_reduce", "dp", (rank, 200, 201, 202))
        with pytest.raises(CommunicationError) as raised, Watchdog(trace, 1000, HeartbeatStore(store, rank), 1.0):
            raise CommunicationError("all_reduce number 1 of group dp: failed")
        printed.append(str(raised.value))
    assert "ranks 200 201 202: no heartbeat" in printed[0] and "999" not in printed[0]
    assert (
        "200" not in printed[1]
        and "rank 0: also failed and is exiting" in printed[1]
        and "ranks 1 2 3 4 5 6 7: also failed and is exiting" in printed[1]
    )


def test_late_heartbeat_does_not_count_as_a_dead_rank(tmp_path, monkeypatch):
    """The next heartbeat comes after the second read, by which time two were due."""
    monkeypatch.setattr(
        Watchdog, "_wait_for_peers_to_read", lambda self, is_interrupted: None
    )  # it would wait for 60 s
    store = dist.FileStore(str(tmp_path / "store"), 2)
    heartbeats, other, reads = HeartbeatStore(store, 0), HeartbeatStore(store, 1), []
    other.post(RankStatus(1, "runs", "", "now in f", 1.0))
    read = heartbeats.read

    def read_and_post(ranks):
        reads.append(1)
        if len(reads) == 3:
            other.post(RankStatus(2, "runs", "", "now in f", 2.0))
        return read(ranks)

    monkeypatch.setattr(heartbeats, "read", read_and_post)
    assert (
        Watchdog(Trace(0), 2, None, TIMEOUT).heartbeat_timeout == 2.0
        and Watchdog(Trace(0), 2, None, 600.0).heartbeat_timeout == 11.0
    )
    monkeypatch.setattr("moe_trainer.resilience.watchdog._MIN_HEARTBEAT_TIMEOUT_S", 60.0)
    with pytest.raises(CommunicationError) as raised, Watchdog(Trace(0), 2, heartbeats, TIMEOUT):
        raise CommunicationError("all_reduce number 1 of group dp: failed")
    assert len(reads) == 3 and "rank 1: running, not blocked in a collective: now in f" in raised.value.peers


def test_the_message_is_printed_before_rank_0_waits_for_peers(tmp_path, capsys, monkeypatch):
    """A launcher kills all ranks within half a minute of the first death; a killed rank never acknowledges."""
    printed = []
    monkeypatch.setattr(
        Watchdog, "_wait_for_peers_to_read", lambda self, is_interrupted: printed.append(capsys.readouterr().err)
    )
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(CommunicationError) as raised, Watchdog(Trace(0), 2, HeartbeatStore(store, 0), TIMEOUT):
        raise CommunicationError("all_reduce number 1 of group dp: failed")
    assert printed[0].startswith(
        "pretrain_moe.py: rank 0: all_reduce number 1 of group dp: failed\n  rank 1: no status (never sent a heartbeat)"
    )
    assert raised.value.was_reported, "the program would print it again"


def test_no_garbage_collection_while_frames_are_read(tmp_path, monkeypatch):
    """It can deadlock the process before Python 3.12 (CPython issue 106883); seen in a real run on two busy cores."""
    seen, read = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or read())
    heartbeats = HeartbeatStore(dist.FileStore(str(tmp_path / "store"), 2), 0)
    with Watchdog(Trace(0), 2, heartbeats, TIMEOUT):
        deadline = time.monotonic() + 30
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
    assert seen and not any(seen)
    assert gc.isenabled()


def test_no_thread_outlives_the_watchdog():
    """A thread that is in C++ code when the interpreter exits would abort a successful job."""
    before = set(threading.enumerate())
    with Watchdog(Trace(), 1, None, TIMEOUT):
        assert set(threading.enumerate()) - before, "the watchdog runs in threads"
    assert not set(threading.enumerate()) - before
