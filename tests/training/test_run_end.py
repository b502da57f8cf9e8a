"""How an error, an exit or a signal is recorded as the end of a run."""

import sys

import pytest

from moe_trainer.metrics.run_state import RunEnd
from moe_trainer.training.run_end import end_by


@pytest.mark.parametrize(
    ("given", "state", "code", "reason"),
    [
        (1, "failed", 1, "SystemExit: 1"),
        (None, "failed", 0, "SystemExit: None"),
        ("no data", "failed", 1, "SystemExit: no data"),
        (250, "failed", 250, "SystemExit: 250"),
        (143, "interrupted", 143, "terminated by SIGTERM after iteration 7"),
    ],
)
def test_exit_of_user_code_is_a_failure_and_that_of_a_signal_is_not(given, state, code, reason):
    with pytest.raises(SystemExit) as ended:
        sys.exit(given)
    assert end_by(ended.value, 7) == RunEnd(state, 7, code, reason)
