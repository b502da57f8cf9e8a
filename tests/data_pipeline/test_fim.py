"""Fill-in-the-middle samples: those of Megatron-LM's GPTFIMDataset, the same for every reader, and their composition."""

import json
from pathlib import Path

import numpy as np
import pytest
from training.tiny import TINY

from arguments import ArgumentError, parse_args
from arguments.data import DataArgs
from arguments.training import TrainingArgs
from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.fim import FillInTheMiddle
from moe_trainer.data.loader import make_batch
from moe_trainer.data.tokenizer import build_tokenizer

PREFIX, MIDDLE, SUFFIX, PAD, EOD, SPLIT = range(6)
GOLDEN = json.loads((Path(__file__).parents[1] / "data/fim_samples.json").read_text())


class Characters:
    """Every character is a token, its code point; special tokens have no text."""

    def tokenize(self, text):
        return [ord(character) for character in text]

    def plain_text(self, ids):
        return "".join(chr(number) for number in ids if number > SPLIT)


def fim(**changes):
    settings = {"rate": 1.0, "spm_rate": 0.5, "split": None, "fragment_rate": None, "no_prefix": None} | changes
    return FillInTheMiddle(Characters(), prefix=PREFIX, middle=MIDDLE, suffix=SUFFIX, pad=PAD, eod=EOD, **settings)


def token_ids(*parts):
    return np.array(
        [number for part in parts for number in ([ord(c) for c in part] if isinstance(part, str) else [part])]
    )


def restore_document(ids):
    """Return the original text of a rearranged document, and its order (PSM or SPM)."""
    ids = ids.tolist()
    if ids[1] == SUFFIX:  # prefix suffix SUFFIX-TEXT middle PREFIX-TEXT MIDDLE-TEXT: where the last two meet is lost
        at = ids.index(MIDDLE)
        return sorted(ids[2:at] + ids[at + 1 :]), "SPM"
    at, end = ids.index(SUFFIX), ids.index(MIDDLE)
    return ids[1:at] + ids[end + 1 :] + ids[at + 1 : end], "PSM"


def test_fim_keeps_text_and_uses_both_orders():
    rng, orders = np.random.RandomState(3), []
    document = token_ids("the quick brown fox")
    for _ in range(60):
        full = fim().rearrange(np.append(document, [ord("x")] * 3), rng)
        assert len(full) == len(document) + 3
        cut, order = restore_document(fim()._document(document, rng))
        assert cut == (sorted(document.tolist()) if order == "SPM" else document.tolist())
        orders.append(order)
    assert 15 < orders.count("SPM") < 45


def test_fim_keeps_sample_length_and_document_ends():
    sample = token_ids("first document", EOD, "second", EOD, EOD, "third one")
    for seed in range(20):
        found = fim().rearrange(sample, np.random.RandomState(seed))
        assert len(found) == len(sample) and (found == EOD).sum() <= 2  # the empty document is gone
    untouched = fim(rate=0.0).rearrange(sample, np.random.RandomState(0))
    assert untouched.tolist() == [*token_ids("first document", EOD, "second", EOD, "third one"), PAD]


def test_fim_rearranges_each_fragment_separately():
    sample = token_ids("aaaa", SPLIT, "bbbb", SPLIT, "cccc" * 9)
    found = fim(split=SPLIT, fragment_rate=1.0)._document(sample, np.random.RandomState(1)).tolist()
    pieces = "".join(map(str, (min(n, 9) for n in found))).split(str(SPLIT))
    assert len(pieces) == 3 and all(piece.count(str(PREFIX)) == piece.count(str(MIDDLE)) == 1 for piece in pieces)
    none = fim(split=SPLIT, fragment_rate=0.0)._document(sample, np.random.RandomState(1))
    assert none.tolist() == sample.tolist()


def test_text_with_no_fim_prefix_is_unchanged():
    sample = token_ids("import os", EOD, "print")
    found = fim(no_prefix="import").rearrange(sample, np.random.RandomState(0)).tolist()
    assert found[:10] == sample[:10].tolist() and found[10] == PREFIX


def make_data_args(folder, **changes):
    settings = {
        "fim_data": True,
        "fim_eod_token": GOLDEN["eod"],
        "special_tokens": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"],
    }
    return DataArgs(
        **(
            {
                "data_path": [f"{folder}/A_text_document"],
                "split": "100,0,0",
                "seq_length": 64,
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": f"{folder}/tokenizer",
            }
            | settings
            | changes
        )
    )


def build_train_set(data, tmp_path, seed=1234):
    data = DataArgs(**(vars(data) | {"data_cache_path": str(tmp_path)}))
    tokenizer = build_tokenizer(data)
    training = TrainingArgs(train_iters=1, micro_batch_size=1, global_batch_size=1, seed=seed)
    return build_datasets(data, training, tokenizer, (200, 0, 0)).train, tokenizer, data


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: " ".join(case["flags"]) or "defaults")
def test_fim_samples_equal_megatron(shared, tmp_path, case):
    """Recorded with main d98e8a64, its stream set to this program's before every sample."""
    dataset, tokenizer, data = build_train_set(make_data_args(shared / "golden/dataset", **case["flags"]), tmp_path)
    for index in (3, 0, 5, 1, 4, 2):  # in any order
        assert dataset.tokens(index).tolist() == case["samples"][index]
    assert dataset.class_name == "GPTFIMDataset" and list(tmp_path.glob("*-GPTFIMDataset-train-description.txt"))
    batch = make_batch(dataset, [0, 1], batch_format(data, tokenizer))
    assert batch.labels_BS[0].tolist() == case["samples"][0][1:]


def test_fim_samples_depend_on_the_seed(shared, tmp_path):
    one, other = (
        build_train_set(make_data_args(shared / "golden/dataset", fim_rate=1.0), tmp_path, seed)[0] for seed in (1, 2)
    )
    assert not all(np.array_equal(one.tokens(index), other.tokens(index)) for index in range(4))


def test_fim_token_missing_in_vocabulary_is_named(shared, tmp_path):
    with pytest.raises(ValueError, match="--fim-prefix-token <fim_prefix>.*--tokenizer-special-tokens"):
        build_train_set(make_data_args(shared / "golden/dataset", special_tokens=None), tmp_path)


HF = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model somewhere"


@pytest.mark.parametrize(("flags", "named"), [
    (f"{HF} --mock-data", "--mock-data"),
    ("--data-path x --tokenizer-type NullTokenizer --vocab-size 99", "NullTokenizer"),
    (f"{HF} --data-path x --fim-rate 0", "--fim-rate 0"),
    (f"{HF} --data-path x --fim-spm-rate 1.5", "--fim-spm-rate 1.5"),
    (f"{HF} --data-path x --fim-split-sample e", "--fim-fragment-rate"),
    (f"{HF} --data-path x --fim-split-sample e --fim-fragment-rate -1", "--fim-fragment-rate"),
])  # fmt: skip
def test_incompatible_fim_flags_are_rejected(flags, named):
    with pytest.raises(ArgumentError) as caught:
        parse_args([*TINY, "--train-iters", "1", "--fim-data", *flags.split()], 1)
    assert any(named in violation.message for violation in caught.value.violations)
