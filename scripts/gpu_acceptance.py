#!/usr/bin/env python3
"""Run all checks that need GPUs, and write one dated report.

python scripts/gpu_acceptance.py                                  all sections, to gpu_acceptance-DATE-TIME/
python scripts/gpu_acceptance.py --only waits graphs --output FOLDER
python scripts/gpu_acceptance.py --short                          only the first line of every section
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from arguments.paths import find_path_problem
from scripts.acceptance_checks import SECTIONS, NotMeasuredError, is_emulated
from scripts.bench_common import get_commit

DETAILS = """\
Sections, in this order:
  environment   driver, GPUs, links, torch, CUDA, NCCL; version or import error of every optional library
  tests         tests/gpu, one pytest process per file
  parity        every tiny preset, three steps: one process on the CPU against the GPU
  waits         training steps under torch.cuda.set_sync_debug_mode("error"), except documented waits
  races         short trainings under the stream sanitizer of torch (torch.cuda._sanitizer)
  graphs        captured and replayed against eager, as in tests/gpu/test_cuda_graph.py
  dispatchers   experts on 2, 4 and 8 GPUs: alltoall and allgather against one process, DeepEP, HybridEP,
                hierarchical and NCCL EP against alltoall
  kernels       every Triton kernel against torch: results and time
  benchmark     scripts/bench_gpu.py: slices of large models; transformers and torchtitan if installed
  profile       the ten largest gaps between kernels of one training step, and the cause of each

Every section runs in its own process. A line that fails, crashes or exceeds --time-limit is a failed line, and the
section continues in a new process. Each line is "passed", "failed" or "not measured" with the reason. The directory
contains report.md, report.json, a log per section and the profiler's trace.

Exit code: 0, nothing failed; 1, a line failed; 2, wrong command line or no CUDA device; 130, Ctrl-C.
"""
PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Line:
    section: str
    name: str
    verdict: str
    detail: str
    seconds: float = 0.0
    below: list[str] = field(default_factory=list)


# ---- sections: this script is also the process of a section


def run_section(section: str, results: Path, skip: int, limit: int | None) -> None:
    """Check the lines skip, ..., limit - 1 of a section and append the results to a file.

    The main function of a section's process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # do not outlive a supervisor that is killed

    def write(**record) -> None:
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")

    for number, (name, check) in enumerate(SECTIONS[section]()):
        if number < skip:
            continue
        if number == limit:
            break
        write(begins=name)
        start, below = time.monotonic(), []
        try:
            result = check()
            verdict, detail = PASSED, result if isinstance(result, str) else result.detail
            below = [] if isinstance(result, str) else result.below
        except NotMeasuredError as error:
            verdict, detail = NOT_MEASURED, str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            traceback.print_exc()
            verdict, detail = FAILED, f"{type(error).__name__}: {error}"
        write(**asdict(Line(section, name, verdict, " ".join(detail.split())[:600], time.monotonic() - start, below)))
    write(ends=True)


def supervise(section: str, folder: Path, timeout_s: float, limit: int | None, program: Path) -> Iterator[Line]:
    """Run a section in its own process, and in a new one after each line that ended it. Yields its lines."""
    results, log, num_done = folder / f"{section}.jsonl", folder / f"{section}.log", 0
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):  # relative entries: the sections run in the directory of the report
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    while True:
        results.unlink(missing_ok=True)
        results.touch()
        options = [] if limit is None else ["--most", str(limit)]
        command = [sys.executable, program, "--run-section", section, results.resolve(), num_done, *options]
        with log.open("a") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            command = list(map(str, command))
            process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)
        num_read, running, last_change, is_complete = 0, None, time.monotonic(), False
        try:
            while True:
                is_alive, records = process.poll() is None, complete_records(results.read_text())
                for record in records[num_read:]:
                    is_complete, running = is_complete or "ends" in record, record.get("begins")
                    if "verdict" in record:
                        num_done += 1
                        yield Line(**record)
                last_change = time.monotonic() if len(records) > num_read else last_change
                num_read = len(records)
                is_late = time.monotonic() - last_change > timeout_s
                if not is_alive or is_late:
                    break
                time.sleep(0.1)
        finally:
            _kill(process)
        if is_complete:
            results.unlink()
            return
        reason = f"its process ended with {process.returncode}"
        if is_late:
            reason = f"took longer than {timeout_s:.0f} s (--time-limit)"
        seconds = time.monotonic() - last_change
        yield Line(section, running or "between lines", FAILED, f"{reason}; see {log.name}", seconds)
        if running is None:
            return  # the generator of the lines failed
        num_done += 1


def complete_records(text: str) -> list[dict]:
    """Parse the complete lines; text after the last newline is still being written."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _kill(process: subprocess.Popen) -> None:
    """Kill the process and its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _table(lines: list[Line]) -> list[str]:
    rows = ["| line | verdict | result | s |", "|---|---|---|---:|"]
    for line in lines:
        verdict = f"**{line.verdict}**" if line.verdict == FAILED else line.verdict
        rows.append(f"| {line.name} | {verdict} | {line.detail.replace('|', '/')} | {line.seconds:.1f} |")
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
        counts, seconds = Counter(line.verdict for line in its_lines), sum(line.seconds for line in its_lines)
        text.append(f"| {section} | {counts[PASSED]} | {counts[FAILED]} | {counts[NOT_MEASURED]} | {seconds:.0f} |")
    failed = [replace(line, name=f"{line.section}: {line.name}") for line in lines if line.verdict == FAILED]
    if failed:
        text += ["", "## Failures", "", *_table(failed)]
    for section, its_lines in by_section.items():
        text += ["", f"## {section}", "", *_table(its_lines)]
        for line in its_lines:
            if line.below:
                fence = [] if line.below[0].startswith("|") else ["```"]
                text += ["", f"{line.name}:", "", *fence, *line.below, *fence]
    return "\n".join(text) + "\n"


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


def main(argv: list[str], program: Path = SCRIPT) -> int:
    """Run the sections, each by starting `program`. Returns the exit code."""
    if argv[:1] == ["--run-section"]:
        section, results, skip, *limit = argv[1:]
        run_section(section, Path(results), int(skip), int(limit[1]) if limit else None)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=DETAILS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = f"sections to run: {', '.join(SECTIONS)} (default: all)"
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=SECTIONS, default=list(SECTIONS), help=text)
    parser.add_argument("--output", metavar="FOLDER", help="a directory that does not exist yet")
    text = "of one line (default: %(default)g)"
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS", help=text)
    parser.add_argument("--short", action="store_true", help="only the first line of every section except environment")
    options = parser.parse_args(argv)
    if options.output == "":
        parser.error("--output is empty: give the name of a new directory")
    if problem := find_path_problem(options.output or ""):
        parser.error(f"--output {options.output}: {problem}")
    folder = Path(options.output or f"gpu_acceptance-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if not options.time_limit > 0:
        parser.error(f"--time-limit {options.time_limit:g}: a positive number of seconds is needed")
    if folder.exists():
        parser.error(f"--output {folder} exists: give the name of a new directory")
    if problem := find_problem():
        parser.error(problem)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--output {folder}: cannot create the directory ({error.strerror})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no section outlives this process
    head, lines = get_provenance(), []
    try:
        for section in dict.fromkeys(options.only):
            limit = 1 if options.short and section != "environment" else None
            for line in supervise(section, folder, options.time_limit, limit, program):
                lines.append(line)
                print(f"{line.section}: {line.name}: {line.verdict}: {line.detail}", flush=True)
                (folder / "report.md").write_text(report(lines, head))
                record = {**head, "lines": [asdict(line) for line in lines]}
                (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n")
    except KeyboardInterrupt:
        head["stopped"] = "by Ctrl-C, before all lines were checked"
    (folder / "report.md").write_text(report(lines, head))
    counts = Counter(line.verdict for line in lines)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (PASSED, FAILED, NOT_MEASURED))
    print(f"{summary}; {folder / 'report.md'}")
    return 130 if "stopped" in head else int(counts[FAILED] > 0)


def find_problem() -> str | None:
    """Return why no section can run here; None if they can."""
    from moe_trainer.errors import UserError, require_packages

    try:
        require_packages("torch", "numpy", "safetensors", "pytest", "hypothesis")
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
