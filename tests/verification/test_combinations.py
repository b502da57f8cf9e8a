"""The table of combinations in the manual, and the proof of its entries."""

import json

import pytest
from verification import prove_combinations

from moe_trainer.commands import train_process
from moe_trainer.verification import parity
from scripts import combinations
from scripts.proof_record import ProofRecord


def test_page_matches_the_program():
    """`python scripts/combinations.py --write` renews it."""
    assert combinations.PAGE.read_text() == "\n".join(combinations.page_lines()) + "\n"


def test_every_accepted_pair_is_proven():
    """On this command line: `combinations.py --prove FEATURE --record` and `prove_combinations.py --record FEATURE` renew it."""
    cells = {pair: combinations.proofs(pair).split() for pair in combinations.accepted_pairs()}
    assert [pair for pair, cell in cells.items() if ("D" if combinations.needs_device(pair) else "P") not in cell] == []


def test_proof_of_other_flags_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(combinations, "PROVEN", ProofRecord(tmp_path / "combinations.json", "flags"))
    pair = ("CP", "MTP")
    assert combinations.proofs(pair) == "valid"
    combinations.record(pair, process="cp 2")
    assert combinations.proofs(pair) == "P"
    combinations.record(("PP", "CP"), device="bits")
    combinations.record(pair, device="bits")
    assert combinations.proofs(pair) == "P D" and combinations.proofs(("PP", "CP")) == "D"
    monkeypatch.setattr(combinations, "MODEL", combinations.MODEL + " --seed 7")
    assert combinations.proofs(pair) == "valid"
    combinations.record(pair, device="bits")
    assert combinations.proofs(pair) == "D", "the other proof was of other flags"


@pytest.mark.parametrize("pair", [("graph, dropless", "MTP"), ("MXFP8", "HybridEP")], ids=" + ".join)
def test_pair_on_devices_equals_its_reference(shared, pair):
    recorded = json.loads((shared / "reference" / "deep_ep_api.json").read_text())
    found = prove_combinations.prove(pair, recorded)
    assert found == "bits" if "graph" in pair[0] else found.startswith("within"), found


@pytest.mark.parametrize("words", [["--record"], ["--write", "--record"], ["--prove", "CP", "--write"]], ids=" ".join)
def test_options_without_effect_are_rejected(words, capsys):
    page = combinations.PAGE.read_text()
    with pytest.raises(SystemExit) as stopped:
        combinations.main(words)
    assert stopped.value.code == 2 and "--prove" in capsys.readouterr().err and combinations.PAGE.read_text() == page


def test_features_print_a_cell_and_a_command_that_repeats_it(capsys):
    """In any order of the two names."""
    assert combinations.main(["MTP", "TE graphs"]) == 0
    first, command = capsys.readouterr().out.splitlines()
    assert first == "TE graphs + MTP: P D"
    argv = command.removeprefix("python pretrain_moe.py ").split()
    assert train_process.main(argv) == 0 and "--mtp-num-layers 1" in command and "--cuda-graph-impl tr" in command
    combinations.main(["FSDP", "local graphs"])
    first, why, command = capsys.readouterr().out.splitlines()[-3:]
    assert first == "local graphs + FSDP: rejected" and why in combinations.PAGE.read_text().replace("9. ", "reason: ")
    assert train_process.main(command.removeprefix("python pretrain_moe.py ").split()) == 2
    capsys.readouterr()
    combinations.main(["CP"])
    assert capsys.readouterr().out.startswith("CP: yes\n")
    combinations.main(["VPP", "PP"])
    assert capsys.readouterr().out == "PP + VPP: -\nThey are alternatives of each other.\n"


@pytest.mark.parametrize("words", [["CQ"], ["CP", "MTP", "PP"], ["CP", "--write"]], ids=" ".join)
def test_bad_features_are_rejected(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        combinations.main(words)
    assert stopped.value.code == 2 and "FEATURE" in capsys.readouterr().err.splitlines()[-1]


def test_alternatives_are_not_pairs():
    assert combinations.excludes("PP", "VPP") and combinations.excludes("stash", "alltoall")
    assert not combinations.excludes("stash", "HybridEP") and not combinations.excludes("PP", "PP")
    assert not combinations.excludes("graph, dropless", "stash")


def test_a_pair_is_proven_and_a_difference_is_reported(capsys, monkeypatch):
    assert combinations.prove([("CP", "recompute")], False) == 0
    assert "CP + recompute (cp 2" in (out := capsys.readouterr().out) and "equal" in out
    wrong = lambda pool, case: parity.ParityResult(case, [], "loss of step 1")  # noqa: E731
    monkeypatch.setattr(parity, "check_parity", wrong)
    assert combinations.prove([("CP", "MTP")], False) == 1
    assert "CP + MTP" in (out := capsys.readouterr().out) and "DIFFERENT loss of step 1" in out


@pytest.mark.slow
@pytest.mark.parametrize("feature", combinations.FEATURES)
def test_accepted_pairs_equal_one_process(feature, capsys):
    pairs = [pair for pair in combinations.accepted_pairs(feature) if pair[0] == feature]  # each once
    assert combinations.prove(pairs, False) == 0, capsys.readouterr().out
