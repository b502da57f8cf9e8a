"""Apply small mistakes to copies of the checkout, and report which test notices each.

    python tests/mutants/run.py                        all mutants, with all tests that reach their lines
    python tests/mutants/run.py --tier default         with the tests of the default tier only
    python tests/mutants/run.py NAME NAME              these
    python tests/mutants/run.py --changed              those in files that differ from main, or whose noticing test has changed
    python tests/mutants/run.py --write                store the results in noticed.json
    python tests/mutants/run.py --table FILE           mutants of another table

A mutant is an entry of a YAML file of this folder: `file`, `function`, `line` as it stands, its `change`, and what
`breaks` for a user. One whose line is not found is reported as moved. A mutant is settled by the first test that fails.
Those that noticed it before come first, then those that reach its block (tests/data/suite/record.xz, ranks and started
programs included), by duration and by the words that their names share with the mutant's texts. A run that lasts much
longer than its tests did is noticed, by a hang. A test that fails or hangs without the mutant too notices nothing.
Exit code 1: a mutant survived or has moved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

# One thread: the tests start ranks by fork.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import hypothesis  # noqa: F401 - with torch loaded once: a run of tests is a fork of this process
import pytest
import torch._dynamo
import yaml

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from structure.source import ROOT
from suite import blocks, record, tiers

torch.set_num_threads(1)

HERE = Path(__file__).parent
NOTICED_FILE = HERE / "noticed.json"
FIRST_S = 25.0
"""Processor seconds of recorded tests in the first attempt; the next ones are four times as long each."""
MODULE_S = 1.0
"""What importing another test module costs, about."""
OWN = ("tests/mutants/", "tests/suite/")
"""Tests of the tables and of this machinery, which fail for any change of some lines."""


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    name: str
    file: str
    function: str
    line: str
    change: str
    breaks: str

    def place(self, root: Path) -> tuple[str, int] | None:
        """Return the changed text and the number of the changed line; None if the line is not there exactly once."""
        if not (root / self.file).exists():
            return None
        lines = (root / self.file).read_text().splitlines(keepends=True)
        wanted = [line.strip() for line in self.line.strip().splitlines()]
        found = [
            at
            for first, last in self._spans(lines)
            for at in range(first, last - len(wanted) + 1)
            if [line.strip() for line in lines[at : at + len(wanted)]] == wanted
        ]
        if len(set(found)) != 1:
            return None
        at = found[0]
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        changed = [f"{indent}{line}\n" for line in self.change.rstrip().splitlines()]
        return "".join([*lines[:at], *changed, *lines[at + len(wanted) :]]), at + 1

    def _spans(self, lines: list[str]) -> list[tuple[int, int]]:
        if not self.function:
            return [(0, len(lines))]
        return blocks.function_spans("".join(lines), self.function)


@dataclass
class Result:
    """What became of a mutant: noticed, survived or moved."""

    outcome: str
    test: str = ""
    seconds: float = 0.0
    """Wall time until it was settled."""
    tests_run: int = 0
    left_out: int = 0
    """Tests that reach the line and were not run."""


def read_table(paths: list[Path]) -> list[Mutant]:
    """Return the mutants of the YAML files."""
    mutants = []
    for path in paths:
        try:
            mutants += [Mutant(**entry) for entry in yaml.safe_load(path.read_text())]
        except (OSError, yaml.YAMLError, TypeError) as error:
            raise pytest.UsageError(f"{path} is no table of mutants: {error}") from error
    for mutant in mutants:
        if not (ROOT / mutant.file).resolve().is_relative_to(ROOT) or Path(mutant.file).is_absolute():
            raise pytest.UsageError(f"{mutant.name}: {mutant.file} is not a path inside the checkout")
    return mutants


def candidates(mutant: Mutant, text: str, line: int, known: record.Record, allowed: frozenset[str] | None) -> list[str]:
    """Return the tests that reach a line of the file's text, in the order in which they are tried."""
    columns: list[int] = []
    if mutant.file.endswith(".py") and mutant.function:
        own = [
            block
            for block in blocks.blocks_of(text)
            if block[0].split(".")[: mutant.function.count(".") + 1] == mutant.function.split(".")
        ]
        at = max((block for block in own if block[2] <= line), key=lambda block: block[2], default=None)
        numbers = {
            (known.blocks[column][1], known.blocks[column][2]): column
            for column in known.columns.get((mutant.file, None), ())
        }
        columns = [numbers[at[:2]]] if at is not None and at[:2] in numbers else []
    tests = known.tests_that_reach(columns).tolist() if columns else []
    near, stem = mutant.file.split("/"), Path(mutant.file).stem
    folders = {"tests/" + part + "/" for part in near[:-1]}
    if near[-2:-1] == ["data"]:
        folders.add("tests/data_pipeline/")
    if not tests:  # module level, kernels, files that are not Python: those of the file, and those that name it
        tests = known.tests_that_reach(known.columns.get((mutant.file, None), ())).tolist()
        naming = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / "tests").rglob("test_*.py")
            if stem in path.read_text()
        }
        tests += [
            at
            for at, name in enumerate(known.tests)
            if (module := name.partition("::")[0]) in naming or any(module.startswith(folder) for folder in folders)
        ]
        tests = list(dict.fromkeys(tests))
    similar = _similarity(mutant, known.tests)
    cases: dict[str, int] = defaultdict(int)

    def order(at: int) -> float:
        name = known.tests[at]
        cost = (known.seconds[at] + 0.2) / (1 + similar[at]) ** 3
        return cost if any(name.startswith(folder) for folder in folders) else 2 * cost

    ranked = []
    for at in sorted(tests, key=order):
        function = known.tests[at].partition("[")[0]
        cases[function] += 1
        ranked.append((order(at) * cases[function], at))  # other cases of a test that did not notice come later
    names = [known.tests[at] for _, at in sorted(ranked) if not known.tests[at].startswith(OWN)]
    return [name for name in names if allowed is None or name in allowed]


def _similarity(mutant: Mutant, tests: list[str]) -> list[float]:
    """Return how rare the words are that a mutant's texts share with the names of tests, from 0 to about 3."""

    def words(text: str) -> set[str]:
        return {word[:6] for word in re.findall("[a-z]{3,}", text.lower())} - {"test", "tests"}

    own = words(f"{mutant.name} {mutant.file} {mutant.function} {mutant.breaks}".replace("moe_trainer", ""))
    of_test = [words(name) for name in tests]
    counts = Counter(word for found in of_test for word in found)
    rarity = {word: math.log(len(tests) / counts[word]) for word in own if word in counts}
    return [sum(rarity.get(word, 0.0) for word in found & own) / 8 for found in of_test]


def attempts(names: list[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Split the tests into runs of growing length; every module counts for what its import costs."""
    limit, batch, modules, total = FIRST_S, [], set(), 0.0
    for name in names:
        module = name.partition("::")[0]
        cost = seconds.get(name, 0.1) + (0 if module in modules else MODULE_S)
        if batch and total + cost > limit:
            yield batch
            limit, batch, modules, total = limit * 4, [], set(), 0.0
            cost = seconds.get(name, 0.1) + MODULE_S
        batch.append(name)
        modules.add(module)
        total += cost
    if batch:
        yield batch


class Copy:
    """A copy of the checkout in which one mutant at a time is applied."""

    def __init__(self, folder: Path):
        self.folder = folder
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for name in filter(None, listed):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        self._time = int(time.time())

    def set_text(self, file: str, text: str) -> None:
        """Write a file with a time that no compiled form of it has."""
        self._time += 2
        (self.folder / file).write_text(text)
        os.utime(self.folder / file, (self._time, self._time))


def run_tests(folder: Path, names: list[str], limit_s: float) -> tuple[str | None, list[str]]:
    """Run the tests in the copy until one fails; return its name, None if all pass, and those that passed.

    The name is that of a module if it cannot be imported.
    """
    with tempfile.TemporaryDirectory(prefix="mutant") as name:
        ran = Path(name, "ran")
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(folder, names, Path(name)))
        process.start()
        try:
            process.join(limit_s)
            is_late = process.is_alive()
        finally:  # on Ctrl-C too: the tests have a session, which the terminal does not interrupt
            _kill_all((folder, Path(name)), process.pid)
        process.join()
        lines = [line.split(" ", 1) for line in (ran.read_text().splitlines() if ran.exists() else ())]
    failed = [test for event, test in lines if event == "failed"]
    started = [test for event, test in lines if event == "start"] or names[:1]
    passed = [test for event, test in lines if event == "passed" and test not in failed]
    if failed:
        return failed[0], passed
    if is_late:
        return started[-1], passed
    # 5: none of the names exists any more; 0 without the end of a test: it ended the process
    is_complete = process.exitcode == 5 or process.exitcode == 0 and started[-1] in passed
    return (None if is_complete else started[-1]), passed


def _kill_all(folders: tuple[Path, ...], pid: int) -> None:
    """Kill what a run has left: processes of its session, and those that work in its folders."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            if session == pid or any((entry / "cwd").resolve().is_relative_to(folder) for folder in folders):
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue


def _pytest(folder: Path, names: list[str], scratch: Path) -> None:
    """Become a pytest of the copy, in a new session, that writes what it ran."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(scratch / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.chdir(folder)
    sys.path[:] = [
        str(folder),
        *(path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT / "tests")),
    ]
    os.environ.update(PYTHONPATH=str(folder), TMPDIR=str(scratch))
    tempfile.tempdir = str(scratch)
    os.environ.setdefault("MOE_TRAINER_SHARED", str(ROOT.parent / "shared"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("suite", "structure")]:
        del sys.modules[name]
    modules = list(dict.fromkeys(name.partition("::")[0] for name in names))
    options = ["-q", "-x", "-p", "no:cacheprovider", "--processes", "1", "--basetemp", str(scratch / "pytest")]
    code = pytest.main([*options, *modules], plugins=[_Listed(names, scratch / "ran")])
    sys.stdout.flush()
    os._exit(int(code))


class _Listed:
    """Plugin that keeps the listed tests, in their order, and writes which ran."""

    def __init__(self, names: list[str], ran: Path):
        self.names = {name: at for at, name in enumerate(names)}
        self.file = ran.open("a", buffering=1)

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.names), key=lambda item: self.names[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write(f"start {nodeid}\n")

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            self.file.write(f"failed {report.nodeid}\n")
        elif report.when == "teardown":
            self.file.write(f"passed {report.nodeid}\n")

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:
            self.file.write(f"failed {report.nodeid}\n")


def settle(
    mutant: Mutant, copy: Copy, known: record.Record, before: list[str], allowed: frozenset[str] | None, limit_s: float
) -> Result:
    """Apply a mutant in the copy and run tests until one notices."""
    start, count, spent = time.monotonic(), 0, 0.0
    placed = mutant.place(copy.folder)  # what is edited meanwhile in the checkout does not count
    if placed is None:
        return Result("moved")
    text, line = placed
    unchanged = (copy.folder / mutant.file).read_text()
    seconds = dict(zip(known.tests, known.seconds))
    names = candidates(mutant, unchanged, line, known, allowed)
    first = [name for name in before if allowed is None or name in allowed]
    first, names = (
        [name for name in each if (copy.folder / name.partition("::")[0]).exists()] for each in (first, names)
    )
    batches = deque([name] for name in first)
    batches.extend(attempts([name for name in names if name not in first], seconds))
    try:
        while batches:
            copy.set_text(mutant.file, text)
            batch = batches.popleft()
            expected = sum(seconds.get(name, 0.1) for name in batch)
            if spent and spent + expected > limit_s:
                left = len(batch) + sum(map(len, batches))
                return Result("survived", "", time.monotonic() - start, count, left)
            limit = 60 + 10 * expected
            test, passed = run_tests(copy.folder, batch, limit)
            spent += expected
            count += len(passed)
            if test is None:
                continue
            which = re.compile(re.escape(test) + "(::|/|$)")  # a test, a module, a folder's conftest.py
            failed = [name for name in batch if which.match(name)] or batch[:1]
            if rest := [name for name in batch if name not in (*passed, *failed)]:
                batches.appendleft(rest)
            if _confirm(failed[0], copy, mutant.file, text, unchanged, limit):
                return Result("noticed", failed[0], time.monotonic() - start, count + 1)
        return Result("survived", "", time.monotonic() - start, count)
    finally:
        copy.set_text(mutant.file, unchanged)


def _confirm(test: str, copy: Copy, file: str, mutated: str, unchanged: str, limit_s: float) -> bool:
    """Return whether a test fails with the mutant and passes without it, each time alone."""
    copy.set_text(file, unchanged)
    if run_tests(copy.folder, [test], limit_s) != (None, [test]):
        return False
    copy.set_text(file, mutated)
    return run_tests(copy.folder, [test], limit_s)[0] is not None


def _serve(
    pipe: Connection,
    others: list[Connection],
    folder: Path,
    known: record.Record,
    allowed: frozenset[str] | None,
    limit_s: float,
) -> None:
    for other in others:  # else the end of the first process would not end this one
        other.close()
    with contextlib.suppress(KeyboardInterrupt, EOFError):  # the first process has been interrupted, or is gone
        copy = Copy(folder)
        while (job := pipe.recv()) is not None:
            mutant, before = job
            pipe.send((mutant, settle(mutant, copy, known, before, allowed, limit_s)))
    pipe.close()


def run_all(
    jobs: list[tuple[Mutant, list[str]]],
    processes: int,
    known: record.Record,
    allowed: frozenset[str] | None,
    limit_s: float,
) -> Iterator[tuple[Mutant, Result]]:
    """Yield the mutants with their results as they are settled, several at a time."""
    context = multiprocessing.get_context("fork")
    waiting = jobs[::-1]
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        pipes, servers = [], []
        for number in range(min(processes, len(jobs))):
            ours, theirs = context.Pipe()
            arguments = (theirs, [*pipes, ours], Path(name, f"copy{number}"), known, allowed, limit_s)
            servers.append(context.Process(target=_serve, args=arguments))
            servers[-1].start()
            theirs.close()  # else an error there would not end the wait here
            ours.send(waiting.pop())
            pipes.append(ours)
        try:
            while pipes:
                for pipe in wait(pipes):
                    yield pipe.recv()
                    if waiting:
                        pipe.send(waiting.pop())
                    else:
                        pipe.send(None)
                        pipes.remove(pipe)
        finally:  # they kill their tests before their copies are deleted
            for server in servers if pipes else ():
                os.kill(server.pid, signal.SIGINT)
            for server in servers:
                server.join()


def main(argv: list[str]) -> int:
    """Run the mutants that the command line selects; return 1 if one survived or moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants; default: all")
    parser.add_argument("--tier", choices=("default", "all"), default="all")
    parser.add_argument("--table", type=Path, action="append", help="default: the tables of this folder")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=200.0, help="processor seconds of tests for one mutant")
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: at least one is needed")
    # as Ctrl-C: the tests are killed; a job in the background of a script starts with SIGINT ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mutants = read_table(args.table or sorted(HERE.glob("*.yaml")))
    known = record.read()
    if known is None:
        parser.error(f"no record of the tests at {record.FILE}; python tests/suite/make_tiers.py writes it")
    unknown = set(args.names) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    noticed = json.loads(NOTICED_FILE.read_text()) if NOTICED_FILE.exists() else {}
    if args.names:
        mutants = [mutant for mutant in mutants if mutant.name in args.names]
    elif args.changed:
        files = tiers.changed_files()
        mutants = [mutant for mutant in mutants if mutant.file in files or _modules(noticed, mutant) & files]
    allowed = frozenset(tiers.DEFAULT_FILE.read_text().splitlines()) if args.tier == "default" else None
    jobs = [(mutant, [tests[0] for tests in noticed.get(mutant.name, {}).values() if tests]) for mutant in mutants]
    if not jobs:
        print("no mutant is in a file that differs from main, or is noticed by a test that does")
        return 0
    start, outcomes = time.monotonic(), defaultdict(list)
    for mutant, result in run_all(jobs, args.processes, known, allowed, args.limit):
        outcomes[result.outcome].append(mutant.name)
        print(f"{result.outcome:9}{result.seconds:6.0f} s  {mutant.name}  {_detail(mutant, result)}", flush=True)
        if result.outcome != "moved":
            found = [result.test, round(result.seconds)] if result.test else None
            noticed.setdefault(mutant.name, {})[args.tier] = found
        if args.write and not args.table:
            written = NOTICED_FILE.with_suffix(".new")
            written.write_text(json.dumps(noticed, indent=0, sort_keys=True) + "\n")
            written.replace(NOTICED_FILE)
    counts = ", ".join(f"{len(names)} {outcome}" for outcome, names in sorted(outcomes.items()))
    print(f"{counts} in {time.monotonic() - start:.0f} s, tier: {args.tier}")
    return int(outcomes.keys() != {"noticed"})


def _modules(noticed: dict, mutant: Mutant) -> set[str]:
    return {tests[0].partition("::")[0] for tests in noticed.get(mutant.name, {}).values() if tests}


def _detail(mutant: Mutant, result: Result) -> str:
    if result.outcome == "noticed":
        return f"by {result.test}, {result.tests_run} tests"
    if result.outcome == "moved":
        return f"the line is not in {mutant.file} {mutant.function} exactly once: {mutant.line.strip()}"
    left = f"; {result.left_out} that reach it were not run (--limit)" if result.left_out else ""
    return f"{result.tests_run} tests passed{left}: {mutant.breaks}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except pytest.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
