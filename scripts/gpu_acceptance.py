#!/usr/bin/env python3
"""The first hour on a machine with GPUs: run everything that only a GPU can show, and write one dated report.

    python scripts/gpu_acceptance.py                                  all sections, into gpu_acceptance-DATE-TIME/
    python scripts/gpu_acceptance.py --only waits graphs --output FOLDER
    python scripts/gpu_acceptance.py --short                          the first line of every section: does the program itself work here?

Sections, in this order:

    environment   driver, GPUs, links, torch, CUDA, NCCL; every optional library with its version, or the error of its import
    tests         tests/gpu, one pytest for each file
    parity        every tiny preset, three steps: one process on the CPU against the GPU
    waits         training steps under torch.cuda.set_sync_debug_mode("error"), outside of the places that are documented to wait
    races         short trainings under torch's stream sanitizer (torch.cuda._sanitizer)
    graphs        captured and replayed against eager, as in tests/gpu/test_cuda_graph.py
    dispatchers   experts on 2, 4 and 8 GPUs: alltoall and allgather against one process, DeepEP and HybridEP against alltoall
    kernels       every Triton kernel against torch: numbers and time
    benchmark     scripts/bench_gpu.py: slices of large models, transformers and torchtitan where they are installed
    profile       the ten largest gaps between kernels of one training step, and what each waited for

Every section is a process of its own. A line that fails, crashes or takes longer than --time-limit is a failed line; the section goes on
behind it in a new process. Each line is "passed", "failed" or "not measured" with the reason. The folder holds report.md, report.json,
a log for each section and the profiler's trace.

Exit code: 0, nothing failed; 1, something failed; 2, the command line is wrong or there is no CUDA device; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from scripts.acceptance_checks import SECTIONS, NotMeasured, emulated

PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    section: str
    name: str
    verdict: str
    detail: str
    seconds: float = 0.0
    below: list[str] = field(default_factory=list)


# ---- running them: this program is also the process of a section

def run_section(section: str, written: Path, skip: int, most: int | None) -> None:
    """The process of a section: check its lines from number `skip` on, up to number `most`, and add what came out to a file."""

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a supervisor that is killed leaves no section running

    def write(**record) -> None:
        with written.open("a") as file:
            file.write(json.dumps(record) + "\n")

    for number, (name, check) in enumerate(SECTIONS[section]()):
        if number < skip:
            continue
        if number == most:
            break
        write(begins=name)
        start, below = time.monotonic(), []
        try:
            found = check()
            verdict, detail = PASSED, found if isinstance(found, str) else found.detail
            below = [] if isinstance(found, str) else found.below
        except NotMeasured as error:
            verdict, detail = NOT_MEASURED, str(error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            verdict, detail = FAILED, f"{type(error).__name__}: {error}"
        write(**asdict(Line(section, name, verdict, " ".join(detail.split())[:600], time.monotonic() - start, below)))
    write(ends=True)


def supervise(section: str, folder: Path, limit: float, most: int | None, program: Path) -> Iterator[Line]:
    """Run a section in processes of its own, a new one behind each line that ended it. Yields: its lines."""
    written, log, done = folder / f"{section}.jsonl", folder / f"{section}.log", 0
    path = os.environ.get("PYTHONPATH")  # the sections run in the report's folder
    environment = os.environ | ({"PYTHONPATH": os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))} if path else {})
    while True:
        written.unlink(missing_ok=True)
        written.touch()
        more = [] if most is None else ["--most", str(most)]
        command = [sys.executable, str(program), "--run-section", section, str(written.resolve()), str(done), *more]
        with log.open("a") as out:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        read, running, changed, ended = 0, None, time.monotonic(), False
        try:
            while True:
                alive, records = process.poll() is None, complete_records(written.read_text())
                for record in records[read:]:
                    ended, running = ended or "ends" in record, record.get("begins")
                    if "verdict" in record:
                        done += 1
                        yield Line(**record)
                changed, read = time.monotonic() if len(records) > read else changed, len(records)
                late = time.monotonic() - changed > limit
                if not alive or late:
                    break
                time.sleep(0.1)
        finally:
            _end(process)
        if ended:
            written.unlink()
            return
        why = f"took longer than {limit:.0f} s (--time-limit)" if late else f"its process ended with {process.returncode}"
        yield Line(section, running or "between lines", FAILED, f"{why}; see {log.name}", time.monotonic() - changed)
        if running is None:
            return  # what makes the lines failed
        done += 1


def complete_records(text: str) -> list[dict]:
    """Parse the lines that are written; what follows the last newline is still being written."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _end(process: subprocess.Popen) -> None:
    """End the process and all it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def report(lines: list[Line], head: dict[str, str]) -> str:
    """The report as Markdown: what failed first, then every line."""

    def table(of: list[Line]) -> list[str]:
        return ["| line | verdict | what was found | s |", "|---|---|---|---:|",
                *(f"| {each.name} | {f'**{each.verdict}**' if each.verdict == FAILED else each.verdict} | {each.detail.replace('|', '/')} | {each.seconds:.1f} |"
                  for each in of)]

    sections = list(dict.fromkeys(line.section for line in lines))
    of = {section: [line for line in lines if line.section == section] for section in sections}
    text = ["# GPU acceptance", "", *(f"- {name}: {value}" for name, value in head.items()), "",
            f"| section | {PASSED} | {FAILED} | {NOT_MEASURED} | s |", "|---|---:|---:|---:|---:|"]
    for section in sections:
        counts = [sum(line.verdict == verdict for line in of[section]) for verdict in (PASSED, FAILED, NOT_MEASURED)]
        text.append(f"| {section} | {' | '.join(map(str, counts))} | {sum(line.seconds for line in of[section]):.0f} |")
    if failed := [Line(line.section, f"{line.section}: {line.name}", line.verdict, line.detail, line.seconds) for line in lines if line.verdict == FAILED]:
        text += ["", "## What failed", "", *table(failed)]
    for section in sections:
        text += ["", f"## {section}", "", *table(of[section])]
        for line in of[section]:
            if line.below:
                fence = [] if line.below[0].startswith("|") else ["```"]
                text += ["", f"{line.name}:", "", *fence, *line.below, *fence]
    return "\n".join(text) + "\n"


def facts() -> dict[str, str]:
    """Where and with what this ran."""
    import torch

    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "device": f"{device}, EMULATED on the CPU (docs/testing_without_gpu.md): nothing here is about speed, NCCL or compiled kernels" if emulated() else device,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}", "python": sys.version.split()[0], "commit": done.stdout.strip() or "unknown",
    }


def main(argv: list[str], program: Path = Path(__file__).resolve()) -> int:
    """Run the sections. program: what calls this, to be run for each section. Returns: the exit code."""
    if argv[:1] == ["--run-section"]:
        section, written, skip, *most = argv[1:]
        run_section(section, Path(written), int(skip), int(most[1]) if most else None)
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Sections and exit codes: see the head of this file.")
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=SECTIONS, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--output", metavar="FOLDER", help="a folder that does not exist yet")
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS", help="of one line (1800)")
    parser.add_argument("--short", action="store_true", help="the first line of every section only, but all of environment")
    given = parser.parse_args(argv)
    if given.output == "":
        parser.error("--output is given an empty name: a folder that does not exist yet is needed")
    folder = Path(given.output or f"gpu_acceptance-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if not given.time_limit > 0:
        parser.error(f"--time-limit {given.time_limit:g}: a positive number of seconds is needed")
    if folder.exists():
        parser.error(f"--output {folder} exists: give the name of a new folder")
    if problem := no_device():
        parser.error(problem)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--output {folder}: the folder cannot be made ({error.strerror})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no section outlives this process
    head, lines = facts(), []
    stopped = False
    try:
        for section in dict.fromkeys(given.only):
            for line in supervise(section, folder, given.time_limit, 1 if given.short and section != "environment" else None, program):
                lines.append(line)
                print(f"{line.section}: {line.name}: {line.verdict}: {line.detail}", flush=True)
                (folder / "report.md").write_text(report(lines, head))
                (folder / "report.json").write_text(json.dumps({**head, "lines": [asdict(each) for each in lines]}, indent=1) + "\n")
    except KeyboardInterrupt:
        stopped = True
    (folder / "report.md").write_text(report(lines, head | ({"stopped": "by Ctrl-C, before all lines were checked"} if stopped else {})))
    counts = ", ".join(f"{sum(line.verdict == verdict for line in lines)} {verdict}" for verdict in (PASSED, FAILED, NOT_MEASURED))
    print(f"{counts}; {folder / 'report.md'}")
    return 130 if stopped else int(any(line.verdict == FAILED for line in lines))


def no_device() -> str | None:
    """What is missing for the whole program; None if nothing is."""
    from moe_trainer.errors import InputError, need_packages

    try:
        need_packages("torch", "numpy", "safetensors", "pytest", "hypothesis")
    except InputError as error:
        return str(error)
    import torch

    if torch.cuda.is_available():
        return None
    why = "this torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch sees no device (driver, CUDA_VISIBLE_DEVICES)"
    return (f"{why}: a machine with NVIDIA GPUs of compute capability 8.0 or later is needed. On the emulated device, from the checkout:\n"
            "EMULATED_CUDA=2 EMULATED_CUDA_LIBRARY=$(python tests/emulated_cuda/build.py) PYTHONPATH=$PWD/tests/emulated_cuda/site TRITON_INTERPRET=1 "
            "python scripts/gpu_acceptance.py (docs/testing_without_gpu.md)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
