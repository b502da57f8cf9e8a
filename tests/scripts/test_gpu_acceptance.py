"""Tests of scripts/gpu_acceptance.py: emulated device, lines that crash or hang, wrong input, gaps of a trace."""

import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from commands import REPOSITORY
from emulated_cuda.run import environment, on_device
from emulated_cuda.test_waits import CASES, MICROBATCHES, expected, run_acceptance_line
from harness import wait_until
from training.layouts import make_argv, shallow

from arguments import parse_args
from moe_trainer.estimate.dry_run import plan_of_flags
from scripts import acceptance_checks, acceptance_report, acceptance_times, gpu_acceptance
from scripts.benchmarks import bench_gpu, bench_kernels
from scripts.provenance import get_commit

SCRIPT = REPOSITORY / "scripts" / "gpu_acceptance.py"
LINES = f"""
import os, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from scripts import gpu_acceptance as script
from scripts.acceptance_checks import CheckResult, NotMeasuredError

def wrong():
    raise ValueError("seven is not eight")

def absent():
    raise NotMeasuredError("no such library")

def made():
    yield "fine", lambda: "it is"
    yield "crash", lambda: os.kill(os.getpid(), 9)
    yield "hang", lambda: time.sleep(600)
    yield "wrong", wrong
    yield "absent", absent
    yield "table", lambda: CheckResult("two lines", ["| a |", "|---|"])

def broken():
    raise RuntimeError("has no lines")
    yield

Section = script.Section
script.SECTIONS.update(made=Section(made), broken=Section(broken))
script.find_problem, script.get_provenance = lambda: None, lambda: {{"device": "none"}}
sys.exit(script.main(sys.argv[1:], Path(__file__)))
"""


def write_program(folder, old="", new=""):
    """Write LINES with one part replaced; returns the words of its command, whose report is in out."""
    program = folder / "program.py"
    program.write_text(LINES.replace(old, new) if old else LINES)
    return [sys.executable, str(program), "--output", str(folder / "out")]


def read_details(folder: Path) -> dict[str, str]:
    """Return the texts of the packed files."""
    with tarfile.open(folder / "details.tar.gz") as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


def test_a_crash_or_hang_fails_only_its_line(tmp_path):
    command = [*write_program(tmp_path), "--only", "made", "broken", "--time-limit", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    found = [(line["name"], line["status"]) for line in lines if line["section"] == "made"]
    assert found[:3] == [("fine", "passed"), ("crash", "failed"), ("hang", "failed")]
    assert found[3:] == [("wrong", "failed"), ("absent", "not measured"), ("table", "passed")]
    assert [(line["name"], line["status"]) for line in lines if line["section"] == "broken"] == [
        ("between lines", "failed")
    ]
    details = {line["name"]: line["detail"] for line in lines}
    assert "ended with -9" in details["crash"] and "took longer than 8 s" in details["hang"]
    assert (details["wrong"], details["absent"]) == ("ValueError: seven is not eight", "no such library")
    assert "has no lines" in read_details(tmp_path / "out")["broken.log"]
    text = (tmp_path / "out/report.md").read_text()
    assert "| made | 2 | 3 | 1 |" in text and "made: crash" in text
    assert text.index("## Failures") < text.index("## made")


def test_incomplete_records_are_not_read(tmp_path):
    """A record larger than the file buffer has two parts; in the second case the process ends between them."""
    slow = """
import json
def begun():
    yield "long", lambda: CheckResult("fine", ["x" * 100000])
    yield "cut", cut
def cut():
    with open(sys.argv[3], "a") as file:
        file.write('{"section": "begun", "na')
    os.kill(os.getpid(), 9)
dumps = json.dumps
def slowly(record, **how):
    text = dumps(record, **how)
    if "status" in record and record.get("name") == "long":
        with open(sys.argv[3], "a") as file:
            file.write(text[:8192])
        time.sleep(1)
        return text[8192:]
    return text
if "--run-part" in sys.argv:
    json.dumps = slowly

script.SECTIONS.update(begun=script.Section(begun), """
    command = [*write_program(tmp_path, "script.SECTIONS.update(", slow), "--only", "begun"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    long, cut = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    assert (long["name"], long["status"], len(long["below"])) == ("long", "passed", 1)
    assert (cut["name"], cut["status"], len(cut["below"])) == ("cut", "failed", 0)
    assert "ended with -9" in cut["detail"]


def test_short_runs_the_first_line_of_a_section(tmp_path):
    done = subprocess.run([*write_program(tmp_path), "--short", "--only", "made"], capture_output=True, text=True)
    assert done.stdout.startswith("made: fine: passed: it is\n1 passed, 0 failed, 0 not measured"), done.stderr


def test_a_budget_ends_every_section_in_time(tmp_path):
    hang = 'yield "hang", lambda: time.sleep(600)\n    yield "crash"'
    timed = "script.SECTIONS.update(timed=Section(made, is_timed=True), "
    command = write_program(tmp_path, 'yield "crash"', hang)
    program = tmp_path / "program.py"
    program.write_text(program.read_text().replace("script.SECTIONS.update(", timed))
    done = subprocess.run([*command, "--only", "timed", "made", "--budget", "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    last = {line["section"]: line for line in lines}
    assert list(last) == ["made", "timed"]
    for line in last.values():
        assert line["status"] == "not measured" and "--budget" in line["detail"]


def test_what_measures_times_runs_alone_in_equal_shares_of_the_rest(monkeypatch, tmp_path):
    clock, started = [0.0], []

    class Process:
        """Ends when it must, or after ten seconds if it measures times."""

        def __init__(self, part, folder, program, time_limit_s, end):
            started.append((part.section, clock[0], end))
            self.ends_at = clock[0] + 10 if gpu_acceptance.SECTIONS[part.section].is_timed else end

        def poll(self):
            return [], clock[0] >= self.ends_at

    def sleep(seconds):
        clock[0] += 1.0

    monkeypatch.setattr(gpu_acceptance, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(gpu_acceptance, "PartProcess", Process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    parts = [gpu_acceptance.Part(name) for name in ("profile", "benchmark", "runs", "tests", "waits", "races")]
    new = sum(gpu_acceptance.run_parts(parts, tmp_path, SCRIPT, 60.0, 100.0), [])
    assert started == [("runs", 0, 50), ("tests", 0, 50), ("waits", 0, 50), ("profile", 50, 75), ("benchmark", 60, 100)]
    assert [(line.section, line.status) for line in new] == [("races", "not measured")]
    started.clear()
    assert not sum(gpu_acceptance.run_parts(parts[:1], tmp_path, SCRIPT, 60.0, math.inf), [])
    assert started == [("profile", 70, math.inf)]


def test_the_archive_leaves_out_what_is_too_large(monkeypatch, tmp_path):
    monkeypatch.setattr(acceptance_report, "ARCHIVE_BYTES", 10_000)
    work = tmp_path / "work"
    work.mkdir()
    for name, size in (("small.log", 100), ("medium", 3000), ("large", 20_000), ("huge", 60_000)):
        (work / name).write_bytes(random.Random(0).randbytes(size))
    results = acceptance_report.Results(tmp_path, work, {})
    results.add([])
    with tarfile.open(tmp_path / "details.tar.gz") as archive:
        assert archive.getnames() == ["small.log", "medium"]
    assert results.head["not in details.tar.gz"] == "huge, large"
    assert (tmp_path / "details.tar.gz").stat().st_size <= 10_000


def test_sections_without_their_packages_are_not_measured(monkeypatch):
    monkeypatch.setattr(gpu_acceptance.importlib.util, "find_spec", lambda name: None)
    parts, missing = gpu_acceptance.choose_parts(
        argparse.Namespace(only=[("tests", None), ("profile", 1)], short=False)
    )
    assert parts == [gpu_acceptance.Part("profile", 0, 1, 1)]
    assert [(line.section, line.status) for line in missing] == [("tests", "not measured")]


def test_processes_share_the_lines_of_a_section(monkeypatch, tmp_path):
    section = gpu_acceptance.Section(lambda: ((str(number), lambda: "") for number in range(7)), parts=3)
    monkeypatch.setitem(gpu_acceptance.SECTIONS, "shared", section)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(gpu_acceptance.ctypes, "CDLL", mock.Mock())
    parts, _ = gpu_acceptance.choose_parts(argparse.Namespace(only=[("shared", 6)], short=False))
    found = []
    for part in parts:
        results = tmp_path / f"{part.index}"
        gpu_acceptance.run_part(part, results, skip=1)
        records = gpu_acceptance.complete_records(results.read_text())
        found.append([record["name"] for record in records if "status" in record])
    assert found == [["3"], ["4"], ["5"]]  # the first of each was skipped


def test_every_test_of_tests_gpu_has_a_line():
    names = [name for name, _ in acceptance_checks.tests()]
    assert "test_one_device: test_three_steps_on_a_device_equal_the_cpu" in names
    assert {name.partition(":")[0] for name in names} == {
        path.stem for path in (REPOSITORY / "tests/gpu").glob("test_*.py")
    }


@pytest.mark.parametrize("tiny", [False, True])
def test_command_lines_of_the_runs_are_valid(tiny):
    for preset in acceptance_checks.RUNS:
        flags = f"--preset {preset}_tiny {acceptance_checks.RUN_FLAGS} {acceptance_checks.run_sizes(tiny)}"
        assert parse_args(flags.split(), 1).training.train_iters == 4


def test_command_lines_of_the_alternatives_are_valid(monkeypatch):
    monkeypatch.setattr(acceptance_times, "is_emulated", lambda: False)
    for flags in acceptance_times.ALTERNATIVES:
        assert parse_args(acceptance_times.shape_argv("qwen3", flags), 1).model.num_layers == 4


def test_calls_for_a_rented_machine_are_valid(monkeypatch, tmp_path):
    """They fit 15 minutes with two starts of the machine, and at most 2,000 characters each."""
    monkeypatch.setattr(gpu_acceptance, "find_problem", lambda: None)
    text = (REPOSITORY / "docs/first_gpu.md").read_text()
    calls = re.findall(r'```bash title="Needs a rented GPU"\n(.*?)```', text, re.DOTALL)
    assert len(calls) == 2
    budgets = []
    for call in calls:
        assert len(call) < 2000
        subprocess.run(["bash", "-n"], input=call, text=True, check=True)
        _, python, program, *argv = shlex.split(call.replace("$OUT", str(tmp_path)).replace("\\\n", ""))
        assert python == "python3" and (REPOSITORY / program).samefile(gpu_acceptance.__file__)
        options = gpu_acceptance.parse_options(argv)
        parts, missing = gpu_acceptance.choose_parts(options)
        assert parts and not missing
        budgets.append(options.budget)
    assert max(budgets) <= 580 and sum(budgets) + 2 * 80 <= 900


def test_environment_of_the_emulated_device(tmp_path):
    command = [sys.executable, SCRIPT, "--short", "--only", "environment", "--output", tmp_path / "out"]
    done = subprocess.run(command, env=environment(2), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    details = {line["name"]: line["detail"] for line in report["lines"]}
    assert details["GPUs"].startswith("2 x ") and "emulated" in details["nccl"] and "EMULATED" in report["device"]


def check_first_line(section: str, folder: Path) -> str:
    """Return the detail of a section's first line, or why it is not measured."""
    os.chdir(folder)
    _, check = next(gpu_acceptance.SECTIONS[section].lines())
    try:
        return str(check())
    except acceptance_checks.NotMeasuredError as error:
        return str(error)


@pytest.mark.parametrize(
    ("section", "detail"),
    [
        ("races", "the access check of the emulated device passed"),
        ("dispatchers", "with gloo instead of NCCL"),
    ],
)
def test_first_lines_pass_on_the_emulated_device(tmp_path, section, detail):
    assert detail in on_device(check_first_line, section, tmp_path, devices=2)


@pytest.mark.parametrize("shape", bench_gpu.SHAPES)
def test_shapes_of_the_benchmark_fit_a_device_of_80_gb(shape):
    argv = [*bench_gpu.command_line(shape, bench_gpu.SEQ, False, ""), "--world-size", "1", "--hardware", "h100"]
    assert plan_of_flags(argv).margin > 0


def profile_and_measure(folder: Path) -> tuple[str, int]:
    """The detail of a profiled shape, and the bytes that its process has on the device afterwards."""
    return check_first_line("profile", folder), torch.cuda.memory_allocated()


def test_a_profiled_shape_leaves_no_memory_to_the_next_one(tmp_path):
    """Also of the step that another process has profiled the trace is written."""
    detail, num_bytes = on_device(profile_and_measure, tmp_path)
    assert "the trace was written" in detail and num_bytes == 0 and list(tmp_path.rglob("*.json.gz"))


def test_only_default_kernels_must_be_as_fast_as_torch(monkeypatch):
    monkeypatch.setattr(bench_kernels, "measure", lambda name, size, rounds: [name, size, "1", "2", "0.5", "-", "0"])
    monkeypatch.setattr(acceptance_times, "is_emulated", lambda: False)
    monkeypatch.setattr(acceptance_checks.importlib.util, "find_spec", lambda name: name)
    lines = dict(acceptance_times.kernel_times())
    assert "not a default kernel" in lines["grouped-gemm, qwen3-30b"]()
    with pytest.raises(AssertionError, match="slower than torch"):
        lines["router, qwen3-30b"]()


def test_a_machine_without_git_has_an_unknown_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert get_commit() == "unknown"


def test_an_undocumented_wait_fails():
    argv, places = [*shallow(make_argv("plain")), "--global-batch-size", "2"], ("training/step.py", "moe/balancing.py")
    with pytest.raises(AssertionError, match="called a synchronizing CUDA operation") as raised:
        on_device(acceptance_checks.count_waits, argv, 1, places)
    assert "clip.py" in str(raised.value)


@pytest.mark.parametrize("name", CASES)
def test_waits_are_allowed_as_documented(monkeypatch, name):
    """Every line allows exactly the waits that tests/emulated_cuda/test_waits.py expects of three steps."""
    check = dict(acceptance_checks.waits())[name]
    allowed = {
        place.removeprefix("train "): 3 * times
        for place, times in expected(*CASES[name], MICROBATCHES).items()
        if place.startswith("train ")
    }
    found = {}
    monkeypatch.setattr(acceptance_checks, "count_waits", lambda argv, steps, places: found)
    found |= allowed
    assert "3 in training/step.py" in check()
    for place in (*allowed, "memory/host_read.py"):
        found |= allowed | {"memory/host_read.py": allowed.get("memory/host_read.py", 0)}
        found[place] += 1
        with pytest.raises(AssertionError, match="more often than documented"):
            check()


def test_waits_of_multi_token_prediction():
    """Run the line of the section "waits" whose number of MoE layers differs on the emulated device."""
    printed = on_device(run_acceptance_line, "losses of multi-token prediction come with the others")
    assert "60 in memory/host_read.py" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "{tmp}"], "exists: give the name of a new directory"),
        (["--time-limit", "0", "--output", "{tmp}/new"], "--time-limit 0"),
        (["--time-limit", "nan", "--output", "{tmp}/new"], "--time-limit nan"),
        (["--output", ""], "--output is empty"),
        (["--budget", "-1", "--output", "{tmp}/new"], "--budget -1"),
        (["--only", "everything", "--output", "{tmp}/new"], "invalid choice: 'everything'"),
        (["--only", "waits:0", "--output", "{tmp}/new"], "waits:0: a positive number of lines"),
        (["--output", "{tmp}/new"], "EMULATED_CUDA=2"),
    ],
)
def test_wrong_input_is_a_user_error(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        gpu_acceptance.main([word.format(tmp=tmp_path) for word in words])
    assert exit_info.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_invalid_output_directory_is_a_user_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_acceptance, "find_problem", lambda: None)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_info:
        gpu_acceptance.main(["--output", str(tmp_path / "file" / "new")])
    assert exit_info.value.code == 2 and "cannot create the directory (Not a directory)" in capsys.readouterr().err


def test_sections_do_not_outlive_the_supervisor(tmp_path):
    pid = tmp_path / "pid"
    hang = f'yield "hang", lambda: (Path({str(pid)!r}).write_text(str(os.getpid())), time.sleep(600))[0]'
    command = [*write_program(tmp_path, 'yield "fine", lambda: "it is"', hang), "--only", "made"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(lambda: (pid.exists() and pid.read_text()) or process.poll() is not None)
    process.kill()
    process.wait()
    section = Path("/proc", pid.read_text(), "stat")
    wait_until(lambda: not section.exists() or section.read_text().rpartition(")")[2].split()[0] == "Z", 60)


def test_ctrl_c_writes_a_report(tmp_path):
    hang = 'yield "hang", lambda: time.sleep(600)\n    yield "crash"'
    command = [*write_program(tmp_path, 'yield "crash"', hang), "--only", "made"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "made: fine: passed: it is\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "1 passed, 0 failed" in out and not err
    assert "- stopped: by Ctrl-C" in (tmp_path / "out/report.md").read_text()


def test_finds_the_largest_gaps_of_a_trace():
    events = [
        {"cat": "cpu_op", "name": "aten::outer", "ts": 140, "dur": 20, "tid": 1},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 147, "dur": 4, "tid": 1},
    ]
    kernels = (("first", 100, 10, 90), ("overlapped", 102, 3, 91), ("late", 150, 10, 148), ("waiting", 190, 10, 120))
    for number, (name, ts, dur, launched) in enumerate(kernels):
        args = {"args": {"correlation": number}}
        events.append({"cat": "kernel", "name": name, "ts": ts, "dur": dur, **args})
        events.append({"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, "tid": 1, **args})
    gaps, idle, total = acceptance_times.largest_gaps(events)
    assert (idle, total) == (70, 100)
    assert [(gap.microseconds, gap.after, gap.before) for gap in gaps] == [
        (40, "first", "late"),
        (30, "late", "waiting"),
    ]
    assert gaps[0].cause == "launched 38 us late, in aten::mm" and "waited for another stream" in gaps[1].cause
    assert acceptance_times.largest_gaps(events, 1)[0] == gaps[:1]
    assert acceptance_times.largest_gaps([]) == ([], 0.0, 0.0)
    assert acceptance_times.kernel_table([*events, events[2]])[2:4] == ["| 20 | 2 | first |", "| 10 | 1 | late |"]
