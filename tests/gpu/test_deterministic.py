"""--deterministic-mode on a device: every operation of a small run has a deterministic form, and two runs give the same bits."""

import pytest
from commands import read_metrics, run
from training.tiny import MOCK, TINY

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--bf16 --triton-kernels all",
        "--bf16 --moe-permute-fusion --on-missing-backend fallback --moe-expert-capacity-factor 1.0 --hidden-dropout 0.1",
    ],
)
def test_two_deterministic_runs_on_a_device_are_bitwise_equal(tmp_path, flags):
    def losses(name: str) -> list[tuple[float, float]]:
        (tmp_path / name).mkdir()
        done = run(
            [
                *TINY,
                *MOCK,
                *flags.split(),
                "--deterministic-mode",
                "--train-iters",
                "4",
                "--metrics-file",
                "metrics.jsonl",
            ],
            tmp_path / name,
        )
        assert done.returncode == 0, done.stderr
        return [(record["lm loss"], record["grad_norm"]) for record in read_metrics(tmp_path / name / "metrics.jsonl")]

    assert losses("one") == losses("two")
