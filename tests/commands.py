"""Running the command line in tests: one process or several ranks, as a user would."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit code and what it printed (per rank)."""

    returncode: int
    stdout: str
    stderr: str


def environment(**extra: str) -> dict[str, str]:
    """The environment of one rank: one thread, no rank variables left over from the caller."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env.update(OMP_NUM_THREADS="1", **extra)
    return env


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(argv: list[str], cwd: Path, env: dict[str, str]) -> subprocess.Popen:
    """Start one rank."""
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *argv],
        cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def run(argv: list[str], cwd: Path, world_size: int = 1, timeout: float = 300.0, **env: str) -> Finished:
    """Run `pretrain_moe.py argv` on `world_size` ranks; returns the first failing rank's result, else all output.

    The ranks are started with torchrun's variables and without torchrun itself, which costs seconds a time.
    """
    if world_size == 1:
        ranks = [start(argv, cwd, environment(**env))]
    else:
        common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            start(argv, cwd, environment(RANK=str(rank), LOCAL_RANK=str(rank), **common, **env))
            for rank in range(world_size)
        ]
    try:
        ended = [(process.communicate(timeout=timeout), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    results = [Finished(code, *texts) for texts, code in ended]
    failed = [result for result in results if result.returncode != 0]
    if failed and failed[0].returncode == 2:  # any of the ranks that find the same wrong says so
        return Finished(2, failed[0].stdout, "".join(result.stderr for result in failed if result.returncode == 2))
    if failed:
        return failed[0]
    return Finished(0, "".join(r.stdout for r in results), "".join(r.stderr for r in results))


def torchrun(argv: list[str], cwd: Path, world_size: int, timeout: float = 300.0) -> Finished:
    """Run `torchrun --nproc-per-node world_size pretrain_moe.py argv`, as a user does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--master-port", str(free_port())]
    done = subprocess.run(
        [*launcher, str(REPOSITORY / "pretrain_moe.py"), *argv],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def read_metrics(path: Path) -> list[dict]:
    """All records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def golden_workspace(shared: Path, folder: Path) -> Path:
    """A working directory in which the golden command lines run: a writable copy of the dataset under golden/."""
    target = folder / "golden" / "dataset"
    if not target.exists():
        shutil.copytree(shared / "golden" / "dataset", target, ignore=shutil.ignore_patterns("cache", "*.npz"))
        for path in [target, *target.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
