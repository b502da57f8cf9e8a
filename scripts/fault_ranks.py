"""Ranks of pretrain_moe.py that meet with a mishap: forked on this machine, struck at a named function of one rank.

The product knows nothing of it: the child replaces the function by name before it runs `pretrain_moe.main`, and does the rest as
ever. `Strike` says where; ACTIONS what. Disks are real file systems (a small tmpfs, remounted read-only, detached), mounted in
a mount namespace that belongs to one case and goes with it; hosts are network namespaces with a cable between them.
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
DISK, BEHIND, FILLER = "disk", "behind", "disk/filler"  # in the folder of a case
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


class NotHere(Exception):
    """This machine does not allow what a case needs (mounts, namespaces, control groups)."""


@dataclass(frozen=True)
class Strike:
    """Something that befalls a rank at a call of a function.

    where: "module:Class.function". iteration: of the training, the one that is under way or was the last; None for any. call: the how
    many-th call there, 0 for each of them. after: when the function has returned, instead of before.
    """

    action: str
    where: str
    rank: int = 1
    iteration: int | None = None
    call: int = 1
    after: bool = False


@dataclass(frozen=True)
class RankChange:
    """Other environment variables, or further flags, of one rank (None: of all) at the first start.

    `{port}` is the port of the job, `{listener}` one where a program accepts connections and never answers.
    """

    rank: int | None
    env: tuple[tuple[str, str], ...] = ()
    flags: str = ""


@dataclass(frozen=True)
class FileEdit:
    """What is done to a file before the first start, in the folder of the case; a file of the data is restored afterwards, others are removed.

    kind: "patch" writes content at an offset, "write" makes the file, "cut" leaves `offset` bytes, "remove", "directory", "fifo",
    "link" makes a symbolic link to content.
    """

    kind: str
    path: str
    offset: int = 0
    content: bytes = b""

    def apply(self) -> None:
        """Do it."""
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
        """Restore a file of the data, remove any other."""
        path = Path(self.path)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if (originals / self.path).is_file():
            path.write_bytes((originals / self.path).read_bytes())


# ---- what can happen; the current folder is that of the case

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


def mistake(_: object) -> None:
    raise KeyError("a mistake on one rank")


def term(_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def storm(_: object) -> None:
    """A hundred SIGTERM, a few milliseconds apart, from outside; the rank goes on when the first has come."""
    once = f"kill -TERM {os.getpid()} || exit"
    sender = subprocess.Popen(["sh", "-c", f"{once}; echo sent; exec >/dev/null; for i in $(seq 99); do sleep 0.003; {once}; done"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    sender.stdout.readline()


def fill(_: object) -> None:
    """Leave no byte on the disk."""
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
    """Stop for four seconds, which is less than a collective may take."""
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def stdout_full(_: object) -> None:
    """Standard output goes to a full disk from now on."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def few_files(_: object) -> None:
    """No more than a few further open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def small_files(_: object) -> None:
    """No file may grow beyond 20 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def python_memory(_: object) -> None:
    """An allocation of Python itself that the system refuses."""
    _limit_address_space()
    bytearray(1 << 30)


def read_only(_: object) -> None:
    mount("--bind", DISK, DISK)
    mount("-o", "remount,bind,ro", DISK)


def read_write(_: object) -> None:
    subprocess.run(["umount", "-l", DISK], check=True)


def vanish(_: object) -> None:
    subprocess.run(["umount", "-l", DISK], check=True)


def come_back(_: object) -> None:
    mount("--bind", BEHIND, DISK)


def later(_: object) -> None:
    """The clock jumps a year ahead."""
    time.time = lambda: REAL_TIME() + 3.2e7


def earlier(_: object) -> None:
    """The clock jumps a year back."""
    time.time = lambda: REAL_TIME() - 3.2e7


def slow(_: object) -> None:
    """The disk takes longer than a collective may."""
    time.sleep(12)


def unplug(_: object) -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def no_memory(_: object) -> None:
    """An allocation that the system refuses."""
    import torch

    _limit_address_space()
    torch.empty(1 << 28)


def _limit_address_space() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))


def oom(_: object) -> None:
    """Take memory until the kernel kills this process."""
    group = MEMORY_GROUPS / f"fault_table-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(32 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = [bytearray(os.urandom(1 << 20)) for _ in range(256)]
    raise AssertionError(f"{len(taken)} MiB were granted")


def remove_memory_groups() -> None:
    """Those whose process has been killed."""
    for group in MEMORY_GROUPS.glob("fault_table-*"):
        try:
            group.rmdir()
        except OSError:
            pass  # of a case that still runs


def poison(result: object) -> object:
    """NaN in one element of what the function returned."""
    tensor = result[0] if isinstance(result, tuple) else result
    spoilt = tensor.clone()
    spoilt.view(-1)[3] = float("nan")
    return (spoilt, *result[1:]) if isinstance(result, tuple) else spoilt


def shorten(_: object) -> None:
    """Somebody cuts the token file off."""
    os.truncate("text.bin", 4096)


ACTIONS: dict[str, Callable[[object], object]] = {action.__name__: action for action in (
    kill, stop, hang, diverge, mistake, term, storm, fill, free, read_only, read_write, vanish, come_back, later, earlier, slow, unplug,
    no_memory, oom, poison, shorten, hangup, interrupt, usr1, pause, stdout_full, few_files, small_files, python_memory)}


# ---- striking

def install(strikes: tuple[Strike, ...]) -> None:
    """Lay them in wait in this process."""
    from moe_trainer import train

    train_iteration, now = train.train_iteration, [0]

    def counting(run: object, state: object) -> object:
        now[0] = state.iteration + 1
        return train_iteration(run, state)

    train.train_iteration = counting
    for strike in strikes:
        _lay(strike, now)


def _lay(strike: Strike, now: list[int]) -> None:
    module, _, path = strike.where.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original, seen = getattr(owner, name), []

    def struck(*args: object, **kwargs: object) -> object:
        if strike.iteration in (None, now[0]):
            seen.append(1)
        strikes = strike.call in (0, len(seen)) and strike.iteration in (None, now[0])
        if strikes and not strike.after:
            ACTIONS[strike.action](None)
        result = original(*args, **kwargs)
        if strikes and strike.after:
            found = ACTIONS[strike.action](result)
            return result if found is None else found
        return result

    setattr(owner, name, struck)


# ---- ranks

@dataclass(frozen=True)
class Ended:
    """How a run ended: exit codes (minus the signal) and what each rank wrote, by rank."""

    codes: list[int]
    out: list[str]
    err: list[str]


def run_ranks(argv: list[str], folder: Path, world: int, strikes: tuple[Strike, ...] = (), hosts: tuple[str, ...] = (),
              patience: float = 300.0, changes: tuple[RankChange, ...] = ()) -> Ended:
    """Run the program on forked ranks; a rank that was struck and stands still is killed when all others have ended.

    hosts: network namespaces of the ranks, of which the first has the address 10.77.0.1. Raises: TimeoutError.
    """
    with reserved_port() as port, socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {"port": port, "listener": listener.getsockname()[1]}
        return _run_ranks(argv, folder, world, strikes, hosts, patience, ports, changes)


def _run_ranks(argv: list[str], folder: Path, world: int, strikes: tuple[Strike, ...], hosts: tuple[str, ...], patience: float,
               ports: dict[str, int], changes: tuple[RankChange, ...]) -> Ended:
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "10.77.0.1" if hosts else "127.0.0.1", "MASTER_PORT": str(ports["port"]),
              "OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {})}
    context = multiprocessing.get_context("fork")
    logs = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(world)]
    for path in (each for pair in logs for each in pair):
        path.unlink(missing_ok=True)
    ranks = []
    for rank in range(world):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common} if world > 1 else {"OMP_NUM_THREADS": "1"}
        mine = tuple(strike for strike in strikes if strike.rank == rank)
        words = list(argv)
        for change in changes:
            if change.rank in (None, rank):
                env |= {name: value.format(**ports) for name, value in change.env}
                words += change.flags.split()
        ranks.append(context.Process(target=_main, args=(words, folder, env, mine, logs[rank], hosts[rank] if hosts else None)))
    for process in ranks:
        process.start()
    victims, deadline = {strike.rank for strike in strikes if strike.action in ("stop", "hang")}, time.monotonic() + patience
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
        raise TimeoutError(f"ranks {late} did not end within {patience:.0f} s")
    texts = [[path.read_text(errors="replace") if path.exists() else "" for path in pair] for pair in logs]
    return Ended([process.exitcode for process in ranks], [out for out, _ in texts], [err for _, err in texts])


def _main(argv: list[str], folder: Path, env: dict[str, str], strikes: tuple[Strike, ...], logs: tuple[Path, Path], host: str | None) -> None:
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
        import pretrain_moe

        if strikes:
            install(strikes)
        code = pretrain_moe.main(argv)
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else 1
    except BaseException:  # noqa: BLE001 - as an interpreter tells of it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of this host for the store of a job, which is free and given to nobody else for as long as the context lasts.

    A socket is bound to it that never listens: the system passes it over when it gives out ports, and the store may listen there
    all the same, since both say SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# ---- disks and hosts

def mount(*given: str) -> None:
    """Raises: NotHere."""
    done = subprocess.run(["mount", *given], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(f"mount is not allowed here: {done.stderr.strip()}")


def private_mounts() -> None:
    """Whatever this process and its children mount from now on goes with them. Raises: NotHere."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise NotHere("a mount namespace needs root")
    mount("--make-rprivate", "/")


def make_disk(size: str) -> None:
    """A file system of its own at DISK, and the same at BEHIND, where it stays reachable. Raises: NotHere."""
    for name in (DISK, BEHIND):
        Path(name).mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", DISK)
    mount("--bind", DISK, BEHIND)


def make_hosts(names: tuple[str, str]) -> None:
    """Two network namespaces with a cable between them, both ends called eth0. Raises: NotHere."""
    lines = [f"netns add {name}" for name in names]
    lines += [f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
    for number, name in enumerate(names, 1):
        lines += [f"-n {name} link set lo up", f"-n {name} addr add 10.77.0.{number}/24 dev eth0"]
    for line in lines:
        done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotHere(f"network namespaces are not allowed here: ip {line}: {done.stderr.strip()}")
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
            raise NotHere(f"the network namespace {name} cannot be entered")
