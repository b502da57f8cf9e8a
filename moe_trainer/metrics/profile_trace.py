"""What the traces of --profile show of each rank: computation, communication, and how much of it is exposed. No torch.

A trace of a GPU is read by its kernels: those of NCCL communicate, copies are apart, all others compute. A trace
without kernels is that of a CPU: operators on the threads of the program compute, what Gloo's threads run communicates.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_trainer.drawing.report_page import Figure
from moe_trainer.drawing.svg import BLUE, GRAY, ORANGE, PURPLE
from moe_trainer.drawing.trace_timeline import Interval, Lane, merge, trace_timeline

COMPUTE, BACKWARD, COMMUNICATION, COPY = "computation", "backward", "communication", "copies"
COLORS = MappingProxyType({COMPUTE: BLUE, BACKWARD: ORANGE, COMMUNICATION: PURPLE, COPY: GRAY})
_LANES = (("computes", (COMPUTE, BACKWARD)), ("communicates", (COMMUNICATION,)), ("copies", (COPY,)))
_NAME = re.compile(r"rank(\d+)_iterations")
_KERNELS = MappingProxyType({"kernel": COMPUTE, "gpu_memcpy": COPY, "gpu_memset": COPY})


class TraceError(ValueError):
    """A file that is no trace of a rank."""


@dataclass(frozen=True)
class RankTrace:
    """The work of one rank.

    Attributes:
        work: by kind, the intervals in ms since the epoch of the rank's clock; they may overlap.
    """

    rank: int
    path: Path
    work: Mapping[str, Sequence[Interval]] = field(repr=False)

    @property
    def compute(self) -> list[Interval]:
        """When the rank computes."""
        return merge([*self.work.get(COMPUTE, ()), *self.work.get(BACKWARD, ())])

    @property
    def communicate(self) -> list[Interval]:
        """When the rank communicates."""
        return merge(self.work.get(COMMUNICATION, ()))

    @property
    def exposed(self) -> float:
        """Milliseconds in which the rank communicates and does not compute."""
        compute = self.compute
        return length(merge([*compute, *self.communicate])) - length(compute)


def length(intervals: Sequence[Interval]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - start for start, end in intervals)


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and of folders the traces that --profile wrote there.

    Raises:
        TraceError: if a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        found = (
            [path] if not path.is_dir() else sorted(each for each in path.glob("rank*.json") if _NAME.match(each.name))
        )
        if not found:
            raise TraceError(f"{path}: no trace there (rankR_iterationsA-B.json; --profile --use-pytorch-profiler)")
        files += found
    return files


def read_traces(files: Sequence[Path]) -> list[RankTrace]:
    """Read one trace per rank, in the order of ranks.

    Raises:
        TraceError: if a file is no trace, or two are of one rank.
    """
    traces: dict[int, RankTrace] = {}
    for path in files:
        trace = read_trace(path)
        if trace.rank in traces:
            other = traces[trace.rank].path
            raise TraceError(f"{path}: {other} is of rank {trace.rank} too; name one trace of each rank")
        traces[trace.rank] = trace
    return [traces[rank] for rank in sorted(traces)]


def read_trace(path: Path) -> RankTrace:
    """Read a Chrome trace of torch's profiler.

    Raises:
        TraceError: if it is none, or empty.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        events = [_Event.of(event) for event in content["traceEvents"] if event.get("ph") == "X"]
        base = float(content.get("baseTimeNanoseconds", 0)) / 1e6
        match = _NAME.search(path.name)
        rank = int(content.get("distributedInfo", {}).get("rank", match[1] if match else 0))
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TraceError(f"{path}: not a Chrome trace of torch's profiler") from None
    work: dict[str, list[Interval]] = defaultdict(list)
    for kind, event in _kernels(events) if any(event.category == "kernel" for event in events) else _operators(events):
        work[kind].append((base + event.start, base + event.end))
    if not work:
        raise TraceError(f"{path}: the trace has neither operators nor kernels")
    return RankTrace(rank, path, work)


@dataclass(frozen=True)
class _Event:
    """One event of a trace, in ms."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start: float
    end: float

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> _Event:
        start = float(event["ts"]) / 1e3
        thread = event.get("pid"), event.get("tid")
        return cls(str(event["name"]), str(event.get("cat")), thread, start, start + float(event.get("dur", 0)) / 1e3)


def _kernels(events: Sequence[_Event]) -> Iterator[tuple[str, _Event]]:
    for event in events:
        if event.category in _KERNELS:
            yield COMMUNICATION if "nccl" in event.name else _KERNELS[event.category], event


def _operators(events: Sequence[_Event]) -> Iterator[tuple[str, _Event]]:
    """Yield the outermost operators of the threads that compute, and the collectives of Gloo.

    Gloo's own threads run operators inside of their collectives only. A collective on a thread that computes is
    asynchronous, and operators run meanwhile.
    """
    gloo, operators = defaultdict(list), defaultdict(list)
    for event in events:
        if event.name.startswith("gloo:"):
            gloo[event.thread].append(event)
            yield COMMUNICATION, event
        elif event.category == "cpu_op":
            operators[event.thread].append(event)
    for thread, found in operators.items():
        collectives = [(event.start, event.end) for event in gloo[thread]]
        together = merge([*collectives, *((event.start, event.end) for event in found)])
        if together == merge(collectives):
            continue
        busy_until = -math.inf
        for event in sorted(found, key=lambda event: (event.start, -event.end)):
            if event.start >= busy_until:
                busy_until = event.end
                if not event.name.startswith("c10d::"):
                    yield BACKWARD if event.name.startswith("autograd::engine") else COMPUTE, event


def trace_lines(traces: Sequence[RankTrace]) -> Iterator[str]:
    """Yield the lines of a table: ms of each rank, and the share of the time that all traces cover."""
    start, end = _span(traces)
    whole = end - start
    ranks = f"{len(traces)} rank{'s' if len(traces) != 1 else ''}"
    yield f"{ranks}, {whole:,.1f} ms from the first event of a rank to the last one"
    yield f"{'rank':>6s} {'computes ms':>16s} {'communicates ms':>22s} {'of it exposed ms':>22s} {'idle ms':>18s}"
    for trace in traces:
        compute, communicate, exposed = length(trace.compute), length(trace.communicate), trace.exposed
        columns = [(compute, 16), (communicate, 22), (exposed, 22), (whole - compute - exposed, 18)]
        numbers = " ".join(f"{f'{value:,.1f} ({value / whole:4.0%})':>{width}s}" for value, width in columns)
        yield f"{trace.rank:6d} {numbers}"


def trace_figure(traces: Sequence[RankTrace]) -> Figure:
    """Draw all ranks on one time axis."""
    start, end = _span(traces)
    ranks = []
    for trace in traces:
        shifted = {
            kind: tuple((first - start, last - start) for first, last in intervals)
            for kind, intervals in trace.work.items()
        }
        lanes = [
            Lane(name, tuple((kind, shifted[kind]) for kind in kinds if kind in shifted)) for name, kinds in _LANES
        ]
        ranks.append((f"rank {trace.rank}", [lane for lane in lanes if lane.work]))
    heading = f"{len(traces)} rank{'s' if len(traces) != 1 else ''}, {end - start:,.1f} ms"
    svg = trace_timeline("Profile of all ranks on one time axis", heading, ranks, dict(COLORS), end - start, "ms")
    caption = (
        "Ranks are placed by the clocks of their machines. Waiting for another rank counts as communication; inside of "
        "an operator of a CPU, as computation."
    )
    return Figure("Profile", svg, caption)


def _span(traces: Sequence[RankTrace]) -> tuple[float, float]:
    intervals = [interval for trace in traces for each in trace.work.values() for interval in each]
    return min(start for start, _ in intervals), max(end for _, end in intervals)
