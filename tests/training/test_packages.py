"""A Python without the required packages ends with one error line and exit code 2."""

import subprocess
import sys

import pytest
from commands import environment
from structure.source import ROOT
from training.tiny import MOCK, TINY

from moe_trainer.errors import UserError, require_packages


def test_missing_packages_are_named():
    require_packages("json", "torch")
    with pytest.raises(UserError, match=r"has no not_a_package, nor_this: "):
        require_packages("json", "not_a_package", "nor_this")


@pytest.mark.parametrize(
    "words, name",
    [
        (["pretrain_moe.py", *TINY, *MOCK, "--train-iters", "1"], "torch"),
        (["scripts/preprocess_data.py", "--help"], "numpy"),
        (["scripts/convert.py", "a", "b"], "torch"),
        (["scripts/replay.py", "a"], "torch"),
        (["scripts/generate.py", "a", "b"], "torch"),
        (["scripts/evaluate.py", "a", "--tasks", "b"], "torch"),
        (["scripts/torchrun.py", "--nproc-per-node", "2", "pretrain_moe.py"], "torch"),
        (["scripts/prove_layout.py", *TINY, *MOCK, "--train-iters", "1", "--world-size", "2"], "torch"),
        (["pretrain_moe.py", "--preset", "mixtral_tiny", *MOCK], "PyYAML"),
    ],
)
def test_python_without_packages_ends_with_exit_code_2(tmp_path, words, name):
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / words[0]), *words[1:]],
        cwd=tmp_path,
        env=environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr, done.stderr
