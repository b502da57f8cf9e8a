"""--auto-resume: the same command line, started again and again, gives one run."""

import os
import signal

import pytest
from commands import read_metrics, run
from training.tiny import MOCK, TINY

from moe_trainer.training import loop

ITERATIONS = 6
LINE = [
    *TINY,
    *MOCK,
    *f"--train-iters {ITERATIONS} --save ckpt --save-interval 2 --tensorboard-dir tb --auto-resume".split(),
]


def run_job(cwd, *flags, code=0):
    finished = run([*LINE, *flags], cwd)
    assert finished.returncode == code, finished.stderr
    return finished


def curve(cwd):
    return [
        (r["iteration"], r["lm loss"], r["grad_norm"], r["learning_rate"])
        for r in read_metrics(cwd / "ckpt" / "metrics.jsonl")
        if "validation" not in r
    ]


def scalars(cwd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(cwd / "tb"), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in ("lm loss", "lm loss vs samples", "grad-norm")
    }


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_job(folder)
    return folder


def test_exit_duration_requests_restarts(tmp_path, full):
    for done in (1, 2):
        finished = run_job(tmp_path, "--exit-duration-in-mins", "0", code=75)
        assert "[exiting program after" in finished.stdout
        assert len(curve(tmp_path)) == done
    run_job(tmp_path)
    assert curve(tmp_path) == curve(full)
    assert scalars(tmp_path) == scalars(full)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_batch_system_signals_save_and_request_a_restart(tmp_path, monkeypatch, name):
    def step_with_signals(run, state, microbatches):
        if state.iteration == 2:
            for _ in range(3):
                os.kill(os.getpid(), signal.Signals[name])
        return train_step(run, state, microbatches)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", step_with_signals)
    finished = run_job(tmp_path, "--save-interval", "100", code=75)
    assert f"[exiting program after receiving {name}.] datetime:" in finished.stdout
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == str(curve(tmp_path)[-1][0]) == "3"


def test_repeated_iterations_are_logged_once(tmp_path, full):
    """The checkpoints of iterations 4 and 5 are damaged, so iterations 3 to 5 run again."""
    run_job(tmp_path, "--exit-interval", "5")
    for iteration in (4, 5):
        next((tmp_path / "ckpt" / f"iter_000000{iteration}").glob("*.distcp")).unlink()
    finished = run_job(tmp_path)
    assert finished.stderr.count("skipping the damaged checkpoint") == 2
    assert "going on from iteration 2" in finished.stderr
    assert curve(tmp_path) == curve(full)
    assert scalars(tmp_path) == scalars(full)


def test_resumes_with_a_corrupt_tracker_file(tmp_path, full):
    run_job(tmp_path, "--exit-interval", "4")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1x")
    run_job(tmp_path)
    assert curve(tmp_path) == curve(full)


def test_logs_of_a_start_without_checkpoint_are_moved_aside(tmp_path, full):
    run_job(tmp_path, "--exit-interval", "3", "--save-interval", "100")
    for path in (tmp_path / "ckpt").iterdir():
        if path.name != "metrics.jsonl":
            path.rename(tmp_path / path.name)
    run_job(tmp_path)
    assert curve(tmp_path) == curve(full)
    assert scalars(tmp_path) == scalars(full)
    assert len(list((tmp_path / "tb" / "earlier-1").iterdir())) == 1


def test_second_start_ignores_the_initial_finetune_checkpoint(tmp_path):
    run_job(tmp_path, "--save", "base")
    base = ["--load", "base", "--finetune", "--no-load-optim", "--no-load-rng", "--seed", "7"]
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "base").symlink_to(tmp_path / "base")
    run_job(tmp_path / "undisturbed", *base)
    run_job(tmp_path, *base, "--exit-interval", "3")
    run_job(tmp_path, *base)
    assert curve(tmp_path) == curve(tmp_path / "undisturbed")


def test_auto_resume_requires_a_save_folder(tmp_path):
    finished = run([*TINY, *MOCK, "--train-iters", "2", "--auto-resume"], tmp_path)
    assert finished.returncode == 2
    assert "--auto-resume needs --save" in finished.stderr


def test_use_checkpoint_args_reads_the_checkpoint_of_the_run(tmp_path, full):
    """--use-checkpoint-args with --auto-resume alone: the first start needs the flags, a later one takes them from the run's own checkpoint."""
    run_job(tmp_path, "--use-checkpoint-args", "--exit-interval", "4")
    shape = ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--num-experts")
    without = [word for before, word in zip(["", *LINE], LINE) if word not in shape and before not in shape]
    finished = run([*without, "--use-checkpoint-args"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert curve(tmp_path) == curve(full)
    other = run([*LINE, "--num-layers", "3", "--use-checkpoint-args"], tmp_path)
    assert other.returncode == 2 and "--num-layers 3: the checkpoint has num_layers 2" in other.stderr
    nothing = run([*without, "--use-checkpoint-args"], tmp_path / "ckpt")
    assert nothing.returncode == 2 and "--num-layers is missing" in nothing.stderr


def test_restarting_a_finished_run_logs_nothing_new(tmp_path):
    flags = ["--eval-interval", "3", "--eval-iters", "1"]
    run_job(tmp_path, *flags)
    full = [
        {name: value for name, value in record.items() if name in ("iteration", "validation", "lm loss")}
        for record in read_metrics(tmp_path / "ckpt" / "metrics.jsonl")
    ]
    assert [record["iteration"] for record in full if "validation" in record] == [
        3,
        6,
        6,
        6,
    ]  # the last one is of the test set
    run_job(tmp_path, *flags)
    assert [
        {name: record[name] for name in kept}
        for kept, record in zip(full, read_metrics(tmp_path / "ckpt" / "metrics.jsonl"), strict=True)
    ] == full
