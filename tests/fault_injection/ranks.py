"""Run pretrain_moe.py on forked ranks and inject a fault at a given function call of one rank.

The product has no hooks for this: the child replaces the function by name before it runs `train_process.main`. `Injection` names the
place, ACTIONS the fault. Disks are real file systems (a small tmpfs, remounted read-only, detached) in a mount namespace per case;
hosts are network namespaces connected by a virtual cable.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NEW_MOUNTS, NEW_NET = 0x20000, 0x40000000
REAL_TIME = time.time
DISK, BACKING, FILLER = "disk", "behind", "disk/filler"  # in the folder of a case
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


class UnsupportedHostError(Exception):
    """Raised when this machine lacks what a case needs (mounts, namespaces, control groups)."""


@dataclass(frozen=True)
class Injection:
    """A fault at a call of a function on one rank.

    Attributes:
        where: "module:Class.function".
        iteration: the current or last training iteration; None for any.
        call: which matching call, counted from 1; 0 for every call.
        after: inject after the function returns instead of before it is called.
    """

    action: str
    where: str
    rank: int = 1
    iteration: int | None = None
    call: int = 1
    after: bool = False


@dataclass(frozen=True)
class RankOverride:
    """Different environment variables or additional flags for one rank (None: all ranks) in the first run.

    In values, `{port}` is the job's port and `{listener}` a port where a program accepts connections and never answers.
    """

    rank: int | None
    env: tuple[tuple[str, str], ...] = ()
    flags: str = ""


@dataclass(frozen=True)
class FileEdit:
    """A change to a file in the case's folder before the first run; data files are restored afterwards, others removed.

    kind: "patch" writes content at an offset, "write" creates the file, "cut" truncates it to `offset` bytes, "remove", "directory",
    "fifo", "link" creates a symbolic link to content.
    """

    kind: str
    path: str
    offset: int = 0
    content: bytes = b""

    def apply(self) -> None:
        path = Path(self.path)
        if self.kind == "patch":
            with open(path, "r+b") as file:
                file.seek(self.offset)
                file.write(self.content)
        elif self.kind == "cut":
            os.truncate(path, self.offset)
        else:
            path.unlink(missing_ok=True)
            if self.kind == "write":
                path.write_bytes(self.content)
            elif self.kind == "directory":
                path.mkdir()
            elif self.kind == "fifo":
                os.mkfifo(path)
            elif self.kind == "link":
                path.symlink_to(self.content.decode())
            else:
                assert self.kind == "remove", self.kind

    def undo(self, originals: Path) -> None:
        """Restore a data file, remove any other file."""
        path = Path(self.path)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if (originals / self.path).is_file():
            path.write_bytes((originals / self.path).read_bytes())


# ---- actions; the current folder is the case's


def kill(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(_: object) -> None:
    time.sleep(3600)


def diverge(_: object) -> None:
    """Enter a collective that no other rank enters."""
    import torch.distributed as dist

    dist.barrier()


def raise_error(_: object) -> None:
    raise KeyError("a mistake on one rank")


def term(_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def send_many_sigterms(_: object) -> None:
    """Send 100 SIGTERM a few milliseconds apart from another process; return after the first one arrived."""
    once = f"kill -TERM {os.getpid()} || exit"
    sender = subprocess.Popen(
        ["sh", "-c", f"{once}; echo sent; exec >/dev/null; for i in $(seq 99); do sleep 0.003; {once}; done"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    sender.stdout.readline()


def fill(_: object) -> None:
    """Fill the disk to the last byte."""
    with open(FILLER, "wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                pass


def free(_: object) -> None:
    Path(FILLER).unlink()


def hangup(_: object) -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def interrupt(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def usr1(_: object) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def pause(_: object) -> None:
    """Stop for four seconds, less than the collective timeout."""
    subprocess.Popen(
        ["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.kill(os.getpid(), signal.SIGSTOP)


def stdout_full(_: object) -> None:
    """Redirect standard output to a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def few_files(_: object) -> None:
    """Limit the number of open files to a few more than now."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def small_files(_: object) -> None:
    """Limit the file size to 20 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def python_memory(_: object) -> None:
    """Make an allocation of the Python interpreter fail."""
    _limit_address_space()
    bytearray(1 << 30)


def read_only(_: object) -> None:
    mount("--bind", DISK, DISK)
    mount("-o", "remount,bind,ro", DISK)


def unmount(_: object) -> None:
    """Undo the last mount: a read-only disk can be written again, a mounted one vanishes."""
    subprocess.run(["umount", "-l", DISK], check=True)


def come_back(_: object) -> None:
    mount("--bind", BACKING, DISK)


def clock_ahead(_: object) -> None:
    """Set the clock one year ahead."""
    time.time = lambda: REAL_TIME() + 3.2e7


def clock_back(_: object) -> None:
    """Set the clock one year back."""
    time.time = lambda: REAL_TIME() - 3.2e7


def slow(_: object) -> None:
    """Block longer than the collective timeout, like a slow disk."""
    time.sleep(12)


def unplug(_: object) -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def no_memory(_: object) -> None:
    """Make an allocation of torch fail."""
    import torch

    _limit_address_space()
    torch.empty(1 << 28)


def _limit_address_space() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))


def oom(_: object) -> None:
    """Allocate memory until the kernel kills this process."""
    group = MEMORY_GROUPS / f"fault_table-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(32 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    chunks = [bytearray(os.urandom(1 << 20)) for _ in range(256)]
    raise AssertionError(f"{len(chunks)} MiB were granted")


def remove_memory_groups() -> None:
    """Remove the control groups of killed processes."""
    for group in MEMORY_GROUPS.glob("fault_table-*"):
        with contextlib.suppress(OSError):  # its case is still running
            group.rmdir()


def poison(output: object) -> object:
    """Return the function's output with NaN in one element."""
    tensor = output[0] if isinstance(output, tuple) else output
    poisoned = tensor.clone()
    poisoned.view(-1)[3] = float("nan")
    return (poisoned, *output[1:]) if isinstance(output, tuple) else poisoned


def shorten(_: object) -> None:
    """Truncate the token file."""
    os.truncate("text.bin", 4096)


ACTIONS: dict[str, Callable[[object], object]] = {
    action.__name__: action
    for action in (
        kill,
        stop,
        hang,
        diverge,
        raise_error,
        term,
        send_many_sigterms,
        fill,
        free,
        read_only,
        unmount,
        come_back,
        clock_ahead,
        clock_back,
        slow,
        unplug,
        no_memory,
        oom,
        poison,
        shorten,
        hangup,
        interrupt,
        usr1,
        pause,
        stdout_full,
        few_files,
        small_files,
        python_memory,
    )
}


# ---- injecting


def install(injections: tuple[Injection, ...]) -> None:
    from moe_trainer.training import loop

    train_iteration, current = loop.train_iteration, [0]

    def counting(run: object, state: object, monitors: object) -> object:
        current[0] = state.iteration + 1
        return train_iteration(run, state, monitors)

    loop.train_iteration = counting
    for injection in injections:
        _install_one(injection, current)


def _install_one(injection: Injection, current: list[int]) -> None:
    module, _, path = injection.where.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), []

    def injected(*args: object, **kwargs: object) -> object:
        if injection.iteration in (None, current[0]):
            calls.append(1)
        due = injection.call in (0, len(calls)) and injection.iteration in (None, current[0])
        if due and not injection.after:
            ACTIONS[injection.action](None)
        returned = original(*args, **kwargs)
        if due and injection.after:
            replaced = ACTIONS[injection.action](returned)
            return returned if replaced is None else replaced
        return returned

    setattr(owner, name, injected)


# ---- ranks


@dataclass(frozen=True)
class RunResult:
    """Exit codes (negative: killed by that signal) and output of a run, by rank."""

    codes: list[int]
    out: list[str]
    err: list[str]


def run_ranks(
    argv: list[str],
    folder: Path,
    world: int,
    injections: tuple[Injection, ...] = (),
    hosts: tuple[str, ...] = (),
    timeout_s: float = 300.0,
    overrides: tuple[RankOverride, ...] = (),
) -> RunResult:
    """Run the program on forked ranks. A rank that an injection stopped is killed after all others have exited.

    `hosts`: network namespaces of the ranks; the first one has the address 10.77.0.1.

    Raises:
        TimeoutError: if other ranks are still running after `timeout_s`.
    """
    with reserved_port() as port, socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {"port": port, "listener": listener.getsockname()[1]}
        return _run_ranks(argv, folder, world, injections, hosts, timeout_s, ports, overrides)


def _run_ranks(
    argv: list[str],
    folder: Path,
    world: int,
    injections: tuple[Injection, ...],
    hosts: tuple[str, ...],
    timeout_s: float,
    ports: dict[str, int],
    overrides: tuple[RankOverride, ...],
) -> RunResult:
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "10.77.0.1" if hosts else "127.0.0.1",
        "MASTER_PORT": str(ports["port"]),
        "OMP_NUM_THREADS": "1",
        **({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {}),
    }
    context = multiprocessing.get_context("fork")
    logs = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(world)]
    for path in (each for pair in logs for each in pair):
        path.unlink(missing_ok=True)
    ranks = []
    for rank in range(world):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common} if world > 1 else {"OMP_NUM_THREADS": "1"}
        own_injections = tuple(injection for injection in injections if injection.rank == rank)
        flags = list(argv)
        for override in overrides:
            if override.rank in (None, rank):
                env |= {name: value.format(**ports) for name, value in override.env}
                flags += override.flags.split()
        ranks.append(
            context.Process(
                target=_main, args=(flags, folder, env, own_injections, logs[rank], hosts[rank] if hosts else None)
            )
        )
    for process in ranks:
        process.start()
    victims, deadline = (
        {injection.rank for injection in injections if injection.action in ("stop", "hang")},
        time.monotonic() + timeout_s,
    )
    try:
        for rank, process in enumerate(ranks):
            if rank not in victims:
                process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(ranks) if process.is_alive() and rank not in victims]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if late:
        raise TimeoutError(f"ranks {late} did not end within {timeout_s:.0f} s")
    texts = [[path.read_text(errors="replace") if path.exists() else "" for path in pair] for pair in logs]
    return RunResult([process.exitcode for process in ranks], [out for out, _ in texts], [err for _, err in texts])


def _main(
    argv: list[str],
    folder: Path,
    env: dict[str, str],
    injections: tuple[Injection, ...],
    logs: tuple[Path, Path],
    host: str | None,
) -> None:
    for stream, path in zip((1, 2), logs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    sys.argv = ["pretrain_moe.py", *argv]
    os.environ.update(env)
    os.chdir(folder)
    code = 1
    try:
        if host is not None:
            enter_host(host)
        from moe_trainer.commands import train_process

        if injections:
            install(injections)
        code = train_process.main(argv)
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else 1
    except BaseException:  # noqa: BLE001 - print it as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port of this host for the store of a job while the context is active.

    A socket is bound to the port and never listens: the system does not hand out the port again, and the store can still listen
    there because both sockets set SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# ---- disks and hosts


def mount(*words: str) -> None:
    """Raises: UnsupportedHostError."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedHostError(f"mount is not allowed here: {done.stderr.strip()}")


def private_mounts() -> None:
    """Whatever this process and its children mount from now on goes with them. Raises: UnsupportedHostError."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise UnsupportedHostError("a mount namespace needs root")
    mount("--make-rprivate", "/")


def make_disk(size: str) -> None:
    """A file system of its own at DISK, and the same at BACKING, where it stays reachable. Raises: UnsupportedHostError."""
    for name in (DISK, BACKING):
        Path(name).mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", DISK)
    mount("--bind", DISK, BACKING)


def make_hosts(names: tuple[str, str]) -> None:
    """Two network namespaces with a cable between them, both ends called eth0. Raises: UnsupportedHostError."""
    lines = [f"netns add {name}" for name in names]
    lines += [f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
    for number, name in enumerate(names, 1):
        lines += [f"-n {name} link set lo up", f"-n {name} addr add 10.77.0.{number}/24 dev eth0"]
    for line in lines:
        done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnsupportedHostError(f"network namespaces are not allowed here: ip {line}: {done.stderr.strip()}")
    plug_in(names)


def plug_in(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True)


def remove_hosts(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter_host(name: str) -> None:
    """Let this process live in a network namespace."""
    with open(f"/run/netns/{name}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), NEW_NET):
            raise UnsupportedHostError(f"the network namespace {name} cannot be entered")
