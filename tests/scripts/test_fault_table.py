"""The fault table: a handful of its cases here, all of them in the slow tier; and what the table itself must be able to see."""

import dataclasses

import pytest

from scripts import fault_table
from scripts.fault_ranks import Strike
from scripts.faults import FAULTS, FORWARD

HANDFUL = ("kill: optimizer", "kill: save, before the index", "kill: save, before the tracker", "full disk: tracker, for one save",
           "full disk: for good", "vanishing mount: for one save", "damaged newest checkpoint: a bit of a shard", "clock: a year ahead",
           "SIGTERM storm: a hundred at each rank")


def chosen(*names):
    found = [fault for fault in FAULTS if fault.name in names]
    assert len(found) == len(names), "a fault has another name now"
    return found


def judged(rows):
    bad = [f"{row.fault.name}: {problem}" for row in rows for problem in row.problems]
    assert not bad, "\n".join(bad)
    skipped = [f"{row.fault.name}: {row.skipped}" for row in rows if row.skipped]
    if skipped:
        pytest.skip("; ".join(skipped))


def test_a_handful_of_faults_cost_the_work_since_the_last_save(tmp_path):
    rows = fault_table.run_faults(chosen(*HANDFUL), tmp_path)
    assert [row.done - row.resumed for row in rows if row.fault.name.startswith("kill")] == [1, 3, 0]
    judged(rows)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_every_fault(tmp_path, fault):
    judged(fault_table.run_faults([fault], tmp_path))


def test_there_are_many_and_each_has_a_name_of_its_own():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 30
    # wherever a strike is to happen, there is something
    for strike in (strike for fault in FAULTS for strike in fault.strikes):
        module, _, path = strike.where.partition(":")
        owner = pytest.importorskip(module)
        for part in path.split("."):
            owner = getattr(owner, part)
        assert callable(owner)


def test_a_case_that_goes_another_way_fails(tmp_path):
    """A run that a fault does not strike, and one that loses more than it may, are no success."""
    missed = dataclasses.replace(chosen("kill: optimizer")[0], strikes=(Strike("kill", FORWARD, 1, 99),))
    row, = fault_table.run_faults([missed], tmp_path / "missed")
    assert any("exit codes 0 0 instead of 3 -9" in problem for problem in row.problems) and "FAILED" in fault_table.line(row)
    row = fault_table.Row(missed, done=6, saved=6)
    fault_table.judge_second(row, fault_table.fault_ranks.Ended([0, 0], ["", ""], ["going on from iteration 3\n", ""]), tmp_path)
    assert "it went on from 3, and 6 had been saved" in row.problems[0]


def test_names_are_listed(capsys):
    assert fault_table.main(["--list"]) == 0
    assert "kill: optimizer" in capsys.readouterr().out
    assert fault_table.main(["--only", "no such word"]) == 2


def test_the_table_tells_what_was_lost():
    row = fault_table.Row(chosen("kill: optimizer")[0], codes="3 -9", said="rank 1: gone | away", done=4, saved=3, resumed=3, same=True)
    assert fault_table.table([row]).splitlines()[-1] == (
        "| kill: optimizer | update, iteration 5 | 3 -9 | rank 1: gone \\| away | 4 | 3 | 3 | 1 | yes |")
    assert "1 faults (0 more could not be tried here), 1 as documented. 0 runs lost more" in fault_table.summary([row])
    worse = dataclasses.replace(row, done=6, saved=6, same=False, problems=["it went on from 3"])
    assert "0 as documented. 1 runs lost more" in fault_table.summary([worse]) and "1 do not" in fault_table.summary([worse])
