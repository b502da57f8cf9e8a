"""Exit signals: recorded during the run, ignored while it exits."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.resilience import signals
from moe_trainer.resilience.signals import SCHEDULER_SIGNALS, ExitSignalHandler, SignalWatch, make_exit_signal_handler

WORK = """
import os, signal, sys, threading, time
from moe_trainer.resilience.signals import ExitSignalHandler

# next to other threads, any of which the kernel may give a signal to
threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
with ExitSignalHandler("SIGTERM", "SIGUSR1") as listening:
    for number in {during}:
        os.kill(os.getpid(), number)
    print(listening.received)
for number in (signal.SIGTERM, signal.SIGUSR1):
    os.kill(os.getpid(), number)
sys.exit(75)
"""


def run_with_signals(during):
    numbers = "[" + ", ".join(map(str, map(int, during))) + "]"
    return subprocess.run([sys.executable, "-c", WORK.format(during=numbers)], capture_output=True, text=True)


def test_first_signal_is_kept_and_late_signals_keep_the_exit_code():
    done = run_with_signals([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM])
    assert done.stdout.strip() == str(signal.SIGUSR1) and done.returncode == 75, done.stderr


def test_signal_during_exit_keeps_the_exit_code():
    done = run_with_signals([])
    assert done.stdout.strip() == "None" and done.returncode == 75, done.stderr


def test_automatic_restarts_listen_to_the_exit_signal_too():
    flags = "--train-iters 1 --auto-resume --exit-signal SIGUSR2 --save x --save-interval 1"
    args = parse_args([*TINY, *MOCK, *flags.split()], 1)
    numbers = [signal.SIGUSR2, *(signal.Signals[name] for name in SCHEDULER_SIGNALS)]
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with make_exit_signal_handler(args.training, args.output) as listening:
            signal.raise_signal(signal.SIGUSR2)
            assert listening.received == signal.SIGUSR2
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_second_interrupt_ends_a_run_that_saves_at_the_first(monkeypatch):
    """Under torchrun, which repeats the first one, the run continues and saves."""
    flags = "--train-iters 1 --save x --save-interval 1 --save-on-interrupt"
    args = parse_args([*TINY, *MOCK, *flags.split()], 1)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(KeyboardInterrupt), make_exit_signal_handler(args.training, args.output) as listening:
            signal.raise_signal(signal.SIGINT)
            assert listening.received == signal.SIGINT
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with make_exit_signal_handler(args.training, args.output) as listening:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                signal.raise_signal(number)
            assert listening.received == signal.SIGTERM
        args = parse_args([*TINY, *MOCK, "--train-iters", "1", "--save-on-interrupt"], 1)
        assert make_exit_signal_handler(args.training, args.output) is None, "there is nothing to save to"
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "reported", "code"), [(signal.SIGINT, KeyboardInterrupt, 130), (signal.SIGTERM, SystemExit, 143)]
)
def test_signals_end_a_process_whose_main_thread_is_stuck(monkeypatch, number, reported, code):
    """The handler of the main thread does nothing, as long as it waits in a collective."""
    monkeypatch.setattr(signals, "_INTERRUPT_GRACE_S", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    happened, ended = [], threading.Event()
    try:
        with SignalWatch(lambda error: happened.append(type(error)), lambda code: (happened.append(code), ended.set())):
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.raise_signal(number)
            assert ended.wait(30)
        assert happened == [reported, code] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(each, handler)


def test_interrupt_that_the_run_handles_ends_nothing(monkeypatch):
    monkeypatch.setattr(signals, "_INTERRUPT_GRACE_S", 0.0)
    happened = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ExitSignalHandler("SIGINT") as listening, SignalWatch(happened.append, happened.append) as watch:
            signal.raise_signal(signal.SIGINT)
        assert listening.received == signal.SIGINT and not watch._thread.is_alive() and happened == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_leaves_the_main_thread_time_to_end():
    happened = []
    with pytest.raises(KeyboardInterrupt), SignalWatch(happened.append, happened.append):
        signal.raise_signal(signal.SIGINT)
    assert happened == []


def test_forked_process_does_not_end_its_parent():
    happened = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with SignalWatch(happened.append, happened.append):
            if (child := os.fork()) == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert happened == []
    finally:
        signal.signal(signal.SIGTERM, before)
