"""Runs with fully sharded parameters: checkpoints that any layout resumes, evaluation, export, bf16, and what a rank holds."""

import subprocess
import sys

import pytest
import torch
from commands import REPOSITORY, environment, rank_variables
from harness import run_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training.forked import pretrain
from training.layouts import create_groups, make_argv, make_run, shallow
from training.resuming import assert_alike, load_and_save, run_steps, train_and_save
from training.tiny import MOCK, TINY

from moe_trainer.checkpoint.inspect import differences
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.shards import local_shards
from moe_trainer.training.setup import parameters

MEGATRON = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"


CHAIN = (
    (1, ""),
    (2, "--use-torch-fsdp2"),
    (4, f"{MEGATRON} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"),
    (4, f"{MEGATRON} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
)


def test_state_is_unchanged_across_sharded_and_other_layouts(tmp_path):
    first = tmp_path / "first"
    argv = [*shallow(make_argv("deepseek")), *"--num-experts 4 --micro-batch-size 1 --global-batch-size 4".split()]
    sharded = f"{MEGATRON} --expert-model-parallel-size 2".split()
    expected = run_ranks(train_and_save, 2, [*argv, *sharded], first, 1)[0]
    source = first
    for number, (n, flags) in enumerate(CHAIN):
        target = tmp_path / str(number)
        found = run_ranks(load_and_save, n, [*argv, *flags.split()], source, target, 1)[0]
        assert differences(first / "iter_0000002", target / "iter_0000002") == [], flags
        assert_alike(found, expected, norm=3e-6)
        source = target


def count_local_elements(rank, n, argv):
    """Number of elements on this rank, of all parameters, and of FSDP modules."""
    run = make_run(argv, rank, create_groups(argv, rank, n), 3)
    params = parameters(run.chunks)
    units = sum(isinstance(module, FSDPModule) for module in run.chunks[0].modules())
    for param in params:
        assert isinstance(param, DTensor) and param.dtype == torch.float32, get_param_info(param).names
    before = sum(part.numel() for param in params for part, _, _ in local_shards(param))
    full = sum(param.numel() for param in params)
    run_steps(run, 0, 1)
    with torch.no_grad():
        batch = next(run.train_batches)
        run.chunks[0](batch.tokens_BS, batch.position_ids_BS, batch.labels_BS, batch.loss_mask_BS)
    after = parameters(run.chunks)
    assert all(a is b for a, b in zip(params, after, strict=True)), "gathered parameters were left behind"
    return before, full, units


@pytest.mark.parametrize("flags", ["--use-torch-fsdp2", f"{MEGATRON} --data-parallel-sharding-strategy optim_grads"])
def test_each_rank_holds_its_shard_of_all_parameters(flags):
    parts = run_ranks(count_local_elements, 4, [*make_argv("deepseek"), *flags.split()])
    full = parts[0][1]
    assert sum(held for held, _, _ in parts) == full
    assert max(held for held, _, _ in parts) < 0.3 * full
    assert (
        parts[0][2] == 5 + 4 + 2
    )  # layers with that of MTP, their experts (one layer is dense), the embedding, the rest


JOB = [
    *TINY,
    *MOCK,
    *"--train-iters 4 --log-params-norm --log-num-zeros-in-grad --eval-interval 2 --eval-iters 1".split(),
]


def get_losses(records):
    return {
        record["iteration"]: record["lm loss"]
        for record in records
        if "lm loss" in record and "learning_rate" in record
    }


@pytest.mark.parametrize(
    "flags",
    ["", "--bf16 --megatron-fsdp-main-params-dtype bf16", "--fp16 --initial-loss-scale 4294967296 --hysteresis 1"],
)
def test_fully_sharded_run_evaluates_saves_resumes_and_exports(tmp_path, flags):
    argv = [*JOB, *flags.split()]
    plain, weights = pretrain(argv, tmp_path / "plain", 2)
    sharded = [*argv, *f"{MEGATRON} --expert-model-parallel-size 2 --save ckpt --save-interval 2".split()]
    full, sharded_weights = pretrain(sharded, tmp_path / "sharded", 2)
    near = 1e-5 if not flags else 2e-2
    assert get_losses(full) == pytest.approx(get_losses(plain), rel=near)
    assert set(weights) == set(sharded_weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(sharded_weights[name].float(), tensor.float(), rtol=near, atol=near)
    # the last two iterations by another process: as in one go
    middle = ["--load", str(tmp_path / "sharded/ckpt"), "--ckpt-step", "2", "--exit-on-missing-checkpoint"]
    second, resumed_weights = pretrain([*sharded, *middle], tmp_path / "resumed", 2)
    losses = get_losses(full)
    assert get_losses(second) == {iteration: losses[iteration] for iteration in (3, 4)}
    for name, tensor in sharded_weights.items():
        assert torch.equal(resumed_weights[name], tensor), name


THREADS_AT_EXIT = """
import atexit, glob, pathlib, runpy, sys, time

def count_threads():
    found = 0
    for path in glob.glob("/proc/self/task/*/comm"):
        try:
            found += pathlib.Path(path).read_text().strip() == "pt_gloo_runloop"
        except OSError:
            pass
    return found

def print_threads():
    deadline = time.monotonic() + 10.0  # the kernel removes a thread a moment after its end
    while count_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("gloo threads at exit:", count_threads(), flush=True)

atexit.register(print_threads)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_process_groups_end_before_the_interpreter(tmp_path):
    """A thread of theirs that needs the interpreter while it ends would abort the process, now and then.

    Sharded, there are the groups of a plain run and those of the device meshes.
    """
    argv = [
        str(REPOSITORY / "pretrain_moe.py"),
        *TINY,
        *MOCK,
        *MEGATRON.split(),
        "--train-iters",
        "1",
        "--eval-iters",
        "0",
    ]
    with rank_variables(2) as variables:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", THREADS_AT_EXIT, *argv],
                cwd=tmp_path,
                env=environment(**each),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for each in variables
        ]
        for rank in ranks:
            out, _ = rank.communicate(timeout=300)
            assert rank.returncode == 0 and "gloo threads at exit: 0" in out, out
