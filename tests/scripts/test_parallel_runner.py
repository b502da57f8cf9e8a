"""Tests of tests/parallel_runner.py: every test runs once, failures are reported, folders that wait have their own process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ONE = """
import os, time
def test_one():
    time.sleep(0.1)
    open(os.environ['RUN'], 'a').write(f'{__file__} {os.getpid()}\\n')
"""
MEET = """
    deadline = time.monotonic() + 60
    while len({line.split()[1] for line in open(os.environ['RUN'])}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
"""  # until the other process has run something


@pytest.fixture
def suite(tmp_path):
    """Return a function that runs a small suite and returns exit code, output, and the process of each module."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text(
        "from parallel_runner import pytest_configure, pytest_runtestloop, pytest_terminal_summary\n"
    )
    for folder in ("resilience", "moe", "estimate"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "tests" / folder / f"test_{number}.py").write_text(ONE)

    def run(*argv, processes=2):
        ran = tmp_path / "ran"
        ran.write_text("")
        # other installed plugins take longer to load than these tests to run
        env = {
            **os.environ,
            "MOE_TRAINER_TEST_PROCESSES": str(processes),
            "RUN": str(ran),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        done = subprocess.run(
            [sys.executable, str(TESTS / "parallel_runner.py"), "-q", *argv],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        pairs = [line.rsplit(" ", 1) for line in ran.read_text().splitlines()]
        processes_of = {str(Path(path).relative_to(tmp_path / "tests")): pid for path, pid in pairs}
        assert len(processes_of) == len(pairs), "a test was run twice"
        return done.returncode, done.stdout + done.stderr, processes_of

    return run


def test_every_test_runs_once_and_a_waiting_folder_has_its_own_process(suite, tmp_path):
    (tmp_path / "tests" / "resilience" / "test_0.py").write_text(ONE + MEET)
    code, output, ran = suite()
    assert code == 0 and len(ran) == 12 and "3 processes together: 12 passed in" in output, output
    waiting = {ran[f"resilience/test_{number}.py"] for number in range(4)}
    assert len(waiting) == 1 and not waiting & {pid for name, pid in ran.items() if not name.startswith("resilience")}
    (tmp_path / "tests" / "resilience" / "test_0.py").write_text(ONE)
    code, output, ran = suite(processes=1)
    assert (
        code == 0
        and len(set(ran.values())) == 1
        and len(ran) == 12
        and "12 passed" in output
        and "together" not in output
    )


def test_a_failure_in_any_process_is_reported_and_stored(suite, tmp_path):
    for folder, name in (("moe", "test_0"), ("resilience", "test_3")):
        (tmp_path / "tests" / folder / f"{name}.py").write_text(f"def test_wrong():\n    assert {name!r} == 0\n")
    code, output, ran = suite()
    assert code == 1 and len(ran) == 10 and "2 failed" in output and "10 passed" in output
    assert "FAILED tests/moe/test_0.py" in output and "FAILED tests/resilience/test_3.py" in output
    known = json.loads((tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed").read_text())
    assert sorted(known) == ["tests/moe/test_0.py::test_wrong", "tests/resilience/test_3.py::test_wrong"]
    _, output, ran = suite("--lf")
    assert "2 failed" in output and not ran


def test_exit_first_stops_all_processes(suite, tmp_path):
    for number in range(4):
        (tmp_path / "tests" / "estimate" / f"test_{number}.py").write_text(ONE.replace("0.1", "1.0"))
    (tmp_path / "tests" / "moe" / "test_0.py").write_text("def test_wrong():\n    assert False\n")
    code, output, ran = suite("tests/moe", "tests/estimate", "-x")
    assert code == 1 and "1 failed" in output and len(ran) < 7


@pytest.mark.parametrize(
    ("text", "code", "needle"),
    [
        ("import nothing_of_that_name", 2, "ModuleNotFoundError"),
        ("import os\ndef test_dies():\n    os._exit(7)", 7, "together"),
    ],
)
def test_collection_error_and_dead_process_are_failures(suite, tmp_path, text, code, needle):
    (tmp_path / "tests" / "estimate" / "test_0.py").write_text(text)
    found, output, _ = suite()
    assert found == code and needle in output


def test_no_selected_tests_exit_with_the_code_of_pytest(suite):
    code, output, ran = suite("-k", "nothing_of_that_name")
    assert code == 5 and not ran and "no tests" in output
