"""A run that stops and resumes equals one that never stopped, to the last bit."""

import json

import pytest
import torch
from commands import golden_workspace, read_metrics, run
from data_pipeline.corpora import write_chat_tokenizer
from safetensors.torch import load_file
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.model import build
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training import resume

VOLATILE = (
    *("elapsed_ms", "tokens_per_s", "tflops_per_gpu", "max_memory_mb", "resumed_from", "run"),
    *("time", "interval_s", "saved"),
)


def drop_volatile(records):
    return [{k: v for k, v in record.items() if k not in VOLATILE} for record in records]


def assert_same_end(one, other, after=0):
    """Metrics of the iterations after `after` and final weights of two run folders agree bit for bit."""
    first, second = (drop_volatile(read_metrics(folder / "metrics.jsonl")) for folder in (one, other))
    assert [record for record in first if record["iteration"] > after] == second
    first, second = load_file(one / "final.safetensors"), load_file(other / "final.safetensors")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name


def outputs(folder, *extra):
    paths = f"--save {folder}/ckpt --load {folder}/ckpt --metrics-file {folder}/metrics.jsonl --export-weights {folder}/final.safetensors"
    return [*paths.split(), "--save-interval", "100", *extra]


def train(argv, cwd, world_size=1, **how):
    """Run to the end, and return what is printed."""
    finished = run(argv, cwd, world_size, **how)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


JOB = [*TINY, *MOCK, "--train-iters", "4"]
STOPPED = {
    "fp32": (1, ""),
    "dp2-distributed-optimizer": (2, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}
"""Number of ranks and flags of runs that end early and continue in their own folder."""
VARIANTS = {
    # the scale grows after three
    "fp16": (1, "--fp16 --initial-loss-scale 65536 --loss-scale-window 3 --train-iters 4"),
    "bf16-sgd-dropout": (1, "--bf16 --optimizer sgd --hidden-dropout 0.1 --attention-dropout 0.1"),
    "quantile-balancing-validation": (
        1,
        "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0 "
        "--moe-router-quantile-balancing-ema 0.5 --mtp-num-layers 1 --eval-interval 2 --eval-iters 2 --bf16",
    ),
    "global-aux-validation": (1, "--moe-router-load-balancing-type global_aux_loss --eval-interval 2 --eval-iters 2"),
    "dp2-expert-bias": (
        2,
        "--overlap-grad-reduce --moe-router-score-function sigmoid --moe-router-enable-expert-bias --mtp-num-layers 1",
    ),
    "nvfp4": (1, "--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0"),
    "tp2-fp8-delayed-recompute-dropout-validation": (
        2,
        "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max --tensor-model-parallel-size 2 "
        "--sequence-parallel --use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 2 --eval-iters 1 "
        "--global-batch-size 2",
    ),
    "dp2-packed-sequences-validation": (
        2,
        "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 70 --moe-token-dispatcher-type alltoall "
        "--global-batch-size 8 --eval-interval 2 --eval-iters 1",
    ),
    "dynamic-context-parallel": (
        2,
        "--use-varlen-dataset --dynamic-context-parallel --calculate-per-token-loss --max-seqlen-per-dp-cp-rank 36 "
        "--moe-token-dispatcher-type alltoall --global-batch-size 8 --eval-interval 2 --eval-iters 1",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run in fp32 that never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train([*JOB, *outputs(folder)], folder)
    return folder


@pytest.mark.parametrize("name", STOPPED)
def test_resumed_run_equals_uninterrupted_run(whole, tmp_path, name):
    world_size, extra = STOPPED[name]
    argv, parts = [*JOB, *extra.split()], tmp_path / "parts"
    if extra:
        whole = tmp_path / "whole"
        train([*argv, *outputs(whole)], tmp_path, world_size)
    first = train([*argv, *outputs(parts), "--exit-interval", "2"], tmp_path, world_size)
    assert "[exiting program at iteration 2] datetime:" in first
    # without a checkpoint the second run would simply train all four iterations, to the same end
    second = train([*argv, *outputs(parts), "--exit-on-missing-checkpoint"], tmp_path, world_size)
    assert " iteration        2/" not in second and " iteration        3/" in second
    assert_same_end(whole, parts)


@pytest.mark.parametrize(
    ("flags", "draws"), [([], False), (["--dist-ckpt-strictness", "log_all"], True), (["--lora-dim", "4"], True)]
)
def test_weights_that_the_checkpoint_replaces_are_not_drawn(whole, tmp_path, monkeypatch, flags, draws):
    """Those of the vocabulary are: its padding may differ."""
    init, drawn = build.init_parameters, tmp_path / "drawn"

    def record(params, seed):
        drawn.write_text(" ".join(name for param in params for name in param.info.names))
        init(params, seed)

    monkeypatch.setattr(build, "init_parameters", record)
    train([*JOB, *flags, "--load", str(whole / "ckpt"), "--finetune", "--train-iters", "1"], tmp_path)
    names = drawn.read_text().split()
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= set(names) and (len(names) > 2) == draws


def test_models_that_a_checkpoint_may_not_fill_keep_their_initial_weights(whole):
    """An indexer starts with a warm-up from a checkpoint that has none."""
    world, load = ParallelState.single(), ["--mock-data", "--load", str(whole / "ckpt"), "--finetune"]
    filled = {
        preset: resume._replaces_all_weights(parse_args(["--preset", preset, *load], 1), world)
        for preset in ("deepseek_v3_tiny", "deepseek_v3_2_tiny")
    }
    assert filled == {"deepseek_v3_tiny": True, "deepseek_v3_2_tiny": False}


def test_a_checkpoint_that_vanishes_is_an_error(whole, tmp_path, monkeypatch):
    """The weights are zero then."""
    monkeypatch.setattr(resume, "_load", lambda *_: None)
    done = run([*JOB, "--load", str(whole / "ckpt")], tmp_path)
    assert done.returncode == 2 and "the checkpoint that was in this folder a moment ago is gone" in done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_run_resumed_in_the_middle_of_another_ends_as_that(tmp_path, name):
    world_size, extra = VARIANTS[name]
    argv, full, part = [*JOB, "--train-iters", "3", *extra.split()], tmp_path / "whole", tmp_path / "part"
    train([*argv, *outputs(full, "--save-interval", "2")], tmp_path, world_size)
    middle = ["--load", str(full / "ckpt"), "--ckpt-step", "2", "--exit-on-missing-checkpoint"]
    second = train([*argv, *outputs(part, *middle)], tmp_path, world_size)
    assert " iteration        2/" not in second and " iteration        3/" in second
    assert_same_end(full, part, after=2)


@pytest.mark.parametrize(
    ("world_size", "extra"), [(2, []), (1, ["--async-save", "--use-persistent-ckpt-worker"])], ids=["dp2", "async"]
)
def test_resume_of_conversations(tmp_path, world_size, extra):
    """Packed conversations in a blend with text, over two data ranks, with validation; a line that cannot be read."""
    folder = write_chat_tokenizer(tmp_path / "tokenizer", None)
    chats = [
        {
            "messages": [{"role": "user", "content": "fox " * (n % 5)}, {"role": "assistant", "content": f"dog {n}"}]
            * (1 + n % 2)
        }
        for n in range(20)
    ]
    for name, rows in (("chats", chats), ("text", [{"text": f"the river {n} " * (n % 4)} for n in range(13)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"--use-varlen-dataset --data-path 0.7 chats.jsonl 0.3 text.jsonl --split 80,20,0 --data-cache-path cache --tokenizer-type SFTTokenizer "
        f"--tokenizer-model {folder} --moe-token-dispatcher-type alltoall --global-batch-size 8 --max-seqlen-per-dp-cp-rank 70 --num-workers 1 "
        "--eval-interval 2 --eval-iters 1"
    ).split()
    argv = [*TINY, *data, "--train-iters", "5"]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    train([*argv, *outputs(full)], tmp_path, world_size)
    # with --async-save an interpreter ends while something is still being written
    train([*argv, *extra, *outputs(parts, "--exit-interval", "3")], tmp_path, world_size, new_interpreter=bool(extra))
    train([*argv, *extra, *outputs(parts, "--exit-on-missing-checkpoint")], tmp_path, world_size)
    assert (parts / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "5", "the last iteration is saved"
    assert_same_end(full, parts)
    (tmp_path / "chats.jsonl").write_text('{"messages": [}\n')
    failed = run(argv, tmp_path, world_size)
    assert failed.returncode == 2 and "chats.jsonl, line 1: not JSON" in failed.stderr, failed.stderr
    assert "Traceback" not in failed.stderr


def test_resume_inside_a_later_epoch_of_real_data(shared, tmp_path):
    cwd = golden_workspace(shared, tmp_path)
    data = (
        "--data-path golden/dataset/A_text_document --split 20,30,50 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        "golden/dataset/tokenizer --num-workers 1 --data-cache-path cache --micro-batch-size 8 --global-batch-size 32 --eval-interval 3 --eval-iters 1"
    ).split()
    argv = [*TINY, *data, "--train-iters", "7"]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    train([*argv, *outputs(full)], cwd)
    train([*argv, *outputs(parts), "--exit-interval", "5"], cwd)
    second = train([*argv, *outputs(parts), "--exit-on-missing-checkpoint"], cwd)
    assert " iteration        5/" not in second and " iteration        6/" in second
    assert_same_end(full, parts)


def test_two_rank_checkpoint_resumes_on_one_rank(whole, tmp_path):
    train([*JOB, *outputs(tmp_path), "--exit-interval", "2", "--use-distributed-optimizer"], tmp_path, 2)
    train([*JOB, *outputs(tmp_path), "--exit-on-missing-checkpoint"], tmp_path)
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "4", "the last iteration is saved"
    for one, other in zip(read_metrics(whole / "metrics.jsonl"), read_metrics(tmp_path / "metrics.jsonl"), strict=True):
        assert other["lm loss"] == pytest.approx(one["lm loss"], rel=2e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-6)


def test_finetune_starts_at_iteration_zero_with_the_weights(whole, tmp_path):
    train([*JOB, *outputs(tmp_path), "--load", str(whole / "ckpt"), "--finetune"], tmp_path)
    before, after = (read_metrics(folder / "metrics.jsonl") for folder in (whole, tmp_path))
    assert [r["iteration"] for r in after] == [1, 2, 3, 4]
    assert after[0]["lm loss"] < before[0]["lm loss"]
