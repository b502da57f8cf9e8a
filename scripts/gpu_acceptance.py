#!/usr/bin/env python3
"""Run all checks that need GPUs, and write one dated report.

python scripts/gpu_acceptance.py                                  all sections, to gpu_acceptance-DATE-TIME/
python scripts/gpu_acceptance.py --only waits graphs --output FOLDER
python scripts/gpu_acceptance.py --budget 480 --only runs tests benchmark:1
python scripts/gpu_acceptance.py --short                          only the first line of every section
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from arguments.machine import ALLOCATOR, EXPANDABLE
from arguments.paths import find_path_problem
from scripts import acceptance_checks, acceptance_times
from scripts.acceptance_checks import Check, NotMeasuredError
from scripts.acceptance_report import FAILED, NOT_MEASURED, PASSED, Line, Results, get_provenance

DETAILS = """\
Sections whose lines run side by side, as many processes as there are cores and half as many again:
  environment   driver, GPUs, links, torch, CUDA, NCCL; version or import error of every optional library
  runs          five tiny presets by pretrain_moe.py, four iterations in bf16
  kernels       every Triton kernel against torch: results
  parity        every tiny preset, three steps: one process on the CPU against the GPU
  graphs        captured and replayed against eager, as in tests/gpu/test_cuda_graph.py
  waits         training steps under torch.cuda.set_sync_debug_mode("error"), except documented waits
  races         short trainings under the stream sanitizer of torch (torch.cuda._sanitizer)
  tests         tests/gpu, one pytest process per test function
  dispatchers   experts on 2, 4 and 8 GPUs: alltoall and allgather against one process, the others against
                alltoall
Sections that measure times; each runs alone, after those above:
  benchmark     scripts/benchmarks/bench_gpu.py: slices of large models; transformers and torchtitan if installed
  kernel_times  every Triton kernel against torch: time
  profile       the largest gaps between kernels of one training step, the cause of each, and the longest kernels
  alternatives  the first slice of the benchmark with other attention and GEMM kernels

A line that fails, crashes or exceeds --time-limit is a failed line, and its section continues in a new process. Each
line is "passed", "failed" or "not measured" with the reason. With --budget everything ends in time: sections side by
side may use half of the budget if others follow, and each of those an equal share of the rest; what was not reached is
not measured. The directory has three files, rewritten while the checks run: report.md, report.json, and
details.tar.gz (at most 16 MiB) with the logs and the profiler's traces.

Exit code: 0, nothing failed; 1, a line failed; 2, wrong command line or no CUDA device; 130, Ctrl-C.
"""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
START_S = 60.0  # for imports, before a line begins
RESERVE_S = 2.0  # of the budget, to write the results


class Section(NamedTuple):
    """A group of lines.

    Attributes:
        lines: yields their names and checks.
        parts: at most so many processes share its lines.
        is_timed: it measures times, and runs alone.
        needs: packages without which no line can be checked.
    """

    lines: Callable[[], Iterator[tuple[str, Check]]]
    parts: int = 1
    is_timed: bool = False
    needs: tuple[str, ...] = ()


PYTEST = ("pytest",)
SECTIONS = {
    "environment": Section(acceptance_checks.environment),
    "runs": Section(acceptance_checks.runs, parts=5),
    "kernels": Section(acceptance_checks.kernels, parts=4),
    "parity": Section(acceptance_checks.parity, parts=4, needs=PYTEST),
    "graphs": Section(acceptance_checks.graphs, parts=3, needs=PYTEST),
    "waits": Section(acceptance_checks.waits, parts=4, needs=PYTEST),
    "races": Section(acceptance_checks.races, parts=3, needs=PYTEST),
    "tests": Section(acceptance_checks.tests, parts=13, needs=("pytest", "hypothesis")),
    "dispatchers": Section(acceptance_checks.dispatchers, needs=PYTEST),
    "benchmark": Section(acceptance_times.benchmark, is_timed=True),
    "kernel_times": Section(acceptance_times.kernel_times, is_timed=True),
    "profile": Section(acceptance_times.profile, is_timed=True),
    "alternatives": Section(acceptance_times.alternatives, is_timed=True),
}
"""In the order of what they show for their time."""


class Part(NamedTuple):
    """Lines index, index + parts, index + 2 * parts, ... of a section, those below `most`; None for all."""

    section: str
    index: int = 0
    parts: int = 1
    most: int | None = None


def run_part(part: Part, results: Path, skip: int) -> None:
    """Check the lines of a part but the first `skip`, and append the results to a file.

    The main function of a part's process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # do not outlive a supervisor that is killed

    def write(**record) -> None:
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")

    for number, (name, check) in enumerate(SECTIONS[part.section].lines()):
        if number == part.most:
            break
        if number % part.parts != part.index or number // part.parts < skip:
            continue
        write(begins=name)
        start, below = time.monotonic(), []
        try:
            result = check()
            status, detail = PASSED, result if isinstance(result, str) else result.detail
            below = [] if isinstance(result, str) else result.below
        except NotMeasuredError as error:
            status, detail = NOT_MEASURED, str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            traceback.print_exc()
            status, detail = FAILED, f"{type(error).__name__}: {error}"
        line = Line(part.section, name, status, " ".join(detail.split())[:600], time.monotonic() - start, below)
        write(**asdict(line))
    write(ends=True)


class PartProcess:
    """The process of a part, and a new one after each line that ended it."""

    def __init__(self, part: Part, folder: Path, program: Path, time_limit_s: float, end: float):
        """Start it.

        Args:
            part: what it checks.
            folder: where it runs, and for its log.
            program: this script, or one like it.
            time_limit_s: of a line.
            end: of the part, in time.monotonic().
        """
        self._part, self._folder, self._program = part, folder, program
        self._time_limit_s, self._end, self._num_done = time_limit_s, end, 0
        name = part.section if part.parts == 1 else f"{part.section}-{part.index}"
        self._results, self._log = folder / f"{name}.jsonl", folder / f"{name}.log"
        self._environment = dict(os.environ)
        if path := os.environ.get("PYTHONPATH"):  # relative entries: the parts run in another directory
            self._environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
        if not SECTIONS[part.section].is_timed:
            self._environment.setdefault("OMP_NUM_THREADS", "1")
        elif not any(name in os.environ for name in ALLOCATOR):
            self._environment[ALLOCATOR[0]] = EXPANDABLE  # as pretrain_moe.py; torch reads it once
        self._start()

    def _start(self) -> None:
        self._results.unlink(missing_ok=True)
        self._results.touch()
        part = json.dumps(self._part)
        command = [sys.executable, self._program, "--run-part", part, self._results.resolve(), self._num_done]
        with self._log.open("a") as out:
            self._process = subprocess.Popen(
                list(map(str, command)),
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._num_read, self._running, self._last_change = 0, None, time.monotonic()

    def poll(self) -> tuple[list[Line], bool]:
        """Return the new lines, and whether the part has ended."""
        is_alive, records = self._process.poll() is None, complete_records(self._results.read_text())
        new, is_complete = [], False
        for record in records[self._num_read :]:
            is_complete, self._running = "ends" in record, record.get("begins")
            if "status" in record:
                self._num_done += 1
                new.append(Line(**record))
        now = time.monotonic()
        if len(records) > self._num_read:
            self._num_read, self._last_change = len(records), now
        seconds = now - self._last_change
        is_late = seconds > self._time_limit_s + (START_S if self._running is None else 0.0)
        is_over = now > self._end
        if is_alive and not is_late and not is_over and not is_complete:
            return new, False
        self.stop()
        if is_complete:
            self._results.unlink()
            return new, True
        name = self._running or "between lines"
        if is_over:
            reason = f"stopped after {seconds:.0f} s, when the section had used its share of --budget; nor was any "
            return [*new, self._line(name, NOT_MEASURED, f"{reason}line behind it", seconds)], True
        reason = f"its process ended with {self._process.returncode}"
        if is_late:
            reason = f"took longer than {self._time_limit_s:.0f} s (--time-limit)"
        new.append(self._line(name, FAILED, f"{reason}; see {self._log.name}", seconds))
        if self._running is None:
            return new, True  # the generator of the lines failed
        self._num_done += 1
        self._start()
        return new, False

    def _line(self, name: str, status: str, detail: str, seconds: float) -> Line:
        return Line(self._part.section, name, status, detail, seconds)

    def stop(self) -> None:
        """Kill the process and its descendants."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_parts(
    parts: list[Part], folder: Path, program: Path, time_limit_s: float, deadline: float
) -> Iterator[list[Line]]:
    """Run parts side by side, then one by one those that measure times. Yields the new lines, often none.

    Args:
        parts: what to run.
        folder: where they run, and for their logs.
        program: this script, or one like it.
        time_limit_s: of a line.
        deadline: of all of them, in time.monotonic(); sections side by side have half of the time if others follow, and
            each of these has an equal share of what is left.
    """
    waiting = sorted(parts, key=lambda part: SECTIONS[part.section].is_timed)
    cores = len(os.sched_getaffinity(0))
    most = cores + cores // 2
    begin = time.monotonic()
    has_both = len({SECTIONS[part.section].is_timed for part in parts}) == 2
    shared_end = begin + (deadline - begin) / (2 if has_both else 1)
    running: list[PartProcess] = []
    try:
        while waiting or running:
            new: list[Line] = []
            while waiting and len(running) < (1 if SECTIONS[waiting[0].section].is_timed else most):
                now = time.monotonic()
                is_timed = SECTIONS[waiting[0].section].is_timed
                end = now + (deadline - now) / len(waiting) if is_timed else shared_end
                part = waiting.pop(0)
                if now < end:
                    running.append(PartProcess(part, folder, program, time_limit_s, end))
                else:
                    name = f"part {part.index + 1} of {part.parts}"
                    new.append(Line(part.section, name, NOT_MEASURED, "--budget was used up before it began"))
            for process in list(running):
                lines, has_ended = process.poll()
                new += lines
                if has_ended:
                    running.remove(process)
            yield new
            if running and not new:
                time.sleep(0.1)
    finally:
        for process in running:
            process.stop()


def complete_records(text: str) -> list[dict]:
    """Parse the complete lines; text after the last newline is still being written."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def parse_selection(word: str) -> tuple[str, int | None]:
    """Parse SECTION or SECTION:N."""
    name, colon, number = word.partition(":")
    if name not in SECTIONS:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(SECTIONS)})")
    if not colon:
        return name, None
    if not (number.isascii() and number.isdigit() and int(number)):
        raise argparse.ArgumentTypeError(f"{word}: a positive number of lines is needed after the colon")
    return name, int(number)


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; exits with code 2 where it is wrong, or no section can run here."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=DETAILS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "sections to run (default: all); with :N only their first N lines"
    everything = [(name, None) for name in SECTIONS]
    parser.add_argument("--only", nargs="+", metavar="SECTION[:N]", type=parse_selection, default=everything, help=text)
    parser.add_argument("--output", metavar="FOLDER", help="a directory that does not exist yet")
    text = "of everything (default: no limit)"
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help=text)
    text = "of one line (default: %(default)g)"
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS", help=text)
    parser.add_argument("--short", action="store_true", help="only the first line of every section except environment")
    options = parser.parse_args(argv)
    if options.output == "":
        parser.error("--output is empty: give the name of a new directory")
    if problem := find_path_problem(options.output or ""):
        parser.error(f"--output {options.output}: {problem}")
    options.output = Path(options.output or f"gpu_acceptance-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    for flag, seconds in (("--budget", options.budget), ("--time-limit", options.time_limit)):
        if not seconds > 0:
            parser.error(f"{flag} {seconds:g}: a positive number of seconds is needed")
    if options.output.exists():
        parser.error(f"--output {options.output} exists: give the name of a new directory")
    if problem := find_problem():
        parser.error(problem)
    try:
        options.output.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--output {options.output}: cannot create the directory ({error.strerror})")
    return options


def main(argv: list[str], program: Path = SCRIPT) -> int:
    """Run the sections, each by starting `program`. Returns the exit code."""
    if argv[:1] == ["--run-part"]:
        part, results, skip = argv[1:]
        run_part(Part(*json.loads(part)), Path(results), int(skip))
        return 0
    begin = time.monotonic()
    options = parse_options(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no section outlives this process
    with tempfile.TemporaryDirectory(prefix="gpu_acceptance-") as work:
        results = Results(options.output, Path(work), get_provenance())
        head = results.head
        if options.budget < math.inf:
            head["budget"] = f"{options.budget:g} s"
        try:
            parts, missing = choose_parts(options)
            results.add(missing)
            deadline = begin + options.budget - RESERVE_S
            for new in run_parts(parts, results.work, program, options.time_limit, deadline):
                results.add(new)  # first: a reader of a line may end this program
                for line in new:
                    print(f"{line.section}: {line.name}: {line.status}: {line.detail}", flush=True)
        except KeyboardInterrupt:
            head["stopped"] = "by Ctrl-C, before all lines were checked"
        finally:
            head["duration"] = f"{time.monotonic() - begin:.0f} s"
            results.pack()
            results.write_report()
    counts = Counter(line.status for line in results.lines)
    summary = ", ".join(f"{counts[status]} {status}" for status in (PASSED, FAILED, NOT_MEASURED))
    print(f"{summary}; {head['duration']}; {options.output / 'report.md'}")
    return 130 if "stopped" in head else int(counts[FAILED] > 0)


def choose_parts(options: argparse.Namespace) -> tuple[list[Part], list[Line]]:
    """Return the parts of the chosen sections, and a line for each section whose packages are missing."""
    parts, missing = [], []
    for name, most in dict(options.only).items():
        section = SECTIONS[name]
        absent = [package for package in section.needs if importlib.util.find_spec(package) is None]
        if absent:
            detail = f"the package {absent[0]} is not installed"
            missing.append(Line(name, "all lines", NOT_MEASURED, detail))
            continue
        if options.short and name != "environment":
            most = 1
        count = min(section.parts, len(os.sched_getaffinity(0)), most or section.parts)
        parts += [Part(name, index, count, most) for index in range(count)]
    return parts, missing


def find_problem() -> str | None:
    """Return why no section can run here; None if they can."""
    from moe_trainer.errors import UserError, require_packages

    try:
        require_packages("torch", "numpy", "safetensors")
    except UserError as error:
        return str(error)
    import torch

    if torch.cuda.is_available():
        return None
    reason = "torch sees no device (driver, CUDA_VISIBLE_DEVICES)"
    if not torch.backends.cuda.is_built():
        reason = "this torch is built without CUDA"
    return (
        f"{reason}: a machine with NVIDIA GPUs of compute capability 8.0 or later is needed. For the emulated device, "
        "run in the checkout:\nEMULATED_CUDA=2 EMULATED_CUDA_LIBRARY=$(python tests/emulated_cuda/build.py) "
        "PYTHONPATH=$PWD/tests/emulated_cuda/site TRITON_INTERPRET=1 python scripts/gpu_acceptance.py "
        "(docs/testing_without_gpu.md)"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
