"""Small token files and argument sections for the data tests."""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

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


def losses(records: list[dict]) -> list[float]:
    """Return the losses of the iterations of a run."""
    return [record["lm loss"] for record in records if "lm loss" in record and "validation" not in record]


def assert_equal_runs(run: tuple, other: tuple, num_iterations: int) -> None:
    """Assert that two runs, each (records, weights), have the same losses and final weights in every bit."""
    (records, weights), (expected, expected_weights) = run, other
    assert [record.get("lm loss") for record in records] == [record.get("lm loss") for record in expected]
    assert len(losses(records)) == num_iterations
    assert weights and all((weights[name] == value).all() for name, value in expected_weights.items())


def write_ids(path: Path, seed: int, count: int = 200) -> str:
    """Write JSON lines of texts of random ids from 1 to 118; returns the path."""
    random = np.random.default_rng(seed)
    texts = (" ".join(map(str, random.integers(1, 119, random.integers(1, 60)))) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_corpus(prefix: Path, lengths, dtype=np.uint16, vocab_size=500, seed=0) -> str:
    """Write one document per length, with random ids below `vocab_size`; returns the prefix."""
    random = np.random.default_rng(seed)
    with write_indexed_dataset(str(prefix), dtype) as builder:
        for length in lengths:
            builder.add_document(random.integers(2, vocab_size, length), [length])
    return str(prefix)


CHAT_TOKENS = (
    "<s> </s> <pad> <unk> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <SPECIAL_233> <|im_start|> <|im_end|> System User "
    "Assistant"
).split()


def train_byte_level_bpe(texts, special_tokens):
    """Train a byte-level BPE of 400 ids, which decodes to its text."""
    tokenizers = pytest.importorskip("tokenizers")
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(texts, trainer)
    return encoder


def write_chat_tokenizer(folder: Path, template: str | None, special_tokens=CHAT_TOKENS) -> Path:
    """Write a small byte-level BPE with the tokens of the prompt formats and a chat template; return the folder."""
    encoder = train_byte_level_bpe(["the quick brown fox jumps over the lazy dog and the river"] * 9, special_tokens)
    folder.mkdir()
    encoder.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return folder


def attention_mask(document_ids_BS) -> np.ndarray:
    """Return the attention mask of Megatron-LM [B, 1, S, S] for document ids, True = masked."""
    ids = np.asarray(document_ids_BS)
    other = ids[:, :, None] != ids[:, None, :]
    return (other | ~np.tri(ids.shape[1], dtype=bool))[:, None]
