#!/usr/bin/env python3
"""Where the time of an iteration goes, from a report of NVIDIA Nsight Systems of one rank.

    PROFILE=nsys bash scripts/sbatch_train.sh ... --nvtx-ranges     writes OUTPUT_PATH/nsys/NAME-rank0.sqlite
    nsys export --type sqlite NAME.nsys-rep                         makes the same of any report
    python scripts/analyze_nsys.py NAME-rank0.sqlite [--json FILE]

For each iteration: time of kernels, of communication, of communication that no computation hides, time in which the
device does nothing, kernels launched, and host synchronizations. Then the kernels' time by phase (experts, dispatch,
attention, ...), forward and backward, as a mean over the iterations. The ranges are those of --nvtx-ranges
(moe_trainer/metrics/nvtx.py); a kernel belongs to the innermost range in which it was launched. Kernels of a CUDA graph
are launched at once, so they belong to the range of the replay. Needs Python alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

PUSH_POP, START_END = 59, 60
"""Types of NVTX_EVENTS that are ranges."""
PROCESS_BITS = 24
"""A thread's global id without these low bits is its process's."""
COMMUNICATION = re.compile(r"nccl|nvshmem|deep_?ep|hybrid_?ep|(intranode|internode)::", re.IGNORECASE)
WAITS = re.compile(r"(Device|Stream|Event|Ctx)Synchronize|^cudaMemcpy(_v\d+)?$")
ACTIVITIES = ("KERNEL", "MEMCPY", "MEMSET")
PARTS = {"self_attention": "attention", "shared_experts": "shared experts", "mlp": "mlp", "layer": "layer, rest"}
Interval = tuple[int, int]


class Range(NamedTuple):
    """Range of the host, in nanoseconds."""

    start: int
    end: int
    thread: int
    name: str


class Kernel(NamedTuple):
    """Kernel or copy on the device, with the time and the thread of its launch."""

    start: int
    end: int
    launch: int
    thread: int
    name: str

    @property
    def is_communication(self) -> bool:
        return COMMUNICATION.search(self.name) is not None


@dataclass
class Iteration:
    """Milliseconds of one iteration on the device, from its first kernel to its last.

    Attributes:
        exposed: communication during which nothing is computed.
    """

    name: str
    span: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    kernels: int = 0
    host_waits: int = 0
    host_wait: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


class ReportError(ValueError):
    """Error for a file that cannot be analyzed."""


def read_report(path: Path) -> tuple[list[Range], list[Kernel], list[Range]]:
    """Return ranges, kernels and the host's waits.

    Raises:
        ReportError: if the file is not such a report, or has no kernels or ranges.
    """
    if path.is_dir():
        raise ReportError("this is a directory; give the SQLite file that nsys export --type sqlite makes")
    if not path.is_file():
        raise ReportError("there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as report:
            return _read_tables(report)
    except sqlite3.Error as error:
        problem = f"this is no SQLite file of a report ({error}); nsys export --type sqlite makes one"
        raise ReportError(problem) from error


def _read_tables(report: sqlite3.Connection) -> tuple[list[Range], list[Kernel], list[Range]]:
    tables = {name for (name,) in report.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    needed = {"NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"}
    if missing := sorted(needed - tables):
        raise ReportError(f"it has no {missing[0]}; profile with --trace=cuda,nvtx and train with --nvtx-ranges")
    ranges = [
        Range(*row)
        for row in _rows(
            report,
            "NVTX_EVENTS",
            "SELECT n.start, n.end, n.globalTid, COALESCE(n.text, s.value) FROM NVTX_EVENTS n "
            "LEFT JOIN StringIds s ON s.id = n.textId WHERE n.eventType IN (?, ?) AND n.end IS NOT NULL "
            "AND COALESCE(n.text, s.value) IS NOT NULL ORDER BY n.start",
            (PUSH_POP, START_END),
        )
    ]
    kernels = [kernel for kind in ACTIVITIES if _table(kind) in tables for kernel in _read_kernels(report, kind)]
    calls = _rows(
        report,
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "SELECT r.start, r.end, r.globalTid, s.value FROM CUPTI_ACTIVITY_KIND_RUNTIME r "
        "JOIN StringIds s ON s.id = r.nameId WHERE r.end IS NOT NULL ORDER BY r.start",
    )
    waits = [Range(*row) for row in calls if WAITS.search(row[3])]
    return ranges, sorted(kernels, key=lambda kernel: kernel.launch), waits


def _table(kind: str) -> str:
    return f"CUPTI_ACTIVITY_KIND_{kind}"


def _read_kernels(report: sqlite3.Connection, kind: str) -> Iterator[Kernel]:
    name = "s.value" if kind == "KERNEL" else f"'{kind.lower()}'"
    join = "JOIN StringIds s ON s.id = k.shortName" if kind == "KERNEL" else ""
    query = (
        f"SELECT k.start, k.end, r.start, r.globalTid, {name} FROM {_table(kind)} k {join} "
        "JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId "
        "AND (r.globalTid >> ?) = (k.globalPid >> ?) WHERE k.end IS NOT NULL"
    )
    return (Kernel(*row) for row in _rows(report, _table(kind), query, (PROCESS_BITS, PROCESS_BITS)))


def _rows(report: sqlite3.Connection, table: str, query: str, values: tuple[int, ...] = ()) -> Iterator[tuple]:
    """Yield the rows of a query: times, a thread, a name. SQLite stores any type in any column.

    Raises:
        ReportError: if a time is no integer, or a name is no text.
    """
    for row in report.execute(query, values):
        *times, _, name = row
        wrong = [value for value in times if type(value) is not int] + ([] if type(name) is str else [name])
        if wrong:
            raise ReportError(f"{table} has {wrong[0]!r} where a time (an integer) or a name (text) is needed")
        yield row


def innermost(ranges: Iterable[Range], kernels: Sequence[Kernel]) -> list[Range | None]:
    """Return for each kernel, in the order of launches, the range that began last of those open at its launch.

    Ranges of the launching thread come first; those of other threads count where it has none.
    """
    waiting, position = sorted(ranges, key=lambda each: each.start), 0
    open_ranges: list[Range] = []
    found: list[Range | None] = []
    for kernel in kernels:
        while position < len(waiting) and waiting[position].start <= kernel.launch:
            open_ranges.append(waiting[position])
            position += 1
        open_ranges = [each for each in open_ranges if each.end >= kernel.launch]
        same = [each for each in open_ranges if each.thread == kernel.thread]
        found.append(max(same or open_ranges, key=lambda each: (each.start, -each.end), default=None))
    return found


def phase(name: str) -> str:
    """Return the phase of a range: its name without the numbers of layers and microbatches."""
    rest = name.removeprefix("backward of ")
    suffix = " backward" if rest != name else ""
    if match := re.fullmatch(r"(decoder|mtp)\.layers\.\d+(?:\.(.+))?", rest):
        last = (match[2] or "layer").rpartition(".")[2]
        return PARTS.get(last, last) + suffix
    if match := re.match(r"(forward|backward|weight gradients) microbatch ", rest):
        return f"{match[1]}, outside layers"
    return "iteration, rest" if re.fullmatch(r"iteration \d+", rest) else rest + suffix


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of disjoint intervals in milliseconds."""
    return sum(end - start for start, end in intervals) / 1e6


def analyze(ranges: list[Range], kernels: list[Kernel], waits: list[Range]) -> list[Iteration]:
    """Return the iterations of a report.

    Raises:
        ReportError: if no iteration is marked.
    """
    marked = [each for each in ranges if re.fullmatch(r"iteration \d+", each.name)]
    if not marked:
        raise ReportError("it has no ranges of iterations; train with --nvtx-ranges")
    owners, results = innermost(ranges, kernels), []
    for whole in marked:
        inside = [index for index, each in enumerate(kernels) if whole.start <= each.launch <= whole.end]
        if not inside:
            continue
        result, chosen = Iteration(whole.name), [kernels[index] for index in inside]
        computing = union((each.start, each.end) for each in chosen if not each.is_communication)
        communicating = union((each.start, each.end) for each in chosen if each.is_communication)
        busy = union([*computing, *communicating])
        result.span = (busy[-1][1] - busy[0][0]) / 1e6
        result.compute, result.communication = length(computing), length(communicating)
        result.exposed = length(busy) - result.compute
        result.idle, result.kernels = result.span - length(busy), len(chosen)
        waited = [each for each in waits if whole.start <= each.start <= whole.end]
        result.host_waits, result.host_wait = len(waited), sum(each.end - each.start for each in waited) / 1e6
        phases: Counter[str] = Counter()
        for index in inside:
            owner = owners[index]
            phases[phase(whole.name if owner is None else owner.name)] += kernels[index].end - kernels[index].start
        result.phases = {name: time / 1e6 for name, time in phases.most_common()}
        results.append(result)
    return results


def report_lines(iterations: list[Iteration]) -> Iterator[str]:
    """Yield the tables."""
    columns = ("span", "compute", "communication", "exposed", "idle", "kernels", "host_waits", "host_wait")
    yield "ms".ljust(16) + "".join(name.replace("_", " ").rjust(14) for name in columns)
    for each in iterations:
        values = (getattr(each, name) for name in columns)
        yield each.name.ljust(16) + "".join(
            (f"{value:.3f}" if isinstance(value, float) else str(value)).rjust(14) for value in values
        )
    phases: Counter[str] = Counter()
    for each in iterations:
        phases.update(each.phases)
    total = sum(phases.values()) or 1.0  # kernels without a duration
    yield ""
    yield "kernels by phase, ms per iteration and share"
    for name, time in phases.most_common():
        yield f"{name.ljust(40)}{time / len(iterations):12.3f}{100 * time / total:7.1f} %"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analyze_nsys.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="SQLite export of a report")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    options = parser.parse_args(words)
    if options.json is not None and options.json.resolve() == options.report.resolve():
        parser.error(f"--json {options.json} is the report, which it would overwrite")
    try:
        iterations = analyze(*read_report(options.report))
        if not iterations:
            raise ReportError("no kernel was launched in an iteration")
    except ReportError as error:
        print(f"analyze_nsys.py: {options.report}: {error}", file=sys.stderr)
        return 2
    print("\n".join(report_lines(iterations)))
    if options.json is not None:
        try:
            options.json.write_text(json.dumps([asdict(each) for each in iterations], indent=1) + "\n")
        except OSError as error:
            print(f"analyze_nsys.py: --json {options.json}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
