"""Every tiny preset trains through the command line, with the losses its code paths report."""

import math

import numpy as np
import pytest
from commands import read_metrics, run

from moe_trainer.data.indexed import write_indexed_dataset

LOSSES = {
    "mixtral_tiny": {"lm loss", "load_balancing_loss"},
    "deepseek_v3_tiny": {"lm loss", "seq_load_balancing_loss", "mtp_1 loss"},
    "deepseek_v3_2_tiny": {"lm loss", "seq_load_balancing_loss", "mtp_1 loss", "indexer loss"},
    "deepseek_v4_tiny": {"lm loss", "seq_load_balancing_loss"},
    "finermoe_tiny": {"lm loss", "seq_load_balancing_loss"},
    "latentmoe_tiny": {"lm loss", "seq_load_balancing_loss"},
    "nemotron_3_tiny": {"lm loss", "seq_load_balancing_loss"},
    "gpt_oss_tiny": {"lm loss", "load_balancing_loss"},
    "qwen3_next_tiny": {"lm loss", "global_load_balancing_loss", "mtp_1 loss"},
    "qwen3_tiny": {"lm loss", "global_load_balancing_loss"},
}
FEW = "--split 80,10,10 --train-iters 10 --seq-length 64 --global-batch-size 2 --eval-iters 1 --log-interval 1"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_tiny_preset_trains(name, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    with write_indexed_dataset(str(tmp_path / "pattern"), np.uint16) as builder:
        for start in range(50):
            builder.add_document((np.arange(300) * 7 + start) % 50, [300])
    done = run(
        ["--preset", name, *FEW.split(), "--data-path", str(tmp_path / "pattern"), "--metrics-file", str(metrics)],
        tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [record for record in read_metrics(metrics) if "validation" not in record]
    assert [step["iteration"] for step in steps] == list(range(1, 11))
    for step in steps:
        assert LOSSES[name] <= set(step)
        assert all(math.isfinite(step[loss]) and step[loss] > 0 for loss in LOSSES[name])
    # The loss of a model that has learned nothing is the logarithm of the vocabulary.
    assert steps[0]["lm loss"] == pytest.approx(math.log(4096), abs=0.2)
    assert steps[-1]["lm loss"] < steps[0]["lm loss"] - 2.0
