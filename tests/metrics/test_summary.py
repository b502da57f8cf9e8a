"""The summary of a run: medians, best and last validation, what is saved."""

import pytest
from metrics.test_logger import record

from moe_trainer.metrics.console import flops_rate
from moe_trainer.metrics.summary import RunSummary


def test_summary_of_a_resumed_run():
    summary = RunSummary(train_iters=20, world_size=2, start_iteration=10)
    for iteration, seconds in ((11, 8.0), (12, 1.0), (13, 2.0)):
        summary.add_iteration(
            record(iteration, 5.0 - iteration / 10, iteration == 12, tokens=1000, flops=4e12, elapsed_s=seconds)
        )
    summary.add_line(3, {"lm loss": 3.9})
    for iteration, loss in ((11, 3.0), (12, 2.5), (13, 2.25), (13, 2.75)):  # 13 is due, and the last one
        summary.add_validation("validation", iteration, loss)
    summary.add_validation("test", 13, 2.0)
    lines = summary.lines("early, after iteration 13: because", [11, 13], "ck", None)
    assert lines[1] == "  ended:       early, after iteration 13: because"
    assert lines[2].startswith("  iterations:  13 of 20, resumed after 10 (3 in this start, 0:00:0") and lines[
        2
    ].endswith(", 1 without an update)")
    assert lines[3:] == [
        "  tokens:      3,000 in this start",
        "  throughput:  500 tokens/s, 1 TFLOP/s per rank (medians over iterations)",
        "  lm loss:     3.7000 (the batch of iteration 13; mean of the last 3 iterations 3.9000)",
        "  validation:  2.7500 at iteration 13, best 2.5000 at iteration 12",
        "  test:        2.0000 at iteration 13",
        "  saved:       2 checkpoints saved to ck, the last at iteration 13",
    ]


@pytest.mark.parametrize(
    ("tflops", "text"), [(612.4, "612 TFLOP/s"), (0.01763, "17.6 GFLOP/s"), (1.2e-4, "120 MFLOP/s"), (0.0, "0 MFLOP/s")]
)
def test_rate_of_a_cpu_has_digits(tflops, text):
    assert flops_rate(tflops) == text
