"""Run `python` and `torchrun` commands of shell scripts without starting interpreters.

An interpreter that imports torch takes seconds. A server process is forked from the test's process, which has torch; two small stand-ins, `python` and
`torchrun`, come first in PATH, send their command and their standard streams to the server, and end with the exit code that it returns. Every command runs
in a separate process. Trainings are made small: the flags in SMALL are appended, and --train-iters is at most 6. With VALIDATE
in the environment they are only validated.
"""

import gc
import json
import logging
import os
import runpy
import signal
import socket
import stat
import sys
import traceback
import warnings
from pathlib import Path

import commands
import mock_data
import torch

TRAINER = "pretrain_moe.py"
SMALL = "--micro-batch-size 1 --seq-length 32 --eval-iters 1".split()
MAX_ITERATIONS, DEFAULT_ITERATIONS = 6, 2
VALIDATE = "MOE_TRAINER_TEST_VALIDATES"
"""Set in a script's environment: its trainings are validated and do not run."""
CHECKS_ONLY = {"--validate-only", "--dry-run", "--help", "--skip-train"}

CLIENT = """#!{python} -SEs
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
stdin = sys.stdin.read() if sys.argv[1:2] == ["-"] else ""
command = dict(name={name!r}, argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ), stdin=stdin)
socket.send_fds(connection, [b"x"], [0, 1, 2])
connection.sendall(json.dumps(command).encode() + b"\\n")
sys.exit(int(connection.makefile().readline() or 1))
"""


class CommandServer:
    """A context in which scripts that run in `folder` with `environment` use the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder.parent / f"{folder.name}-bin"
        self._pid = 0
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        self.environment = commands.environment(PATH=path, TOKENIZERS_PARALLELISM="false", PYTHONPATH="")

    def __enter__(self) -> "CommandServer":
        self._bin.mkdir()
        address = str(self._bin / "socket")
        for name in ("python", "python3", "torchrun"):
            client = self._bin / name
            client.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
            client.chmod(client.stat().st_mode | stat.S_IXUSR)
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen()
        self._pid = os.fork()
        if self._pid == 0:
            os.setsid()
            _serve(server)
        server.close()
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)


def _serve(server: socket.socket) -> None:
    # What most commands import, once.
    import tensorboard.summary.writer.event_file_writer  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    import moe_trainer.training.pretrain  # noqa: F401
    import moe_trainer.verification.replay  # noqa: F401

    mock_data.shorten()
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    parent = os.getppid()
    server.settimeout(5.0)
    while os.getppid() == parent:  # a killed test leaves no server
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        connection.setblocking(True)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            _handle(connection)
        connection.close()
    os._exit(0)


def _handle(connection: socket.socket) -> None:
    """Run one command in this process (torchrun: its ranks in children of it) and report its exit code."""
    code = 1
    try:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        command = json.loads(connection.makefile().readline())
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        code = _ranks(command)
    except BaseException:  # noqa: BLE001 - the exit code must be sent
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _ranks(command: dict) -> int:
    argv, world_size = list(command["argv"]), 1
    if argv[:2] == ["-m", "torch.distributed.run"]:
        command["name"], argv = "torchrun", argv[2:]
    elif argv and Path(argv[0]).name == "torchrun.py":
        command["name"], argv = "torchrun", argv[1:]
    if command["name"] == "torchrun":
        while argv[0].startswith("-"):
            option = argv.pop(0)
            if option == "--nproc-per-node":
                world_size = int(argv.pop(0))
            elif option != "--standalone":
                raise ValueError(f"the stand-in for torchrun does not know {option}")
    codes = []
    with commands.rank_variables(world_size) as ranks:
        children = []
        for variables in ranks:
            child = os.fork()
            if child == 0:
                _become(_small(argv, world_size, VALIDATE in command["env"]), command, variables)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code if code > 0 else 1 for code in codes if code), 0)


def _small(argv: list[str], world_size: int, validate: bool) -> list[str]:
    """The same command, with a training that takes a second, or is only validated."""
    name = Path(argv[0]).name if argv else ""
    if name == "prove_layout.py":
        return [*argv, "--shrink-only"]
    if name != TRAINER or CHECKS_ONLY & set(argv):
        return argv
    if validate:
        return [*argv, "--validate-only"]
    iterations = [int(argv[index + 1]) for index, word in enumerate(argv[:-1]) if word == "--train-iters"]
    return [
        *argv,
        *SMALL,
        "--global-batch-size",
        str(max(2, world_size)),
        "--train-iters",
        str(min(iterations[-1], MAX_ITERATIONS) if iterations else DEFAULT_ITERATIONS),
    ]


def _become(argv: list[str], command: dict, variables: dict[str, str]) -> None:
    # The streams of the command, open until it ends
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    code = 1
    try:
        _forget_pytest()
        os.environ.clear()
        os.environ.update(command["env"] | variables)
        os.chdir(command["cwd"])
        code = _run(argv, command["stdin"])
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter reports it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forget_pytest() -> None:
    """Drop what the test's process has set up: log handlers, warning filters, torch's settings."""
    for logger in (logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)):
        logger.handlers.clear()
    warnings.resetwarnings()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _run(argv: list[str], stdin: str) -> int:
    """Do what `python argv` does."""
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    elif argv[0] == "-":
        sys.argv = argv
        exec(compile(stdin, "<stdin>", "exec"), {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif Path(argv[0]).name == TRAINER:
        from moe_trainer.commands import train_process

        sys.argv = argv
        return train_process.main(argv[1:])
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
    return 0
