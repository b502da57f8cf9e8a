"""Rejection of results: rules, loss history, statistics of reruns, fault reports."""

import math
import re

import pytest

from moe_trainer.resilience.rejection import (
    HISTORY_LENGTH,
    LossHistory,
    PendingFaultReport,
    RejectionRules,
    RerunStatistics,
    difference,
    pick_injected_rank,
    track,
)

NAN, INF = math.nan, math.inf
ALL = RejectionRules(finite=True, spikes=True, large_grads=True)
MEDIAN = RejectionRules(finite=False, spikes=True, large_grads=False, spike_factor=3.0)


def make_history(rules, losses, norm=1.0):
    history = LossHistory()
    for loss in losses:
        history.update(loss, norm, rules)
    return history


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_results_are_rejected_when_enabled(value):
    history = LossHistory()
    assert history.judge_loss(value, ALL).kind == history.judge_norm(value, ALL).kind == "nan"
    assert history.judge_loss(value, MEDIAN) is None and history.judge_norm(value, MEDIAN) is None
    assert history.judge_loss(1e9, ALL) is None and history.judge_norm(1e9, ALL) is None, "nothing is known yet"


def test_ten_times_the_largest_of_the_first_100_losses_is_a_spike():
    history = make_history(ALL, [2.0] * (HISTORY_LENGTH - 2), norm=0.5)
    history.update(3.0, 0.7, ALL)
    assert history.judge_loss(20.0, ALL) is None, "one is missing"
    history.update(2.5, 0.6, ALL)
    assert history.judge_loss(29.9, ALL) is None and history.judge_loss(30.0, ALL).kind == "spike"
    assert history.judge_norm(6.9, ALL) is None and history.judge_norm(7.0, ALL).kind == "spike"
    history.update(9.0, 9.0, ALL)
    assert history.judge_loss(30.0, ALL).kind == "spike", "only the first hundred count"


def test_spike_factor_applies_to_the_running_median():
    history = make_history(MEDIAN, [8.0] * HISTORY_LENGTH + [2.0] * (HISTORY_LENGTH - 1))
    assert history.judge_loss(6.1, MEDIAN).kind == "spike"
    assert "times the median 2 of the last 100" in history.judge_loss(6.1, MEDIAN).text
    assert history.judge_loss(6.0, MEDIAN) is None
    assert make_history(MEDIAN, [2.0] * (HISTORY_LENGTH - 1)).judge_loss(1e6, MEDIAN) is None
    assert len(history.recent) == HISTORY_LENGTH


def test_loss_history_round_trips_through_a_checkpoint():
    assert LossHistory().as_dict() == {} and LossHistory.from_dict({}) == LossHistory.from_dict(None) == LossHistory()
    history = make_history(ALL, [2.0, 3.0])
    history.skip(3, 8, 12, "the loss is nan")
    history.skip(4, 12, 16, "the loss is inf")
    assert history.consecutive_skips == 2
    again = LossHistory.from_dict(history.as_dict())
    assert again == history and again.skipped[0] == {"iteration": 3, "samples": [8, 12], "because": "the loss is nan"}
    again.update(2.0, 1.0, ALL)
    assert again.consecutive_skips == 0 and len(again.skipped) == 2


def test_rerun_statistics_count_identical_results():
    spread = RerunStatistics()
    spread.add((2.0, 2.0), (1.0, 1.0))
    spread.add((2.0, 2.0), (1.0, 1.5))
    spread.add((NAN, NAN), (INF, INF))
    assert (spread.repeats, spread.identical, spread.loss) == (3, 2, 0.0) and spread.norm == pytest.approx(1 / 3)
    assert difference(1.0, NAN) == difference(INF, NAN) == difference(INF, -INF) == INF


def test_injected_errors_follow_their_rate_and_agree_on_all_ranks():
    chosen = [pick_injected_rank(5, 1234, iteration, 4) for iteration in range(2000)]
    hit = [rank for rank in chosen if rank is not None]
    assert 300 < len(hit) < 500 and set(hit) == {0, 1, 2, 3}
    assert chosen == [pick_injected_rank(5, 1234, iteration, 4) for iteration in range(2000)]
    assert pick_injected_rank(0, 1234, 7, 4) is None and pick_injected_rank(1, 1234, 7, 1) == 0


def test_pending_fault_report_round_trips_through_its_file(tmp_path):
    folder = str(tmp_path / "ckpt")
    assert PendingFaultReport.read(folder) is None
    PendingFaultReport.clear(folder)
    noted = PendingFaultReport(7, "the loss is nan", "layer 3", ["node1 0", "node1 1"])
    noted.write(folder)
    assert PendingFaultReport.read(folder) == noted
    (tmp_path / "ckpt" / "rejected_result.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*rejected_result\.json .* delete it"):
        PendingFaultReport.read(folder)
    PendingFaultReport.clear(folder)
    assert PendingFaultReport.read(folder) is None


def test_rejection_tracker_has_the_fields_of_megatron(tmp_path):
    path = tmp_path / "rejected.txt"
    track(str(path), 12, 3, "node7 1", "initial_run", "the loss is nan")
    track(str(path), 12, 3, "node7", "first_rerun_reproducible", "the loss is nan")
    lines = path.read_text().splitlines()
    fields = re.compile(
        r"ts=.+ node=(.+) device=(.+) jobID=(.+) rank=(.+) iteration=(.+) status=(.+) result=.+ message=.+"
    )
    assert [fields.search(line).groups()[i] for line in lines for i in (0, 1, 3, 4, 5)] == [
        "node7",
        "1",
        "3",
        "12",
        "initial_run",
        "node7",
        "cpu",
        "3",
        "12",
        "first_rerun_reproducible",
    ]
