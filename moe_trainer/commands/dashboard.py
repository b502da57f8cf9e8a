"""Serve the dashboards of a folder of runs to a browser on this machine.

    python scripts/dashboard.py RUNS/ [--port N]

Prints an address with a random token. It lists all runs below the folder (metrics.jsonl), shows one or compares
several, follows those that are running, and shows the reports (--report-html) that lie with them. On a cluster,
forward the port: ssh -L N:127.0.0.1:N HOST.

The server binds to 127.0.0.1, serves nothing without the token, and reads metrics files and reports below the folder
only.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from arguments.paths import local_path
from arguments.program import other_command
from moe_trainer.checkpoint.directory import is_locked
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.comparison.report import COMPARISON_TITLE, comparison_figures, comparison_lines
from moe_trainer.comparison.runs import make_groups
from moe_trainer.drawing.report_page import report_page
from moe_trainer.exit_codes import ExitCode
from moe_trainer.metrics.dashboard import MAX_RUNS, as_json, page_data, render_page
from moe_trainer.metrics.run_data import RunData
from moe_trainer.metrics.run_files import (
    MAX_PARSED_BYTES,
    METRICS_NAME,
    find_metrics_files,
    find_reports,
    read_run,
    take_line,
)

POLL_MS = 5000
MAX_LISTED = 500
HTML = "text/html; charset=utf-8"
_KEPT_BYTES = 4096  # of a file, to see whether what was read is still there
NAME_ERRORS = "surrogateescape"  # of names of folders that are not UTF-8, as Python reads them


class Follower:
    """Reads a metrics file once, and then what is appended to it. `num_runs`: see RunData."""

    def __init__(self, path: Path, num_runs: int):
        self._path, self._num_runs = path, num_runs
        self._position, self._inode, self._newest = 0, 0, b""
        self._run: RunData | None = None

    def read(self) -> RunData | None:
        """Return the run with all complete lines.

        Raises:
            OSError: if the file is gone or cannot be read.
        """
        status = self._path.stat()
        lines = self._appended() if self._run is not None and status.st_ino == self._inode else None
        if self._run is None or lines is None:
            self._inode, self._position = status.st_ino, self._end_of_lines(status.st_size)
            self._run = read_run(self._path, self._num_runs, self._position)
            return self._run
        complete = lines[: lines.rfind(b"\n") + 1]
        for line in complete.splitlines():
            take_line(self._run, line)
        self._position += len(complete)
        self._newest = (self._newest + complete)[-_KEPT_BYTES:]
        return self._run

    def _appended(self) -> bytes | None:
        """Return what follows what was read; None if that has changed, as when a resumed run repeats iterations."""
        with self._path.open("rb") as file:
            file.seek(self._position - len(self._newest))
            return file.read(MAX_PARSED_BYTES) if file.read(len(self._newest)) == self._newest else None

    def _end_of_lines(self, size: int) -> int:
        """Return where the last complete line ends, and keep the bytes before it."""
        with self._path.open("rb") as file:
            start = max(0, size - 2**20)
            file.seek(start)
            content = file.read(size - start)
        end = content.rfind(b"\n") + 1
        self._newest = content[max(0, end - _KEPT_BYTES) : end]
        return start + end


class Runs:
    """The runs below a folder, by path relative to it."""

    def __init__(self, folder: Path):
        self._folder = folder.resolve()
        self._followers: dict[tuple[str, int], Follower] = {}
        self._lock = threading.Lock()

    def paths(self) -> list[str]:
        """Return the runs, the newest first; links that lead out of the folder are left out."""
        found = []
        for path in find_metrics_files(self._folder):
            with contextlib.suppress(OSError):  # a run that is deleted now
                if path.is_file() and path.resolve().is_relative_to(self._folder):
                    found.append((-path.stat().st_mtime, path.parent.relative_to(self._folder).as_posix()))
        return [path for _, path in sorted(found)[:MAX_LISTED]]

    def page(self, path: str, num_runs: int) -> dict[str, Any] | None:
        """Return a run as the page reads it; None if it is no run of the folder."""
        file = self._folder / path / METRICS_NAME
        with self._lock:
            follower = self._followers.setdefault((path, num_runs), Follower(file, num_runs))
            try:
                run = follower.read()
                page = None if run is None else run.as_page(file.stat().st_mtime, is_locked(file.parent))
            except OSError:
                page = None
            if page is None:
                del self._followers[path, num_runs]
                return None
        return {**page, "name": self._folder.name if path == "." else path}

    def reports(self, paths: Sequence[str]) -> dict[str, str]:
        """Return the titles of the reports in the folders of runs and above these, by path relative to the folder.

        Links that lead out of the folder are left out.
        """
        folders = dict.fromkeys(folder for path in paths for folder in Path(path, METRICS_NAME).parents)
        return {
            file.relative_to(self._folder).as_posix(): title
            for folder in folders
            for file, title in find_reports(self._folder / folder)
            if file.resolve().is_relative_to(self._folder)
        }

    def read_report(self, path: str, paths: Sequence[str]) -> str | None:
        """Return the page of a report of the runs; None if it is none of theirs."""
        if path not in self.reports(paths):
            return None
        try:
            with (self._folder / path).open("rb") as file:  # a browser shows no page as long as the limit either
                return file.read(MAX_PARSED_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return None

    def comparison(self, paths: Sequence[str]) -> str | None:
        """Return the page that compare.py writes of runs; None if they were deleted."""
        pages = [page for path in paths if (page := self.page(path, len(paths))) is not None]
        command = f"{other_command('compare')} {shlex.join(str(self._folder / path) for path in paths)}"
        groups = make_groups(pages)
        if not groups:
            return None
        return report_page(COMPARISON_TITLE, command, comparison_figures(groups), comparison_lines(groups))

    def summaries(self, paths: Sequence[str], address: str) -> list[dict[str, Any]]:
        """Return a line for each of the runs, with the settings that one of them has set."""
        found: list[dict[str, Any]] = []
        changed: set[str] = set()
        for path in paths:
            run = self.page(path, 1)
            if run is not None:
                series = run["records"]["series"].get("lm loss") or [None]
                progress, findings = run["progress"], run["findings"]
                changed.update(run["head"].get("changed", ()))
                query = f"run={quote(path, errors=NAME_ERRORS)}"
                found.append(
                    {
                        "name": run["name"],
                        "query": query,
                        "status": run["status"],
                        "state": run["state"],
                        "iteration": progress.get("iteration"),
                        "train_iters": progress.get("train_iters"),
                        "lm_loss": series[-1],
                        "validation_loss": (run["newest_validation"] or {}).get("lm loss"),
                        "tokens_per_s": run["throughput"],
                        "settings": run["head"].get("settings", {}),
                        "finding": findings[0] if findings and findings[0]["severity"] != "ok" else None,
                        "updated": run["updated"],
                        "url": f"{address}?{query}",
                    }
                )
        for line in found:
            line["settings"] = {name: value for name, value in line["settings"].items() if name in changed}
        return found


class RunsHandler(BaseHTTPRequestHandler):
    """Answers for a page and its data, below an address with the token."""

    runs: Runs
    token: str
    server_version, sys_version = "moe-trainer", ""

    def do_GET(self) -> None:
        """Answer the page, or its data as JSON."""
        port = cast("tuple[Any, ...]", self.server.server_address)[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._send(403, "text/plain", "forbidden: open the address that the server printed\n")
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            return self._send(400, "text/plain", f"not an address: {error}\n")
        parts = address.path.split("/")
        if len(parts) != 3 or not secrets.compare_digest(parts[1].encode(), self.token.encode()):
            return self._send(403, "text/plain", "forbidden: the token is missing or wrong\n")
        if parts[2] not in ("", "data", "report"):
            return self._send(404, "text/plain", "not found\n")
        base, query = f"/{self.token}/", parse_qs(address.query, errors=NAME_ERRORS)
        wanted, paths = query.get("run", []), self.runs.paths()
        if len(wanted) > MAX_RUNS or not set(paths).issuperset(wanted):
            return self._send(404, "text/plain", f"not found: no such run, or more than {MAX_RUNS}\n")
        if parts[2] == "report":
            return self._send_report(wanted, query.get("file", []), paths)
        data = self._data(base, address.query, wanted, paths)
        if parts[2] == "data":
            return self._send(200, "application/json", as_json(data))
        return self._send(200, HTML, render_page("moe-trainer", data))

    def _data(self, base: str, query: str, wanted: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
        """Return what the page of the wanted runs reads, or that of the list of all."""
        live = {
            "poll_ms": POLL_MS,
            "data_url": f"{base}data?{query}",
            "list_url": base,
            "compare_url": f"{base}?compare=1",
            "max_runs": MAX_RUNS,
        }
        reports = [
            {"title": title, "file": file, "url": f"{base}report?file={quote(file, errors=NAME_ERRORS)}"}
            for file, title in self.runs.reports(wanted or paths).items()
        ]
        if not wanted:
            return page_data([], list=self.runs.summaries(paths, base), reports=reports, live=live)
        if len(wanted) > 1:
            words = "these runs as they are now: equal tokens, intervals over seeds"
            reports.insert(0, {"title": COMPARISON_TITLE, "file": words, "url": f"{base}report?{query}"})
        found = [self.runs.page(path, len(wanted)) for path in wanted]
        return page_data([run for run in found if run is not None], reports=reports, live=live)

    def _send_report(self, wanted: Sequence[str], files: Sequence[str], paths: Sequence[str]) -> None:
        """Answer the comparison of the wanted runs, or a report that lies with any run."""
        page = self.runs.comparison(wanted) if wanted else self.runs.read_report(files[0], paths) if files else None
        if page is None:
            return self._send(404, "text/plain", "not found: no such report\n")
        # a report is a file that anyone may have written: it draws itself, and runs and loads nothing
        policy = "sandbox; default-src 'none'; style-src 'unsafe-inline'"
        self._send(200, HTML, page, {"Content-Security-Policy": policy})

    def _send(self, status: int, kind: str, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        body = text.encode(errors="replace")  # names of folders need not be UTF-8
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the page was closed
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the address contains the token."""


def make_server(folder: Path, port: int) -> tuple[ThreadingHTTPServer, str]:
    """Return a server, and the address to open.

    Raises:
        OSError: if the port is in use.
    """
    token = secrets.token_urlsafe(18)
    handler = type("ServerHandler", (RunsHandler,), {"runs": Runs(folder), "token": token})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    return server, f"http://127.0.0.1:{server.server_address[1]}/{token}/"


def main(argv: Sequence[str]) -> int:
    parser = make_command_parser("dashboard", __doc__, allow_abbrev=True)
    parser.add_argument("folder", metavar="RUNS", type=local_path, help="folder below which runs are")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: not a directory")
    if not 0 <= options.port < 65536:
        parser.error(f"--port {options.port}: needs a number from 0 to 65535")
    try:
        server, address = make_server(options.folder, options.port)
    except OSError as error:
        parser.error(f"--port {options.port}: {error.strerror or error}")
    print(f"dashboards of {options.folder}: {address} (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return ExitCode.OK
    finally:
        server.server_close()
    return ExitCode.OK
