"""Run functions of test modules on emulated CUDA devices.

    def work(x): ...                                   # of a test module; imports torch as it likes
    result = on_device(work, 3)                        # in a process that has one device
    results = on_device(train, "plain", ranks=2, devices=2)   # train(rank, world_size, "plain") on ranks with a device each

One server process for each test process (and library) has loaded the device; it forks the processes that run the functions. Arguments and results are
pickled; what a function raises comes back with its traceback.
"""

import atexit
import contextlib
import functools
import importlib
import io
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
MAX_DEVICES = 8


class Library(NamedTuple):
    """A library that processes with devices may have: the module to import, the folders with it, environment variables."""

    name: str
    folders: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def environment(self, devices: int) -> dict[str, str]:
        """As run.environment, with the library."""
        env = environment(devices)
        return {**env, **dict(self.variables), "PYTHONPATH": os.pathsep.join([*self.folders, env["PYTHONPATH"]])}


def environment(devices: int) -> dict[str, str]:
    """What a Python process needs to have devices. Skips the test where the device cannot be built."""
    from emulated_cuda import build

    try:
        return build.environment(devices)
    except build.CannotBuildError as error:
        pytest.skip(str(error))


def check_races() -> None:
    """Check the accesses of this process for races, with source lines. In a process with devices."""
    import emulation

    emulation.DEVICE().watch(True)
    emulation.DEVICE().lib.ec_check_races(1)


def on_device(function: Callable, *args: Any, devices: int = 1, ranks: int = 1, library: Library | None = None) -> Any:
    """Call function(*args) in a process with devices, or function(rank, ranks, *args) on several ranks, rank r on device r % devices.

    library: of processes that have imported it.
    Returns: what it returns; a list by rank where there are several.
    Raises: AssertionError with the tracebacks.
    """
    channel = _server(library)
    channel.send((function.__module__, function.__qualname__, pickle.dumps(args), devices, ranks))
    succeeded, outcome = channel.recv()
    assert succeeded, outcome
    results = [pickle.loads(result) for result in outcome]
    return results[0] if ranks == 1 else results


def run_pytest(words: list[str], capability: tuple[int, int] = (9, 0)) -> tuple[int, str]:
    """For on_device: run pytest with these words, on devices of this compute capability. Returns its exit code and what it printed."""
    import emulation

    emulation.DEVICE().capability = capability
    with contextlib.redirect_stdout(io.StringIO()) as output:
        # one process: a device has threads, which workers forked from here would not have
        code = pytest.main(["-q", "-p", "no:cacheprovider", "--processes", "1", *words])
    return int(code), output.getvalue()


def device_test(test: Callable) -> Callable:
    """Have a test run in a separate process with one device; its parameters are pickled."""

    @functools.wraps(test)
    def run(**kwargs: Any) -> None:
        on_device(_run_test, test.__module__, test.__qualname__, kwargs)

    return run


def _run_test(module: str, name: str, kwargs: dict[str, Any]) -> None:
    functools.reduce(getattr, name.split("."), importlib.import_module(module)).__wrapped__(**kwargs)


@functools.cache
def _server(library: Library | None) -> Connection:
    ours, theirs = socket.socketpair()
    env = environment(MAX_DEVICES) if library is None else library.environment(MAX_DEVICES)
    command = [
        sys.executable,
        str(HERE / "run.py"),
        str(theirs.fileno()),
        *([] if library is None else [library.name]),
    ]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
    theirs.close()
    channel, here = Connection(ours.detach()), os.getpid()

    def stop() -> None:
        if os.getpid() == here:
            channel.close()
            process.wait()

    atexit.register(stop)
    return channel


def _call(rank: int, world_size: int, module: str, name: str, args: bytes, devices: int) -> bytes:
    import emulation
    import torch

    emulation.DEVICE().lib.ec_devices(devices)
    torch.cuda.set_device(rank % devices)
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    values = pickle.loads(args)
    return pickle.dumps(function(*values) if world_size == 1 else function(rank, world_size, *values))


def _serve(channel: Connection, *libraries: str) -> None:
    import emulation
    import gloo
    from harness import RanksFailedError, run_ranks

    gloo.share_device()
    # a process that forks must have started no thread of autograd: it has no device
    emulation.DEVICE().lib.ec_hide_from_this_process()
    # here once, instead of in every process
    kernels = (
        [f"moe_trainer.ops.{path.stem}" for path in HERE.parents[1].glob("moe_trainer/ops/triton_*.py")]
        if "triton" in sys.modules
        else []
    )
    for module in ("moe_trainer.verification.training_trace", "torch._dynamo", *kernels, *libraries):
        importlib.import_module(module)

    while True:
        try:
            module, name, args, devices, ranks = channel.recv()
        except EOFError:
            return
        with contextlib.suppress(BaseException):  # which the processes report
            importlib.import_module(module)  # here once
        try:
            channel.send((True, run_ranks(_call, ranks, module, name, args, devices)))
        except RanksFailedError as error:
            channel.send((False, str(error)))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), *sys.argv[2:])
