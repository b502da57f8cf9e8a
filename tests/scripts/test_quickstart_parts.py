"""The quickstart's own pieces: documents out of a text, the unigram loss."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from structure.source import ROOT

from moe_trainer.data.indexed import IndexedDatasetBuilder
from scripts.quickstart_text import DOCUMENT_CHARACTERS, documents_of, python_sources
from scripts.unigram_loss import main, unigram_loss


def test_python_sources_are_limited_and_repeatable():
    first, second = list(python_sources(300_000)), list(python_sources(300_000))
    assert first == second
    assert 300_000 <= sum(map(len, first)) < 300_000 + 10 * DOCUMENT_CHARACTERS


def test_a_text_is_cut_at_blank_lines_and_loses_no_words(tmp_path):
    words = [f"word{number}" for number in range(20_000)]
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join(" ".join(words[start : start + 50]) for start in range(0, len(words), 50)))
    documents = list(documents_of(path, 10**9))
    assert len(documents) > 10
    assert " ".join(documents).split() == words


def test_a_jsonl_is_taken_as_it_is(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one", "two", "three")))
    assert list(documents_of(path, 5)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.txt", "short", "characters of text; 500000 are needed"), ("a.jsonl", '{"x": 1}', '"text"')],
)
def test_bad_text_is_one_clear_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    command = [sys.executable, "scripts/quickstart_text.py", str(tmp_path / "out"), "--text", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_unigram_loss_is_the_cross_entropy():
    train, valid = np.array([0, 0, 0, 1]), np.array([0, 1, 2])
    # counts plus one: 4, 2, 1 of 7
    assert unigram_loss(train, valid, 3) == pytest.approx(-(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3)


def test_unigram_loss_of_files(tmp_path, capsys):
    with IndexedDatasetBuilder(str(tmp_path / "d"), np.uint16) as builder:
        for token in (0, 0, 1, 1):
            builder.add_document([token, token], [2])
    assert main(["--data-path", str(tmp_path / "d"), "--split", "50,50,0", "--vocab-size", "2"]) == 0
    assert float(capsys.readouterr().out) == pytest.approx(-math.log(1 / 6), abs=1e-4)
    assert main(["--data-path", str(tmp_path / "d"), "--split", "1,0,0", "--vocab-size", "2"]) == 2
    assert main(["--data-path", str(tmp_path / "missing"), "--vocab-size", "2"]) == 2
