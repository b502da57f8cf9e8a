"""Signals that ask a run to leave: remembered while it works, ignored while it leaves."""

import signal
import subprocess
import sys

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


def ended(during):
    numbers = "[" + ", ".join(map(str, map(int, during))) + "]"
    return subprocess.run([sys.executable, "-c", WORK.format(during=numbers)], capture_output=True, text=True)


def test_the_first_signal_is_remembered_and_the_exit_code_survives_late_ones():
    done = ended([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM])
    assert done.stdout.strip() == str(signal.SIGUSR1) and done.returncode == 75, done.stderr


def test_a_rank_that_no_signal_has_reached_may_get_one_while_it_leaves():
    done = ended([])
    assert done.stdout.strip() == "None" and done.returncode == 75, done.stderr
