"""The table of combinations in the manual, and the proof of its entries."""

import pytest

from moe_trainer.verification import parity
from scripts import combinations


def test_page_matches_the_program():
    """`python scripts/combinations.py --write` renews it."""
    assert combinations.PAGE.read_text() == "\n".join(combinations.page_lines()) + "\n"


def test_alternatives_are_not_pairs():
    assert combinations.excludes("PP", "VPP") and combinations.excludes("stash", "alltoall")
    assert not combinations.excludes("stash", "HybridEP") and not combinations.excludes("PP", "PP")
    assert not combinations.excludes("graph, dropless", "stash")


def test_a_pair_is_proven_and_a_difference_is_reported(capsys, monkeypatch):
    assert combinations.prove([("CP", "recompute")]) == 0
    assert "CP + recompute (cp 2" in (out := capsys.readouterr().out) and "equal" in out
    wrong = lambda pool, case: parity.ParityResult(case, [], "loss of step 1")  # noqa: E731
    monkeypatch.setattr(parity, "check_parity", wrong)
    assert combinations.prove([("CP", "MTP")]) == 1
    assert "CP + MTP" in (out := capsys.readouterr().out) and "DIFFERENT loss of step 1" in out


@pytest.mark.slow
@pytest.mark.parametrize("feature", combinations.FEATURES)
def test_accepted_pairs_equal_one_process(feature, capsys):
    pairs = [pair for pair in combinations.accepted_pairs(feature) if pair[0] == feature]  # each once
    assert combinations.prove(pairs) == 0, capsys.readouterr().out
