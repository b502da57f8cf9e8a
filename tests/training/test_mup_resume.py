"""A checkpoint trained with --use-mup: evaluated with its multipliers, and refused by a run that lacks them."""

import re

import pytest
from commands import run
from training.tiny import MOCK, TINY

MUP = "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3".split()
EVALUATED = ["--eval-iters", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mup")
    finished = run(
        [
            *TINY,
            *MOCK,
            *MUP,
            *EVALUATED,
            "--train-iters",
            "2",
            "--lr-decay-iters",
            "9",
            "--save",
            "ck",
            "--save-interval",
            "2",
        ],
        folder,
    )
    assert finished.returncode == 0, finished.stderr
    return folder, read_test_loss(finished.stdout)


def read_test_loss(log):
    return re.search(r"on test set \| lm loss value: (\S+)", log).group(1)


def test_evaluation_uses_the_mup_multipliers_of_the_checkpoint(trained):
    folder, expected = trained
    finished = run(["--use-checkpoint-args", "--load", "ck", "--skip-train"], folder)
    assert finished.returncode == 0, finished.stderr
    assert read_test_loss(finished.stdout) == expected


def test_resuming_without_mup_flags_is_refused(trained):
    folder, _ = trained
    argv = [*TINY, *MOCK, "--train-iters", "3", "--lr-decay-iters", "9", "--load", "ck", "--use-checkpoint-args"]
    finished = run(argv, folder)
    assert finished.returncode == 2 and "--use-mup" in finished.stderr
    assert run([*argv, *MUP], folder).returncode == 0
    assert run([*argv, "--finetune"], folder).returncode == 0
