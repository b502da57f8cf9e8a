"""scripts/gpu_acceptance.py: on the emulated device, with lines that crash or hang, with wrong input, and the gaps of a trace."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import REPOSITORY
from emulated_cuda.run import environment
from emulated_cuda.test_waits import CASES, MICROBATCHES, expected

from scripts import acceptance_checks, gpu_acceptance

SCRIPT = REPOSITORY / "scripts" / "gpu_acceptance.py"
LINES = f"""
import os, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from scripts import gpu_acceptance as script
from scripts.acceptance_checks import Found, NotMeasured

def wrong():
    raise ValueError("seven is not eight")

def absent():
    raise NotMeasured("no such library")

def made():
    yield "fine", lambda: "it is"
    yield "crash", lambda: os.kill(os.getpid(), 9)
    yield "hang", lambda: time.sleep(600)
    yield "wrong", wrong
    yield "absent", absent
    yield "table", lambda: Found("two lines", ["| a |", "|---|"])

def broken():
    raise RuntimeError("has no lines")
    yield

script.SECTIONS.update(made=made, broken=broken)
script.no_device, script.facts = lambda: None, lambda: {{"device": "none"}}
sys.exit(script.main(sys.argv[1:], Path(__file__)))
"""


def test_a_crash_and_a_hang_fail_their_lines_alone(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LINES)
    done = subprocess.run([sys.executable, program, "--only", "made", "broken", "--time-limit", "8", "--output", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    assert [(line["name"], line["verdict"]) for line in lines] == [
        ("fine", "passed"), ("crash", "failed"), ("hang", "failed"), ("wrong", "failed"), ("absent", "not measured"), ("table", "passed"),
        ("between lines", "failed")]
    details = [line["detail"] for line in lines]
    assert "ended with -9" in details[1] and "took longer than 8 s" in details[2]
    assert details[3:5] == ["ValueError: seven is not eight", "no such library"]
    assert "has no lines" in (tmp_path / "out/broken.log").read_text()
    text = (tmp_path / "out/report.md").read_text()
    assert "| made | 2 | 3 | 1 |" in text and text.index("## What failed") < text.index("## made") and "made: crash" in text


def test_a_record_that_is_half_written(tmp_path):
    """As one that is larger than the buffer of the file: its first half is read once, and once its process ends there."""
    program = tmp_path / "program.py"
    slow = """
import json
def begun():
    yield "long", lambda: Found("fine", ["x" * 100000])
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
    program.write_text(LINES.replace("def made():", f"{slow}\ndef made():").replace("made=made", "made=made, begun=begun"))
    done = subprocess.run([sys.executable, program, "--only", "begun", "--output", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    assert [(line["name"], line["verdict"], len(line["below"])) for line in lines] == [("long", "passed", 1), ("cut", "failed", 0)]
    assert "ended with -9" in lines[1]["detail"]


def test_on_the_emulated_device(tmp_path):
    """The first line of the sections that take no minutes."""
    sections = ("environment", "waits", "races", "dispatchers", "profile")
    done = subprocess.run([sys.executable, SCRIPT, "--short", "--only", *sections, "--output", tmp_path / "out"], env=environment(2), capture_output=True,
                          text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    verdicts = {line["section"]: line["verdict"] for line in report["lines"]}
    assert verdicts == {**dict.fromkeys(sections, "passed"), "environment": verdicts["environment"], "races": "not measured", "profile": "not measured"}
    assert "EMULATED" in report["device"] and "emulated device" in next(line["detail"] for line in report["lines"] if line["section"] == "races")
    assert list((tmp_path / "out/profile").glob("*.json"))


def test_a_wait_that_is_not_documented_fails(tmp_path):
    """As one that somebody adds to the optimizer would."""
    probe = ("import sys; sys.path[:0] = ['.', 'tests']; from scripts import acceptance_checks; from train.layouts import argv_of; "
             "acceptance_checks.waits_of(argv_of('plain'), 1, ('training/step.py', 'moe/balancing.py'))")
    done = subprocess.run([sys.executable, "-c", probe], env=environment(1), capture_output=True, text=True, cwd=REPOSITORY)
    assert "called a synchronizing CUDA operation" in done.stderr and "clip.py" in done.stderr


@pytest.mark.parametrize("name", CASES)
def test_waits_are_allowed_as_documented(monkeypatch, name):
    """Every line allows in three steps what tests/emulated_cuda/test_waits.py expects of three, and not one more."""
    check = dict(acceptance_checks.waits())[name]
    of_training = {place.removeprefix("train "): 3 * times for place, times in expected(*CASES[name], MICROBATCHES).items() if place.startswith("train ")}
    monkeypatch.setattr(acceptance_checks, "waits_of", lambda argv, steps, places: of_training)
    assert "3 in training/step.py" in check()
    for place in (*of_training, "memory/host_read.py"):
        monkeypatch.setattr(acceptance_checks, "waits_of", lambda argv, steps, places, place=place: {**of_training, place: of_training.get(place, 0) + 1})
        with pytest.raises(AssertionError, match="more often than documented"):
            check()


def test_waits_of_multi_token_prediction():
    """The line whose number of MoE layers differs, on the emulated device."""
    probe = ("import sys; sys.path[:0] = ['.', 'tests']; from scripts import acceptance_checks; "
             "print(dict(acceptance_checks.waits())['losses of multi-token prediction come with the others']())")
    done = subprocess.run([sys.executable, "-c", probe], env=environment(1), capture_output=True, text=True, cwd=REPOSITORY)
    assert "60 in memory/host_read.py" in done.stdout, done.stderr


@pytest.mark.parametrize(("given", "message"), [
    (["--output", "{tmp}"], "exists: give the name of a new folder"), (["--time-limit", "0", "--output", "{tmp}/new"], "--time-limit 0"),
    (["--time-limit", "nan", "--output", "{tmp}/new"], "--time-limit nan"), (["--output", ""], "--output is given an empty name"),
    (["--only", "everything", "--output", "{tmp}/new"], "invalid choice: 'everything'"), (["--output", "{tmp}/new"], "EMULATED_CUDA=2"),
])
def test_wrong_input(tmp_path, monkeypatch, capsys, given, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        gpu_acceptance.main([word.format(tmp=tmp_path) for word in given])
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_acceptance, "no_device", lambda: None)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        gpu_acceptance.main(["--output", str(tmp_path / "file" / "new")])
    assert end.value.code == 2 and "the folder cannot be made (Not a directory)" in capsys.readouterr().err


def test_no_section_outlives_its_supervisor(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LINES.replace('yield "fine", lambda: "it is"', 'yield "hang", lambda: (Path("pid").write_text(str(os.getpid())), time.sleep(600))[0]'))
    process = subprocess.Popen([sys.executable, program, "--only", "made", "--output", tmp_path / "out"], stdout=subprocess.DEVNULL)
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


def test_ctrl_c_leaves_a_report(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LINES.replace('yield "crash"', 'yield "hang", lambda: time.sleep(600)\n    yield "crash"'))
    process = subprocess.Popen([sys.executable, program, "--only", "made", "--output", tmp_path / "out"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "made: fine: passed: it is\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and "1 passed, 0 failed" in out and not err
    assert "- stopped: by Ctrl-C" in (tmp_path / "out/report.md").read_text()


def test_gaps_of_a_trace():
    def kernel(name, ts, dur, launched, number):
        return [{"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": number}},
                {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, "tid": 1, "args": {"correlation": number}}]

    events = [*kernel("first", 100, 10, 90, 1), *kernel("beside", 102, 3, 91, 2), *kernel("late", 150, 10, 148, 3), *kernel("waiting", 190, 10, 120, 4),
              {"cat": "cpu_op", "name": "aten::outer", "ts": 140, "dur": 20, "tid": 1}, {"cat": "cpu_op", "name": "aten::mm", "ts": 147, "dur": 4, "tid": 1}]
    gaps, idle, total = acceptance_checks.largest_gaps(events)
    assert (idle, total) == (70, 100)
    assert [(gap.microseconds, gap.after, gap.before) for gap in gaps] == [(40, "first", "late"), (30, "late", "waiting")]
    assert gaps[0].because == "the host came 38 us late, in aten::mm" and "waited for another stream" in gaps[1].because
    assert acceptance_checks.largest_gaps(events, 1)[0] == gaps[:1] and acceptance_checks.largest_gaps([]) == ([], 0.0, 0.0)
