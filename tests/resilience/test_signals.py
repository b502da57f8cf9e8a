"""Exit signals: recorded during the run, ignored while it exits."""

import signal
import subprocess
import sys

from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.resilience.signals import SCHEDULER_SIGNALS, make_exit_signal_handler

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
