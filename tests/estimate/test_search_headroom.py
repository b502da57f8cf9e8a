"""The search asks every plan for the headroom that it was given."""

from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.search import search


def test_plans_must_fit_with_the_given_headroom(monkeypatch):
    asked = set()
    monkeypatch.setattr(Plan, "fits", lambda plan, headroom: not asked.add(headroom))
    flags = ["--preset", "mixtral_tiny", "--mock-data", "--global-batch-size", "4"]
    assert search(flags, 1, find_hardware("h100"), best=1, headroom=1.7).found
    assert asked == {1.7}
