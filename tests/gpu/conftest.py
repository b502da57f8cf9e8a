"""What all tests on a GPU have in common."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """fp32 products in fp32, as long as a test runs."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
