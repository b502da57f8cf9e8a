"""Small token files and argument sections for the data tests."""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from arguments.data import DataArgs
from arguments.training import TrainingArgs
from moe_trainer.data.indexed import write_indexed_dataset

RECORDED_CLASS = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"


@dataclass
class FixedTokenizer:
    """A tokenizer with fixed vocabulary size and special tokens."""

    vocab_size: int = 500
    eod: int | None = 0
    pad: int | None = 1
    unique_identifiers: OrderedDict = field(
        default_factory=lambda: OrderedDict([("class", RECORDED_CLASS), ("tokenizer_path", "golden/dataset/tokenizer")])
    )


def data_args(**changes) -> DataArgs:
    return DataArgs(**{"seq_length": 16} | changes)


def training_args(**changes) -> TrainingArgs:
    return TrainingArgs(**{"seed": 1234} | changes)


def write_corpus(prefix: Path, lengths, dtype=np.uint16, vocab_size=500, seed=0) -> str:
    """Write one document per length, with random ids below `vocab_size`; returns the prefix."""
    random = np.random.default_rng(seed)
    with write_indexed_dataset(str(prefix), dtype) as builder:
        for length in lengths:
            builder.add_document(random.integers(2, vocab_size, length), [length])
    return str(prefix)


def attention_mask(document_ids_BS) -> np.ndarray:
    """Return the attention mask of Megatron-LM [B, 1, S, S] for document ids, True = masked."""
    ids = np.asarray(document_ids_BS)
    other = ids[:, :, None] != ids[:, None, :]
    return (other | ~np.tri(ids.shape[1], dtype=bool))[:, None]
