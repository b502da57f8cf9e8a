"""Diverged replicas: one flipped bit on one rank is found, named, and ends the run; equal weights log nothing."""

import os

import pytest
import torch
from commands import run
from harness import run_ranks
from torch.nn import Parameter
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel.params import ParamInfo, get_param_info, is_quantized_param
from moe_trainer.parallel.state import ParallelState
from moe_trainer.resilience.weight_hash import WeightsDifferError, check_replica_weights, weight_hash
from moe_trainer.training import loop
from moe_trainer.training.initialize import Runtime
from moe_trainer.training.monitors import RankMonitors

JOB = [
    *TINY,
    *MOCK,
    "--global-batch-size",
    "8",
    "--train-iters",
    "4",
    "--check-weight-hash-across-dp-replicas-interval",
    "2",
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_weight_hash_changes_with_every_bit(dtype):
    torch.manual_seed(1)
    x = torch.randint(0, 255, (5, 7), dtype=torch.uint8).to(dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    known, changed = weight_hash(x), []
    assert torch.equal(known, weight_hash(x.clone()))
    for place in (0, 17, 34):
        for bit in range(8 * size):
            raw = x.clone().view(-1).view(torch.uint8)
            raw[place * size + bit // 8] ^= 1 << bit % 8
            changed.append(int(weight_hash(raw.view(dtype))))
    assert len(changed) == 3 * 8 * size and int(known) not in changed


def test_weight_hash_depends_on_positions_and_not_on_chunks(monkeypatch):
    x = torch.arange(1000, dtype=torch.float32)
    known = weight_hash(x)
    swapped = x.clone()
    swapped[[3, 998]] = x[[998, 3]]
    assert not torch.equal(weight_hash(swapped), known)
    assert not torch.equal(weight_hash(torch.zeros(5)), weight_hash(torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0])))
    monkeypatch.setattr("moe_trainer.resilience.weight_hash._CHUNK_WORDS", 7)
    assert torch.equal(weight_hash(x), known)
    assert torch.equal(weight_hash(x.view(10, 100).t().contiguous().t()), weight_hash(x))


def parameter(values, **info):
    param = Parameter(torch.tensor(values))
    param.info = ParamInfo(**info)
    return param


def compare_on_rank(rank, n, culprit):
    """Four ranks, experts over two of them: rank `culprit` has other values in a dense weight and in its second expert."""
    ps = ParallelState.create(n, rank, ep=2)
    off = 0.5 if rank == culprit else 0.0
    first = ps.ep.rank * 2
    params = [
        parameter([1.0, 2.0 + off], names=("decoder.weight",)),
        parameter([3.0], names=("decoder.bias",)),
        parameter(
            [[4.0 + first], [5.0 + first + off]],
            names=(f"experts.{first}", f"experts.{first + 1}"),
            kind="expert",
            stacked=True,
        ),
    ]
    try:
        check_replica_weights(params, ps, 7)
    except WeightsDifferError as error:
        return str(error)
    return ""


def test_diverged_parameters_and_ranks_are_named_on_every_rank():
    assert run_ranks(compare_on_rank, 4, -1) == [""] * 4
    messages = run_ranks(compare_on_rank, 4, 2)
    assert len(set(messages)) == 1
    head, *lines = messages[0].splitlines()
    assert head.startswith("iteration 7: data-parallel replicas hold different weights")
    assert lines[0].startswith("  decoder.weight: ranks 0 1 3 hash ") and ", rank 2 hash " in lines[0]
    assert lines[1].startswith("  experts.1: rank 0 hash ") and ", rank 2 hash " in lines[1]
    assert len(lines) == 2


def compare_while_gathering(rank, n):
    """The weights of the ranks are equal only after the param gather has been waited for."""
    runtime = Runtime(
        LaunchEnv(rank, n, rank, "127.0.0.1", 1, "test"), torch.device("cpu"), ParallelState.create(n, rank)
    )
    param = parameter([float(rank)], names=("decoder.weight",))
    chunk = torch.nn.Module()
    chunk.register_parameter("weight", param)
    monitors = RankMonitors(parse_args(JOB, n), runtime)
    monitors.run_due_checks([chunk], lambda: param.data.zero_(), 2)
    param.data.fill_(rank)
    monitors.run_due_checks([chunk], lambda: None, 3)  # nothing is due
    with pytest.raises(WeightsDifferError):
        monitors.run_due_checks([chunk], lambda: None, 4)


def test_weight_hash_waits_for_the_param_gather():
    run_ranks(compare_while_gathering, 2)


def flip_a_bit(monkeypatch, victim, iteration, name):
    """Flip the lowest bit of one element of a parameter on one rank, behind an iteration's step."""
    train_step = loop.train_step

    def faulty(run, state, microbatches):
        result = train_step(run, state, microbatches)
        if os.environ["RANK"] == str(victim) and state.iteration + 1 == iteration:
            run.optimizer.wait_params()
            param = next(
                param for chunk in run.chunks for param in chunk.parameters() if name in get_param_info(param).names[0]
            )
            flat = (param.stored_weight.codes if is_quantized_param(param) else param.detach()).view(-1)
            flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.element_size()])[-1] ^= 1
        return result

    monkeypatch.setattr(loop, "train_step", faulty)


@pytest.mark.parametrize(
    ("mapping", "world_size", "name", "ranks"),
    [
        ("", 2, "linear_qkv.weight", ("rank 0", "rank 1")),
        (
            "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
            2,
            "output_layer.weight",
            ("rank 0", "rank 1"),
        ),
        (
            "--expert-model-parallel-size 2 --bf16 --use-distributed-optimizer",
            4,
            "linear_fc1.weight",
            ("rank 1", "rank 3"),
        ),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 4, "linear_proj.weight", ("rank 1", "rank 3")),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather --use-distributed-optimizer",
            2,
            "linear_proj.weight",
            ("rank 0", "rank 1"),
        ),
    ],
)
def test_flipped_weight_bit_ends_the_run(tmp_path, monkeypatch, mapping, world_size, name, ranks):
    flip_a_bit(monkeypatch, world_size - 1, 4, name)
    done = run([*JOB, *mapping.split()], tmp_path, world_size)
    assert [line for line in done.stdout.splitlines() if line.startswith(">>>")] == [
        f">>> Weight hashes match after {iteration} iterations..." for iteration in (0, 2)
    ]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "pretrain_moe.py: iteration 4: data-parallel replicas hold different weights" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("  ") and " hash " in line]
    assert lines and all(f"{rank} hash " in line for line in lines for rank in ranks), lines
    assert name.split(".")[-2] in lines[0]


def test_sharded_weights_have_no_replicas(tmp_path):
    done = run([*JOB, "--use-torch-fsdp2", "--log-straggler"], tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert "--check-weight-hash-across-dp-replicas-interval has no effect" in done.stderr and ">>>" not in done.stdout
    assert "--log-straggler has no effect" in done.stderr
    done = run([*JOB, "--use-megatron-fsdp"], tmp_path)
    assert done.returncode == 2 and "there is nothing to compare" in done.stderr
