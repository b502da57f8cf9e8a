"""Parts of the quickstart: documents from a text, the unigram loss, the environment."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from structure.source import ROOT

from moe_trainer.data.indexed import write_indexed_dataset
from scripts.quickstart_text import DOCUMENT_CHARACTERS, python_sources, read_documents
from scripts.unigram_loss import main, unigram_loss


def test_python_sources_have_the_given_size_and_are_repeatable():
    first, second = list(python_sources(300_000)), list(python_sources(300_000))
    assert first == second
    assert 300_000 <= sum(map(len, first)) < 300_000 + 10 * DOCUMENT_CHARACTERS


def test_text_is_split_at_blank_lines_without_losing_words(tmp_path):
    words = [f"word{number}" for number in range(20_000)]
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join(" ".join(words[start : start + 50]) for start in range(0, len(words), 50)))
    documents = list(read_documents(path, 10**9))
    assert len(documents) > 10
    assert " ".join(documents).split() == words


def test_jsonl_documents_are_read_unchanged(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one", "two", "three")))
    assert list(read_documents(path, 5)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.txt", "short", "characters of text; 500000 are needed"), ("a.jsonl", '{"x": 1}', '"text"')],
)
def test_invalid_text_gives_a_one_line_error(tmp_path, name, text, message):
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
    with write_indexed_dataset(str(tmp_path / "d"), np.uint16) as builder:
        for token in (0, 0, 1, 1):
            builder.add_document([token, token], [2])
    assert main(["--data-path", str(tmp_path / "d"), "--split", "50,50,0", "--vocab-size", "2"]) == 0
    assert float(capsys.readouterr().out) == pytest.approx(-math.log(1 / 6), abs=1e-4)
    assert main(["--data-path", str(tmp_path / "d"), "--split", "1,0,0", "--vocab-size", "2"]) == 2
    assert main(["--data-path", str(tmp_path / "missing"), "--vocab-size", "2"]) == 2


def test_environment_of_another_checkout_is_not_up_to_date(tmp_path):
    """The package is installed editable, so it would run the code of the other checkout."""
    stub = tmp_path / "venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(
        f'#!/bin/bash\n[ "$1" = -m ] && echo "$*" >>{tmp_path}/calls\n[ "$1" != --version ] || echo Python 3.11.0\nexit 0\n'
    )
    stub.chmod(0o755)
    is_up_to_date = []
    for name in ("one", "one", "two", "one"):
        other = tmp_path / name
        (other / "scripts").mkdir(parents=True, exist_ok=True)
        for file in ("setup.py", "constraints.txt", "scripts/environment.sh"):
            (other / file).write_bytes((ROOT / file).read_bytes())
        env = {**os.environ, "PYTHON": str(stub), "MOE_TRAINER_VENV": str(tmp_path / "venv")}
        done = subprocess.run(
            ["bash", "-euc", f'. "{other}/scripts/environment.sh"; make_environment test'],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        is_up_to_date.append("up to date" in done.stdout)
    assert is_up_to_date == [False, True, False, False]
    assert [
        line.rpartition("/")[2] for line in (tmp_path / "calls").read_text().splitlines() if "--editable" in line
    ] == ["one", "two", "one"]


def test_nothing_that_a_kept_torch_decides_is_pinned(tmp_path):
    """A pinned Triton that the kept torch does not accept would replace that torch: gigabytes, for another CUDA."""
    stub = tmp_path / "venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f'#!/bin/bash\ncase "$*" in -|*purelib*) echo {tmp_path};; esac\n')
    stub.chmod(0o755)
    env = {**os.environ, "PYTHON": str(stub), "MOE_TRAINER_VENV": str(tmp_path / "venv")}
    command = f'. "{ROOT}/scripts/environment.sh"; make_environment test'
    done = subprocess.run(["bash", "-euc", command], env=env, capture_output=True, text=True, check=True)
    assert f"keeping the CUDA torch in {tmp_path}" in done.stdout
    pinned = (tmp_path / "venv" / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line.startswith(("torch=", "triton", "numpy"))] == []
    assert any(line.startswith("transformers==") for line in pinned)


def test_unigram_loss_script_uses_the_code_of_its_checkout(tmp_path):
    (tmp_path / "moe_trainer").mkdir()
    (tmp_path / "moe_trainer" / "__init__.py").write_text("raise RuntimeError('another checkout')")
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "unigram_loss.py"), "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
