"""fp16 iterations that overflow: the update is skipped, the schedule waits, samples and routing statistics continue."""

import torch
from training.forked import pretrain
from training.tiny import MOCK, TINY

ARGV = [
    *TINY,
    *MOCK,
    "--fp16",
    "--hysteresis",
    "1",
    "--moe-router-score-function",
    "sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate",
    "1e-2",
]


def test_fp16_overflow_pauses_the_schedule_and_resumes_equally(tmp_path):
    argv = [
        *ARGV,
        "--initial-loss-scale",
        str(2**24),
        "--train-iters",
        "14",
        "--save-interval",
        "100",
        "--save",
        "ckpt",
        "--load",
        "ckpt",
        "--lr-warmup-iters",
        "2",
        "--log-params-norm",
    ]
    full, _ = pretrain(argv, tmp_path / "whole")
    skipped = [record["skipped_iterations"] for record in full]
    assert set(skipped) == {0, 1} and skipped[:2] == [1, 1], skipped
    assert [record["consumed_samples"] for record in full] == list(range(4, 60, 4))
    rates = [record["learning_rate"] for record in full]
    for skip, rate, following in zip(skipped, rates, rates[1:]):
        assert (following == rate) == bool(skip)
    # the first update is at the start of the warmup, where the rate is zero, however late it comes
    first = skipped.index(0)
    norms = [record["params_norm"] for record in full]
    assert rates[first] == 0.0 and norms[first] == norms[0] and norms[-1] != norms[0]
    # stop after some updates, so that consumed and scheduled samples are both behind it and differ
    stop = first + 2
    pretrain([*argv, "--exit-interval", str(stop)], tmp_path / "parts")
    resumed, _ = pretrain(argv, tmp_path / "parts")
    assert [record["iteration"] for record in resumed] == list(range(1, 15))
    for key in ("learning_rate", "skipped_iterations", "consumed_samples", "loss_scale", "lm loss"):
        assert [record[key] for record in resumed] == [record[key] for record in full], key


def test_fp16_overflow_keeps_weights_and_updates_expert_bias(tmp_path):
    argv = [*ARGV, "--initial-loss-scale", str(2**36), "--lr-decay-iters", "9", "--train-iters"]
    (_, once), (records, thrice) = (pretrain([*argv, number], tmp_path / number) for number in ("1", "3"))
    assert [record["skipped_iterations"] for record in records] == [1, 1, 1]
    biases = {name for name in once if name.endswith("expert_bias")}
    assert len(biases) == 2
    for name in once:
        assert torch.equal(once[name], thrice[name]) == (name not in biases), name
