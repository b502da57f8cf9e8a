"""With --auto-resume a signal of the batch system is deferred from the first line on until the run handles it."""

import os
import signal

from commands import environment, run, start
from harness import wait_until
from training.tiny import MOCK, TINY

import pretrain_moe
from moe_trainer.training import loop

LINE = [*TINY, *MOCK, "--train-iters", "8", "--save", "ckpt", "--save-interval", "2"]


# the interpreter looks for this module first: the program waits in the middle of its imports until a signal has come
WAITING = """
import atexit, pathlib, signal, sys, time

class Wait:
    @staticmethod
    def find_spec(name, *others):
        if name == "arguments":
            sys.meta_path.remove(Wait)
            pathlib.Path("importing").touch()
            while not signal.sigpending():
                time.sleep(0.01)

sys.meta_path.insert(0, Wait)
atexit.register(lambda: print("blocked at exit:", *signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def blocked_signals(pid: int) -> set[int]:
    """The signals that a process blocks."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
    return {number for number in range(1, 32) if mask >> number - 1 & 1}


def test_signal_during_imports_saves_and_requests_a_restart(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WAITING)
    process = start([*LINE, "--auto-resume"], tmp_path, environment(PYTHONPATH=str(tmp_path)))
    wait_until(lambda: (tmp_path / "importing").exists() or process.poll() is not None)
    assert process.poll() is None and {signal.SIGUSR1, signal.SIGTERM} <= blocked_signals(process.pid), (
        "no signal was blocked"
    )
    process.send_signal(signal.SIGUSR1)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 75, stderr
    assert "[exiting program after receiving SIGUSR1.] datetime:" in stdout
    assert stdout.splitlines()[-1].split() == ["blocked", "at", "exit:"], "signals are blocked until they are handled"
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_an_interrupted_run_ends_with_its_summary(tmp_path, monkeypatch):
    def interrupted_step(run, state, microbatches):
        if state.iteration == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(run, state, microbatches)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", interrupted_step)
    ended = run(LINE, tmp_path)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr, ended.stderr
    summary = ended.stdout[ended.stdout.index("run summary") :].splitlines()
    assert summary[1] == "  ended:       interrupted after iteration 5"
    assert summary[2].startswith("  iterations:  5 of 8")
    assert "pretrain_moe.py: interrupted; the checkpoint of iteration 4 in ckpt is complete" in ended.stderr


def test_describe_saved_names_the_last_complete_checkpoint(tmp_path):
    assert pretrain_moe._describe_saved(None) == "nothing was saved (no --save)"
    assert pretrain_moe._describe_saved(str(tmp_path)) == f"there is no checkpoint in {tmp_path} yet"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    assert pretrain_moe._describe_saved(str(tmp_path)) == f"the checkpoint of iteration 40 in {tmp_path} is complete"
