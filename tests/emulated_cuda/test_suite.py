"""The tests of the CPU on a machine with a device."""

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
