"""Receive buffers that are too small, in full jobs: what the metrics and the log say."""

from training.forked import pretrain
from training.tiny import MOCK, TINY

JOB = [
    *TINY,
    *MOCK,
    *"--train-iters 3 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex".split(),
    *"--moe-flex-dispatcher-backend hybridep --on-missing-backend fallback --moe-expert-rank-capacity-factor".split(),
]


def test_repeated_iteration_is_counted_and_logged_once(tmp_path, capfd):
    records, _ = pretrain([*JOB, "0.3"], tmp_path, 2)
    assert records[0]["repeated_iterations"] == 1 and records[-1]["iteration"] == 3
    lines = capfd.readouterr()
    repeated = [record["iteration"] for record in records if record["repeated_iterations"]]
    logged = [line for line in (lines.out + lines.err).splitlines() if "would have been enough" in line]
    assert len(logged) == len(repeated) and "iteration 1: experts received more" in logged[0]
    assert "number of repeated iterations:   1 |" in lines.out


def test_every_rank_with_host_counts_logs_growth_once(tmp_path, capfd):
    """In training and in evaluations; nothing is repeated."""
    flags = [*JOB, "0.3", *"--freeze-all-layers --eval-iters 20 --eval-interval 1".split()]
    records, _ = pretrain([*flags, "--moe-permute-fusion-into-hybridep"], tmp_path, 2)
    lines = capfd.readouterr()
    assert not any(record.get("repeated_iterations") for record in records)
    logged = [line for line in (lines.out + lines.err).splitlines() if "would have been enough" in line]
    where = [line.partition(":")[0] for line in logged]
    assert {"[rank 0] iteration 1", "[rank 1] iteration 1"} <= set(where) and len(where) == len(set(where))
    assert any("evaluation at iteration 1" in each for each in where), where
    assert all("no token is lost" in line and "ranks: 1)" in line for line in logged)
