"""Setup of the parity tests."""

import pytest


@pytest.fixture(autouse=True)
def two_steps(monkeypatch, request):
    """Train for two steps instead of three, except in the slow tier: the second depends on all that the first leaves."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("moe_trainer.verification.parity.STEPS", 2)
