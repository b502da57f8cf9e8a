"""dashboard.html: one page that shows a run, made of its metrics.jsonl, with everything it needs inside (no network, no server).

    python -m moe_trainer.report.dashboard runs/a/metrics.jsonl      writes runs/a/dashboard.html anew, of any metrics file

How it works: `Dashboard` takes in the records as they are written and rewrites the page now and then: a temporary file renamed over the old
one, so that a browser never reads half a page. It takes at most a hundredth of the run's time (the next page waits for a hundred
times what the last one took, a second at least), and its size is bounded: of long runs evenly spread records are
shown, the newest always. The page must never end a run: what cannot be written is told once as a warning.

The plots are uPlot's (page/uPlot.*, version 1.6.32, MIT licence, https://github.com/leeoniya/uPlot); page/dashboard.js draws the heat map.
Rejected: a page that fetches metrics.jsonl (browsers refuse that of local files), and plotting libraries of megabytes.
"""

from __future__ import annotations

import html
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from moe_trainer.exit_codes import ExitCode

logger = logging.getLogger(__name__)

MAX_RECORDS = 2000
MAX_EVENTS = 500
MAX_PARSED = 200_000_000  # bytes of a metrics file
MAX_LAYER_VALUES = 200_000
MAX_LOADS = 300_000
SHARE_OF_TIME = 0.01
_LARGEST = 1e300  # of a number that a page can draw


class Thinned:
    """A list that keeps at most `limit` items, evenly spread over all it was given, and the last one."""

    def __init__(self, limit: int):
        self._limit, self._stride, self._count = max(2, limit), 1, 0
        self._kept: list[Any] = []
        self._last: Any = None

    def add(self, item: Any) -> None:
        """Take in the next item."""
        if self._count % self._stride == 0:
            self._kept.append(item)
            if len(self._kept) > self._limit:
                self._kept, self._stride = self._kept[::2], self._stride * 2
        self._count, self._last = self._count + 1, item

    def items(self) -> list[Any]:
        """Those that are kept, in order."""
        return self._kept if not self._kept or self._kept[-1] is self._last else [*self._kept, self._last]


class Dashboard:
    """Collects records of metrics.jsonl and writes them as a page. Nothing here raises OSError.

    head: what the page says of the run besides its records: "train_iters", "world_size", "settings" (name -> value), any of them.
    """

    def __init__(self, path: str | Path, head: Mapping[str, Any]):
        self.path = Path(path)
        self._head = {"title": self.path.resolve().parent.name, **head}
        self._records, self._validations = Thinned(MAX_RECORDS), Thinned(MAX_RECORDS)
        self._events = Thinned(MAX_EVENTS)
        self._layers: Thinned | None = None
        self._loads: Thinned | None = None
        self._not_before = -math.inf
        self._told = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in a record without writing the page."""
        if "validation" in record:
            self._validations.add(dict(record))
            return
        self._take_routing(record)
        self._records.add({name: value for name, value in record.items() if name not in ("routing", "run")})
        if event := {name: record[name] for name in ("resumed_from", "rejected") if name in record}:
            self._events.add(event)  # records are thinned, and what happened in them must not go

    def _take_routing(self, record: Mapping[str, Any]) -> None:
        routing = record.get("routing")
        if routing and routing["layers"]:
            loads = routing["tokens_per_expert"]
            if self._layers is None or self._loads is None:
                self._layers = Thinned(MAX_LAYER_VALUES // (8 * len(loads)))
                self._loads = Thinned(MAX_LOADS // (len(loads) * len(loads[0])))
            self._layers.add({"iteration": record["iteration"], **{k: v for k, v in routing.items() if k != "tokens_per_expert"}})
            self._loads.add({"iteration": record["iteration"], "layers": routing["layers"], "tokens_per_expert": loads})

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in a record; write the page if that is due."""
        self.take(record)
        if time.monotonic() >= self._not_before:
            self.write()

    def write(self, done: bool = False) -> bool:
        """Write the page now. done: the run has ended, nothing follows. Returns: could it be written?"""
        begin = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        written = True
        try:
            temporary.write_text(self.page(done), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            self._give_up(temporary, error)
            written = False
        taken = time.monotonic() - begin
        self._not_before = begin + max(1.0, taken / SHARE_OF_TIME)
        return written

    def _give_up(self, temporary: Path, error: OSError) -> None:
        if not self._told:
            why = error.strerror or error
            logger.warning("the dashboard cannot be written to %s (%s); the run goes on, and tries again", self.path, why)
        self._told = True
        try:
            temporary.unlink(missing_ok=True)
        except OSError as again:
            logger.debug("%s stays behind: %s", temporary, again)

    def page(self, done: bool = False) -> str:
        """The page as text."""
        data = {
            **self._head, "done": done, "written": time.strftime("%Y-%m-%d %H:%M:%S"), "records": self._records.items(),
            "validations": self._validations.items(), "events": self._events.items(), "layers": self._layers.items() if self._layers else [],
            "loads": self._loads.items() if self._loads else [],
        }
        # "</script>" and "<!--" inside a string would end or confuse the element that holds it
        text = json.dumps(_finite(data), separators=(",", ":"), default=str).replace("<", "\\u003c")
        folder = resources.files("moe_trainer.report").joinpath("page")
        page = folder.joinpath("dashboard.html").read_text(encoding="utf-8")
        parts = {"TITLE": html.escape(self._head["title"]), "DATA": text}
        for name, file in (("LICENSE", "uPlot.LICENSE.txt"), ("PLOT_STYLE", "uPlot.min.css"), ("STYLE", "dashboard.css"),
                           ("PLOT", "uPlot.iife.min.js"), ("SCRIPT", "dashboard.js")):
            parts[name] = folder.joinpath(file).read_text(encoding="utf-8")
        pieces = page.split("@@")  # the template is text, name, text, name, ..., text
        return "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def _finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _is_number(value: Any) -> bool:
    """Whether a value is one that the page can draw; None where JSON had none for it."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST)


def _checked(record: Any) -> dict[str, Any] | None:
    """What the page can draw of a line that anybody may have written: one text where a number belongs would leave the page empty.

    Returns: None for what is no record.
    """
    if not isinstance(record, dict) or not _is_number(record.get("iteration")) or not isinstance(record["iteration"], int):
        return None
    found = {name: value for name, value in record.items() if _is_number(value) and name not in ("routing", "rejected", "own_time_ms")}
    if "validation" in record:
        return found | {"validation": record["validation"]} if isinstance(record["validation"], str) else None
    times = record.get("own_time_ms")
    if isinstance(times, dict):
        found["own_time_ms"] = {str(name): value for name, value in times.items() if _is_number(value) or isinstance(value, str)}
        if not all(_is_number(times.get(name)) for name in ("min", "median", "max")):
            del found["own_time_ms"]
    rejected = record.get("rejected")
    if isinstance(rejected, list):
        found["rejected"] = [one for one in rejected if isinstance(one, dict) and isinstance(one.get("iteration"), int) and isinstance(one.get("because"), str)]
    if _is_routing(record.get("routing")):
        found["routing"] = record["routing"]
    return found


def _is_routing(routing: Any) -> bool:
    """Whether it has numbers for every layer, and as many experts in each."""
    if not isinstance(routing, dict) or not isinstance(layers := routing.get("layers"), list) or not layers:
        return False
    loads = routing.get("tokens_per_expert")
    lists = [value for name, value in routing.items() if name not in ("tokens_per_expert", "straggler_cost")]
    return (_is_number(routing.get("straggler_cost")) and all(isinstance(value, list) and len(value) == len(layers) and all(map(_is_number, value)) for value in lists)
            and isinstance(loads, list) and len(loads) == len(layers)
            and all(isinstance(row, list) and row and len(row) == len(loads[0]) and all(map(_is_number, row)) for row in loads)
            and all(name in routing for name in ("load_max_over_mean", "load_entropy", "dead_experts", "rank_max_over_mean")))


def page_beside(metrics_file: str | Path) -> Path:
    """Where the page of a metrics file stands: dashboard.html for metrics.jsonl, NAME-dashboard.html for NAME.jsonl."""
    path = Path(metrics_file)
    return path.with_name("dashboard.html" if path.stem == "metrics" else f"{path.stem}-dashboard.html")


def open_dashboard(metrics_file: str | Path, head: Mapping[str, Any]) -> Dashboard | None:
    """The dashboard of a metrics file, with the records that stand in it; None where that is no plain file."""
    path = Path(metrics_file)
    if not path.is_file():
        return None
    dashboard = Dashboard(page_beside(path), head)
    try:
        for line in _lines(path):
            try:
                record = _checked(json.loads(line))
            except (ValueError, TypeError, LookupError, RecursionError):
                continue  # torn by a kill, or written by somebody else
            if record is not None:
                dashboard.take(record)
    except OSError as error:
        logger.warning("the dashboard begins anew, %s cannot be read: %s", path, error.strerror or error)
        return Dashboard(dashboard.path, head)
    return dashboard


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a metrics file; of one that is too large to be parsed while ranks wait, evenly spread ones, all events and the last."""
    every, line, given = path.stat().st_size // MAX_PARSED + 1, b"", True
    with path.open("rb") as file:
        for number, line in enumerate(file):
            given = number % every == 0 or any(mark in line for mark in (b'{"validation"', b'"resumed_from"', b'"rejected"'))
            if given:
                yield line
    if not given:
        yield line


def main(argv: list[str]) -> int:
    """Write the page of a finished or running run again."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__.strip().splitlines()[2].strip(), file=sys.stderr)
        return ExitCode.USER_ERROR
    dashboard = open_dashboard(argv[0], {})
    if dashboard is None:
        print(f"{argv[0]}: there is no such file", file=sys.stderr)
        return ExitCode.USER_ERROR
    if not dashboard.write(done=True):
        return ExitCode.FAILED
    print(dashboard.path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
