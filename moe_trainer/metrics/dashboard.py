"""dashboard.html: a self-contained page (no network, no server) that shows a run from its metrics.jsonl.

    python -m moe_trainer.metrics.dashboard runs/a/metrics.jsonl      writes runs/a/dashboard.html

`Dashboard` collects the records as they are written and rewrites the page now and then, in at most a hundredth of the
run's time. The size of the page is bounded: of a long run it shows evenly spaced records and always the newest. A
page that cannot be written never ends a run. The plots are uPlot's (page/uPlot.*, version 1.6.32, MIT license,
https://github.com/leeoniya/uPlot). Rejected: a page that fetches metrics.jsonl, which browsers do not allow for local
files, and plotting libraries of megabytes.
"""

from __future__ import annotations

import html
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import atomic_path

logger = logging.getLogger(__name__)

MAX_RECORDS = 2000
MAX_EVENTS = 500
MAX_PARSED_BYTES = 200_000_000  # of a metrics file
MAX_LAYER_VALUES = 200_000
MAX_LOADS = 300_000
MAX_TIME_SHARE = 0.01
_MAX_DRAWN = 1e300  # largest number that the page can draw


class DownsampledList:
    """A list that keeps at most `limit` items, evenly spaced over all that were added, and the last one."""

    def __init__(self, limit: int):
        self._limit, self._stride, self._count = max(2, limit), 1, 0
        self._sampled: list[Any] = []
        self._last: Any = None

    def add(self, item: Any) -> None:
        if self._count % self._stride == 0:
            self._sampled.append(item)
            if len(self._sampled) > self._limit:
                self._sampled, self._stride = self._sampled[::2], self._stride * 2
        self._count, self._last = self._count + 1, item

    def items(self) -> list[Any]:
        """Return the items that were kept, in order."""
        return self._sampled if not self._sampled or self._sampled[-1] is self._last else [*self._sampled, self._last]


class Dashboard:
    """Collects records of metrics.jsonl and writes them as a page. No method raises OSError.

    `head` has what the page shows besides: any of "train_iters", "world_size", "settings" (name -> value).
    """

    def __init__(self, path: str | Path, head: Mapping[str, Any]):
        self.path = Path(path)
        self._head = {"title": self.path.resolve().parent.name, **head}
        self._records, self._validations = DownsampledList(MAX_RECORDS), DownsampledList(MAX_RECORDS)
        self._events = DownsampledList(MAX_EVENTS)
        self._layers: DownsampledList | None = None
        self._loads: DownsampledList | None = None
        self._not_before = -math.inf
        self._has_warned = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a record without writing the page."""
        if "validation" in record:
            self._validations.add(dict(record))
            return
        self._take_routing(record)
        self._records.add({name: value for name, value in record.items() if name not in ("routing", "run")})
        if event := {name: record[name] for name in ("resumed_from", "rejected") if name in record}:
            self._events.add(event)  # records are downsampled; events must not be lost

    def _take_routing(self, record: Mapping[str, Any]) -> None:
        routing = record.get("routing")
        if routing and routing["layers"]:
            loads = routing["tokens_per_expert"]
            if self._layers is None or self._loads is None:
                self._layers = DownsampledList(MAX_LAYER_VALUES // (8 * len(loads)))
                self._loads = DownsampledList(MAX_LOADS // (len(loads) * len(loads[0])))
            self._layers.add(
                {"iteration": record["iteration"], **{k: v for k, v in routing.items() if k != "tokens_per_expert"}}
            )
            self._loads.add({"iteration": record["iteration"], "layers": routing["layers"], "tokens_per_expert": loads})

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, and write the page if it is due."""
        self.take(record)
        if time.monotonic() >= self._not_before:
            self.write()

    def write(self, done: bool = False) -> bool:
        """Write the page now and return whether that succeeded. `done`: the run has ended."""
        begin = time.monotonic()
        try:
            with atomic_path(self.path) as temporary:
                temporary.write_text(self.page(done), encoding="utf-8")
            return True
        except OSError as error:
            if not self._has_warned:
                reason = error.strerror or error
                logger.warning(f"cannot write the dashboard to {self.path} ({reason}); the run continues and retries")
            self._has_warned = True
            return False
        finally:
            self._not_before = begin + max(1.0, (time.monotonic() - begin) / MAX_TIME_SHARE)

    def page(self, done: bool = False) -> str:
        data = {
            **self._head,
            "done": done,
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            "records": self._records.items(),
            "validations": self._validations.items(),
            "events": self._events.items(),
            "layers": self._layers.items() if self._layers else [],
            "loads": self._loads.items() if self._loads else [],
        }
        return render_page(self._head["title"], data)


def render_page(title: str, data: Mapping[str, Any]) -> str:
    """Return the page with its data, as one HTML file."""
    # "</script>" or "<!--" inside a string would end or break the element that contains it
    text = json.dumps(_finite(data), separators=(",", ":"), default=str).replace("<", "\\u003c")
    directory = resources.files("moe_trainer.metrics").joinpath("page")
    page = directory.joinpath("dashboard.html").read_text(encoding="utf-8")
    files = {
        "LICENSE": "uPlot.LICENSE.txt",
        "PLOT_STYLE": "uPlot.min.css",
        "STYLE": "dashboard.css",
        "PLOT": "uPlot.iife.min.js",
        "SCRIPT": "dashboard.js",
    }
    parts = {name: directory.joinpath(file).read_text(encoding="utf-8") for name, file in files.items()}
    parts |= {"TITLE": html.escape(title), "DATA": text}
    pieces = page.split("@@")  # the template is text, name, text, name, ..., text
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _is_number(value: Any) -> bool:
    """Return whether the page can draw a value; None stands for a number that JSON cannot represent."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_DRAWN)


def _checked(record: Any) -> dict[str, Any] | None:
    """Return the fields of a line that the page can draw; None if it is not a record.

    Any program may have written the line. A string in place of a number would leave the page empty.
    """
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    if not _is_number(record["iteration"]) or "task" in record:  # the page has no figures of tasks yet
        return None
    nested = ("routing", "rejected", "own_time_ms")
    checked = {name: value for name, value in record.items() if _is_number(value) and name not in nested}
    if "validation" in record:
        return checked | {"validation": record["validation"]} if isinstance(record["validation"], str) else None
    times = record.get("own_time_ms")
    if isinstance(times, dict):
        checked["own_time_ms"] = {
            str(name): value for name, value in times.items() if _is_number(value) or isinstance(value, str)
        }
        if not all(_is_number(times.get(name)) for name in ("min", "median", "max")):
            del checked["own_time_ms"]
    rejected = record.get("rejected")
    if isinstance(rejected, list):
        types = {"iteration": int, "because": str}
        checked["rejected"] = [
            entry
            for entry in rejected
            if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in types.items())
        ]
    if _is_routing(record.get("routing")):
        checked["routing"] = record["routing"]
    return checked


def _is_routing(routing: Any) -> bool:
    """Return whether it has numbers for every layer, and equally many experts in each."""
    if not isinstance(routing, dict) or not isinstance(layers := routing.get("layers"), list) or not layers:
        return False
    loads = routing.get("tokens_per_expert")
    lists = [value for name, value in routing.items() if name not in ("tokens_per_expert", "straggler_cost")]
    required = ("load_max_over_mean", "load_entropy", "dead_experts", "rank_max_over_mean")
    return (
        _is_number(routing.get("straggler_cost"))
        and all(name in routing for name in required)
        and all(_are_numbers(values, len(layers)) for values in lists)
        and isinstance(loads, list)
        and len(loads) == len(layers)
        and all(isinstance(row, list) and row and _are_numbers(row, len(loads[0])) for row in loads)
    )


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))


def dashboard_path_for(metrics_file: str | Path) -> Path:
    """Return the page of a metrics file: dashboard.html for metrics.jsonl, NAME-dashboard.html for NAME.jsonl."""
    path = Path(metrics_file)
    return path.with_name("dashboard.html" if path.stem == "metrics" else f"{path.stem}-dashboard.html")


def open_dashboard(metrics_file: str | Path, head: Mapping[str, Any]) -> Dashboard | None:
    """Return the dashboard of a metrics file, with its records; None if that is not a regular file."""
    path = Path(metrics_file)
    if not path.is_file():
        return None
    dashboard = Dashboard(dashboard_path_for(path), head)
    try:
        for line in _lines(path):
            try:
                record = _checked(json.loads(line))
            except (ValueError, TypeError, LookupError, RecursionError):
                continue  # torn by a kill, or written by another program
            if record is not None:
                dashboard.take(record)
    except OSError as error:
        logger.warning("starting an empty dashboard: cannot read %s: %s", path, error.strerror or error)
        return Dashboard(dashboard.path, head)
    return dashboard


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a metrics file; of a very large one, evenly spaced lines, all events and the last line."""
    stride, line, is_selected = path.stat().st_size // MAX_PARSED_BYTES + 1, b"", True
    events = (b'{"validation"', b'"resumed_from"', b'"rejected"')
    with path.open("rb") as file:
        for number, line in enumerate(file):
            is_selected = number % stride == 0 or any(event in line for event in events)
            if is_selected:
                yield line
    if not is_selected:
        yield line


def main(argv: list[str]) -> int:
    """Write the page of a finished or running run."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__.strip().splitlines()[2].strip(), file=sys.stderr)
        return ExitCode.USER_ERROR
    dashboard = open_dashboard(argv[0], {})
    if dashboard is None:
        print(f"{argv[0]}: no such file", file=sys.stderr)
        return ExitCode.USER_ERROR
    if not dashboard.write(done=True):
        return ExitCode.FAILED
    print(dashboard.path)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
