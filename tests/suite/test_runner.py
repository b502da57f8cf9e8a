"""Tests of suite/runner.py: every test runs once, failures are reported, folders that wait have a separate worker."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from suite.runner import Board

TESTS = Path(__file__).resolve().parents[1]
HOOKS = "addoption configure ignore_collect collection_modifyitems report_header runtestloop terminal_summary"
ONE = """
import os, time
def test_one():
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
        "".join(f"from suite.runner import pytest_{hook}\n" for hook in HOOKS.split())
    )
    for folder in ("resilience", "moe", "estimate"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "tests" / folder / f"test_{number}.py").write_text(ONE)

    def run(*argv, processes=2):
        ran = tmp_path / "ran"
        ran.write_text("")
        # other installed plugins take longer to load than these tests to run
        env = {**os.environ, "RUN": str(ran), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with (tmp_path / "output").open("w") as output:  # a pipe would wait for what a test has left running
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--processes", str(processes), *argv],
                cwd=tmp_path,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=600,
                check=False,
            )
        pairs = [line.rsplit(" ", 1) for line in ran.read_text().splitlines()]
        processes_of = {str(Path(path).relative_to(tmp_path / "tests")): pid for path, pid in pairs}
        assert len(processes_of) == len(pairs), "a test was run twice"
        return done.returncode, (tmp_path / "output").read_text(), processes_of

    return run


def test_every_test_runs_once_and_a_waiting_folder_has_its_own_process(suite, tmp_path):
    (tmp_path / "tests" / "resilience" / "test_0.py").write_text(ONE + MEET)
    code, output, ran = suite()
    assert code == 0 and len(ran) == 12 and "12 passed in" in output, output
    waiting = {ran[f"resilience/test_{number}.py"] for number in range(4)}
    assert len(waiting) == 1 and not waiting & {pid for name, pid in ran.items() if not name.startswith("resilience")}
    (tmp_path / "tests" / "resilience" / "test_0.py").write_text(ONE)
    code, output, ran = suite(processes=1)
    assert code == 0 and len(set(ran.values())) == 1 and len(ran) == 12 and "12 passed" in output


def test_a_failure_in_any_process_is_reported_and_stored(suite, tmp_path):
    for folder, name in (("moe", "test_0"), ("resilience", "test_3")):
        (tmp_path / "tests" / folder / f"{name}.py").write_text(f"def test_wrong():\n    assert {name!r} == 0\n")
    code, output, ran = suite()
    assert code == 1 and len(ran) == 10 and "2 failed" in output and "10 passed" in output
    assert "FAILED tests/moe/test_0.py" in output and "AssertionError: assert 'test_3' == 0" in output
    known = json.loads((tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed").read_text())
    assert sorted(known) == ["tests/moe/test_0.py::test_wrong", "tests/resilience/test_3.py::test_wrong"]
    seconds = json.loads((tmp_path / ".pytest_cache" / "v" / "moe-trainer" / "seconds").read_text())
    assert len(seconds) == 12 and all(len(pair) == 2 for pair in seconds.values())
    _, output, ran = suite("--lf")
    assert "2 failed" in output and not ran


def test_only_the_folders_of_failed_tests_stay(suite, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    policy = next(line for line in (TESTS.parent / "pytest.ini").read_text().splitlines() if "retention" in line[:30])
    with (tmp_path / "pytest.ini").open("a") as file:
        file.write(f"{policy}\n")
    writes = "def test_writes(tmp_path):\n    (tmp_path / 'written').touch()\n"
    for number in range(4):
        (tmp_path / "tests" / "moe" / f"test_{number}.py").write_text(writes)
    code, output, _ = suite()
    assert code == 0, output
    assert not [*tmp_path.rglob("written")] and not [*tmp_path.rglob(".lock")]
    (tmp_path / "tests" / "moe" / "test_0.py").write_text(f"{writes}    assert False\n")
    code, output, _ = suite()
    assert code == 1 and len([*tmp_path.rglob("written")]) == 1 and not [*tmp_path.rglob(".lock")], output


def test_exit_first_stops_all_processes(suite, tmp_path):
    for number in range(20):
        slow = ONE.replace("    open", "    time.sleep(1)\n    open")
        (tmp_path / "tests" / "estimate" / f"test_{number}.py").write_text(slow)
    (tmp_path / "tests" / "moe" / "test_0.py").write_text("def test_wrong():\n    assert False\n")
    code, output, ran = suite("tests/moe", "tests/estimate", "-x")
    assert code == 1 and "1 failed" in output and len(ran) < 20


def test_a_collection_error_is_a_failure(suite, tmp_path):
    (tmp_path / "tests" / "estimate" / "test_0.py").write_text("import nothing_of_that_name")
    code, output, ran = suite()
    assert code == 2 and "ModuleNotFoundError" in output and not ran


@pytest.mark.parametrize("code", [0, 7])
def test_a_dead_process_is_a_failure_of_its_test_and_the_others_run(suite, tmp_path, code):
    dies = f"def test_dies():\n    os._exit({code})\n"
    dying = f"import os\ndef test_before(): pass\n{dies}{ONE}def test_after(): pass\n"
    (tmp_path / "tests" / "estimate" / "test_0.py").write_text(dying)
    ended, output, ran = suite()
    assert ended == 1 and "1 failed" in output and "14 passed" in output and len(ran) == 12
    assert "FAILED tests/estimate/test_0.py::test_dies" in output and f"ended with exit code {code}" in output


def test_an_error_of_the_worker_is_a_failure_of_its_test_and_the_others_run(suite, tmp_path):
    text = "def test_unsendable(record_property): record_property('a', lambda: 0)\n"
    (tmp_path / "tests" / "estimate" / "test_0.py").write_text(text + ONE)
    code, output, ran = suite()
    assert code == 1 and "1 failed" in output and "12 passed" in output and len(ran) == 12
    assert "FAILED tests/estimate/test_0.py::test_unsendable" in output and "ended with exit code 1" in output


def test_interrupted_workers_end_what_their_fixtures_started(suite, tmp_path):
    text = """
import os, pathlib, pytest, signal, time
@pytest.fixture(scope="module")
def program():
    yield
    pathlib.Path('ended').touch()
def test_waits(program):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
"""
    (tmp_path / "tests" / "moe" / "test_0.py").write_text(text)
    code, output, _ = suite()
    assert code == 2 and "KeyboardInterrupt" in output and (tmp_path / "ended").exists()


def test_no_selected_tests_exit_with_the_code_of_pytest(suite):
    code, output, ran = suite("-k", "nothing_of_that_name")
    assert code == 5 and not ran and "deselected" in output


def test_fixtures_of_a_module_are_made_once_per_worker(suite, tmp_path):
    text = """
import os, pytest
@pytest.fixture(scope="module")
def shared():
    open(os.environ['RUN'], 'a').write(f'{__file__} {os.getpid()}\\n')
    yield
@pytest.mark.parametrize("n", range(30))
def test_many(shared, n): pass
"""
    (tmp_path / "tests" / "moe" / "test_0.py").write_text(text)
    code, output, ran = suite()  # fails if the fixture was made twice
    assert code == 0 and "41 passed" in output


class _Item:
    """What the board reads of a test."""

    def __init__(self, nodeid):
        self.nodeid, self.fixturenames = nodeid, ()
        self._fixtureinfo = types.SimpleNamespace(name2fixturedefs={})


def test_longest_modules_come_first_and_an_idle_worker_helps_from_the_back():
    names = [
        *(f"tests/a/test_short.py::test_{n}" for n in range(2)),
        *(f"tests/a/test_long.py::test_{n}" for n in range(4)),
    ]
    board = Board([_Item(name) for name in names], {name: 3.0 for name in names if "long" in name})
    owner, other = board.claims(None), board.claims(None)
    assert [next(owner), next(other), next(other)] == [2, 0, 1]
    assert [next(other), next(owner)] == [5, 3]  # 9 seconds are left: worth helping
    assert list(other) == []  # 3 seconds are not
    assert list(owner) == [4]


def test_a_process_that_outlives_its_test_does_not_keep_the_run(suite, tmp_path):
    """A killed worker's pipe stays open in what a test has left running; the test is an error, the run ends."""
    (tmp_path / "tests" / "moe" / "test_0.py").write_text(
        "import os, signal, time\n"
        "def test_one():\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(1000)\n"
        "    open('left', 'w').write('')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    try:
        code, output, processes_of = suite()
    finally:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (entry / "cwd").resolve() == tmp_path:
                    os.kill(int(entry.name), signal.SIGKILL)
    assert code == 1 and "1 failed, 11 passed" in output and len(processes_of) == 11


def test_termination_of_the_first_process_ends_its_workers(suite, tmp_path):
    (tmp_path / "tests" / "moe" / "test_0.py").write_text(
        "import os, signal, time\n"
        "def test_one():\n"
        "    try:\n"
        "        os.kill(os.getppid(), signal.SIGTERM)\n"
        "        time.sleep(1000)\n"
        "    finally:\n"
        "        open('cleaned', 'w').write('')\n"
    )
    code, _, _ = suite()
    assert code == 2 and (tmp_path / "cleaned").exists()


def test_termination_during_a_fork_is_not_lost(suite, tmp_path):
    with (tmp_path / "conftest.py").open("a") as file:
        file.write(
            "import os, signal\n"
            "def pytest_collection_finish(session):\n"
            "    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        )
    (tmp_path / "tests" / "moe" / "test_0.py").write_text("import time\ndef test_one():\n    time.sleep(1000)\n")
    code, _, _ = suite("tests/moe", "tests/estimate")
    assert code == 2
