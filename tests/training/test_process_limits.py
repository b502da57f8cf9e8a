"""Limits of the process: closed streams, Ctrl-C during imports, too little memory."""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from commands import REPOSITORY, environment
from training.tiny import MOCK, TINY

LINE = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *TINY, *MOCK, "--train-iters", "1"]


def start(folder, *more, **how):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.Popen([*LINE, *more], cwd=folder, env=environment(), text=True, **how)


def test_closed_streams_do_not_end_a_run(tmp_path):
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&-', "sh", *LINE, "--save", "ckpt", "--save-interval", "1"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


def test_interrupted_imports_leave_no_traceback(tmp_path):
    process = start(tmp_path)
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 120
    while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in err, (process.returncode, err)


def test_out_of_host_memory_is_a_one_line_error(tmp_path):
    limit = 300 << 20
    process = start(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "Traceback" not in err, err
    assert "out of host memory (ulimit -v allows 300 MiB)" in err.splitlines()[-1]
