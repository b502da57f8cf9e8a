"""kill -9 at random moments of runs that save all the time; every restart resumes from a complete checkpoint."""

import random
import time

import pytest
from commands import environment, rank_variables, read_metrics, run, start
from training.tiny import MOCK, TINY

from moe_trainer.checkpoint.verify import verify_checkpoint

KILLS = 20


@pytest.mark.slow
def test_twenty_kills_lose_no_saved_iteration(tmp_path):
    argv = [
        *TINY,
        *MOCK,
        "--train-iters",
        "400",
        "--save",
        "ckpt",
        "--load",
        "ckpt",
        "--save-interval",
        "2",
        "--save-retain-interval",
        "100",
        "--metrics-file",
        "metrics.jsonl",
    ]
    chance = random.Random(7)
    reached = 0
    for _ in range(KILLS):
        process = start(argv, tmp_path, environment())
        metrics = tmp_path / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        deadline = time.monotonic() + 300
        # wait until it trains again, then kill at any moment of an iteration or a save
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and not (metrics.exists() and metrics.stat().st_size > size)
        ):
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
    assert_nothing_lost(tmp_path, argv, reached)


def assert_nothing_lost(tmp_path, argv, reached, world_size=1):
    """Resume for four iterations, and train all of them uninterrupted: the records must be the same."""
    assert reached > 0
    last = [*argv, "--exit-interval", str(reached + 4)]
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    for folder in (tmp_path, undisturbed):
        finished = run(last, folder, world_size, new_interpreter=True)  # forked ranks have other mock data
        assert finished.returncode == 0, finished.stderr
    killed, full = read_metrics(tmp_path / "metrics.jsonl"), read_metrics(undisturbed / "metrics.jsonl")
    assert [record["iteration"] for record in killed] == list(range(1, reached + 5)), (
        "an iteration is missing or repeated"
    )
    for one, other in zip(killed, full, strict=True):
        for name in ("lm loss", "grad_norm", "learning_rate", "load_balancing_loss", "consumed_samples"):
            assert one[name] == other[name], (one["iteration"], name)


RANKS = 4
MAPPING = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--use-distributed-optimizer --distributed-timeout-seconds-after-init 20"
).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [[], ["--async-save", "--use-persistent-ckpt-worker", "--ckpt-assume-constant-structure"]],
    ids=["sync", "async"],
)
def test_killing_one_of_four_ranks_loses_nothing(tmp_path, extra):
    """TP 2, PP 2, a save after every iteration: the others end by themselves, and the restart finds a complete checkpoint."""
    argv = [
        *TINY,
        *MOCK,
        *MAPPING,
        *extra,
        "--train-iters",
        "400",
        "--save",
        "ckpt",
        "--load",
        "ckpt",
        "--save-interval",
        "1",
        "--save-retain-interval",
        "100",
        "--metrics-file",
        "metrics.jsonl",
    ]
    chance, reached, tracker = random.Random(3), 0, tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    for number in range(4):
        with rank_variables(RANKS) as variables:
            ranks = [start(argv, tmp_path, environment(**each)) for each in variables]
            deadline = time.monotonic() + 300
            while not (tracker.exists() and int(tracker.read_text()) > reached):
                assert time.monotonic() < deadline, "the job did not get as far as its first save"
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.4))
            victim = ranks[number]
            victim.kill()
            outputs = [process.communicate(timeout=600)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [-9 if process is victim else 3 for process in ranks], (
            outputs
        )
        now = int(tracker.read_text())
        assert now > reached
        reached = now
        assert verify_checkpoint(tmp_path / "ckpt" / f"iter_{now:07d}").problems == []
    assert_nothing_lost(tmp_path, argv, reached, RANKS)
    assert not list((tmp_path / "ckpt").glob("*.tmp-*")) and not list((tmp_path / "ckpt").glob("*.old-*"))


def test_metrics_logged_before_a_kill_appear_once_in_the_end(tmp_path):
    """Killed soon after a validation: the files hold everything up to then; after the restart every step and validation once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = [
        *TINY,
        *MOCK,
        "--train-iters",
        "4000",
        "--save",
        "ckpt",
        "--save-interval",
        "4",
        "--auto-resume",
        "--tensorboard-dir",
        "tb",
        "--eval-interval",
        "3",
        "--eval-iters",
        "1",
        "--split",
        "90,10,0",
        "--moe-per-layer-logging",
    ]
    metrics, process = tmp_path / "ckpt" / "metrics.jsonl", start(argv, tmp_path, environment())
    deadline = time.monotonic() + 300
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not (metrics.exists() and '"iteration": 7, ' in metrics.read_text())
    ):
        time.sleep(0.002)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -9, errors
    before = read_metrics(metrics)  # whole lines only
    reached = before[-1]["iteration"]
    logged = [(record["iteration"], "validation" in record) for record in before]
    assert 7 <= reached < 4000
    assert logged[:9] == [
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
        (6, True),
        (7, False),
    ]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    steps = [scalar.step for scalar in events.Scalars("lm loss")]
    # the file that is written first may be ahead by what the kill cut in between
    assert steps in (list(range(1, reached + 1)), list(range(1, reached)), list(range(1, reached + 2)))
    assert [scalar.step for scalar in events.Scalars("lm loss validation")][:2] == [3, 6]

    finished = run(
        [*argv, "--exit-interval", "12"], tmp_path, new_interpreter=True
    )  # forked ranks have other mock data
    assert finished.returncode == 0, finished.stderr
    after = read_metrics(metrics)
    steps, checks = (
        [record for record in after if "validation" not in record],
        [record for record in after if "validation" in record],
    )
    assert [record["iteration"] for record in steps] == list(range(1, steps[-1]["iteration"] + 1)) and steps[-1][
        "iteration"
    ] % 12 == 0
    assert [record["iteration"] for record in checks] == list(range(3, steps[-1]["iteration"] + 1, 3))
    same = [record for record in before if "validation" in record]
    assert same == checks[: len(same)], "a validation that was repeated came out otherwise"
    assert [record["iteration"] for record in steps if "resumed_from" in record] == [reached // 4 * 4 + 1]
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"images": 0, "scalars": 0})  # 0: all
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("lm loss")] == [record["iteration"] for record in steps]
    assert [scalar.step for scalar in events.Scalars("lm loss validation")] == [
        record["iteration"] for record in checks
    ]
    assert [image.step for image in events.Images("moe/load")] == [record["iteration"] for record in steps]
