"""The kernel pairs that scripts/benchmarks/bench_kernels.py times and tests/gpu compares, at a tiny size in Triton's interpreter.

Run by tests/ops/test_triton.py.
"""

import pytest
import torch

from scripts.benchmarks.kernel_cases import NAMES, make


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_plain_torch(name):
    pair = make(name, "tiny", torch.float32, "cpu")
    for ours, theirs in zip(pair.kernel(), pair.plain(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert pair.input_bytes > 0
