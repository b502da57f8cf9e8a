"""A small model that was trained on the texts of local_tasks.py, and scripts that use it on several ranks."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from commands import REPOSITORY, environment, run
from evaluation.local_tasks import write_text, write_tokenizer
from harness import run_ranks

from moe_trainer.commands import convert

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 64 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --seq-length 64 --max-position-embeddings 64 --micro-batch-size 8 "
    "--global-batch-size 8 --lr 1e-2 --lr-decay-style cosine --min-lr 1e-3 --log-interval 1 --eval-iters 0 --split 100,0,0 "
    "--data-path text_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok"
).split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()


def train_model(base: Path) -> Path:
    """Write a checkpoint `ck`, its export `hf`, the tokenizer `tok` and the text into a folder; return the folder."""
    write_tokenizer(base / "tok", write_text(base / "text.jsonl"))
    tokens = "--input text.jsonl --output-prefix text --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok --append-eod --workers 1"
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/preprocess_data.py"), *tokens.split()],
        cwd=base,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trained = run([*MODEL, *NO_DROPOUT, "--train-iters", "60", "--save", "ck", "--save-interval", "60"], base)
    assert trained.returncode == 0, trained.stderr
    assert convert.main([str(base / "ck"), str(base / "hf"), "--to", "hf"]) == 0
    return base


def run_script(main: Callable[[list[str]], int], folder: Path, world_size: int, words: list[str]) -> list[int]:
    """Run a script's main function in a folder on several ranks; return the exit codes."""
    return run_ranks(_run_rank, world_size, main, words, folder)


def _run_rank(rank: int, n: int, main: Callable[[list[str]], int], words: list[str], folder: Path) -> int:
    from moe_trainer.parallel import state
    from moe_trainer.training import initialize

    # the harness has joined the ranks and parts them
    initialize._init_process_group = state.close_groups = lambda *_: None
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.chdir(folder)
    return main(words)
