"""The lines of scripts/gpu_acceptance.py, and the files it writes while they are checked."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import math
import sys
import tarfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scripts.acceptance_checks import is_emulated
from scripts.provenance import get_commit

PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"
ARCHIVE_BYTES = 16 * 2**20
PACK_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Line:
    section: str
    name: str
    status: str
    detail: str
    seconds: float = 0.0
    below: list[str] = field(default_factory=list)


def _table(lines: list[Line]) -> list[str]:
    rows = ["| line | status | result | s |", "|---|---|---|---:|"]
    for line in lines:
        status = f"**{line.status}**" if line.status == FAILED else line.status
        rows.append(f"| {line.name} | {status} | {line.detail.replace('|', '/')} | {line.seconds:.1f} |")
    return rows


def report(lines: list[Line], head: dict[str, str]) -> str:
    """Return the report as Markdown: failures first, then every line."""
    by_section: dict[str, list[Line]] = {}
    for line in lines:
        by_section.setdefault(line.section, []).append(line)
    text = [
        "# GPU acceptance",
        "",
        *(f"- {name}: {value}" for name, value in head.items()),
        "",
        f"| section | {PASSED} | {FAILED} | {NOT_MEASURED} | s |",
        "|---|---:|---:|---:|---:|",
    ]
    for section, its_lines in by_section.items():
        counts, seconds = Counter(line.status for line in its_lines), sum(line.seconds for line in its_lines)
        text.append(f"| {section} | {counts[PASSED]} | {counts[FAILED]} | {counts[NOT_MEASURED]} | {seconds:.0f} |")
    failed = [replace(line, name=f"{line.section}: {line.name}") for line in lines if line.status == FAILED]
    if failed:
        text += ["", "## Failures", "", *_table(failed)]
    for section, its_lines in by_section.items():
        text += ["", f"## {section}", "", *_table(its_lines)]
        for line in its_lines:
            if line.below:
                fence = [] if line.below[0].startswith("|") else ["```"]
                text += ["", f"{line.name}:", "", *fence, *line.below, *fence]
    return "\n".join(text) + "\n"


class Results:
    """The files of a run, rewritten while it goes, so that a run that is killed loses seconds."""

    def __init__(self, folder: Path, work: Path, head: dict[str, str]):
        """Store where the files are written, the directory that is packed, and the first lines of the report."""
        self.folder, self.work, self.head = folder, work, head
        self.lines: list[Line] = []
        self._packed, self._last_pack = {}, -math.inf

    def add(self, new: list[Line]) -> None:
        """Add lines, and pack what has changed if it is time."""
        self.lines += new
        if new:
            self.write_report()
        if time.monotonic() - self._last_pack > PACK_INTERVAL_S:
            self.pack()

    def write_report(self) -> None:
        """Write report.md and report.json."""
        replace_file(self.folder / "report.md", report(self.lines, self.head).encode())
        record = {**self.head, "lines": [asdict(line) for line in self.lines]}
        replace_file(self.folder / "report.json", (json.dumps(record, indent=1) + "\n").encode())

    def pack(self) -> None:
        """Write details.tar.gz if a file has changed; the largest ones are left out if it would be too large."""
        files = {path: path.stat().st_size for path in self.work.rglob("*") if path.is_file()}
        if files != self._packed:
            left_out = [path for path, size in files.items() if size > 4 * ARCHIVE_BYTES]
            paths = sorted(files.keys() - left_out, key=files.__getitem__)
            while len(archive := pack_files(self.work, paths)) > ARCHIVE_BYTES:
                left_out.append(paths.pop())
            replace_file(self.folder / "details.tar.gz", archive)
            if left_out:
                self.head["not in details.tar.gz"] = ", ".join(str(path.relative_to(self.work)) for path in left_out)
        self._packed, self._last_pack = files, time.monotonic()


def pack_files(folder: Path, paths: list[Path]) -> bytes:
    """Return a tar.gz of files as they are at this moment."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                content = path.read_bytes()
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that its name always has a whole one."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(content)
    partial.replace(path)


def get_provenance() -> dict[str, str]:
    """Return date, device, versions and commit of this run."""
    import torch

    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if is_emulated():
        device += ", EMULATED on the CPU (docs/testing_without_gpu.md): no result on speed, NCCL or compiled kernels"
    return {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "device": device,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": sys.version.split()[0],
        "commit": get_commit(),
    }
