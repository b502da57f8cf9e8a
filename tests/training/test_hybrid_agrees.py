"""Hybrid models on ranks: training equals one process, and a stopped run resumes bit for bit, in another layout too."""

import pytest
import torch
from harness import run_ranks
from training.agreement import Row, check_rows
from training.layouts import make_argv, shallow
from training.resuming import assert_alike, load_and_save, train_and_save
from training.test_resume import assert_same_end, outputs, run

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.inspect import differences

PATTERN = "ME*M-E"
FLAGS = (
    "--mamba-num-heads 8 --mamba-head-dim 6 --mamba-num-groups 4 --mamba-state-dim 10 --position-embedding-type none "
    "--moe-latent-size 8 --moe-shared-expert-intermediate-size 8 --expert-tensor-parallel-size 1"
).split()


def argv(pattern=PATTERN, *more):
    words = make_argv("plain")
    at = words.index("--num-layers")
    return [*words[:at], *words[at + 2 :], f"--hybrid-layer-pattern={pattern}", *FLAGS, *more]


def test_ranks_equal_one_process():
    """Uneven stages with tensor ranks: the checkpoint of the next test."""
    tp2, small = "--tensor-model-parallel-size 2 --sequence-parallel", ("--global-batch-size", "4")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    stages = "--hybrid-layer-pattern=M|E*|M-|E --pipeline-model-parallel-size 2"
    outcomes = check_rows({
        "tp, sp, ep": Row(4, argv(), f"{tp2} --expert-model-parallel-size 2"),
        "cp, tp, sp": Row(4, argv(PATTERN, *small), f"{tp2} --context-parallel-size 2"),
        "virtual stages, dp": Row(4, argv(), f"{stages} --use-distributed-optimizer {full}"),
    })  # fmt: skip
    for outcome in outcomes.values():
        assert any("mixer.A_log" in key for key in outcome.grads)


def test_a_checkpoint_resumes_under_other_layouts(tmp_path):
    """The stored tensors are bitwise equal, and the next losses are those of the uninterrupted run."""
    source, small = tmp_path / "source", ("--global-batch-size", "4")
    stages = argv("M|E*M-E", *small, *"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2".split())
    expected = run_ranks(train_and_save, 4, stages, source)[0]
    experts = "--expert-model-parallel-size 2 --context-parallel-size 2 --use-distributed-optimizer".split()
    for n, words in ((1, argv(PATTERN, *small)), (2, argv(PATTERN, *small, *experts))):
        target = tmp_path / str(n)
        assert_alike(run_ranks(load_and_save, n, words, source, target)[0], expected)
        assert differences(source / "iter_0000002", target / "iter_0000002") == []
        source = target


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    flags = [
        "--preset",
        "nemotron_3_tiny",
        "--hybrid-layer-pattern=ME*-M",
        "--mock-data",
        "--seq-length",
        "32",
        "--bf16",
    ]
    flags += "--global-batch-size 2 --eval-iters 0 --log-interval 1 --lr-decay-iters 4".split()
    done = [
        run([*flags, *outputs(whole, "--train-iters", "4")], tmp_path),
        run([*flags, *outputs(parts, "--train-iters", "2")], tmp_path),
        run([*flags, *outputs(parts, "--train-iters", "4")], tmp_path),
    ]
    assert [each.returncode for each in done] == [0, 0, 0], "".join(each.stdout + each.stderr for each in done)
    assert_same_end(whole, parts)
    reader = torch.distributed.checkpoint.FileSystemReader(parts / "ckpt" / "iter_0000004")
    keys = reader.read_metadata().state_dict_metadata
    stored = {f"mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")} | {
        "mixer.in_proj.layer_norm_weight", "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight", "mixer.out_proj.weight",
        *(f"mixer.conv1d.{name}.{part}" for name in ("weight", "bias") for part in ("x", "B", "C")),
    }  # fmt: skip
    prefix = "decoder.layers.0."
    named = {key.removeprefix(prefix) for key in keys if key.startswith(prefix) and "extra_state" not in key}
    assert named == stored, "as Megatron-Core's hybrid models"
    assert {"decoder.final_norm.weight", "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"} <= set(keys)
    assert {
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    } <= set(keys)


def test_gpt_and_hybrid_checkpoints_resume_each_other_bit_for_bit(tmp_path):
    """GPT -> hybrid -> GPT: weights, optimizer and expert biases; the next losses are those of the uninterrupted run."""
    bias = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-layer-freq ([1,0])".split()
    gpt = [*shallow(make_argv("plain")), *bias]
    at = gpt.index("--num-layers")
    hybrid = [*gpt[:at], *gpt[at + 2 : -2], "--hybrid-layer-pattern=*E*-"]
    expected = run_ranks(train_and_save, 1, gpt, tmp_path / "gpt")[0]
    assert run_ranks(load_and_save, 1, hybrid, tmp_path / "gpt", tmp_path / "hybrid")[0] == expected
    assert run_ranks(load_and_save, 1, gpt, tmp_path / "hybrid", tmp_path / "back")[0] == expected
    assert differences(tmp_path / "gpt" / "iter_0000002", tmp_path / "back" / "iter_0000002") == []
    with pytest.raises(CheckpointError, match="layer 1 .from 0. is E in the checkpoint and - here"):
        load_and_save(0, 1, [word.replace("*E*-", "*-*E") for word in hybrid], tmp_path / "gpt", tmp_path / "other")
