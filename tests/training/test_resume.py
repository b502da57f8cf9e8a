"""A run that stops and resumes equals one that never stopped, to the last bit."""

import json

import pytest
import torch
from commands import golden_workspace, read_metrics, run
from data_pipeline.corpora import write_chat_tokenizer
from safetensors.torch import load_file
from training.tiny import MOCK, TINY

VOLATILE = (
    *("elapsed_ms", "tokens_per_s", "tflops_per_gpu", "max_memory_mb", "resumed_from", "run"),
    *("time", "interval_s", "saved"),
)


def drop_volatile(records):
    return [{k: v for k, v in record.items() if k not in VOLATILE} for record in records]


def assert_same_end(one, other):
    """Metrics and final weights of two run folders agree bit for bit."""
    assert drop_volatile(read_metrics(one / "metrics.jsonl")) == drop_volatile(read_metrics(other / "metrics.jsonl"))
    first, second = load_file(one / "final.safetensors"), load_file(other / "final.safetensors")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name


def outputs(folder, *extra):
    return [
        "--save",
        str(folder / "ckpt"),
        "--save-interval",
        "100",
        "--load",
        str(folder / "ckpt"),
        "--metrics-file",
        str(folder / "metrics.jsonl"),
        "--export-weights",
        str(folder / "final.safetensors"),
        *extra,
    ]


VARIANTS = {
    "fp32": ([], 1),
    "bf16": (["--bf16"], 1),
    "fp16": (["--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "3"], 1),
    "dropout": (["--hidden-dropout", "0.1", "--attention-dropout", "0.1"], 1),
    "sgd": (["--optimizer", "sgd"], 1),
    "expert-bias": (
        ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--mtp-num-layers", "1"],
        1,
    ),
    "quantile-balancing-validation": (
        "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0 --moe-router-quantile-balancing-ema 0.5 --mtp-num-layers 1 "
        "--eval-interval 3 --eval-iters 2 --bf16".split(),
        1,
    ),
    "global-aux-validation": (
        ["--moe-router-load-balancing-type", "global_aux_loss", "--eval-interval", "3", "--eval-iters", "2"],
        1,
    ),
    "dp2": (["--overlap-grad-reduce"], 2),
    "dp2-distributed-optimizer": (
        ["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        2,
    ),
    "tp2-dropout-validation": (
        "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 3 "
        "--eval-iters 1 --use-distributed-optimizer".split(),
        2,
    ),
    "fp8-delayed": (
        "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max --eval-interval 3 --eval-iters 1".split(),
        1,
    ),
    "nvfp4": ("--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0".split(), 1),
    "tp2-fp8-delayed-recompute": (
        "--fp8-format e4m3 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1".split(),
        2,
    ),
    "dp2-packed-sequences-validation": (
        "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 70 --moe-token-dispatcher-type alltoall --global-batch-size 16 "
        "--eval-interval 3 --eval-iters 2".split(),
        2,
    ),
    "dynamic-context-parallel": (
        "--use-varlen-dataset --dynamic-context-parallel --calculate-per-token-loss --max-seqlen-per-dp-cp-rank 36 "
        "--moe-token-dispatcher-type alltoall --global-batch-size 16 --eval-interval 3 --eval-iters 2".split(),
        2,
    ),
    "async": (["--async-save", "--use-persistent-ckpt-worker"], 1),
}
NEW_INTERPRETER = ("async",)
"""Begun as separate commands: interpreters that end while something is still being written."""


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_run_equals_uninterrupted_run(tmp_path, name):
    extra, world_size = VARIANTS[name]
    argv = [*TINY, *MOCK, "--train-iters", "12", *extra]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    new_interpreter = name in NEW_INTERPRETER
    finished = run([*argv, *outputs(full)], tmp_path, world_size, new_interpreter=new_interpreter)
    assert finished.returncode == 0, finished.stderr
    first = run([*argv, *outputs(parts), "--exit-interval", "6"], tmp_path, world_size, new_interpreter=new_interpreter)
    assert first.returncode == 0, first.stderr
    assert "[exiting program at iteration 6] datetime:" in first.stdout
    # without a checkpoint the second run would simply train all twelve iterations, to the same end
    second = run(
        [*argv, *outputs(parts), "--exit-on-missing-checkpoint"], tmp_path, world_size, new_interpreter=new_interpreter
    )
    assert second.returncode == 0, second.stderr
    assert " iteration        6/" not in second.stdout and " iteration        7/" in second.stdout
    assert_same_end(full, parts)


def test_resume_of_conversations(tmp_path):
    """Packed conversations in a blend with text, over two data ranks, with validation; a line that cannot be read."""
    folder = write_chat_tokenizer(tmp_path / "tokenizer", None)
    chats = [
        {
            "messages": [{"role": "user", "content": "fox " * (n % 5)}, {"role": "assistant", "content": f"dog {n}"}]
            * (1 + n % 2)
        }
        for n in range(40)
    ]
    for name, rows in (("chats", chats), ("text", [{"text": f"the river {n} " * (n % 4)} for n in range(25)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"--use-varlen-dataset --data-path 0.7 chats.jsonl 0.3 text.jsonl --split 80,20,0 --data-cache-path cache --tokenizer-type SFTTokenizer "
        f"--tokenizer-model {folder} --moe-token-dispatcher-type alltoall --global-batch-size 8 --max-seqlen-per-dp-cp-rank 70 --num-workers 1 "
        "--eval-interval 3 --eval-iters 1"
    ).split()
    argv = [*TINY, *data, "--train-iters", "12"]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    for options in (outputs(full), outputs(parts, "--exit-interval", "5"), outputs(parts)):
        finished = run([*argv, *options], tmp_path, 2)
        assert finished.returncode == 0, finished.stderr
    assert_same_end(full, parts)
    (tmp_path / "chats.jsonl").write_text('{"messages": [}\n')
    failed = run(argv, tmp_path, 2)
    assert failed.returncode == 2 and "chats.jsonl, line 1: not JSON" in failed.stderr, failed.stderr
    assert "Traceback" not in failed.stderr


def test_resume_inside_a_later_epoch_of_real_data(shared, tmp_path):
    cwd = golden_workspace(shared, tmp_path)
    data = (
        "--data-path golden/dataset/A_text_document --split 60,30,10 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        "golden/dataset/tokenizer --num-workers 1 --data-cache-path cache --micro-batch-size 8 --global-batch-size 32 --eval-interval 7 --eval-iters 1"
    ).split()
    argv = [*TINY, *data, "--train-iters", "20"]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    assert run([*argv, *outputs(full)], cwd).returncode == 0
    assert run([*argv, *outputs(parts), "--exit-interval", "13"], cwd).returncode == 0
    second = run([*argv, *outputs(parts), "--exit-on-missing-checkpoint"], cwd)
    assert second.returncode == 0, second.stderr
    assert " iteration       13/" not in second.stdout and " iteration       14/" in second.stdout
    assert_same_end(full, parts)


def test_two_rank_checkpoint_resumes_on_one_rank(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "6"]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    assert run([*argv, *outputs(full)], tmp_path).returncode == 0
    assert (
        run([*argv, *outputs(parts), "--exit-interval", "3", "--use-distributed-optimizer"], tmp_path, 2).returncode
        == 0
    )
    assert run([*argv, *outputs(parts), "--exit-on-missing-checkpoint"], tmp_path).returncode == 0
    assert (parts / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "6", "the last iteration is saved"
    for one, other in zip(read_metrics(full / "metrics.jsonl"), read_metrics(parts / "metrics.jsonl"), strict=True):
        assert other["lm loss"] == pytest.approx(one["lm loss"], rel=2e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-6)


def test_finetune_starts_at_iteration_zero_with_the_weights(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "4"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert run([*argv, *outputs(first)], tmp_path).returncode == 0
    finished = run([*argv, *outputs(second), "--load", str(first / "ckpt"), "--finetune"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    before, after = read_metrics(first / "metrics.jsonl"), read_metrics(second / "metrics.jsonl")
    assert [r["iteration"] for r in after] == [1, 2, 3, 4]
    assert after[0]["lm loss"] < before[0]["lm loss"]
