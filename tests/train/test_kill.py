"""kill -9 at random moments of a run that saves every other iteration; every restart goes on from a complete checkpoint."""

import random
import time

import pytest
from commands import environment, read_metrics, run, start
from train.tiny import MOCK, TINY

KILLS = 20


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "400", "--save", "ckpt", "--load", "ckpt", "--save-interval", "2",
            "--save-retain-interval", "100", "--metrics-file", "metrics.jsonl"]
    chance = random.Random(7)
    reached = 0
    for _ in range(KILLS):
        process = start(argv, tmp_path, environment())
        metrics = tmp_path / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        deadline = time.monotonic() + 60
        # wait until it trains again, then kill at any moment of an iteration or a save
        while process.poll() is None and time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > size):
            size = min(size, metrics.stat().st_size) if metrics.exists() else size
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.4))
        process.kill()
        _, errors = process.communicate()
        assert process.returncode == -9, errors
        tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
        now = int(tracker.read_text()) if tracker.exists() else 0
        assert now >= reached
        reached = now
    assert reached > 0
    last = [*argv, "--exit-interval", str(reached + 4)]
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    for folder in (tmp_path, undisturbed):
        finished = run(last, folder)
        assert finished.returncode == 0, finished.stderr
    killed, whole = read_metrics(tmp_path / "metrics.jsonl"), read_metrics(undisturbed / "metrics.jsonl")
    assert [record["iteration"] for record in killed] == list(range(1, reached + 5)), "an iteration is missing or stands twice"
    for one, other in zip(killed, whole, strict=True):
        for name in ("lm loss", "grad_norm", "learning_rate", "load_balancing_loss", "consumed_samples"):
            assert one[name] == other[name], (one["iteration"], name)
