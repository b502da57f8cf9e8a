"""The tests of the CPU on a machine with a device, and the commands that docs/testing_without_gpu.md names."""

import subprocess
import sys

from emulated_cuda.run import HERE, environment

TESTS = '''
import torch
from harness import run_ranks

def gradient(rank=0, world_size=1):
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.tolist(), torch.cuda.is_available()

def test_ranks_forked_behind_a_backward_pass():
    assert gradient() == ([2, 2, 2], False)
    assert run_ranks(gradient, 2) == [([2, 2, 2], False)] * 2
'''


def test_they_see_none_and_fork_as_ever(tmp_path):
    """Autograd would have started a thread for each device, behind which no forked rank computes a gradient."""
    (tmp_path / "test_forks.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", tmp_path / "test_forks.py"],
                          cwd=HERE.parent, env=environment(2), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_counting_a_step_of_any_flags():
    flags = ("--preset mixtral_tiny --num-layers 2 --mock-data --micro-batch-size 1 --global-batch-size 2 --triton-kernels none "
             "--moe-token-dispatcher-type alltoall")
    done = subprocess.run([sys.executable, HERE / "count_step.py", *flags.split()], env=environment(1) | {"EMULATED_CUDA": ""}, capture_output=True,
                          text=True)
    assert "one iteration of 2 microbatches: 7 host waits" in done.stdout and "4  memory/host_read.py" in done.stdout, done.stdout + done.stderr[-2000:]


def test_a_script_of_ones_own_is_checked_for_races(tmp_path):
    script = tmp_path / "race.py"
    script.write_text("import torch\nx = torch.ones(4, device='cuda')\ny = x @ torch.ones(4, 4, device='cuda')\n"
                      "with torch.cuda.stream(torch.cuda.Stream()):\n    y + 1\n")
    done = subprocess.run([sys.executable, script], env=environment(1) | {"EMULATED_CUDA_RACES": "1"}, capture_output=True, text=True)
    assert "CUDA stream race" in done.stderr and "race.py:5" in done.stderr and "race.py:3" in done.stderr, done.stderr
