"""Run the command line in tests, on one process or several ranks.

`run` forks the ranks from the test process, each with its own folder, environment and output: the full program from
`main(argv)` to the exit code, without the three seconds of CPU that an interpreter needs to import torch.
`run(..., new_interpreter=True)`, `start` and `torchrun` start interpreters for what forked ranks do not cover:
imports, interpreter shutdown, string hashes that differ by rank.
"""

import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fault_injection.ranks import reserved_port

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of one rank: one thread, none of the caller's rank variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env.update(OMP_NUM_THREADS="1", **extra)
    return env


@contextlib.contextmanager
def rank_variables(world_size: int) -> Iterator[list[dict[str, str]]]:
    """Yield torchrun's variables for the ranks of a local job; the port is reserved while the context is active."""
    if world_size == 1:
        yield [{}]
        return
    with reserved_port() as port:
        common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        yield [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(world_size)]


def call_main(
    main: Callable[[list[str]], int], argv: Iterable[object], capture: pytest.CaptureFixture[str]
) -> Finished:
    """Run a program's `main(argv)` in this process, also where argparse ends it."""
    capture.readouterr()
    try:
        code = main([str(word) for word in argv])
    except SystemExit as ended:
        code = ended.code
    return Finished(code, *capture.readouterr())


def start(argv: list[str], cwd: Path, env: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *argv],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    argv: list[str], cwd: Path, world_size: int = 1, timeout: float = 600.0, new_interpreter: bool = False, **env: str
) -> Finished:
    """Run `pretrain_moe.py argv` on `world_size` ranks. Return the first failing rank's result, or all output.

    The ranks get torchrun's variables without torchrun, which takes seconds to start. CUDA cannot be used in a fork of a
    process that has asked for devices, so where there are some (tests/gpu) every rank is a new interpreter.
    """
    with rank_variables(world_size) as ranks:
        envs = [environment(**variables, **env) for variables in ranks]
        forks = not new_interpreter and not torch.cuda.is_available()
        results = (_forks if forks else _commands)(argv, cwd, envs, timeout)
    failed = [result for result in results if result.returncode != 0]
    if failed and failed[0].returncode == 2:  # one of the ranks that found the same error prints it
        return Finished(2, failed[0].stdout, "".join(result.stderr for result in failed if result.returncode == 2))
    if failed:
        return failed[0]
    return Finished(0, "".join(r.stdout for r in results), "".join(r.stderr for r in results))


def _commands(argv: list[str], cwd: Path, envs: list[dict[str, str]], timeout: float) -> list[Finished]:
    ranks = [start(argv, cwd, env) for env in envs]
    try:
        ended = [(process.communicate(timeout=timeout), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [Finished(code, *texts) for texts, code in ended]


def _forks(argv: list[str], cwd: Path, envs: list[dict[str, str]], timeout: float) -> list[Finished]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="command") as name:
        outputs = [(Path(name, f"out{rank}"), Path(name, f"err{rank}")) for rank in range(len(envs))]
        ranks = [
            context.Process(target=_fork_main, args=(argv, cwd, env, *texts))
            for env, texts in zip(envs, outputs, strict=True)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            for process in ranks:
                process.join(max(deadline - time.monotonic(), 0.0))
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        texts = [[path.read_text() if path.exists() else "" for path in pair] for pair in outputs]
        _import_modules(outputs[0][0].with_suffix(".modules"))
    if late:
        raise TimeoutError(
            f"ranks {late} did not end within {timeout:.0f} s\n" + "\n".join(error for _, error in texts)
        )
    return [Finished(process.exitcode, *pair) for process, pair in zip(ranks, texts, strict=True)]


def _import_modules(path: Path) -> None:
    """Import what a rank has imported, so that later ranks find it loaded: 400 modules take a second each time."""
    for name in path.read_text().split() if path.exists() else ():
        # Triton's decorators read the environment when a module is imported.
        if name.startswith(("arguments", "moe_trainer", "pretrain_moe", "torch.distributed")) and "triton" not in name:
            importlib.import_module(name)


def _fork_main(argv: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    """Become `python pretrain_moe.py argv`: drop pytest's output, logging, warnings, environment and settings."""
    gc.freeze()
    loaded = set(sys.modules)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    sys.argv = ["pretrain_moe.py", *argv]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for logger in (logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)):
        logger.handlers.clear()
    warnings.resetwarnings()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    code = 1
    try:
        from moe_trainer.commands import train_process

        code = train_process.main(argv)
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:  # noqa: BLE001 - print it as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    out.with_suffix(".modules").write_text("\n".join(name for name in list(sys.modules) if name not in loaded))
    os._exit(code)


def torchrun(argv: list[str], cwd: Path, world_size: int, timeout: float = 600.0) -> Finished:
    """Run `torchrun --nproc-per-node world_size pretrain_moe.py argv`."""
    with reserved_port() as port:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(world_size),
            "--master-port",
            str(port),
        ]
        done = subprocess.run(
            [*launcher, str(REPOSITORY / "pretrain_moe.py"), *argv],
            cwd=cwd,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    return Finished(done.returncode, done.stdout, done.stderr)


def read_metrics(path: Path) -> list[dict]:
    """Return all records of a metrics.jsonl but those of its ends."""
    return [record for line in path.read_text().splitlines() if "ended" not in (record := json.loads(line))]


def read_ends(path: Path) -> list[dict]:
    """Return how the starts of a run ended, without times and descriptions."""
    records = map(json.loads, path.read_text().splitlines())
    return [{k: v for k, v in each.items() if k not in ("time", "run")} for each in records if "ended" in each]


def golden_workspace(shared: Path, folder: Path) -> Path:
    """Make a working directory for the golden command lines: a writable copy of the dataset under golden/."""
    target = folder / "golden" / "dataset"
    if not target.exists():
        shutil.copytree(shared / "golden" / "dataset", target, ignore=shutil.ignore_patterns("cache", "*.npz"))
        for path in [target, *target.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
