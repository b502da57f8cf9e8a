"""The tests of the CPU on a machine with a device, and the commands that docs/testing_without_gpu.md names."""

import contextlib
import io
import runpy
import subprocess
import sys
from unittest import mock

import commands
import pytest
import torch
from emulated_cuda import build
from emulated_cuda.run import HERE, environment, on_device

TESTS = """
import torch
from harness import run_ranks

def gradient(rank=0, world_size=1):
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.tolist(), torch.cuda.is_available()

def test_ranks_forked_behind_a_backward_pass():
    assert gradient() == ([2, 2, 2], False)
    assert run_ranks(gradient, 2) == [([2, 2, 2], False)] * 2
"""


def test_cpu_tests_hide_devices_and_can_fork(tmp_path):
    """With visible devices autograd starts a thread per device, after which forked ranks cannot compute gradients."""
    (tmp_path / "test_forks.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", tmp_path / "test_forks.py"],
        cwd=HERE.parent,
        env=environment(2),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_tests_of_devices_run_in_the_process_that_collects():
    """CUDA cannot be used in a fork of a process that has asked for devices, as the collection does."""
    words = ["-q", "-p", "no:cacheprovider", "--processes", "3", "tests/gpu/test_flash_attention.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=HERE.parents[1],
        env=environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
    assert "3 processes" not in done.stdout


def test_commands_are_not_forked_from_a_process_with_devices(monkeypatch, tmp_path):
    """A real device cannot be used in a fork of a process that has asked for it; the emulated one could."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "_forks", lambda *_: pytest.fail("a fork"))
    monkeypatch.setattr(
        commands, "_commands", lambda argv, cwd, envs, timeout: [commands.Finished(0, "", "")] * len(envs)
    )
    assert commands.run([], tmp_path, world_size=2).returncode == 0


def count_step(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(HERE / "count_step.py"))["count"](words)
    return output.getvalue()


def test_count_step_runs_with_any_flags(monkeypatch):
    flags = (
        "--preset mixtral_tiny --num-layers 2 --mock-data --micro-batch-size 1 --global-batch-size 2 --triton-kernels none "
        "--moe-token-dispatcher-type alltoall"
    ).split()
    printed = on_device(count_step, flags)
    assert "one iteration of 2 microbatches: 7 host waits" in printed and "4  memory/host_read.py" in printed
    command = [str(HERE / "count_step.py"), *flags]
    env = environment(1)
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.syspath_prepend(HERE)
    with mock.patch.object(subprocess, "run") as start, pytest.raises(SystemExit):
        runpy.run_path(command[0], run_name="__main__")
    start.assert_called_once_with([sys.executable, *command], env=env)


def test_user_script_is_checked_for_races(tmp_path):
    script = tmp_path / "race.py"
    script.write_text(
        "import torch\nx = torch.ones(4, device='cuda')\ny = x @ torch.ones(4, 4, device='cuda')\n"
        "with torch.cuda.stream(torch.cuda.Stream()):\n    y + 1\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=environment(1) | {"EMULATED_CUDA_RACES": "1"}, capture_output=True, text=True
    )
    assert "CUDA stream race" in done.stderr and "race.py:5" in done.stderr and "race.py:3" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EMULATED_CUDA", "x"),
        ("EMULATED_CUDA", "-1"),
        ("EMULATED_CUDA", "9"),
        ("EMULATED_CUDA_CAPABILITY", "9"),
        ("EMULATED_CUDA_LIBRARY", "/proc/nowhere"),
    ],
)
def test_invalid_environment_variables_are_rejected(name, value):
    done = subprocess.run(
        [sys.executable, "-c", "print('continues')"], env=environment(1) | {name: value}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"{name}={value}: ")


def test_truncated_library_is_recompiled(tmp_path):
    environment(1)
    content = build.library().read_bytes()
    for damaged in (b"junk", content[:-100], b"\x7fELF" + bytes(1000)):
        (tmp_path / "device.so").write_bytes(damaged)
        assert not build._is_whole(tmp_path / "device.so")
    (tmp_path / "device.so").write_bytes(content)
    assert build._is_whole(tmp_path / "device.so")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PATH": "/nowhere"}, "build.py: the emulated device needs g++"),
        ({"XDG_CACHE_HOME": "/proc/1/nowhere"}, "set XDG_CACHE_HOME to a folder that can be"),
    ],
)
def test_compilation_problems_are_explained(tmp_path, monkeypatch, capsys, variables, message):
    environment(1)  # skips where it cannot be compiled at all
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(HERE / "build.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert (exit_info.value.code, out) == (2, "") and message in err
