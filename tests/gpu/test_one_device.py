"""One CUDA device does what the CPU does: kernels, streams, pinned batches, saves in the background."""

import pytest
from commands import read_metrics, run
from training.layouts import KINDS, make_argv
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.compare_runs import Tolerances, compare
from moe_trainer.verification.training_trace import train

DEVICE = "cuda"
# other kernels sum in another order; nothing here is tuned to a device
NEAR = Tolerances(loss=2e-5, norm=5e-5, grad=2e-4, weight=1e-4)
FURTHER = {
    "packed documents": "--reset-attention-mask --reset-position-ids",
    "a window": "--window-size 5,0",
    "grouped queries": "--group-query-attention --num-query-groups 2 --qk-layernorm",
    "shared experts": "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
    "allgather": "--moe-token-dispatcher-type allgather",
}
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [*KINDS, *FURTHER])
def test_three_steps_on_a_device_equal_the_cpu(kind):
    argv = make_argv(kind) if kind in KINDS else [*make_argv("plain"), *FURTHER[kind].split()]
    one = train(parse_args(argv, 1), 0, ParallelState.single())
    device = train(parse_args(argv, 1), 0, ParallelState.single(), device=DEVICE)
    assert [str(difference) for difference in compare(one, device, NEAR)] == []


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--bf16 --async-save --use-persistent-ckpt-worker",
        "--fp16",
        "--hidden-dropout 0.1 --attention-dropout 0.1",
    ],
)
def test_run_on_a_device_evaluates_saves_and_resumes_bitwise(tmp_path, flags):
    """Four iterations without interruption, and with a resume after two: the losses are bitwise equal."""
    argv = [
        *TINY,
        *MOCK,
        *flags.split(),
        "--train-iters",
        "4",
        "--eval-interval",
        "2",
        "--eval-iters",
        "1",
        "--save",
        "ckpt",
        "--load",
        "ckpt",
        "--save-interval",
        "2",
        "--metrics-file",
        "metrics.jsonl",
    ]

    def losses(name: str, *parts: list[str]) -> list[float]:
        folder = tmp_path / name
        folder.mkdir()
        for part in parts:
            done = run([*argv, *part], folder)
            assert done.returncode == 0, done.stderr
        return [record["lm loss"] for record in read_metrics(folder / "metrics.jsonl") if "learning_rate" in record]

    full = losses("whole", [])
    assert len(full) == 4 and losses("parts", ["--exit-interval", "2"], []) == full
