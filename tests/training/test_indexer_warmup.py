"""--dsa-indexer-warmup: from a dense model, through training of the indexers alone, to sparse attention."""

import pytest
import torch
from commands import read_metrics, run
from harness import run_ranks
from safetensors.torch import load_file
from training.forked import pretrain
from training.layouts import compare, make_argv, shallow, train_ranks

from arguments import parse_args
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace
from moe_trainer.verification.emulate_topology import SequenceSharding, emulate_topology

BASE = [*shallow(make_argv("deepseek")), "--eval-interval", "1000", "--log-interval", "1", "--save-interval", "3"]
DSA = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 1".split()
WARMUP = [*BASE, *DSA, "--dsa-indexer-warmup", "--lr", "1e-2"]
INDEXER = ".core_attention.indexer."
MAPPINGS = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2 --cp-comm-type allgather --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 300",
    "--pipeline-model-parallel-size 2",
    "--expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A trained model without indexers, (checkpoints, weights)."""
    folder = tmp_path_factory.mktemp("dense")
    _, weights = pretrain([*BASE, "--train-iters", "3", "--save", "saved"], folder)
    return str(folder / "saved"), weights


@pytest.fixture(scope="module")
def warm(dense, tmp_path_factory):
    """The same with indexers, warmed up: (folder, records, weights)."""
    folder = tmp_path_factory.mktemp("warm")
    records, weights = pretrain(
        [*WARMUP, "--train-iters", "6", "--load", dense[0], "--finetune", "--save", "saved"], folder
    )
    return folder, records, weights


def test_dsa_warmup_updates_only_indexer_weights(dense, warm):
    _, before = dense
    _, records, after = warm
    assert (
        after.keys() - before.keys() == {name for name in after if INDEXER in name} and len(after) - len(before) == 15
    )
    assert any(name.endswith("expert_bias") for name in before)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    losses = [record["indexer loss"] for record in records]
    assert losses[-1] < 0.8 * losses[0], losses
    assert all("lm loss" in record for record in records)


def test_dsa_warmup_updates_every_indexer_tensor(dense, warm, tmp_path):
    """Compared with the initial weights, which --skip-train exports, exactly the tensors of the indexers changed."""
    _, start = pretrain([*WARMUP, "--train-iters", "6", "--skip-train", "--load", dense[0], "--finetune"], tmp_path)
    for name, tensor in start.items():
        assert torch.equal(tensor, warm[2][name]) != (INDEXER in name), name


def test_an_evaluation_of_the_warmup_attends_to_all_keys(warm, tmp_path):
    """As the run that is to learn from it did: untrained indexers would select others."""
    flags = ["--load", str(warm[0] / "saved"), "--skip-train", "--mock-data", "--eval-iters", "2"]
    by_hand, _ = pretrain([*WARMUP, *flags], tmp_path / "a")
    restored = run(["--use-checkpoint-args", *flags, "--metrics-file", "metrics.jsonl"], tmp_path)
    assert restored.returncode == 0, restored.stderr
    losses = [record["lm loss"] for record in by_hand if "lm loss" in record]
    assert losses and losses == [r["lm loss"] for r in read_metrics(tmp_path / "metrics.jsonl") if "lm loss" in r]


def test_dsa_warmup_resumes_bitwise(dense, warm, tmp_path):
    pretrain(
        [*WARMUP, "--train-iters", "6", "--exit-interval", "3", "--load", dense[0], "--finetune", "--save", "saved"],
        tmp_path,
    )
    records, weights = pretrain([*WARMUP, "--train-iters", "6", "--load", "saved", "--save", "saved"], tmp_path)
    assert [record["indexer loss"] for record in records][-3:] == [record["indexer loss"] for record in warm[1]][-3:]
    assert all(torch.equal(weights[name], tensor) for name, tensor in warm[2].items())


def test_sparse_training_starts_from_the_warmup_checkpoint(warm, tmp_path):
    folder, _, before = warm
    argv = [
        *BASE,
        *DSA,
        "--dsa-indexer-use-sparse-loss",
        "--train-iters",
        "2",
        "--load",
        str(folder / "saved"),
        "--finetune",
    ]
    records, after = pretrain(argv, tmp_path)
    assert after.keys() == before.keys()
    moved = {name: not torch.equal(tensor, after[name]) for name, tensor in before.items()}
    assert all(moved.values()), [name for name, has in moved.items() if not has]
    assert records[0]["indexer loss"] > 0


def test_checkpoint_without_indexers_requires_finetune(dense, tmp_path):
    ended = run([*WARMUP, "--train-iters", "6", "--load", dense[0]], tmp_path)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "has no indexers" in ended.stderr and "--finetune" in ended.stderr and "indexer.linear_wq_b" in ended.stderr
    begun = run([*WARMUP, "--train-iters", "1", "--load", dense[0], "--finetune"], tmp_path)
    assert begun.returncode == 0 and "has no indexers of sparse attention" in begun.stdout + begun.stderr


def test_parallel_dsa_warmup_equals_one_process():
    found = run_ranks(train_ranks, 2, [[*WARMUP, *mapping.split()] for mapping in MAPPINGS])
    whole, halves = (train_sharded(size) for size in (1, 2))
    for mapping, outcome, other in zip(MAPPINGS, *found, strict=True):
        differences = compare(halves if "context" in mapping else whole, outcome)
        assert not differences, "\n".join([mapping, *map(str, differences[:8])])
        assert other.losses == outcome.losses, mapping
        assert {name for name, grad in outcome.grads.items() if grad.abs().max() > 0} == {
            name for name in outcome.grads if INDEXER in name
        }, mapping


def train_sharded(cp):
    """Train on one process by the definitions of `cp` context ranks."""
    sharding = SequenceSharding(1, cp)
    return training_trace.train(
        parse_args(WARMUP, 1), 0, ParallelState.single(), 2, prepare=lambda run: emulate_topology(run, sharding)
    )


def test_dump_step_of_warmup_has_nonzero_gradients_of_indexers_only(tmp_path):
    """Frozen parameters have zero gradients where gradients are recorded."""
    ended = run(
        [
            *WARMUP,
            "--train-iters",
            "1",
            "--dump-step",
            "1",
            "dumped",
            "--metrics-file",
            "metrics.jsonl",
            "--save",
            "saved",
        ],
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    grads = load_file(tmp_path / "dumped" / "grads_step1.safetensors")
    assert (
        {name for name, tensor in grads.items() if tensor.any()} == {name for name in grads if INDEXER in name} != set()
    )
