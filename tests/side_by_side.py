"""Several pytest processes over one list of tests, for machines with several cores: `python tests/side_by_side.py ARGUMENTS OF PYTEST`.

Each process collects all tests and runs those of the modules that no other has claimed: a claim is a file that only one can create, so
a process that gets quick modules takes more of them. A room whose tests measure time is claimed as a whole: no two of its tests run at
the same time. Plain processes rather than pytest-xdist, whose workers have a thread of their own: tests start ranks by fork, which could
find that thread inside a lock.

MOE_TRAINER_TEST_PROCESSES says how many processes (one per core up to 4, where it is not set).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = "MOE_TRAINER_TEST_CLAIMS"
CLAIMS = pytest.StashKey[str | None]()
AT_ONCE = ("tests/guard/",)
"""Rooms in which waits and time limits are looked at; one process has such a room."""
FIRST = ("tests/guard/", "tests/train/", "tests/slurm/", "tests/proof/", "tests/checkpoint/", "tests/moe/", "tests/layers/")
"""Rooms with the longest modules: what is begun last should be short, that the processes end together. Of guard/ and
slurm/, which mostly wait, one has begun long before the other: a core would be idle meanwhile."""
ONE_PROCESS = ("-s", "--capture", "--pdb", "--trace", "--lf", "--last-failed", "--ff", "--failed-first", "--nf", "--new-first", "--sw",
               "--stepwise", "--co", "--collect-only", "--cache-", "--setup-", "--fixtures", "--markers", "--junit", "--debug",
               "-h", "--help", "-V", "--version")
"""What needs the terminal, writes one file, runs nothing or orders the tests itself; so do files that are named one by one."""


# ---- in each pytest process: hooks that tests/conftest.py takes over

def pytest_configure(config) -> None:
    """The folder is for this process: a pytest that a test starts is on its own."""
    config.stash[CLAIMS] = os.environ.pop(FOLDER, None)


def pytest_runtestloop(session) -> bool | None:
    """Run what this process claims; None, which is pytest's own loop, where it is alone."""
    if session.config.stash[CLAIMS] is None:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted("errors during collection")
    folder = Path(session.config.stash[CLAIMS])
    items = claimed(session.items, folder)
    item = next(items, None)
    while item is not None and not (folder / "stop").exists():
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:  # -x: enough failures for all
            (folder / "stop").touch()
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def pytest_terminal_summary(terminalreporter) -> None:
    """Write down what came out, and let --lf know of the failures of all."""
    if terminalreporter.config.stash[CLAIMS] is None:
        return
    folder, stats = Path(terminalreporter.config.stash[CLAIMS]), terminalreporter.stats
    counts = {outcome: len(stats[outcome]) for outcome in ("failed", "error", "passed", "skipped", "xfailed", "xpassed") if outcome in stats}
    failed = [report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())]
    own = folder / f"{os.getpid()}.part"
    own.write_text(json.dumps({"counts": counts, "failed": failed}))
    own.rename(own.with_suffix(".json"))
    cache = getattr(terminalreporter.config, "cache", None)
    if cache is not None:
        cache.set("cache/lastfailed", {name: True for result in results(folder) for name in result["failed"]})


def claimed(items: list, folder: Path) -> Iterator:
    """The tests of one module after the other that this process is the first to ask for, long rooms first."""
    units: dict[str, list] = {}
    for item in items:
        module = item.nodeid.partition("::")[0]
        units.setdefault(next((room for room in AT_ONCE if module.startswith(room)), module), []).append(item)
    for unit in sorted(units, key=lambda unit: next((at for at, room in enumerate(FIRST) if unit.startswith(room)), len(FIRST))):
        try:
            (folder / unit.replace("/", "+")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from units[unit]


def results(folder: Path) -> list[dict]:
    """What the processes that have ended wrote."""
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


# ---- the process that starts them

def main(argv: list[str]) -> int:
    """Run pytest; returns its exit code, or the first one that is not zero."""
    count = int(os.environ.get("MOE_TRAINER_TEST_PROCESSES") or min(os.cpu_count() or 1, 4))
    command = [sys.executable, "-m", "pytest", *argv]
    if count < 2 or any(_alone(word) for word in argv):
        return subprocess.call(command)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="claims") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        outputs = [None, *(stack.enter_context((folder / f"output{number}").open("w+")) for number in range(1, count))]
        # of all tests each process runs a part, so a percentage would never reach 100
        command += ["-o", "console_output_style=classic"]
        running = [subprocess.Popen(command, stdout=output, stderr=output and subprocess.STDOUT, env={**os.environ, FOLDER: name})
                   for output in outputs]
        try:
            codes = [process.wait() for process in running]
        except KeyboardInterrupt:  # the terminal has told them too
            codes = [process.wait() for process in running]
        for number, output in enumerate(outputs[1:], 2):
            output.seek(0)
            print(f"\n==== process {number} of {count}\n{output.read()}", end="", flush=True)
        found = results(folder)
    names = dict.fromkeys(outcome for result in found for outcome in result["counts"])
    total = ", ".join(f"{sum(result['counts'].get(outcome, 0) for result in found)} {outcome}" for outcome in names)
    print(f"\n==== {count} processes together: {total or 'no tests'} in {time.monotonic() - began:.0f} s")
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _alone(word: str) -> bool:
    return ".py" in word or any(word == given or (given.startswith("--") and word.startswith(given)) for given in ONE_PROCESS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
