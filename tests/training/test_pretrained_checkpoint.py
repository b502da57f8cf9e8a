"""--pretrained-checkpoint: weights to start from, as long as --load has no checkpoint."""

from commands import read_metrics, run
from training.tiny import MOCK, TINY


def iterations(path):
    return [record["iteration"] for record in read_metrics(path) if "lm loss" in record and "validation" not in record]


def test_weights_come_from_the_pretrained_checkpoint_and_then_from_load(tmp_path):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    argv = [*TINY, *MOCK, "--save-interval", "2"]
    first = run([*argv, "--train-iters", "4", "--save", old], tmp_path)
    assert first.returncode == 0, first.stderr
    both = ["--pretrained-checkpoint", old, "--load", new, "--save", new]
    second = run([*argv, "--train-iters", "2", *both], tmp_path)
    assert second.returncode == 0, second.stderr
    assert iterations(tmp_path / "new" / "metrics.jsonl") == [1, 2]
    last = read_metrics(tmp_path / "old" / "metrics.jsonl")[-1]["lm loss"]
    start = read_metrics(tmp_path / "new" / "metrics.jsonl")[0]["lm loss"]
    fresh = read_metrics(tmp_path / "old" / "metrics.jsonl")[0]["lm loss"]
    assert abs(start - last) < abs(fresh - last), "the second run did not start from the trained weights"
    third = run([*argv, "--train-iters", "3", "--override-opt_param-scheduler", *both], tmp_path)
    assert third.returncode == 0, third.stderr
    assert iterations(tmp_path / "new" / "metrics.jsonl")[-1] == 3 and "at iteration 2" in third.stdout + third.stderr
