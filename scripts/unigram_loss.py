"""Compute the cross-entropy of a unigram model on the validation split, in nats per token.

    python scripts/unigram_loss.py --data-path PREFIX --split 95,5,0 --vocab-size 4096

The model counts the tokens of the training split plus one of each token, so that no probability is zero. The result is
comparable with "lm loss".
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.data.index_build import parse_split, split_range
from moe_trainer.data.indexed import IndexedDataset
from moe_trainer.exit_codes import ExitCode


def split_tokens(dataset: IndexedDataset, begin: int, end: int) -> np.ndarray:
    """Return the concatenated tokens of the sequences [begin, end)."""
    return (
        np.concatenate([dataset[index] for index in range(begin, end)]) if end > begin else np.empty(0, dataset.dtype)
    )


def unigram_loss(train: np.ndarray, valid: np.ndarray, vocab_size: int) -> float:
    """Return the mean of -log p over the tokens of `valid`, with p from the counts of `train` plus one."""
    counts = np.bincount(train, minlength=vocab_size).astype(np.float64) + 1.0
    return float(-np.log(counts / counts.sum())[valid].mean())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True, help="prefix of the .bin and .idx files")
    parser.add_argument("--split", default="969,30,1", help="weights of the train, valid and test splits")
    parser.add_argument("--vocab-size", type=int, required=True)
    options = parser.parse_args(argv)
    try:
        dataset = IndexedDataset(options.data_path)
        ranges = [split_range(share or (0.0, 0.0), len(dataset)) for share in parse_split(options.split)[:2]]
        train, valid = (split_tokens(dataset, begin, end) for begin, end in ranges)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    if not len(train) or not len(valid):
        print(
            f"error: --split {options.split} leaves no tokens for training or validation in {options.data_path}",
            file=sys.stderr,
        )
        return ExitCode.USER_ERROR
    print(f"{unigram_loss(train, valid, options.vocab_size):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
