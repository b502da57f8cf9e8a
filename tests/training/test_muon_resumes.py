"""Muon's momentum has logical names: a checkpoint of one mapping resumes under any other."""

import pytest
from harness import run_ranks
from training.layouts import make_argv, shallow
from training.resuming import assert_alike, load_and_save, train_and_save

from moe_trainer.checkpoint.inspect import describe, differences

MUON = "--optimizer muon --muon-fp32-matmul-prec high --muon-nesterov --moe-token-dispatcher-type alltoall"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
# (ranks, mapping), each loaded from the one before
CHAIN = (
    (1, ""),
    (4, f"{TP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 {SHARDED} --muon-tp-mode distributed"),
    (2, f"--pipeline-model-parallel-size 2 {SHARDED}"),
    (4, f"--expert-model-parallel-size 2 {SHARDED}"),
)


@pytest.mark.parametrize("kind", ["plain", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_muon_momentum_is_unchanged_across_mappings(tmp_path, kind):
    argv = [*shallow(make_argv(kind)), *MUON.split()]
    first = tmp_path / "first"
    expected = run_ranks(train_and_save, 2, [*argv, *f"{TP} {SHARDED}".split()], first)[0]
    kept = describe(first / "iter_0000002")
    assert (
        "optimizer.state.momentum_buffer.decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in kept
        or "optimizer.state.momentum_buffer.decoder.layers.mlp.experts.experts.linear_fc1.weight" in kept
    )
    assert "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight" in kept
    assert not any("exp_avg" in name and "linear" in name and "norm" not in name for name in kept), (
        "matrices have no moments of Adam"
    )
    source = first
    for number, (n, mapping) in enumerate(CHAIN):
        target = tmp_path / str(number)
        steps = run_ranks(load_and_save, n, [*argv, *mapping.split()], source, target)[0]
        assert differences(first / "iter_0000002", target / "iter_0000002") == [], mapping
        assert_alike(steps, expected)
        source = target
