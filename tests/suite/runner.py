"""pytest plugin of this suite: one collection, tests run by processes forked from it, durations recorded and used.

The process that pytest starts collects. It then forks workers, which find every module, transformers and Triton loaded.
A worker claims a module, runs its tests one by one, and takes the next module; when none is left, it helps with the rest
of a long one. Modules with the longest recorded durations come first. Folders whose tests mostly wait for time limits
have one additional worker each, so that the waits cost no core. Reports go to the first process, which prints them:
-x, --lf, --junit-xml and the summary are those of one pytest.

pytest-xdist was not taken: every worker of it collects again, in a separate interpreter and with an additional
thread, and the tests start ranks by fork, which could find that thread holding a lock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from suite import durations, skips, tiers

WAITING_FOLDERS = ("tests/resilience/", "tests/slurm/")
"""Folders whose tests mostly wait for time limits; no two tests of such a folder run at the same time."""
HELP_FROM_S = 4.0
"""A worker without a module helps with one whose remaining tests took longer than this."""
LOOK_S = 2.0
"""Without a report for so long, the workers are looked after."""
INTERRUPTED_S = 30.0
"""Time for the fixtures of an interrupted worker to end."""
STATE = pytest.StashKey["Run"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that scripts/test.sh documents."""
    group = parser.getgroup("moe-trainer")
    group.addoption("--all", action="store_true", help="run everything; without paths the default tier is run")
    group.addoption("--changed", action="store_true", help="run what the changes since main can affect")
    group.addoption("--tier-limit", type=float, default=300.0, help="seconds of wall time that --changed may take")
    group.addoption(
        "--processes",
        type=int,
        default=int(os.environ.get("MOE_TRAINER_TEST_PROCESSES") or min((os.cpu_count() or 1) + 1, 5)),
        help="workers (default: one more than cores, because tests also wait, at most 5)",
    )
    group.addoption("--record", metavar="FOLDER", help="write durations and reached blocks of every test there")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the recording before any module of the product is imported."""
    config.stash[STATE] = Run(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules of which the tier has no test."""
    tier = config.stash[STATE].tier
    return (
        True if tier is not None and collection_path.suffix == ".py" and not tier.has_module(collection_path) else None
    )


@pytest.hookimpl(trylast=True)  # after -m, which leaves out the slow ones
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier."""
    tier = config.stash[STATE].tier
    if tier is not None:
        kept, left_out = tier.select(items)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which tier is run."""
    tier = config.stash[STATE].tier
    return None if tier is None else tier.header


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked workers; return None, for pytest's own loop, for one process or options that need it."""
    config = session.config
    if session.testsfailed and not config.option.continue_on_collection_errors:
        raise session.Interrupted("errors during collection")
    if config.option.processes < 1:
        raise pytest.UsageError(f"--processes {config.option.processes}: at least one is needed")
    count = min(config.option.processes, len(session.items))
    if config.option.collectonly or (count < 2 and not config.option.record):
        return None
    if config.option.usepdb or config.option.capture == "no":  # the terminal can belong to one test only
        return None
    # Made here once: a worker's would be locked by a process that is gone, and kept for three days.
    config._tmp_path_factory.getbasetemp()
    config.stash[STATE].run(session, max(count, 1))
    return True


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was skipped for want of something, and what a tier left out."""
    reports = terminalreporter.stats.get("skipped", ())
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    tier = config.stash[STATE].tier
    for line in [*skips.summarize(reasons), *(tier.summary() if tier is not None else ())]:
        terminalreporter.write_line(line)


class Run:
    """One run of the suite in the process that collects."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.tier = tiers.choose(config)
        self.finder = None
        if config.option.record:
            from suite import probes

            if loaded := probes.loaded_modules():
                raise pytest.UsageError(f"--record: {loaded[0]} was imported before, by a conftest.py")
            folder = Path(config.option.record).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise pytest.UsageError(f"--record {folder}: needs an empty folder; two runs would be mixed")
            (folder / "size").write_bytes(bytes(probes.prepare(folder)))
            self.finder = probes.install(folder / "collection")
            self.pth = probes.install_for_interpreters()
            config.add_cleanup(self.pth.unlink)

    def run(self, session: pytest.Session, count: int) -> None:
        """Fork workers and report their results until all tests have run."""
        seconds = durations.read(self.config)
        board = Board(session.items, seconds)
        workers = [Worker(session, board, self.finder, None, at) for at in range(count)]
        workers += [Worker(session, board, self.finder, unit, count + at) for at, unit in enumerate(board.waiting)]
        measured: dict[str, tuple[float, float]] = {}
        capture = self.config.pluginmanager.getplugin("capturemanager")
        tier = f": {self.tier.header}" if self.tier else ""
        self.print_lines(f"{len(session.items)} tests, {len(workers)} processes{tier}")
        self.is_terminated = False
        started = []
        before = signal.signal(signal.SIGTERM, self._terminate)  # of CI or timeout: workers are stopped
        try:
            capture.suspend_global_capture(in_=True)
            for worker in workers:
                started.append(worker)
                worker.start()
            self._report(session, board, workers, measured)
        finally:
            for worker in started:
                worker.stop()
            durations.write(self.config, measured)
            signal.signal(signal.SIGTERM, before)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _terminate(self, number: int, frame: object) -> None:
        # The flag too: an exception inside a callback of os.fork or of the garbage collector is printed and dropped.
        self.is_terminated = True
        raise KeyboardInterrupt

    def print_lines(self, *lines: str) -> None:
        """Print in the first process, at once: a log file shows that the tests run."""
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        for line in lines:
            reporter.write_line(line)
        reporter.flush()

    def _report(self, session: pytest.Session, board: Board, workers: list[Worker], measured: dict) -> None:
        hook = self.config.hook
        alive = {worker.pipe: worker for worker in workers}
        missing = set(range(len(session.items)))
        while alive:
            if self.is_terminated:
                raise KeyboardInterrupt
            for pipe in wait(list(alive), LOOK_S) or list(alive):
                worker = alive[pipe]
                try:
                    if not pipe.poll():
                        if worker.process.is_alive():
                            continue
                        raise EOFError  # what it has started may hold the pipe
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    del alive[pipe]
                    worker.process.join()
                    is_done = worker.process.exitcode == 0 and worker.current not in missing and worker.next is None
                    if is_done or session.shouldfail or session.shouldstop:
                        continue
                    if worker.current is None:
                        raise RuntimeError(
                            f"a test process ended with {worker.process.exitcode} before its first test"
                        ) from None
                    hook.pytest_runtest_logreport(report=worker.death(session, worker.current))
                    missing.discard(worker.current)
                    board.release(worker.current)
                    worker.start()
                    alive[worker.pipe] = worker
                    continue
                worker.current, worker.next = message["test"], message["next"]
                for warning in message.get("warnings", ()):
                    hook.pytest_warning_recorded.call_historic(kwargs=warning)
                for data in message.get("reports", ()):
                    report = hook.pytest_report_from_serializable(config=self.config, data=data)
                    hook.pytest_runtest_logreport(report=report)
                if "seconds" in message:
                    missing.discard(message["test"])
                    measured[session.items[message["test"]].nodeid] = message["seconds"]
                self.print_lines()
                if session.shouldfail or session.shouldstop:
                    board.stop()
        if missing and not (session.shouldfail or session.shouldstop):
            names = [session.items[at].nodeid for at in sorted(missing)]
            raise RuntimeError(f"{len(names)} tests were not run: {', '.join(names[:5])}")


class Board:
    """Which tests are claimed: shared memory of all workers.

    A unit is a module, or a waiting folder. Its tests are claimed from the front by the worker that owns it, from the
    back by helpers.
    """

    def __init__(self, items: list[pytest.Item], seconds: dict[str, float]):
        units: dict[str, list[int]] = defaultdict(list)
        self.shares_fixture: set[str] = set()
        for at, item in enumerate(items):
            module = item.nodeid.partition("::")[0]
            unit = next((name for name in WAITING_FOLDERS if module.startswith(name)), module)
            units[unit].append(at)
            if any(
                definition.scope in ("module", "package", "class") and definition.argname in item.fixturenames
                for definitions in item._fixtureinfo.name2fixturedefs.values()
                for definition in definitions
                if definition.argname != "restored_environment"
            ):
                self.shares_fixture.add(unit)
        self.waiting = [unit for unit in WAITING_FOLDERS if unit in units and len(units) > 1]
        self._seconds = [seconds.get(item.nodeid, 0.1) for item in items]
        self._units = dict(sorted(units.items(), key=lambda pair: -sum(self._seconds[at] for at in pair[1])))
        self._numbers = {unit: number for number, unit in enumerate(self._units)}
        context = multiprocessing.get_context("fork")
        self._lock = context.Lock()
        self._fronts = context.RawArray("i", len(self._units))
        self._backs = context.RawArray("i", [len(tests) for tests in self._units.values()])
        self._owned = context.RawArray("b", len(self._units))
        self._stopped = context.RawValue("b", 0)

    def stop(self) -> None:
        """Give out no more tests."""
        self._stopped.value = 1

    def release(self, test: int) -> None:
        """Let another worker take the rest of the unit of a test whose worker has ended."""
        with self._lock:
            for unit, tests in self._units.items():
                if test in tests:
                    self._owned[self._numbers[unit]] = 0

    def claims(self, waiting: str | None) -> Iterator[int]:
        """Yield the tests that a worker runs; `waiting` is the folder that is its only unit."""
        unit = waiting
        while not self._stopped.value:
            with self._lock:
                claimed = self._take(unit, from_back=False) if unit is not None else None
                while claimed is None:
                    unit = None if waiting else self._next_unit()
                    if unit is None:
                        break
                    claimed = self._take(unit, from_back=False)
                if claimed is None and waiting is None and (longest := self._longest()) is not None:
                    claimed = self._take(longest, from_back=True)
            if claimed is None:
                return
            yield claimed

    def _take(self, unit: str, from_back: bool) -> int | None:
        number = self._numbers[unit]
        if self._fronts[number] >= self._backs[number]:
            return None
        if from_back:
            self._backs[number] -= 1
            return self._units[unit][self._backs[number]]
        self._fronts[number] += 1
        return self._units[unit][self._fronts[number] - 1]

    def _next_unit(self) -> str | None:
        for unit, number in self._numbers.items():
            if not self._owned[number] and unit not in self.waiting:
                self._owned[number] = 1
                return unit
        return None

    def _longest(self) -> str | None:
        def remaining(unit: str) -> float:
            number = self._numbers[unit]
            return sum(self._seconds[at] for at in self._units[unit][self._fronts[number] : self._backs[number]])

        candidates = [unit for unit in self._units if unit not in (*WAITING_FOLDERS, *self.shares_fixture)]
        unit = max(candidates, key=remaining, default=None)
        return unit if unit is not None and remaining(unit) > HELP_FROM_S else None


class Worker:
    """A forked process that runs tests; the methods but `serve` belong to the first process."""

    def __init__(self, session: pytest.Session, board: Board, finder: object, waiting: str | None, number: int):
        self.session, self.board, self.finder, self.waiting, self.number = session, board, finder, waiting, number
        self.next: int | None = None
        self.process: BaseProcess | None = None

    def start(self) -> None:
        """Fork."""
        context = multiprocessing.get_context("fork")
        self.current: int | None = None
        self.pipe, child = context.Pipe(duplex=False)
        self.process = context.Process(target=self.serve, args=(child,), name=f"tests {self.number}")
        self.process.start()
        child.close()

    def stop(self) -> None:
        """End the process, as Ctrl-C does: fixtures end the programs that they have started."""
        if self.process is None or self.process.pid is None:  # interrupted before the fork
            return
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)
            self.process.join(INTERRUPTED_S)
            self.process.kill()
        self.process.join()

    def death(self, session: pytest.Session, test: int) -> pytest.TestReport:
        """Return the failure of the test during which the process ended."""
        item = session.items[test]
        text = f"the process that ran this test ended with exit code {self.process.exitcode}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

    def serve(self, pipe: Connection) -> None:
        """Run claimed tests in this process and send their reports."""
        code = 1  # of an error in this file too: only a worker that has found nothing more to run ends with 0
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of the ranks and programs that tests end
            self.pipe.close()
            self._become_worker()
            self._serve(pipe)
            code = 0
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and the first process both send it
            self.session._setupstate.teardown_exact(None)
            code = 130
        except pytest.exit.Exception as asked:
            code = asked.returncode or 1
        except BaseException:  # noqa: BLE001 - the test that runs gets a failure, its text is on stderr
            traceback.print_exc(file=sys.__stderr__)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # no interpreter shutdown: pytest's own must not run twice

    def _become_worker(self) -> None:
        config = self.session.config
        _renew_captured_files(config)
        reporter = config.pluginmanager.getplugin("terminalreporter")
        config.pluginmanager.unregister(reporter)
        config.pluginmanager.register(_Terminal(reporter), "terminalreporter")
        factory = config._tmp_path_factory
        with contextlib.suppress(FileExistsError):
            (factory.getbasetemp() / f"worker{self.number}").mkdir(mode=0o700)
        factory._basetemp = factory.getbasetemp() / f"worker{self.number}"
        self.outbox: dict = {}
        config.pluginmanager.register(_Outbox(config, self.outbox))
        if self.finder is not None:
            self.finder.use(self.finder.folder / f"buffer{self.number}")

    def _serve(self, pipe: Connection) -> None:
        items = self.session.items
        claims = self.board.claims(self.waiting)
        at = self.next if self.next is not None else next(claims, None)  # what a dead process had claimed
        while at is not None:
            following = next(claims, None)
            pipe.send_bytes(pickle.dumps({"test": at, "next": following}))
            wall, cpu = time.monotonic(), _cpu_seconds()
            items[at].config.hook.pytest_runtest_protocol(
                item=items[at], nextitem=None if following is None else items[following]
            )
            seconds = (round(time.monotonic() - wall, 3), round(_cpu_seconds() - cpu, 3))
            if self.finder is not None:
                is_skipped = any(report["outcome"] == "skipped" for report in self.outbox.get("reports", ()))
                self._record(items[at].nodeid, seconds[1], is_skipped)
            message = {"test": at, "next": following, "seconds": seconds, **self.outbox}
            pipe.send_bytes(pickle.dumps(message))
            self.outbox.clear()
            at = following

    def _record(self, nodeid: str, seconds: float, is_skipped: bool) -> None:
        import zlib

        buffer = self.finder.buffer
        reached = bytes(buffer)
        buffer[:] = bytes(len(reached))
        with (self.finder.folder / f"reached{self.number}.pickles").open("ab") as file:
            pickle.dump((nodeid, seconds, None if is_skipped else zlib.compress(reached, 1)), file)


def _renew_captured_files(config: pytest.Config) -> None:
    """Put new files behind those that captured output goes to, which the first process and its workers share.

    The objects stay, since modules have kept sys.stderr, for example as the stream of a log handler.
    """
    captured = config.pluginmanager.getplugin("capturemanager")._global_capturing
    for stream in (captured.out, captured.err):
        if hasattr(stream, "targetfd"):  # captured by file descriptor
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), stream.tmpfile.fileno())
                os.dup2(file.fileno(), stream.targetfd)


class _Terminal:
    """What a worker keeps of pytest's terminal reporter: the writer that failure texts are formatted with."""

    def __init__(self, reporter: pytest.TerminalReporter):
        self._tw = reporter._tw
        self.config = reporter.config


class _Outbox:
    """Collects the reports and warnings of the test that runs."""

    def __init__(self, config: pytest.Config, outbox: dict):
        self.config, self.outbox = config, outbox

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.outbox.setdefault("reports", []).append(data)

    def pytest_warning_recorded(self, warning_message: object, when: str, nodeid: str, location: object) -> None:
        warning = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        with contextlib.suppress(Exception):  # a warning with an object that cannot be sent
            pickle.dumps(warning)
            self.outbox.setdefault("warnings", []).append(warning)


def _cpu_seconds() -> float:
    """Return the processor time of this process, of its children that have ended, and of servers that it has started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(map(_ticks, _children("self")))
    return time.process_time() + ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _children(process: str) -> list[str]:
    children: list[str] = []
    for path in Path("/proc", process, "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += path.read_text().split()
    return children


def _ticks(process: str) -> int:
    """Return the processor time of a process, its ended children, and its living ones."""
    try:
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) + sum(map(_ticks, _children(process)))
    except OSError:  # it has ended
        return 0
