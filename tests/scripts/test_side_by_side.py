"""Tests that several pytest processes share: each is run once, what failed is told, rooms that measure time stay in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ONE = "import os, time\ndef test_one():\n    time.sleep(0.1)\n    open(os.environ['RUN'], 'a').write(f'{__file__} {os.getpid()}\\n')\n"
MEET = """
    deadline = time.monotonic() + 60
    while len({line.split()[1] for line in open(os.environ['RUN'])}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
"""  # until the other process has run something


@pytest.fixture
def suite(tmp_path):
    """A folder with small rooms; returns a function that runs them and gives exit code, output, and the process of each module."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text("from side_by_side import pytest_configure, pytest_runtestloop, pytest_terminal_summary\n")
    for room in ("guard", "moe", "shape"):
        (tmp_path / "tests" / room).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "tests" / room / f"test_{number}.py").write_text(ONE)

    def run(*argv, processes=2):
        ran = tmp_path / "ran"
        ran.write_text("")
        # plugins that are installed beside pytest take longer to load than these tests to run
        env = {**os.environ, "MOE_TRAINER_TEST_PROCESSES": str(processes), "RUN": str(ran), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run([sys.executable, str(TESTS / "side_by_side.py"), "-q", *argv], cwd=tmp_path, env=env, capture_output=True,
                              text=True, timeout=600, check=False)
        pairs = [line.rsplit(" ", 1) for line in ran.read_text().splitlines()]
        processes_of = {str(Path(path).relative_to(tmp_path / "tests")): pid for path, pid in pairs}
        assert len(processes_of) == len(pairs), "a test was run twice"
        return done.returncode, done.stdout + done.stderr, processes_of

    return run


def test_every_test_is_run_once_and_a_room_that_measures_time_by_one_process(suite, tmp_path):
    (tmp_path / "tests" / "guard" / "test_0.py").write_text(ONE + MEET)
    code, said, ran = suite()
    assert code == 0 and len(ran) == 12 and "2 processes together: 12 passed in" in said, said
    assert len(set(ran.values())) == 2 and len({ran[f"guard/test_{number}.py"] for number in range(4)}) == 1
    (tmp_path / "tests" / "guard" / "test_0.py").write_text(ONE)
    code, said, ran = suite(processes=1)
    assert code == 0 and len(set(ran.values())) == 1 and len(ran) == 12 and "12 passed" in said and "together" not in said


def test_a_failure_of_any_process_is_shown_and_remembered(suite, tmp_path):
    for room, name in (("moe", "test_0"), ("guard", "test_3")):
        (tmp_path / "tests" / room / f"{name}.py").write_text(f"def test_wrong():\n    assert {name!r} == 0\n")
    code, said, ran = suite()
    assert code == 1 and len(ran) == 10 and "2 failed" in said and "10 passed" in said
    assert "FAILED tests/moe/test_0.py" in said and "FAILED tests/guard/test_3.py" in said
    known = json.loads((tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed").read_text())
    assert sorted(known) == ["tests/guard/test_3.py::test_wrong", "tests/moe/test_0.py::test_wrong"]
    _, said, ran = suite("--lf")
    assert "2 failed" in said and not ran


def test_the_first_failure_stops_all_where_that_is_asked_for(suite, tmp_path):
    for number in range(4):
        (tmp_path / "tests" / "shape" / f"test_{number}.py").write_text(ONE.replace("0.1", "1.0"))
    (tmp_path / "tests" / "moe" / "test_0.py").write_text("def test_wrong():\n    assert False\n")
    code, said, ran = suite("tests/moe", "tests/shape", "-x")
    assert code == 1 and "1 failed" in said and len(ran) < 7


@pytest.mark.parametrize(("text", "code", "needle"), [("import nothing_of_that_name", 2, "ModuleNotFoundError"),
                                                      ("import os\ndef test_dies():\n    os._exit(7)", 7, "together")])
def test_a_module_that_cannot_be_read_and_a_process_that_dies_are_failures(suite, tmp_path, text, code, needle):
    (tmp_path / "tests" / "shape" / "test_0.py").write_text(text)
    found, said, _ = suite()
    assert found == code and needle in said


def test_no_tests_at_all_are_told_as_pytest_does(suite):
    code, said, ran = suite("-k", "nothing_of_that_name")
    assert code == 5 and not ran and "no tests" in said
