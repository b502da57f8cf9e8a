"""Signals and errors that end a run: deferred until the run handles them, or recorded as its end."""

import json
import os
import signal
import subprocess
import sys
import threading
from unittest.mock import ANY

import pytest
from commands import REPOSITORY, environment, read_ends, run, start
from harness import wait_until
from training.tiny import MOCK, TINY

from moe_trainer.commands import train_process
from moe_trainer.errors import UserError
from moe_trainer.training import loop, pretrain

SOON = ["--distributed-timeout-seconds-after-init", "30"]  # how long ranks wait for each other follows from it
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


def fail_at(monkeypatch, iteration, act):
    """Call act(run) before a step."""

    def failing_step(run, state, microbatches):
        if state.iteration == iteration:
            act(run)
        return train_step(run, state, microbatches)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", failing_step)


def shown_state(folder):
    """State and worst finding of the page that the run has left."""
    page = (folder / "dashboard.html").read_text()
    (run,) = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"]
    return run["status"], run["findings"][0]["text"]


def test_an_interrupted_run_ends_with_its_summary(tmp_path, monkeypatch):
    fail_at(monkeypatch, 5, lambda run: os.kill(os.getpid(), signal.SIGINT))
    ended = run(LINE, tmp_path)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr, ended.stderr
    summary = ended.stdout[ended.stdout.index("run summary") :].splitlines()
    assert summary[1] == "  ended:       interrupted after iteration 5"
    assert summary[2].startswith("  iterations:  5 of 8")
    assert "pretrain_moe.py: interrupted; the checkpoint of iteration 4 in ckpt is complete" in ended.stderr
    expected = {"ended": "interrupted", "iteration": 5, "exit_code": 130, "reason": "interrupted after iteration 5"}
    assert read_ends(tmp_path / "ckpt" / "metrics.jsonl") == [expected]
    assert shown_state(tmp_path / "ckpt")[0] == "interrupted"


def test_exit_signal_may_be_the_interrupt(tmp_path, monkeypatch):
    fail_at(monkeypatch, 4, lambda run: os.kill(os.getpid(), signal.SIGINT))
    ended = run([*LINE, "--exit-signal-handler", "--exit-signal", "SIGINT"], tmp_path)
    assert ended.returncode == 0 and "[exiting program after receiving SIGINT.] datetime:" in ended.stdout, ended.stderr
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "5"


@pytest.mark.parametrize("restart, code", [((), 0), (("--auto-resume",), 75)])
def test_interrupt_saves_where_a_flag_asks_for_it(tmp_path, monkeypatch, restart, code):
    def signal_once(run):
        os.kill(os.getpid(), signal.SIGINT if restart else signal.SIGTERM)

    fail_at(monkeypatch, 4, signal_once)
    ended = run([*LINE, "--save-on-interrupt", *restart], tmp_path)
    assert ended.returncode == code and "[exiting program after receiving SIG" in ended.stdout, ended.stderr
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_ctrl_c_under_torchrun_leaves_no_traceback_of_a_rank(tmp_path):
    """The one traceback is torchrun's own. A terminal signals the launcher and the ranks.

    On a busy machine torchrun may kill a rank before it has recorded the end, which another test demands.
    """
    line = [*LINE, "--train-iters", "100000", "--lr-decay-iters", "100"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = subprocess.Popen(
        [*command, str(REPOSITORY / "pretrain_moe.py"), *line],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "ckpt" / "metrics.jsonl"
    wait_until(lambda: (metrics.exists() and metrics.stat().st_size) or launched.poll() is not None)
    os.killpg(launched.pid, signal.SIGINT)
    output, _ = launched.communicate(timeout=300)
    assert launched.returncode == 1 and output.count("Traceback") <= 1 and "KeyboardInterrupt" not in output, output
    assert {(end["ended"], end["exit_code"]) for end in read_ends(metrics)} <= {("interrupted", 130)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_termination_while_the_main_thread_is_stuck_is_recorded(tmp_path, monkeypatch, world_size):
    def stuck(run):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(300)

    fail_at(monkeypatch, 3, stuck)
    monkeypatch.setattr("moe_trainer.resilience.watchdog._TERMINATED_WAIT_S", 100.0)  # on a busy machine
    ended = run(LINE, tmp_path, world_size)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    reason = "terminated by SIGTERM after iteration 3"
    expected = {"ended": "interrupted", "iteration": 3, "exit_code": 143, "reason": reason}
    assert read_ends(tmp_path / "ckpt" / "metrics.jsonl") == [expected]
    assert world_size > 1 or f"  ended:       {reason}" in ended.stdout
    assert shown_state(tmp_path / "ckpt")[0] == "interrupted"


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (UserError("no data"), {"ended": "failed", "iteration": 2, "exit_code": 2, "reason": "no data"}),
        (KeyboardInterrupt(), {"ended": "interrupted", "iteration": 2, "exit_code": 130, "reason": ANY}),
    ],
)
def test_start_that_fails_is_an_end_of_the_run_that_it_continues(tmp_path, monkeypatch, error, end):
    def fail(*_):
        raise error

    run([*LINE, "--exit-interval", "2"], tmp_path)
    monkeypatch.setattr(pretrain, "build_inputs", fail)
    metrics = tmp_path / "ckpt" / "metrics.jsonl"
    before = metrics.read_text()
    assert run(LINE, tmp_path).returncode == end["exit_code"] and metrics.read_text() == before, "another run"
    assert run([*LINE, "--load", "ckpt"], tmp_path, 2).returncode == end["exit_code"]
    assert read_ends(metrics)[1:] == [end] and read_ends(metrics)[0]["ended"] == "stopped"


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_rank_is_the_recorded_end(tmp_path, monkeypatch, failing):
    """Rank 1, the last one, writes the metrics; it loses rank 0."""

    def boom(run):
        if run.ps.world.rank == failing:
            raise RuntimeError("boom")

    fail_at(monkeypatch, 3, boom)
    run([*LINE, *SOON], tmp_path, 2)
    (end,) = read_ends(tmp_path / "ckpt" / "metrics.jsonl")
    assert end == {"ended": "failed", "iteration": 3, "exit_code": 1, "reason": "RuntimeError: boom"}
    status, finding = shown_state(tmp_path / "ckpt")
    assert status == "failed" and finding == "the run failed after iteration 3, exit code 1: RuntimeError: boom"


def test_lost_rank_is_the_recorded_end(tmp_path, monkeypatch):
    fail_at(monkeypatch, 3, lambda run: run.ps.world.rank == 0 and os.kill(os.getpid(), signal.SIGKILL))
    run([*LINE, *SOON], tmp_path, 2)
    (end,) = read_ends(tmp_path / "ckpt" / "metrics.jsonl")
    assert (end["ended"], end["exit_code"]) == ("failed", 3)
    assert "lost connection to the rendezvous store (hosted by rank 0 or the launcher)" in end["reason"]


def test_describe_saved_names_the_last_complete_checkpoint(tmp_path):
    assert train_process._describe_saved(None) == "nothing was saved (no --save)"
    assert train_process._describe_saved(str(tmp_path)) == f"there is no checkpoint in {tmp_path} yet"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    assert train_process._describe_saved(str(tmp_path)) == f"the checkpoint of iteration 40 in {tmp_path} is complete"
