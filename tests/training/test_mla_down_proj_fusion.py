"""--mla-down-proj-fusion: one parameter and one GEMM for two projections, with the same training and checkpoints."""

from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from training.agreement import Row, check_rows
from training.layouts import FP32, Tolerances, assert_equal, make_argv, make_run, shallow, train
from training.resuming import assert_alike, load_and_save, train_and_save

from moe_trainer.checkpoint.inspect import describe, differences
from moe_trainer.parallel.state import ParallelState

FUSED = "--mla-down-proj-fusion"
DEEPSEEK = [*shallow(make_argv("deepseek")), "--global-batch-size", "4"]
BARE = [word for word in DEEPSEEK if word != "--qk-layernorm"]
SPARSE = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 "
    "--dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss"
)
ONE = {
    "plain": (DEEPSEEK, ""),
    "without norms of latents": (BARE, ""),
    "recompute": (DEEPSEEK, "--recompute-granularity selective --recompute-modules mla_up_proj layernorm"),
    "sparse attention": (DEEPSEEK, SPARSE),
    "muon": (DEEPSEEK, "--optimizer muon"),
    "muon, whole matrices": (DEEPSEEK, "--optimizer muon --muon-no-split-qkv"),
    "fp8, no norms": (BARE, "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 --q-lora-rank 32"),
}
# (flags of the ranks, flags of both)
TWO = (
    ("--tensor-model-parallel-size 2 --sequence-parallel", ""),
    ("--tensor-model-parallel-size 2", ""),
    ("--pipeline-model-parallel-size 2", ""),
    ("--use-distributed-optimizer", "--optimizer muon"),
    ("--use-torch-fsdp2", ""),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params", ""),
)


# an orthogonal factor amplifies rounding by thousands where an expert has few tokens, whose gradient has few directions
AMPLIFIED = replace(FP32, weight=1e-3, norm=1e-5)
# gradients of latents are quantized in blocks that span both
BF16 = Tolerances(loss=2e-3, norm=2e-2, grad=0.1, weight=2e-2, output=2e-2)


def tolerances(flags: str) -> Tolerances:
    return BF16 if "--bf16" in flags else AMPLIFIED if "--optimizer" in flags else FP32


@pytest.mark.parametrize("name", ONE)
def test_fused_projections_train_as_two(name):
    argv, flags = ONE[name]
    argv = [*argv, *flags.split()]
    # experts of near ties may change places in half precision after an update
    steps = 1 if "--bf16" in flags else 2
    expected, outcome = (train([*argv, *more], 0, ParallelState.single(), steps) for more in ([], [FUSED]))
    assert_equal(outcome, expected, name, tolerances(flags))


def test_fused_projections_on_ranks_train_as_two_on_one():
    check_rows({
        f"{flags} {both}": Row(2, [*DEEPSEEK, *both.split()], f"{flags} {FUSED}", tolerances(both))
        for flags, both in TWO
    })  # fmt: skip


def test_checkpoints_hold_both_projections(tmp_path):
    """Fused, separate and fused again: bitwise the same checkpoint, and the same iterations after it."""
    argv = [*DEEPSEEK, "--use-distributed-optimizer", "--tensor-model-parallel-size", "2"]
    folders = [tmp_path / name for name in ("fused", "separate", "again")]
    steps = [run_ranks(train_and_save, 2, [*argv, FUSED], folders[0])[0]]
    steps.append(run_ranks(load_and_save, 1, DEEPSEEK, folders[0], folders[1])[0])
    steps.append(run_ranks(load_and_save, 2, [*argv, FUSED], folders[1], folders[2])[0])
    kept = describe(folders[0] / "iter_0000002")
    leaves = {name.rpartition("self_attention.")[2] for name in kept if "down_proj" in name}
    assert {"linear_q_down_proj.weight", "linear_kv_down_proj.weight"} <= leaves
    assert not any("qkv_down" in leaf for leaf in leaves)
    for folder in folders[1:]:
        assert differences(folders[0] / "iter_0000002", folder / "iter_0000002") == []
    for other in steps[1:]:
        assert_alike(other, steps[0])


def test_initial_values_are_those_of_two_projections():
    separate, fused = (
        make_run([*DEEPSEEK, *flags], 0, ParallelState.single(), 1).chunks[0].decoder.layers[0].self_attention
        for flags in ([], [FUSED])
    )
    weight = fused.linear_qkv_down_proj.weight
    assert torch.equal(weight, torch.cat([separate.linear_q_down_proj.weight, separate.linear_kv_down_proj.weight]))
    assert not hasattr(fused, "linear_q_down_proj") and not hasattr(fused, "linear_kv_down_proj")
