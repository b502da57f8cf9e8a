"""--freeze-all-layers: training batches run forward only; no weight moves and nothing is saved."""

import pytest
import torch
from commands import read_metrics, run
from training.layouts import make_argv
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.initialize import Runtime
from moe_trainer.training.run import FrozenRun, TrainState, with_batches
from moe_trainer.training.setup import build_run
from moe_trainer.training.step import frozen_step
from moe_trainer.verification.synthetic_data import draw_batches, make_null_tokenizer

LENGTH = ["--train-iters", "3", "--metrics-file", "metrics.jsonl"]


def losses(cwd, *flags, world_size=1):
    cwd.mkdir()
    finished = run([*TINY, *MOCK, *LENGTH, *flags], cwd, world_size=world_size)
    assert finished.returncode == 0, finished.stderr
    return [
        record["lm loss"]
        for record in read_metrics(cwd / "metrics.jsonl")
        if "lm loss" in record and "validation" not in record
    ], finished


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen") / "ckpt"
    losses(folder.parent / "trained", "--save", str(folder), "--save-interval", "3")
    return folder


@pytest.mark.parametrize(
    "world_size, flags",
    [
        (1, ["--log-params-norm", "--check-weight-hash-across-dp-replicas-interval", "1"]),
        (2, ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--exit-interval", "3"]),
        (2, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--auto-resume"]),
        (2, ["--expert-model-parallel-size", "2", "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]),
    ],
)
def test_frozen_layers_give_the_losses_of_unchanged_weights(checkpoint, tmp_path, world_size, flags):
    barely = ["--lr", "1e-12", "--min-lr", "0", "--weight-decay", "0", "--finetune"]
    expected, _ = losses(tmp_path / "moves", "--load", str(checkpoint), *barely)
    found, finished = losses(
        tmp_path / "frozen",
        "--load",
        str(checkpoint),
        "--freeze-all-layers",
        "--save",
        "ckpt",
        "--save-interval",
        "1",
        *flags,
        world_size=world_size,
    )
    assert found == pytest.approx(expected, abs=2e-6) and len(set(found)) == 3
    assert not list((tmp_path / "frozen").glob("ckpt/iter_*"))
    assert "no checkpoints are saved" in finished.stderr + finished.stdout


def test_frozen_training_keeps_no_batches_on_the_host():
    args, ps = parse_args([*make_argv("plain"), "--freeze-all-layers"], 1), ParallelState.single()
    runtime = Runtime(LaunchEnv(0, 1, 0, None, None, "test"), torch.device("cpu"), ps)
    run, state = build_run(args, runtime, make_null_tokenizer(args)), TrainState()
    assert isinstance(run, FrozenRun)
    run = with_batches(run, iter([batch for step in draw_batches(args, ps, 0, 2) for batch in step]))
    for _ in range(2):
        frozen = frozen_step(run, state, args.training.global_batch_size // args.training.micro_batch_size)
        state.iteration += 1
    assert frozen.losses and not frozen.updated
    assert len(getattr(run.train_batches, "batches", ())) == 0
