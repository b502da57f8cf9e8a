"""Collective timeouts (shorter after the start, extended for work on one rank), and the synchronized decision to exit."""

import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks, wait_until

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.trace import CommunicationError
from moe_trainer.resilience.timeouts import TimeoutManager
from moe_trainer.resilience.watchdog import Watchdog
from moe_trainer.training.loop import sync_exit_decision

CPU = torch.device("cpu")


def wait_for_a_slow_rank(rank, n, word):
    ps = ParallelState.create(n, rank, timeout=timedelta(seconds=30))
    watchdog = Watchdog(ps.trace, n, None, 30.0)  # not entered: the communicators' own timeouts are looked at
    timeouts = TimeoutManager(ps, watchdog, CPU, 30.0, 2.0)
    with timeouts.extended():
        assert watchdog.timeout == 30.0
    timeouts.use_training_timeout()
    assert watchdog.timeout == 2.0
    with timeouts.extended():
        assert watchdog.timeout == 30.0
        if rank == 0:
            time.sleep(4)  # the others wait at the end of the block, or here:
        collectives.all_reduce(torch.ones(1), ps.dp)
    assert watchdog.timeout == 2.0
    begin = time.monotonic()
    if rank == 0:
        wait_until(word.exists)
    else:
        with pytest.raises(CommunicationError):
            collectives.all_reduce(torch.ones(1), ps.dp)
        assert time.monotonic() - begin < 20
        word.touch()
    ps.set_timeout(timedelta(seconds=30))  # the harness ends with a barrier


def test_extended_timeout_covers_a_slow_save_but_not_a_later_hang(tmp_path):
    run_ranks(wait_for_a_slow_rank, 2, tmp_path / "word", timeout=60.0)


def test_timeout_is_constant_without_the_after_init_flag():
    watchdog = SimpleNamespace(timeout=600.0)
    timeouts = TimeoutManager(ParallelState.single(), watchdog, CPU, 600.0, None)
    timeouts.use_training_timeout()
    with timeouts.extended():
        assert watchdog.timeout == 600.0
    assert watchdog.timeout == 600.0


def check_exit_decision(rank, n):
    """Conditions that only rank 1 has decide for every rank."""
    ps = ParallelState.create(n, rank)

    def ask(signalled=False, writing=False, duration=None, interval=None, started=None):
        training = SimpleNamespace(exit_duration_in_mins=duration, exit_interval=interval)
        run = SimpleNamespace(
            args=SimpleNamespace(
                training=training, data=SimpleNamespace(phase_data_args_path=None, phase_transitions=())
            ),
            saver=SimpleNamespace(in_progress=writing is not None, writing=bool(writing)),
            runtime=SimpleNamespace(device=CPU),
            ps=ps,
        )
        return sync_exit_decision(
            run,
            SimpleNamespace(iteration=6),
            time.monotonic() if started is None else started,
            SimpleNamespace(received=signal.SIGTERM if signalled else None),
        )

    one = rank == 1
    assert ask() == (False, None, False)
    assert ask(writing=one) == (True, None, False)
    assert ask(signalled=one) == (False, "exiting program after receiving SIGTERM.", True)
    saving, reason, interrupted = ask(duration=5, started=time.monotonic() - (600 if one else 400))
    assert interrupted and not saving and reason.startswith("exiting program after 10.0")
    assert ask(duration=5) == (False, None, False)
    assert ask(writing=one, interval=3) == (True, "exiting program at iteration 6", False)
    assert ask(interval=4) == (False, None, False)


def test_all_ranks_take_the_exit_decision_of_one_rank():
    run_ranks(check_exit_decision, 3)
