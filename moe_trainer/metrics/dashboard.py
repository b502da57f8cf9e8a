"""dashboard.html: a self-contained page (no network, no server) that shows runs from their metrics.jsonl.

    python -m moe_trainer.metrics.dashboard runs/a                    writes runs/a/dashboard.html
    python -m moe_trainer.metrics.dashboard runs/a runs/b -o both.html
                                                                      several runs on the same axes

A run is a folder with metrics.jsonl, or such a file. scripts/dashboard.py serves a folder of runs.

`Dashboard` collects the records as they are written and rewrites the page now and then, in at most a hundredth of the
run's time. The size of the page is bounded (run_data.py). A page that cannot be written never ends a run. The plots are
uPlot's (page/uPlot.*, version 1.6.32, MIT license, https://github.com/leeoniya/uPlot). Rejected: a page that fetches
metrics.jsonl, which browsers do not allow for local files, and plotting libraries of megabytes.
"""

from __future__ import annotations

import argparse
import html
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from arguments.paths import local_path, local_prefix
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import atomic_path
from moe_trainer.metrics.run_data import UNCOMPARED_SETTINGS, RunData
from moe_trainer.metrics.run_files import find_reports, name_of_run, read_run

logger = logging.getLogger(__name__)

MAX_TIME_SHARE = 0.01
MAX_RUNS = 20
_SCRIPTS = (
    "values.js",
    "address.js",
    "parts.js",
    "drawing_tools.js",
    "charts.js",
    "maps.js",
    "head.js",
    "run_table.js",
    "sections.js",
    "dashboard.js",
)


class Dashboard:
    """Collects records of metrics.jsonl and writes them as a page. Failing to write never raises."""

    def __init__(self, path: str | Path, run: RunData):
        self.path, self._run = Path(path), run
        self._not_before = -math.inf
        self._has_warned = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a record without writing the page."""
        self._run.take(record)

    def take_save(self, iteration: int) -> None:
        """Add the save of a checkpoint, before the record that will have it."""
        self._run.take_save(iteration, time.time())

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, and write the page if it is due."""
        self.take(record)
        if time.monotonic() >= self._not_before:
            self.write()

    def write(self) -> bool:
        """Write the page now and return whether that succeeded."""
        begin = time.monotonic()
        try:
            with atomic_path(self.path) as temporary:
                temporary.write_text(self.page(), encoding="utf-8")
            return True
        except Exception as error:  # whatever it is, training continues
            if not self._has_warned:
                reason = (error.strerror if isinstance(error, OSError) else None) or repr(error)
                logger.warning(f"cannot write the dashboard to {self.path} ({reason}); the run continues and retries")
            self._has_warned = True
            return False
        finally:
            self._not_before = begin + max(1.0, (time.monotonic() - begin) / MAX_TIME_SHARE)

    def page(self) -> str:
        """Return the page."""
        reports = _links_to_reports([Path(self._run.path).parent], self.path.parent)
        return render_page(self._run.name, page_data([self._run.as_page(time.time())], reports=reports))


def page_data(runs: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Return what the page reads: runs of RunData.as_page, reports to link to; `more` is also of a server."""
    return {
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": list(runs),
        "uncompared": sorted(UNCOMPARED_SETTINGS),
        **more,
    }


def _links_to_reports(folders: Iterable[Path], start: Path) -> list[dict[str, str]]:
    """Return links to the reports in folders, for a page in the folder `start`."""
    found = {path.resolve(): title for folder in folders for path, title in find_reports(folder)}
    names = [(os.path.relpath(path, start.resolve()), title) for path, title in found.items()]
    return [{"title": title, "file": name, "url": quote(os.fsencode(name))} for name, title in names]


def as_json(data: Mapping[str, Any]) -> str:
    """Return JSON without NaN and infinity, which become null."""
    return json.dumps(_finite(data), separators=(",", ":"), default=str)


def render_page(title: str, data: Mapping[str, Any]) -> str:
    """Return the page with its data, as one HTML file."""
    # "</script>" or "<!--" inside a string would end or break the element that contains it
    text = as_json(data).replace("<", "\\u003c")
    directory = resources.files("moe_trainer.metrics").joinpath("page")
    page = directory.joinpath("dashboard.html").read_text(encoding="utf-8")
    files = {
        "LICENSE": "uPlot.LICENSE.txt",
        "PLOT_STYLE": "uPlot.min.css",
        "STYLE": "dashboard.css",
        "PLOT": "uPlot.iife.min.js",
    }
    parts = {name: directory.joinpath(file).read_text(encoding="utf-8") for name, file in files.items()}
    parts["SCRIPT"] = "".join(directory.joinpath(file).read_text(encoding="utf-8") for file in _SCRIPTS)
    title = title.encode(errors="replace").decode()  # a folder's name need not be UTF-8
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


def dashboard_path_for(metrics_file: str | Path) -> Path:
    """Return the page of a metrics file: dashboard.html for metrics.jsonl, NAME-dashboard.html for NAME.jsonl."""
    path = Path(metrics_file)
    return path.with_name("dashboard.html" if path.stem == "metrics" else f"{path.stem}-dashboard.html")


def open_dashboard(metrics_file: str | Path) -> Dashboard | None:
    """Return the dashboard of a metrics file, with its records; None if that is not a regular file."""
    path = Path(metrics_file)
    try:
        run = read_run(path) if path.is_file() else None
    except OSError as error:
        logger.warning("starting an empty dashboard: cannot read %s: %s", path, error.strerror or error)
        run = RunData(name_of_run(path), str(path))
    return None if run is None else Dashboard(dashboard_path_for(path), run)


def read_runs(
    paths: Sequence[str], is_alive: Callable[[Path], bool | None] = lambda folder: None
) -> list[dict[str, Any]]:
    """Return runs as the page reads them, with names that differ.

    Args:
        paths: folders with metrics.jsonl, or such files.
        is_alive: whether the process of the run in a folder runs; None if unknown.

    Raises:
        ValueError: if one is missing or cannot be read, or there are too many.
    """
    if len(paths) > MAX_RUNS:
        raise ValueError(f"{len(paths)} runs; one page shows at most {MAX_RUNS}")
    runs: list[dict[str, Any]] = []
    for path in paths:
        try:
            run = read_run(path, num_runs=len(paths))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
        if run is None:
            raise ValueError(f"{path}: no such file; needed is metrics.jsonl or a folder with it")
        file = Path(run.path)
        runs.append(run.as_page(updated=file.stat().st_mtime, is_alive=is_alive(file.parent)))
    names = [page["name"] for page in runs]
    for page in runs:
        if names.count(page["name"]) > 1:
            page["name"] = str(Path(page["path"]).parent)
    return runs


def main(argv: Sequence[str]) -> int:
    """Write the page of finished or running runs."""
    parser = argparse.ArgumentParser("python -m moe_trainer.metrics.dashboard", allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "runs", type=local_prefix, nargs="+", metavar="RUN", help="folder with metrics.jsonl, or such a file"
    )
    parser.add_argument(
        "-o", "--output", type=local_path, metavar="FILE", help="default: dashboard.html next to the first run's file"
    )
    options = parser.parse_args(argv)
    try:
        runs = read_runs(options.runs)
    except ValueError as error:
        print(f"dashboard: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    path = Path(options.output or dashboard_path_for(runs[0]["path"]))
    reports = _links_to_reports([path.parent, *(Path(run["path"]).parent for run in runs)], path.parent)
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(render_page(runs[0]["name"], page_data(runs, reports=reports)), encoding="utf-8")
    except OSError as error:
        print(f"dashboard: cannot write {path}: {error.strerror or error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    print(path)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
