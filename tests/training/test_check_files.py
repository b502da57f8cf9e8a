"""--validate-only --check-files reports all missing files before the job is submitted, and writes nothing."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from training.tiny import TINY

import pretrain_moe
from moe_trainer.data.indexed import write_indexed_dataset

NULL = "--tokenizer-type NullTokenizer --vocab-size 120".split()
CHECK = ["--validate-only", "--check-files", "--world-size", "2", "--train-iters", "50", *TINY]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, high, documents in (("a", 119, 50), ("b", 119, 10), ("other", 5000, 50), ("short", 119, 1)):
        with write_indexed_dataset(str(tmp_path / name), np.uint16) as builder:
            for number in range(documents):
                builder.add_document(np.arange(number, number + 100) % high, [100])
    return tmp_path


def check(capsys, *flags):
    code = pretrain_moe.main([*CHECK, *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report_lists_tokens_epochs_and_planned_checkpoints(folder, capsys):
    code, out, err = check(
        capsys,
        *NULL,
        "--data-path",
        "0.75",
        "a",
        "0.25",
        "b",
        "--split",
        "80,20,0",
        "--save",
        "new/ck",
        "--save-interval",
        "20",
        "--eval-iters",
        "1",
    )
    assert (code, err) == (0, "")
    assert "data: 2 of 2 prefixes can be read, 6,000 tokens in 60 sequences" in out
    assert "train: 4,800 tokens; 6,400 are read, 1.33 epochs" in out  # 50 iterations of 4 samples of 32
    assert "a: 4,000 tokens, weight 0.75: 1.20 epochs" in out and "b: 800 tokens, weight 0.25: 2.00 epochs" in out
    assert "tokenizer: NullTokenizer, 120 tokens, padded to 128" in out
    assert "--save new/ck: can be written" in out and "3 are planned" in out
    assert not (folder / "new").exists() and {path.name for path in folder.iterdir()} == {
        f"{n}.{e}" for n in ("a", "b", "other", "short") for e in ("bin", "idx")
    }


def test_phases_are_counted_one_by_one(folder, capsys):
    (folder / "first").write_text("a")
    (folder / "second").write_text("0.5 a 0.5 b")
    phases = [*NULL, "--phase-transition-iterations", "20", "--phase-data-args-path", "first"]
    code, out, err = check(capsys, *phases, "second")
    assert (code, err) == (0, "")
    assert "phase 1 of training: 5,000 tokens; 2,560 are read, 0.51 epochs" in out
    assert "phase 2 of training: 6,000 tokens; 3,840 are read, 0.64 epochs" in out
    assert "b: 1,000 tokens, weight 0.5: 1.92 epochs" in out
    code, out, err = check(capsys, *phases, "third")
    assert code == 2 and "--phase-data-args-path third: cannot be read" in out + err
    code, out, err = check(capsys, *phases)
    assert code == 2 and "names 1 files; --phase-transition-iterations 20 divides the run into 2 phases" in out + err
    assert "phase 1 of training: 5,000 tokens" in out
    assert err.startswith("pretrain_moe.py: 1 problem with the arguments or their files:")
    (folder / "third").write_text("absent")
    code, out, err = check(capsys, *phases, "third")
    assert code == 2 and "absent.idx: no such file" in out + err


def test_streamed_text_is_opened(folder, capsys):
    (folder / "text.jsonl").write_text('{"text": "1 2"}')
    flags = [
        *NULL,
        "--dataloader-type",
        "external",
        "--valid-data-path",
        "text.jsonl",
        "--train-data-path",
        "1",
        "*.jsonl",
    ]
    code, out, err = check(capsys, *flags)
    assert (code, err) == (0, "")
    assert "train: *.jsonl: 1 parts of streamed text" in out and "valid: text.jsonl: 1 parts" in out
    code, out, err = check(capsys, *flags, "1", "absent.jsonl")
    assert code == 2 and "--train-data-path: absent.jsonl: no such file" in out + err


def test_all_missing_files_are_reported_together(folder, capsys, monkeypatch):
    (folder / "file").write_text("")
    (folder / "cut.idx").write_bytes((folder / "a.idx").read_bytes())
    (folder / "cut.bin").write_bytes((folder / "a.bin").read_bytes()[:100])
    (folder / "torn").mkdir()
    (folder / "torn" / "latest_checkpointed_iteration.txt").write_text("7")
    _, out, err = check(
        capsys,
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        "none.model",
        "--data-path",
        "a",
        "cut",
        "nix",
        "--load",
        "torn",
        "--save",
        "file/ck",
        "--save-interval",
        "5",
        "--export-weights",
        ".",
        "--init-from",
        "no.safetensors",
        "--moe-router-topk",
        "9",
    )
    for text in (
        "--moe-router-topk 9",
        "none.model: no such file",
        "nix.idx: no such file",
        "cut.bin: found 100 bytes",
        "iter_0000007",
        "file is no folder",
        "--export-weights .: this is a folder",
        "--init-from no.safetensors: there is no such file",
    ):
        assert text in err, text
    assert out.startswith("not valid: 8 problems") and "Traceback" not in err


OVERLAP = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-cfg"
FORMATS = "--fp8-format e4m3 --fp8-recipe mxfp8 --bf16 --te-precision-config-file"


@pytest.mark.parametrize(
    ("flags", "content", "text"),
    [
        (OVERLAP, None, "--tp-comm-overlap-cfg f.yaml: [Errno 2] No such file or directory"),
        (OVERLAP, "a: [", "--tp-comm-overlap-cfg f.yaml: while parsing"),
        (OVERLAP, "proj: {num_splits: 2}", "--tp-comm-overlap-cfg f.yaml: proj is no GEMM"),
        (OVERLAP, "proj_fprop: {num_split: 2}", "num_split is no setting"),
        (OVERLAP, "proj_fprop: {num_splits: 2}", None),
        (FORMATS, None, "--te-precision-config-file f.yaml: [Errno 2] No such file or directory"),
        (
            FORMATS,
            "configs: {}\nmatchers: {a: {type: glob, pattern: x, config: b, enabled: true}}",
            "there is no config 'b'",
        ),
        (FORMATS, "configs: {}\nmatchers: {}", None),
    ],
)
def test_files_of_settings_are_read(folder, capsys, flags, content, text):
    if content is not None:
        (folder / "f.yaml").write_text(content)
    code, _, err = check(capsys, *NULL, "--data-path", "a", "--eval-iters", "0", *flags.split(), "f.yaml")
    assert (code, text or "") == ((2, text) if text and text in " ".join(err.split()) else (0, "")), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--data-path other", "holds the id 99"),
        ("--data-path short --split 100,0,0", None),
        (
            "--data-path short --split 0.1,99,1",
            "the train split of short (0 tokens in 0 of 1 sequences) holds less than one sample of --seq-length 32 (+ 1) tokens; give it a "
            "larger share (now --split 0.1,99,1), or add data",
        ),
        (
            "--data-path short --split 99,0.1,0 --eval-iters 3",
            "or do not evaluate (now --eval-iters 3; --eval-iters 0)",
        ),
        ("--data-path a --load none --exit-on-missing-checkpoint", "--load none: there is no such folder"),
        ("--data-path a --load new --save new --save-interval 5", None),
        ("--data-path a --load none", None),
        ("--data-path a --load none --skip-train", "--load none: there is no such folder"),
        ("--data-path a --export-weights none/w", "--export-weights none/w: the folder none does not exist"),
        ("--valid-data-path a", "samples are asked of the train split, which has no data"),
    ],
)
def test_each_file_problem_is_reported(folder, capsys, flags, text):
    vocabulary = [
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "90" if "other" in flags else "120",
        "--make-vocab-size-divisible-by",
        "1",
    ]
    code, _, err = check(capsys, *vocabulary, *flags.split())
    assert (code == 0) == (text is None) and (text or "") in err


def test_start_from_random_weights_is_a_warning(folder, capsys):
    (folder / "empty").mkdir()
    _, out, _ = check(capsys, *NULL, "--data-path", "a", "--load", "empty")
    assert (
        "WARNING: --load empty: there is no checkpoint in this folder; the run starts from random weights (--exit-on-missing-checkpoint"
        in out
    )


def test_split_smaller_than_one_sample_warns_or_fails(folder, capsys):
    with write_indexed_dataset(str(folder / "three"), np.uint16) as builder:
        for _ in range(3):
            builder.add_document(np.arange(20), [20])
    flags = [*NULL, "--data-path", "three", "--split", "34,33,33"]
    code, out, _ = check(capsys, *flags, "--eval-iters", "1")
    assert (
        code == 0
        and "WARNING: less than one sample of --seq-length 32 (+ 1) tokens: three (20 tokens in 1 of 3 sequences)"
        in out
    )
    code, _, err = check(capsys, *flags, "--full-validation", "--eval-iters", "1")
    assert (
        code == 2
        and "the valid split of three (20 tokens in 1 of 3 sequences) holds less than one sample" in err
        and "now --full-validation" in err
    )


def test_parameters_are_counted_with_the_padded_vocabulary(folder, capsys):
    words = folder / "words"
    words.mkdir()
    vocabulary = {chr(97 + number): number for number in range(20)} | {"<|endoftext|>": 20}
    (words / "vocab.json").write_text(json.dumps(vocabulary))
    (words / "merges.txt").write_text("#version: 0.2\n")
    flags = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        "words/vocab.json",
        "--merge-file",
        "words/merges.txt",
        "--data-path",
        "a",
    ]
    counts = []
    for more in (["--vocab-size", "1000"], ["--padded-vocab-size", "128"], []):
        _, out, _ = check(capsys, *flags, *more)
        counts.append(next(line for line in out.splitlines() if line.startswith("parameters: ")))
    assert "tokenizer: GPT2BPETokenizer words/vocab.json, 21 tokens, padded to 128" in out
    assert counts[0] == counts[1] == counts[2] and "not counted" not in counts[2]


def test_insufficient_disk_space_is_an_error(folder, capsys, monkeypatch):
    stat = namedtuple("stat", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: stat(10, 1000))
    code, _, err = check(capsys, *NULL, "--data-path", "a", "--save", "ck", "--save-interval", "5")
    assert code == 2 and "--save ck: 10 kB are free, one checkpoint takes about" in err


def test_check_files_without_load_does_not_import_torch(folder):
    code = (
        "import sys, pretrain_moe\n"
        f"assert pretrain_moe.main({[*CHECK, *NULL, '--data-path', 'a']!r}) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(pretrain_moe.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
