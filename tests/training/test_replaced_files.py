"""A resumed run reports when its data or its tokenizer were replaced since the checkpoint was saved."""

import os
import shutil
import subprocess
import sys

import numpy as np
from commands import run
from structure.source import ROOT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from training.tiny import TINY

from arguments.data import DataArgs
from moe_trainer.data.fingerprint import compare_fingerprints, make_fingerprint
from moe_trainer.data.indexed import write_indexed_dataset


def write_tokens(prefix, seed):
    random = np.random.default_rng(seed)
    with write_indexed_dataset(str(prefix), np.uint16) as builder:
        for _ in range(60):
            builder.add_document(random.integers(1, 99, size=100, dtype=np.uint16), [100])


def write_tokenizer(folder, first):
    folder.mkdir(exist_ok=True)
    words = {f"{first}{number}": number for number in range(119)} | {"<eos>": 119}
    Tokenizer(WordLevel(words, unk_token="<eos>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )


def test_replaced_data_and_tokenizer_are_named_at_resume(tmp_path):
    write_tokens(tmp_path / "text", seed=1)
    write_tokenizer(tmp_path / "tok", "a")
    argv = [
        *TINY,
        "--data-path",
        str(tmp_path / "text"),
        "--split",
        "100,0,0",
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(tmp_path / "tok"),
        "--save",
        str(tmp_path / "ckpt"),
        "--save-interval",
        "1",
        "--auto-resume",
    ]

    def warnings(iterations):
        ended = run([*argv, "--train-iters", str(iterations), "--override-opt_param-scheduler"], tmp_path)
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stderr.splitlines() if "is not that of the checkpoint" in line]

    assert warnings(1) == []
    assert warnings(2) == []
    write_tokens(tmp_path / "text", seed=2)
    write_tokenizer(tmp_path / "tok", "b")
    data, tokenizer = warnings(3)
    assert f"--data-path: the data is not that of the checkpoint (other content in {tmp_path / 'text'})" in data
    assert (
        "--tokenizer-model: the tokenizer is not that of the checkpoint" in tokenizer and "tokenizer.json" in tokenizer
    )
    assert warnings(4) == []  # said once: the new checkpoint was trained on these


def test_fingerprints_depend_on_contents_and_not_on_names(tmp_path):
    write_tokens(tmp_path / "one", seed=1)
    write_tokens(tmp_path / "two", seed=2)
    for ending in ("bin", "idx"):
        shutil.copy(tmp_path / f"one.{ending}", tmp_path / f"moved.{ending}")

    def fingerprint(*names):
        return make_fingerprint(DataArgs(data_path=tuple(str(tmp_path / name) for name in names)), ())

    both = fingerprint("one", "two")
    assert compare_fingerprints(both, fingerprint("moved", "two")) == compare_fingerprints({}, both) == []
    (warning,) = compare_fingerprints(both, fingerprint("two"))
    assert f"no longer there: {tmp_path / 'one'}" in warning
    (warning,) = compare_fingerprints(fingerprint("two"), both)
    assert f"new: {tmp_path / 'one'}" in warning
    content = bytearray((tmp_path / "two.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "two.bin").write_bytes(content)
    assert compare_fingerprints(both, fingerprint("one", "two"))


def test_other_flags_that_select_the_samples_are_named(tmp_path):
    """The files are the same, and the samples are not; a checkpoint that does not say how it read them passes."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    path = (str(tmp_path / "a.jsonl"),)
    chats = make_fingerprint(DataArgs(data_path=path, sft=True), ())
    rows = make_fingerprint(DataArgs(data_path=path, use_varlen_dataset=True), ())
    streamed = make_fingerprint(DataArgs(data_path=path), (), is_streamed=True)
    plain = make_fingerprint(DataArgs(data_path=path), ())
    for before, now, text in (
        (chats, rows, "saved with --sft, and this run has --use-varlen-dataset; the run does not continue where"),
        (streamed, rows, "saved with --dataloader-type external, and this run has --use-varlen-dataset;"),
        (rows, plain, "saved with --use-varlen-dataset, and this run has samples of --seq-length from token files;"),
    ):
        (warning,) = compare_fingerprints(before, now)
        assert text in warning
        assert compare_fingerprints(before, before) == []
    assert compare_fingerprints({"data": chats["data"]}, rows) == []
    (tmp_path / "a.jsonl").write_text("{ }\n")
    changed = make_fingerprint(DataArgs(data_path=path, use_varlen_dataset=True), ())
    assert len(compare_fingerprints(rows, changed)) == len(compare_fingerprints(chats, changed)) == 1


def test_fingerprint_does_not_block_on_a_named_pipe(tmp_path):
    (tmp_path / "text.bin").write_bytes(b"")
    os.mkfifo(tmp_path / "text.idx")
    os.mkfifo(tmp_path / "tokenizer.json")
    code = (
        "import sys; from pathlib import Path; from arguments.data import DataArgs; from moe_trainer.data.fingerprint import make_fingerprint; "
        "print(make_fingerprint(DataArgs(data_path=['text']), [Path('tokenizer.json')]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout == "{'data': {}, 'tokenizer': {}, 'samples': {'flags': ''}}\n", found.stderr
