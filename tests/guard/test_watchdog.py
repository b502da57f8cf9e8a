"""The watchdog by itself: forked ranks, a GPU that never comes back, and what is said of the others."""

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
from harness import RanksFailed, run_ranks

from moe_trainer.exit_codes import ExitCode
from moe_trainer.guard.bulletin import Bulletin, Note
from moe_trainer.guard.watchdog import Watchdog, describe
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.trace import CommunicationError, Trace
from scripts.fault_ranks import reserved_port

TIMEOUT = 2.0


def work(rank, n, folder, port, mishap):
    """Two groups of two; the last rank meets with a mishap in the second of its collectives."""
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0, timeout=timedelta(seconds=30))
    ps = ParallelState.create(n, rank, ep=2)
    dist.barrier()  # from here on it counts who is late
    ps.set_timeout(timedelta(seconds=TIMEOUT))
    x = torch.ones(4)
    try:
        with Watchdog(ps.trace, n, Bulletin(store, rank), TIMEOUT):
            ps.trace.phase = "forward-backward"
            for number in range(3):
                if number == 1 and rank == n - 1:
                    mishap(ps)
                collectives.all_reduce(x, ps.ep)
                collectives.all_reduce(x, ps.world)
    except CommunicationError as error:
        (folder / f"{rank}").write_text(str(error))
    # the harness stops everybody soon after the first rank that fails to part: the slower ones must have had their say
    limit = time.monotonic() + 40
    while not all((folder / str(other)).exists() for other in range(n - 1)) and time.monotonic() < limit:
        time.sleep(0.02)


def killed(ps):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(ps):
    time.sleep(8)


def raises(ps):
    raise ValueError("a mistake\nof two lines")


def goes_elsewhere(ps):
    collectives.all_reduce(torch.ones(4), ps.edp)


@pytest.mark.parametrize(("mishap", "told"), [
    (killed, "rank 3: gives no sign of life (killed, stopped, or its node is gone); last seen: "),
    (sleeps, "rank 3: is alive and waits for nobody: now "),
    (raises, "rank 3: ended: ValueError: a mistake"),
    (goes_elsewhere, "all_reduce number 1 of group edp (ranks 1 3)"),
])
def test_every_other_rank_says_who_is_to_blame(tmp_path, mishap, told):
    with reserved_port() as port:
        begin = time.monotonic()
        try:
            run_ranks(work, 4, tmp_path, port, mishap, timeout=60.0)
        except RanksFailed as failure:
            print(failure)  # ranks that raise or die fail their job; what matters is what the others wrote
        assert time.monotonic() - begin < 40
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"0", "1", "2"} <= set(said)
    assert said["2"].startswith("all_reduce number 2 of group ep (ranks 2 3) in work (") or mishap is goes_elsewhere
    for rank in "012":
        first, *others = said[rank].splitlines()
        assert ", forward-backward: failed after" in first, first
        assert told in said[rank], said[rank]
        if mishap is not goes_elsewhere:
            assert told in others[0], "the guilty one comes first"


def test_a_call_that_the_gpu_never_finishes_ends_the_process(capsys):
    class Stuck:
        def query(self):
            return False

    codes, ended = [], threading.Event()
    trace = Trace(5)
    call = trace.begin("reduce_scatter", "dp_cp", (1, 5))
    call.event = Stuck()
    with Watchdog(trace, 8, None, 0.5, end=lambda code: (codes.append(code), ended.set())):
        assert ended.wait(10)
    assert codes == [ExitCode.COMMUNICATION_FAILED] and call.waited() < 5
    said = capsys.readouterr().err
    assert "rank 5: reduce_scatter number 1 of group dp_cp (ranks 1 5) in test_a_call_that_the_gpu" in said and "not done after" in said


def test_a_gpu_that_is_behind_its_host_is_not_stuck():
    class Done:
        def __init__(self, at):
            self.at = at

        def query(self):
            return time.monotonic() > self.at

    codes, trace, begin = [], Trace(), time.monotonic()
    for number in range(8):  # queued at once, done one after the other, the last long after the timeout
        trace.begin("all_reduce", "dp", (0, 1)).event = Done(begin + 0.25 * number)
    with Watchdog(trace, 2, None, 0.6, end=codes.append):
        time.sleep(2.2)
    assert codes == [] and trace.oldest() is None


@pytest.mark.parametrize(("ranks", "period"), [(8, 0.5), (250, 0.5), (10_000, 20.0)])
def test_many_ranks_do_not_flood_the_store(ranks, period):
    assert Watchdog(Trace(), ranks, None, 30.0).period == period


def test_a_call_in_time_disturbs_nobody():
    trace, codes = Trace(), []
    with Watchdog(trace, 2, None, 0.5, end=codes.append):
        for _ in range(10):
            call = trace.begin("all_reduce", "dp", (0, 1))
            time.sleep(0.1)
            call.end()
    assert codes == []


def test_who_waits_although_the_job_has_failed_is_ended(tmp_path, capsys):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    other = Bulletin(store, 1)
    codes, ended, trace = [], threading.Event(), Trace(0)
    trace.begin("all_reduce", "dp", (0, 1))
    with Watchdog(trace, 2, Bulletin(store, 0), 15.0, end=lambda code: (codes.append(code), ended.set())) as watchdog:
        assert watchdog.grace == 2.0
        time.sleep(0.5)
        assert not codes
        other.announce_end(Note(1, "ended", "", "MemoryError: no more", 0.0))
        assert ended.wait(20)
    said = capsys.readouterr().err
    assert codes == [ExitCode.COMMUNICATION_FAILED] and "and the job has failed" in said and "rank 1: ended: MemoryError: no more" in said


def ends_at_once_or_waits(rank, n, port):
    """Rank 0 keeps the store and raises; rank 1 waits in a call that nothing else ends. Returns: what rank 1 says."""
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0, timeout=timedelta(seconds=30))
    trace, ended, said = Trace(rank), threading.Event(), io.StringIO()
    with suppress(ValueError), redirect_stderr(said), \
            Watchdog(trace, n, Bulletin(store, rank), 12.0, end=lambda code: ended.set()):
        if rank == 0:
            raise ValueError("a mistake")
        trace.begin("recv", "pp", (0, 1))
        assert ended.wait(20)
    return said.getvalue()


def test_the_keeper_of_the_store_stays_until_it_is_read():
    with reserved_port() as port:
        _, said = run_ranks(ends_at_once_or_waits, 2, port)
    assert "and the job has failed" in said and "rank 0: ended: ValueError: a mistake" in said, said


def test_ranks_are_told_apart_and_those_in_one_place_share_a_line():
    site = "all_to_all number 7 of group ep (ranks 0 1) in dispatch (a.py:1)"
    before = {1: Note(4, "waits", "mine", site, 1.0), 2: Note(4, "runs", "", "now in f (b.py:2)", 9.0),
              3: Note(4, "waits", "other", "barrier number 1", 3.0), 4: Note(4, "runs", "", "now in g", 9.0),
              5: Note(9, "ended", "", "KeyError: 'x'", 0.0), 7: Note(4, "waits", "mine", site, 1.0)}
    after = {**before, **{rank: Note(5, note.state, note.call, note.text, note.seconds) for rank, note in before.items() if rank != 4}}
    lines = describe("mine", [1, 2, 3, 4, 5, 6, 7], before, after).splitlines()
    assert [line.split(":")[0] for line in lines] == ["  rank 5", "  rank 4", "  rank 6", "  rank 2", "  rank 3", "  ranks 1 7"]
    assert "ended: KeyError" in lines[0] and "no sign of life" in lines[1] and "nothing is known" in lines[2]
    assert "waits for nobody: now in f (b.py:2), 9.0 s ago" in lines[3] and "waits elsewhere, for 3.0 s: barrier" in lines[4]
    assert lines[5].endswith("waits in the same call")


def test_in_a_large_job_the_first_to_end_look_around_and_the_rest_listen_to_them(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1000)
    for rank in range(1, 300):
        Bulletin(store, rank).post(Note(1, "waits", "", "somewhere", 1.0))
    said = []
    for rank, others in ((0, ()), (999, range(1, 20))):
        for other in others:
            Bulletin(store, other).announce_end(Note(1, "failed", "", "barrier number 1 of group world", 0.0))
        trace = Trace(rank)
        trace.failed = trace.begin("all_reduce", "dp", (rank, 200, 201, 202))
        with pytest.raises(CommunicationError) as raised, Watchdog(trace, 1000, Bulletin(store, rank), 1.0):
            raise CommunicationError("all_reduce number 1 of group dp: failed")
        said.append(str(raised.value))
    assert "ranks 200 201 202: gives no sign of life" in said[0] and "999" not in said[0]
    assert "200" not in said[1] and "rank 0: also waited in vain" in said[1] and "ranks 1 2 3 4 5 6 7: also waited in vain" in said[1]


def test_a_rank_that_a_busy_machine_keeps_from_posting_is_not_said_to_be_dead(tmp_path, monkeypatch):
    """Its next note comes after the second look, which two postings should have come before."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    board, other, looks = Bulletin(store, 0), Bulletin(store, 1), []
    other.post(Note(1, "runs", "", "now in f", 1.0))
    read = board.read

    def look(ranks):
        looks.append(1)
        if len(looks) == 3:
            other.post(Note(2, "runs", "", "now in f", 2.0))
        return read(ranks)

    monkeypatch.setattr(board, "read", look)
    assert Watchdog(Trace(0), 2, None, TIMEOUT).standstill == 2.0 and Watchdog(Trace(0), 2, None, 600.0).standstill == 11.0
    monkeypatch.setattr("moe_trainer.guard.watchdog._STANDSTILL", 60.0)
    with pytest.raises(CommunicationError) as raised, Watchdog(Trace(0), 2, board, TIMEOUT):
        raise CommunicationError("all_reduce number 1 of group dp: failed")
    assert len(looks) == 3 and "rank 1: is alive and waits for nobody: now in f" in raised.value.peers


def test_the_message_is_out_before_rank_0_stays_for_the_others(tmp_path, capsys, monkeypatch):
    """A launcher that has seen a rank die kills the rest within half a minute; a rank that was killed never takes its leave."""
    said = []
    monkeypatch.setattr(Watchdog, "_linger", lambda self: said.append(capsys.readouterr().err))
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(CommunicationError) as raised, Watchdog(Trace(0), 2, Bulletin(store, 0), TIMEOUT):
        raise CommunicationError("all_reduce number 1 of group dp: failed")
    assert said[0].startswith("pretrain_moe.py: rank 0: all_reduce number 1 of group dp: failed\n  rank 1: nothing is known")
    assert raised.value.told, "the program would print it again"


def test_no_garbage_collection_begins_while_frames_are_read(tmp_path, monkeypatch):
    """It can deadlock the process before Python 3.12 (CPython issue 106883); seen in a real run on two busy cores."""
    seen, read = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or read())
    board = Bulletin(dist.FileStore(str(tmp_path / "store"), 2), 0)
    with Watchdog(Trace(0), 2, board, TIMEOUT):
        deadline = time.monotonic() + 30
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
    assert seen and not any(seen)
    assert gc.isenabled()


def test_no_thread_is_left_when_the_watch_ends():
    """A thread that the interpreter finds in C++ code at its end would abort a job that went well."""
    before = set(threading.enumerate())
    with Watchdog(Trace(), 1, None, TIMEOUT):
        assert set(threading.enumerate()) - before, "the watch runs in threads"
    assert not set(threading.enumerate()) - before
