"""Setup of the parity tests."""

import pytest

from moe_trainer.verification import parity


@pytest.fixture(autouse=True)
def two_steps(monkeypatch, request):
    """Train for two steps instead of three, except in the slow tier: the second depends on all that the first leaves."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(parity, "STEPS", 2)
