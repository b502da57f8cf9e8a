"""Tests of scripts/gpu_acceptance.py: emulated device, lines that crash or hang, wrong input, gaps of a trace."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import REPOSITORY
from emulated_cuda.run import environment, on_device
from emulated_cuda.test_waits import CASES, MICROBATCHES, expected, run_acceptance_line
from training.layouts import make_argv

from scripts import acceptance_checks, gpu_acceptance

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

script.SECTIONS.update(made=made, broken=broken)
script.find_problem, script.get_provenance = lambda: None, lambda: {{"device": "none"}}
sys.exit(script.main(sys.argv[1:], Path(__file__)))
"""


def test_a_crash_or_hang_fails_only_its_line(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LINES)
    done = subprocess.run(
        [sys.executable, program, "--only", "made", "broken", "--time-limit", "8", "--output", tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    lines = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    assert [(line["name"], line["verdict"]) for line in lines] == [
        ("fine", "passed"),
        ("crash", "failed"),
        ("hang", "failed"),
        ("wrong", "failed"),
        ("absent", "not measured"),
        ("table", "passed"),
        ("between lines", "failed"),
    ]
    details = [line["detail"] for line in lines]
    assert "ended with -9" in details[1] and "took longer than 8 s" in details[2]
    assert details[3:5] == ["ValueError: seven is not eight", "no such library"]
    assert "has no lines" in (tmp_path / "out/broken.log").read_text()
    text = (tmp_path / "out/report.md").read_text()
    assert (
        "| made | 2 | 3 | 1 |" in text and text.index("## Failures") < text.index("## made") and "made: crash" in text
    )


def test_incomplete_records_are_not_read(tmp_path):
    """A record larger than the file buffer has two parts; in the second case the process ends between them."""
    program = tmp_path / "program.py"
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
    if "verdict" in record and record.get("name") == "long":
        with open(sys.argv[3], "a") as file:
            file.write(text[:8192])
        time.sleep(1)
        return text[8192:]
    return text
if "--run-section" in sys.argv:
    json.dumps = slowly
"""
    program.write_text(
        LINES.replace("def made():", f"{slow}\ndef made():").replace("made=made", "made=made, begun=begun")
    )
    done = subprocess.run(
        [sys.executable, program, "--only", "begun", "--output", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    lines = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    assert [(line["name"], line["verdict"], len(line["below"])) for line in lines] == [
        ("long", "passed", 1),
        ("cut", "failed", 0),
    ]
    assert "ended with -9" in lines[1]["detail"]


def test_short_sections_pass_on_the_emulated_device(tmp_path):
    """Run the first line of the sections that take less than a minute."""
    sections = ("environment", "waits", "races", "dispatchers", "profile")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short", "--only", *sections, "--output", tmp_path / "out"],
        env=environment(2),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    verdicts = {line["section"]: line["verdict"] for line in report["lines"]}
    assert verdicts == {
        **dict.fromkeys(sections, "passed"),
        "environment": verdicts["environment"],
        "races": "not measured",
        "profile": "not measured",
    }
    assert "EMULATED" in report["device"] and "emulated device" in next(
        line["detail"] for line in report["lines"] if line["section"] == "races"
    )
    assert list((tmp_path / "out/profile").glob("*.json"))


def test_an_undocumented_wait_fails():
    argv, places = make_argv("plain"), ("training/step.py", "moe/balancing.py")
    with pytest.raises(AssertionError, match="called a synchronizing CUDA operation") as raised:
        on_device(acceptance_checks.count_waits, argv, 1, places)
    assert "clip.py" in str(raised.value)


@pytest.mark.parametrize("name", CASES)
def test_waits_are_allowed_as_documented(monkeypatch, name):
    """Every line allows exactly the waits that tests/emulated_cuda/test_waits.py expects of three steps."""
    check = dict(acceptance_checks.waits())[name]
    expected_counts = {
        place.removeprefix("train "): 3 * times
        for place, times in expected(*CASES[name], MICROBATCHES).items()
        if place.startswith("train ")
    }
    monkeypatch.setattr(acceptance_checks, "count_waits", lambda argv, steps, places: expected_counts)
    assert "3 in training/step.py" in check()
    for place in (*expected_counts, "memory/host_read.py"):
        monkeypatch.setattr(
            acceptance_checks,
            "count_waits",
            lambda argv, steps, places, place=place: {**expected_counts, place: expected_counts.get(place, 0) + 1},
        )
        with pytest.raises(AssertionError, match="more often than documented"):
            check()


def test_waits_of_multi_token_prediction():
    """Run the line whose number of MoE layers differs on the emulated device."""
    printed = on_device(run_acceptance_line, "losses of multi-token prediction come with the others")
    assert "60 in memory/host_read.py" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "{tmp}"], "exists: give the name of a new directory"),
        (["--time-limit", "0", "--output", "{tmp}/new"], "--time-limit 0"),
        (["--time-limit", "nan", "--output", "{tmp}/new"], "--time-limit nan"),
        (["--output", ""], "--output is empty"),
        (["--only", "everything", "--output", "{tmp}/new"], "invalid choice: 'everything'"),
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
    program = tmp_path / "program.py"
    program.write_text(
        LINES.replace(
            'yield "fine", lambda: "it is"',
            'yield "hang", lambda: (Path("pid").write_text(str(os.getpid())), time.sleep(600))[0]',
        )
    )
    process = subprocess.Popen(
        [sys.executable, program, "--only", "made", "--output", tmp_path / "out"], stdout=subprocess.DEVNULL
    )
    pid = tmp_path / "out/pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    section = Path("/proc", pid.read_text(), "stat")
    for _ in range(100):
        if not section.exists() or section.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the section is still running")


def test_ctrl_c_writes_a_report(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LINES.replace('yield "crash"', 'yield "hang", lambda: time.sleep(600)\n    yield "crash"'))
    process = subprocess.Popen(
        [sys.executable, program, "--only", "made", "--output", tmp_path / "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "made: fine: passed: it is\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "1 passed, 0 failed" in out and not err
    assert "- stopped: by Ctrl-C" in (tmp_path / "out/report.md").read_text()


def test_finds_the_largest_gaps_of_a_trace():
    def kernel(name, ts, dur, launched, number):
        return [
            {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": number}},
            {
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": launched,
                "dur": 1,
                "tid": 1,
                "args": {"correlation": number},
            },
        ]

    events = [
        *kernel("first", 100, 10, 90, 1),
        *kernel("overlapped", 102, 3, 91, 2),
        *kernel("late", 150, 10, 148, 3),
        *kernel("waiting", 190, 10, 120, 4),
        {"cat": "cpu_op", "name": "aten::outer", "ts": 140, "dur": 20, "tid": 1},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 147, "dur": 4, "tid": 1},
    ]
    gaps, idle, total = acceptance_checks.largest_gaps(events)
    assert (idle, total) == (70, 100)
    assert [(gap.microseconds, gap.after, gap.before) for gap in gaps] == [
        (40, "first", "late"),
        (30, "late", "waiting"),
    ]
    assert gaps[0].cause == "launched 38 us late, in aten::mm" and "waited for another stream" in gaps[1].cause
    assert acceptance_checks.largest_gaps(events, 1)[0] == gaps[:1] and acceptance_checks.largest_gaps([]) == (
        [],
        0.0,
        0.0,
    )
