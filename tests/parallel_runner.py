"""Run the tests in several pytest processes: `python tests/parallel_runner.py PYTEST_ARGUMENTS`.

Every process collects all tests and runs the modules that no other process has claimed; a claim is a file that only one
process can create. Folders whose tests mostly wait for time limits run in one additional process each, so that the
waits cost no core; where paths are given, they are ordinary folders. pytest-xdist is not used: its workers have an
additional thread, and the tests start ranks by fork, which could find that thread holding a lock.

MOE_TRAINER_TEST_PROCESSES sets the number of processes for the other modules (default: one more than cores, because
tests also wait, at most 5).
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

CLAIMS_VARIABLE = "MOE_TRAINER_TEST_CLAIMS"
WAITING_VARIABLE = "MOE_TRAINER_TEST_WAITING"
CLAIMS = pytest.StashKey[str | None]()
WAITING = pytest.StashKey[bool]()
WAITING_FOLDERS = ("tests/resilience/", "tests/slurm/")
"""Folders whose tests mostly wait for time limits; no two tests of such a folder run at the same time."""
FIRST_FOLDERS = tuple(
    f"tests/{name}/" for name in "training verification scripts checkpoint emulated_cuda memory estimate moe".split()
)
"""Folders with the longest modules: what starts last should be short, so that the processes finish together."""
SINGLE_PROCESS_OPTIONS = (
    "-s --capture --pdb --trace --lf --last-failed --ff --failed-first --nf --new-first --sw --stepwise --co "
    "--collect-only --cache- --setup- --fixtures --markers --junit --debug -h --help -V --version"
).split()
"""Options that need the terminal, write one file, run nothing, or order the tests themselves."""


# ---- hooks in every pytest process, imported by tests/conftest.py


def pytest_configure(config) -> None:
    """Take the process's role out of the environment, so that a pytest started by a test does not inherit it."""
    config.stash[CLAIMS] = os.environ.pop(CLAIMS_VARIABLE, None)
    config.stash[WAITING] = os.environ.pop(WAITING_VARIABLE, None) is not None


def pytest_runtestloop(session) -> bool | None:
    """Run the tests that this process claims; return None, for pytest's own loop, in a single process."""
    if session.config.stash[CLAIMS] is None:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted("errors during collection")
    folder = Path(session.config.stash[CLAIMS])
    items = iter(session.items) if session.config.stash[WAITING] else claimed_items(session.items, folder)
    item = next(items, None)
    while item is not None and not (folder / "stop").exists():
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:  # -x: stop the other processes too
            (folder / "stop").touch()
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def pytest_terminal_summary(terminalreporter) -> None:
    """Write this process's results, and store the failures of all processes for --last-failed."""
    if terminalreporter.config.stash[CLAIMS] is None:
        return
    folder, stats = Path(terminalreporter.config.stash[CLAIMS]), terminalreporter.stats
    outcomes = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
    counts = {outcome: len(stats[outcome]) for outcome in outcomes if outcome in stats}
    failed = [report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())]
    partial = folder / f"{os.getpid()}.part"
    partial.write_text(json.dumps({"counts": counts, "failed": failed}))
    partial.rename(partial.with_suffix(".json"))
    cache = getattr(terminalreporter.config, "cache", None)
    if cache is not None:
        cache.set("cache/lastfailed", {name: True for result in read_results(folder) for name in result["failed"]})


def claimed_items(items: list, folder: Path) -> Iterator:
    """Yield the tests of the units (modules or waiting folders) that this process claims first, long folders first."""
    units: dict[str, list] = {}
    for item in items:
        module = item.nodeid.partition("::")[0]
        units.setdefault(next((name for name in WAITING_FOLDERS if module.startswith(name)), module), []).append(item)

    def rank(unit: str) -> int:
        return next((at for at, name in enumerate(FIRST_FOLDERS) if unit.startswith(name)), len(FIRST_FOLDERS))

    for unit in sorted(units, key=rank):
        if claim(folder, unit):
            yield from units[unit]


def claim(folder: Path, unit: str) -> bool:
    """Return True if no other process has claimed the unit before."""
    try:
        (folder / unit.replace("/", "+")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def read_results(folder: Path) -> list[dict]:
    """Return the results of the processes that have finished."""
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


# ---- the parent process


def main(argv: list[str]) -> int:
    """Run pytest; return its exit code, or the first nonzero one of several processes."""
    count = int(os.environ.get("MOE_TRAINER_TEST_PROCESSES") or min((os.cpu_count() or 1) + 1, 5))
    command = [sys.executable, "-m", "pytest", *argv]
    if count < 2 or any(_needs_single_process(argument) for argument in argv):
        return subprocess.call(command)
    start = time.monotonic()
    has_paths = any(not argument.startswith("-") and Path(argument).exists() for argument in argv)
    waiting = [] if has_paths else [folder for folder in WAITING_FOLDERS if Path(folder).is_dir()]
    total_count = count + len(waiting)
    with tempfile.TemporaryDirectory(prefix="claims") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        outputs = [None, *(stack.enter_context((folder / f"output{at}").open("w+")) for at in range(1, total_count))]
        # every process runs a part of the tests, so its percentage would never reach 100
        command += ["-o", "console_output_style=classic"]
        env = {**os.environ, CLAIMS_VARIABLE: name}
        started = [(command, env)] * count
        for unit in waiting:
            claim(folder, unit)
            started.append(([*command, unit], {**env, WAITING_VARIABLE: "1"}))
        processes = [
            subprocess.Popen(arguments, stdout=output, stderr=output and subprocess.STDOUT, env=environment)
            for output, (arguments, environment) in zip(outputs, started, strict=True)
        ]
        try:
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt:  # the terminal has sent it to the children too
            codes = [process.wait() for process in processes]
        for number, output in enumerate(outputs[1:], 2):
            output.seek(0)
            print(f"\n==== process {number} of {total_count}\n{output.read()}", end="", flush=True)
        results = read_results(folder)
    names = dict.fromkeys(outcome for result in results for outcome in result["counts"])
    total = ", ".join(f"{sum(result['counts'].get(name, 0) for result in results)} {name}" for name in names)
    elapsed = time.monotonic() - start
    print(f"\n==== {total_count} processes together: {total or 'no tests'} in {elapsed:.0f} s")
    # 5: no tests among those selected, an error only if all processes report it
    codes = [code for code in codes if code != 5] or [5]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _needs_single_process(argument: str) -> bool:
    return ".py" in argument or any(
        argument == option or (option.startswith("--") and argument.startswith(option))
        for option in SINGLE_PROCESS_OPTIONS
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
