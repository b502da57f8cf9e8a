"""The Triton kernels on a GPU against the torch operations they stand in for: the same numbers in fp32 and bf16, and how long both take.

The ratio of times is printed (pytest -s), not asserted: scripts/benchmarks/bench_kernels.py measures properly. Everything the kernels do at odd sizes
is in tests/ops/triton_cases, in Triton's interpreter; here are sizes that a GPU is made for, and what the interpreter cannot show: bf16,
tensor cores, many programs at once.
"""

import os

import pytest
import torch

from scripts.benchmarks.kernel_cases import NAMES, make

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")

# in Triton's interpreter (which is slow) there is nothing to measure
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZE = "tiny" if INTERPRETED else "parity"
# fp32: other orders of sums; bf16: the torch versions round between their steps, the kernels once
NEAR = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


def is_close(ours, theirs, near: float) -> bool:
    """Norm of the difference relative to the norm; exact for integers and maps."""
    if theirs.dtype in (torch.bool, torch.int64, torch.int32, torch.uint8):
        return torch.equal(ours, theirs)
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= near * theirs.norm() + 1e-12)


@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_triton_kernel_equals_torch_on_a_gpu(name, dtype):
    pair = make(name, SIZE, dtype, "cuda")
    for place, (one, other) in enumerate(zip(pair.kernel(), pair.plain(), strict=True)):
        assert one.shape == other.shape and one.dtype == other.dtype, (
            place,
            one.shape,
            other.shape,
            one.dtype,
            other.dtype,
        )
        assert is_close(one, other, NEAR[dtype]), (name, place)
    if INTERPRETED:
        return
    kernel, plain = pair.milliseconds(pair.kernel), pair.milliseconds(pair.plain)
    print(f"\n{name} {dtype}: torch {plain:.3f} ms, Triton {kernel:.3f} ms, {plain / kernel:.2f} times as fast")


@pytest.mark.parametrize("name", NAMES)
def test_triton_kernels_are_deterministic_on_a_gpu(name):
    pair = make(name, SIZE, torch.bfloat16, "cuda")
    first = [each.clone() for each in pair.kernel()]
    assert all(torch.equal(one, other) for one, other in zip(first, pair.kernel(), strict=True))


def test_three_steps_with_all_triton_kernels_equal_torch():
    """--triton-kernels all end to end, fp32."""
    from training.layouts import make_argv

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.verification.compare_runs import Tolerances, compare
    from moe_trainer.verification.training_trace import train

    argv = make_argv("deepseek")
    plain, ours = (
        train(parse_args([*argv, *more], 1), 0, ParallelState.single(), device="cuda")
        for more in ([], ["--triton-kernels", "all"])
    )
    assert [
        str(difference) for difference in compare(plain, ours, Tolerances(loss=2e-5, norm=5e-5, grad=2e-4, weight=1e-4))
    ] == []
