"""With --auto-resume a signal of the batch system is deferred from the first line on until the run handles it."""

import signal

import pytest
from commands import environment, start
from harness import wait_until
from training.tiny import MOCK, TINY

import pretrain_moe

LINE = [*TINY, *MOCK, "--train-iters", "3", "--save", "ckpt", "--save-interval", "3"]


# the interpreter looks for this module first: the program waits in the middle of its imports until a signal has come
WAITING = """
import pathlib, signal, sys, time

class Wait:
    @staticmethod
    def find_spec(name, *others):
        if name == "arguments":
            sys.meta_path.remove(Wait)
            pathlib.Path("importing").touch()
            while not signal.sigpending():
                time.sleep(0.01)

sys.meta_path.insert(0, Wait)
"""


def blocked_signals(pid: int) -> set[int]:
    """The signals that a process blocks."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
    return {number for number in range(1, 32) if mask >> number - 1 & 1}


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_signal_during_imports_saves_and_requests_a_restart(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text(WAITING)
    process = start([*LINE, "--auto-resume"], tmp_path, environment(PYTHONPATH=str(tmp_path)))
    wait_until(lambda: (tmp_path / "importing").exists() or process.poll() is not None)
    assert process.poll() is None and {signal.SIGUSR1, signal.SIGTERM} <= blocked_signals(process.pid), (
        "no signal was blocked"
    )
    process.send_signal(signal.Signals[name])
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 75, stderr
    assert f"[exiting program after receiving {name}.] datetime:" in stdout
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_signals_are_not_blocked_during_training(tmp_path):
    process = start(
        [*LINE, "--train-iters", "100000", "--lr-decay-iters", "9", "--save-interval", "100000", "--auto-resume"],
        tmp_path,
        environment(),
    )
    try:
        for line in process.stdout:
            if line.startswith("training ..."):
                break
        wait_until(
            lambda: not {signal.SIGUSR1, signal.SIGTERM} & blocked_signals(process.pid)
        )  # for a moment also while a thread is made
    finally:
        process.kill()
        process.communicate()


def test_an_interrupted_run_ends_with_its_summary(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "4000", "--save", "ckpt", "--save-interval", "2"]
    process = start(argv, tmp_path, environment())
    try:
        for line in process.stdout:
            if "iteration        5/" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    summary = out[out.index("run summary") :].splitlines()
    done = int(summary[1].removeprefix("  ended:       interrupted after iteration "))
    assert done >= 5 and summary[2].startswith(f"  iterations:  {done} of 4000")
    saved = int((tmp_path / "ckpt/latest_checkpointed_iteration.txt").read_text())
    assert f"pretrain_moe.py: interrupted; the checkpoint of iteration {saved} in ckpt is complete" in err


def test_describe_saved_names_the_last_complete_checkpoint(tmp_path):
    assert pretrain_moe._describe_saved(None) == "nothing was saved (no --save)"
    assert pretrain_moe._describe_saved(str(tmp_path)) == f"there is no checkpoint in {tmp_path} yet"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    assert pretrain_moe._describe_saved(str(tmp_path)) == f"the checkpoint of iteration 40 in {tmp_path} is complete"
