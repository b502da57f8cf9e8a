"""Tests of the fault table: a sample of its cases here, all of them in the slow tier, and what the table must detect."""

import dataclasses

import pytest
from fault_injection import table
from fault_injection.faults import FAULTS, FORWARD
from fault_injection.ranks import Injection, RunResult

SAMPLE = (
    "kill: optimizer",
    "kill: save, before the index",
    "kill: save, before the tracker",
    "full disk: tracker, for one save",
    "full disk: for good",
    "damaged newest checkpoint: a bit of a shard",
    "clock: a year ahead",
    "SIGTERM storm: a hundred at each rank",
)


def select(*names):
    faults = [fault for fault in FAULTS if fault.name in names]
    assert len(faults) == len(names), "a fault was renamed"
    return faults


def check(results):
    bad = [f"{result.fault.name}: {problem}" for result in results for problem in result.problems]
    assert not bad, "\n".join(bad)
    skipped = [f"{result.fault.name}: {result.skipped}" for result in results if result.skipped]
    if skipped:
        pytest.skip("; ".join(skipped))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The sample, and last a fault that no run reaches."""
    sample = select(*SAMPLE)
    missed = dataclasses.replace(sample[0], injections=(Injection("kill", FORWARD, 1, 99),))
    return table.run_faults([*sample, missed], tmp_path_factory.mktemp("faults"))


def test_a_sample_of_faults_loses_only_the_work_since_the_last_save(results):
    results = results[:-1]
    assert [result.done - result.resumed for result in results if result.fault.name.startswith("kill")] == [1, 3, 0]
    check(results)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_every_fault_ends_as_documented(tmp_path, fault):
    check(table.run_faults([fault], tmp_path))


def test_fault_names_are_unique_and_injection_points_exist():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 30
    for injection in (injection for fault in FAULTS for injection in fault.injections):
        module, _, path = injection.where.partition(":")
        owner = pytest.importorskip(module)
        for part in path.split("."):
            owner = getattr(owner, part)
        assert callable(owner)


def test_unexpected_results_are_failures(results, tmp_path):
    """A run that its fault does not hit, and one that loses more than allowed, are failures."""
    result = results[-1]
    assert any("exit codes 0 0 instead of 3 -9" in problem for problem in result.problems)
    assert "FAILED" in table.line(result)
    result = table.FaultResult(result.fault, done=6, saved=6)
    table.check_resumed_run(result, RunResult([0, 0], ["", ""], ["going on from iteration 3\n", ""]), tmp_path)
    assert "resumed from 3, but 6 was saved" in result.problems[0]


def test_list_prints_the_fault_names(capsys):
    assert table.main(["--list"]) == 0
    assert "kill: optimizer" in capsys.readouterr().out
    assert table.main(["--only", "no such word"]) == 2


def test_table_shows_lost_iterations():
    fault = select("kill: optimizer")[0]
    result = table.FaultResult(
        fault, codes="3 -9", message="rank 1: gone | away", done=4, saved=3, resumed=3, equal=True
    )
    assert table.table([result]).splitlines()[-1] == (
        "| kill: optimizer | update, iteration 5 | 3 -9 | rank 1: gone \\| away | 4 | 3 | 3 | 1 | yes |"
    )
    assert "1 faults (0 more cannot run on this machine), 1 as documented. 0 runs lost more" in table.summary([result])
    worse = dataclasses.replace(result, done=6, saved=6, equal=False, problems=["resumed from 3"])
    assert "0 as documented. 1 runs lost more" in table.summary([worse]) and "1 do not" in table.summary([worse])
