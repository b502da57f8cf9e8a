"""The record of a rank's pending collectives: names, locations and errors."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from harness import run_ranks, wait_until

from moe_trainer.parallel import collectives
from moe_trainer.parallel.p2p import Receive, exchange
from moe_trainer.parallel.state import Group, ParallelState, communicate
from moe_trainer.parallel.trace import CommunicationError, Trace, is_communication_failure

TIMEOUT = 2.0


def _group(name, trace):
    return Group(name, (0, 1), 0, 2, trace=trace)


def test_call_is_open_until_done_and_records_its_location():
    trace = Trace()
    trace.phase, trace.layer, trace.microbatch, trace.iteration = "forward-backward", "layer 3", 2, 17
    seen = []
    communicate(_group("ep", trace), "all_to_all", None, False, lambda: seen.append(trace.oldest()))
    assert trace.oldest() is None and trace.last is seen[0]
    text = seen[0].describe()
    assert text.startswith("all_to_all number 1 of group ep (ranks 0 1) in test_call_is_open")
    assert "test_trace.py:" in text and text.endswith("layer 3, forward-backward, microbatch 2, iteration 17")


def test_new_phase_resets_the_layer():
    trace = Trace()
    trace.layer = "layer 3"
    trace.phase = "optimizer"
    assert (trace.phase, trace.layer) == ("optimizer", "")


def test_layers_of_all_threads_are_left_at_once():
    trace = Trace()
    trace.layer, trace.microbatch = "layer 3", 2

    def other():
        trace.layer = "layer 1"
        yield
        yield trace.layer

    with ThreadPoolExecutor(1) as thread:
        steps = other()
        thread.submit(next, steps).result()
        trace.leave_layers()
        assert thread.submit(next, steps).result() == ""
    assert (trace.layer, trace.microbatch) == ("", 2)


def test_asynchronous_call_is_open_until_its_wait_ends():
    class Work:
        def wait(self):
            seen.append(trace.oldest())

    trace, seen = Trace(), []
    pending = communicate(_group("dp", trace), "all_reduce", None, True, Work)
    assert trace.oldest() is None, "it is not waited for yet"
    assert pending.wait() and pending.wait()
    assert seen == [trace.last] and trace.oldest() is None


def test_only_lost_peers_become_communication_errors():
    def wrong():
        raise RuntimeError("tensors must be contiguous")

    def lost():
        raise RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    trace = Trace()
    with pytest.raises(RuntimeError, match="contiguous") as raised:
        communicate(_group("dp", trace), "all_reduce", None, False, wrong)
    assert not isinstance(raised.value, CommunicationError) and trace.oldest() is None
    with pytest.raises(CommunicationError, match=r"(?s)all_reduce number 2 of group dp.*Connection closed by peer"):
        communicate(_group("dp", trace), "all_reduce", None, False, lost)
    assert trace.failed is trace.last
    assert is_communication_failure(torch.distributed.DistBackendError("NCCL timeout"))


def test_gpu_call_is_open_until_the_gpu_finishes():
    class Event:
        done = False

        def query(self):
            return self.done

    trace = Trace()
    call = trace.begin("all_reduce", "dp", (0, 1))
    call.event = Event()
    assert trace.oldest() is call
    call.event.done = True
    assert trace.oldest() is None


def wait_for_missing_peer(rank, n, kind, word):
    ps = ParallelState.create(n, rank, timeout=timedelta(seconds=TIMEOUT))
    if rank == 0:
        wait_until(word.exists)
        return None
    x = torch.ones(4)
    with pytest.raises(CommunicationError) as raised:
        if kind == "wait":
            collectives.all_reduce(x, ps.dp, async_op=True).wait()
        elif kind == "message":
            exchange([Receive(x, 0)], ps.dp).wait()
        elif kind == "object":
            collectives.all_gather_object("x", ps.dp)
        else:
            collectives.barrier(ps.dp)
    word.touch()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("wait", "all_reduce"),
        ("message", "receive from rank 0"),
        ("barrier", "barrier"),
        ("object", "all_gather_object"),
    ],
)
def test_failed_wait_names_its_location(tmp_path, kind, operation):
    _, message = run_ranks(wait_for_missing_peer, 2, kind, tmp_path / "word")
    assert message.startswith(f"{operation} number 1 of group dp (ranks 0 1) in wait_for_missing_peer")
    assert TIMEOUT <= float(re.search(r"failed after ([\d.]+) s", message)[1]) < 10 * TIMEOUT and "Timed out" in message
