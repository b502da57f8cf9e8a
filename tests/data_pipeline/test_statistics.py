"""Statistics and checks of token files, and the script that prints them."""

import argparse
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, write_corpus
from structure.source import ROOT

from arguments.data import DataArgs
from arguments.tokenizer_flags import add_tokenizer_flags, tokenizer_args
from moe_trainer.commands import inspect as inspect_data
from moe_trainer.data import statistics
from moe_trainer.data.indexed import DataFileError, write_indexed_dataset
from moe_trainer.data.statistics import collect_statistics
from moe_trainer.estimate.length_histogram import read_histogram

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [5, 6, 7, 0], [], [9, 0, 10], [499, 0], [8, 0], list(range(2, 300)) + [0]]


def write_documents(prefix, documents, dtype=np.int32):
    with write_indexed_dataset(str(prefix), dtype) as builder:
        for ids in documents:
            builder.add_document(ids, [len(ids)] if ids else [])
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    with write_indexed_dataset(str(tmp_path / "a"), np.uint16) as builder:
        for ids in DOCUMENTS[:-1]:
            builder.add_document(ids, [len(ids)] if ids else [])
        builder.add_document(DOCUMENTS[-1], [100, 199])  # one document of two sequences
    return str(tmp_path / "a")


def tokenizer(**changes):
    made = FixedTokenizer(**changes)
    made.bos = None
    return made


@pytest.mark.parametrize("count_tokens", [5, 1 << 19])
def test_numbers(prefix, monkeypatch, count_tokens):
    monkeypatch.setattr(statistics, "_COUNT_TOKENS", count_tokens)
    found = collect_statistics(prefix, tokenizer())
    assert (found.documents, found.tokens, found.empty) == (8, 316, 1)
    assert (found.shortest, found.longest, found.mean) == (0, 299, 316 / 8)
    assert found.length_quantiles == [3, 299, 299]
    bins = dict(zip(found.length_bounds, zip(found.documents_by_length, found.tokens_by_length)))
    assert {low: counts for low, counts in bins.items() if counts[0]} == {
        0: (1, 0),
        2: (4, 9),
        4: (2, 8),
        256: (1, 299),
    }
    assert (found.lowest_id, found.highest_id, found.distinct_ids) == (0, 499, 300)
    assert (found.no_eod, found.inner_eod, found.outside, found.no_bos) == (1, 1, 0, None)
    assert (found.duplicates, found.duplicate_tokens, found.first_duplicate) == (2, 6, (2, 0))
    assert len(found.problems) == 4


def test_ids_and_begin_tokens_are_compared_with_the_tokenizer(prefix):
    small = tokenizer(vocab_size=400)
    small.bos = 5
    found = collect_statistics(prefix, small)
    assert (found.outside, found.no_bos) == (1, 5)
    assert any("1 tokens lie outside the vocabulary of 400 ids (the highest is 499)" in text for text in found.problems)
    assert any("5 documents do not begin with the begin token, others do" in text for text in found.problems)
    small.bos = 399
    assert not any("begin token" in text for text in collect_statistics(prefix, small).problems)


def test_sound_files_have_no_problems(tmp_path):
    prefix = write_documents(tmp_path / "a", [[number, 0] for number in range(1, 50)])
    found = collect_statistics(prefix, tokenizer())
    assert found.problems == [] and found.documents == 49
    assert collect_statistics(prefix).no_eod is None


def test_negative_ids_are_one_problem(tmp_path):
    found = collect_statistics(write_documents(tmp_path / "a", ([3, 0], [-7, -1], [3, -1], [4])))
    assert found.problems == ["3 tokens have negative ids (the lowest is -7); the first are in document 1"]
    assert (found.negative, found.lowest_id, found.highest_id, found.distinct_ids) == (3, -7, 4, 3)


@pytest.mark.parametrize(("dtype", "bad"), [(np.int32, 2_000_000_000), (np.int64, 1 << 40)])
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_ids_of_damaged_files_need_no_memory(tmp_path, dtype, bad, has_tokenizer):
    prefix = write_documents(tmp_path / "a", [[5, bad, 0, bad, 0]], dtype)
    tracemalloc.start()
    found = collect_statistics(prefix, tokenizer() if has_tokenizer else None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20, peak
    assert (found.highest_id, found.distinct_ids) == (bad, 2)
    assert found.outside == (2 if has_tokenizer else None)
    assert any("2 tokens lie outside" in problem for problem in found.problems) == has_tokenizer


def test_values_that_are_no_ids_are_an_error(tmp_path):
    with pytest.raises(DataFileError, match=r"a\.idx: holds float32 values, token ids are integers"):
        collect_statistics(write_documents(tmp_path / "a", [[5, 7]], np.float32))


def test_script(prefix, tmp_path, capsys):
    def inspect(*arguments):
        return inspect_data.main(list(map(str, arguments))), *capsys.readouterr()

    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "500", "--null-tokenizer-eod-id", "0"]
    words = [str(ROOT / "scripts" / "inspect_data.py"), prefix, *null, "--preview", "2", "--strict"]
    words += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == ""
    assert "8 documents, 316 tokens (uint16)" in done.stdout and "document 1: 8 0" in done.stdout
    assert "WARNING: 2 documents (6 tokens) repeat an earlier one; the first is document 2" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())[0]["tokens"] == 316
    sound, table = write_corpus(tmp_path / "b", [5, 70]), tmp_path / "lengths.csv"
    code, out, _ = inspect(sound, "--strict", "--length-histogram", table)
    assert code == 0 and "64 - 127" in out and read_histogram(str(table)) == read_histogram(sound)
    inspect(sound, sound, "--length-histogram", table)
    assert table.read_text() == "length,count\n5,2\n70,2\n"
    code, _, err = inspect(tmp_path / "absent")
    assert code == 2 and "absent.idx: no such file" in err


def test_scripts_take_the_tokenizer_flags_of_the_trainer():
    parser = argparse.ArgumentParser()
    add_tokenizer_flags(parser, "tokenizer", required=False)
    assert tokenizer_args(parser.parse_args([])) == DataArgs()
    words = "--tokenizer-type TikTokenizer --tiktoken-pattern v2 --tokenizer-special-tokens a b --vocab-size 7"
    words += " --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-metadata file --trust-remote-code"
    assert tokenizer_args(parser.parse_args(words.split())) == DataArgs(
        tokenizer_type="TikTokenizer",
        tiktoken_pattern="v2",
        special_tokens=["a", "b"],
        vocab_size=7,
        tokenizer_sentencepiece_ignore_extra_whitespaces=False,
        metadata_path="file",
        trust_remote_code=True,
    )
    for words in ("--tokenizer-type Unknown", "--use-gigatoken", "--padded-vocab-size 8", "--vocab-size x"):
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())
