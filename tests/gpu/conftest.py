"""What all tests on a GPU have in common."""

import pytest
import torch


@pytest.fixture(autouse=True)
def default_kernels(seeds):
    """Leave deterministic mode, which the suite's tests start in: it excludes the attention of an ordinary run (cuDNN's)."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def exact_fp32_gemms():
    """Disable TF32 for fp32 GEMMs during a test."""
    # not by monkeypatch: the settings are no attributes of an object, so that it could not take them back
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
