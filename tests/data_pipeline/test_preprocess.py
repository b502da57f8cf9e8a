"""Text to token files: recorded files byte for byte, any number of workers, compressed, plain and bad input."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Finished
from data_pipeline.corpora import data_args
from harness import wait_until

from moe_trainer.commands import preprocess as preprocess_data
from moe_trainer.data.indexed import IndexedDataset
from moe_trainer.data.preprocess import PreprocessOptions, preprocess

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "dataset"
NULL = {"tokenizer_type": "NullTokenizer", "vocab_size": 511}
FLAGS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "511"]
SCRIPT = str(ROOT / "scripts" / "preprocess_data.py")


def run(tmp_path, inputs, name="out", tokenizer=NULL, **options):
    report = io.StringIO()
    inputs = [inputs] if isinstance(inputs, (str, Path)) else inputs
    chosen = PreprocessOptions(tuple(map(str, inputs)), str(tmp_path / name), **options)
    return preprocess(chosen, data_args(**tokenizer), report=report), report.getvalue()


def files(tmp_path, name="out", key="text"):
    return [(tmp_path / f"{name}_{key}_document.{ending}").read_bytes() for ending in ("bin", "idx")]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments, cwd=None):
    words = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def call(*arguments):
    """Run the script in this process; its progress goes elsewhere."""
    out, err, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = preprocess_data.main(list(map(str, arguments)))
    signal.signal(signal.SIGTERM, handler)
    return Finished(code, out.getvalue(), err.getvalue())


def documents(tmp_path, name="out", key="text"):
    data = IndexedDataset(str(tmp_path / f"{name}_{key}_document"))
    return [data[index].tolist() for index in range(len(data))]


@pytest.mark.parametrize(
    ("name", "workers", "vocab_size"),
    [("A", 1, None), ("B", 3, None), ("M", 3, None), ("N", 3, 511), ("N32", 1, 99999)],
)
def test_output_equals_recorded_files(shared, tmp_path, name, workers, vocab_size):
    folder = shared / "golden" / "dataset"
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer")}
    if vocab_size:
        tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size}
    run(tmp_path, folder / f"corpus{name}.jsonl", tokenizer=tokenizer, append_eod=True, workers=workers)
    assert files(tmp_path) == [(folder / f"{name}_text_document.{ending}").read_bytes() for ending in ("bin", "idx")]


def test_output_equals_small_recorded_case(tmp_path):
    recorded = json.loads((RECORDED / "recorded.json").read_text())["preprocessed_md5"]
    totals, _ = run(tmp_path, RECORDED / "corpusN.jsonl", append_eod=True)
    assert [hashlib.md5(raw).hexdigest() for raw in files(tmp_path)] == [recorded["bin"], recorded["idx"]]
    assert (totals.documents, totals.tokens) == (40, 2152)


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_trainer.data.preprocess._CHUNK_DOCUMENTS", 7)
    rows = [{"a": " ".join(str((i * j) % 500) for j in range(1, 2 + i % 40)), "b": str(i % 500)} for i in range(400)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    for workers in (1, 2, 5):
        run(tmp_path, source, f"w{workers}", json_keys=("a", "b"), append_eod=True, workers=workers)
    for key in ("a", "b"):
        assert files(tmp_path, "w1", key) == files(tmp_path, "w2", key) == files(tmp_path, "w5", key)
    assert documents(tmp_path, "w1", "a") == [[*map(int, row["a"].split()), 510] for row in rows]


def test_json_lists_and_empty_documents(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"text": ["1 2", "3"]}, {"text": []}, {"text": "4"}])
    run(tmp_path, tmp_path / "in.jsonl", append_eod=True)
    assert documents(tmp_path) == [[1, 2], [3, 510], [4, 510]]
    # the empty document is a boundary without a sequence
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_indices.tolist() == [0, 2, 2, 3]


def test_compressed_and_several_inputs(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    rows = [{"text": str(i)} for i in range(30)]
    write_jsonl(tmp_path / "all.jsonl", rows)
    for name, part in (("1.jsonl", rows[:10]), ("2.jsonl", rows[10:20]), ("3.jsonl", rows[20:])):
        write_jsonl(tmp_path / name, part)
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress((tmp_path / "2.jsonl").read_bytes()))
    frames = [zstandard.compress(line + b"\n") for line in (tmp_path / "3.jsonl").read_bytes().splitlines()]
    (tmp_path / "3.jsonl.zst").write_bytes(b"".join(frames))
    run(tmp_path, tmp_path / "all.jsonl", "whole")
    run(tmp_path, [tmp_path / "1.jsonl", tmp_path / "2.jsonl.gz", tmp_path / "3.jsonl.zst"], "parts", workers=2)
    run(tmp_path, tmp_path / "?.jsonl", "pattern")
    assert files(tmp_path, "parts") == files(tmp_path, "whole") == files(tmp_path, "pattern")


def test_plain_text_is_split_into_units(tmp_path):
    (tmp_path / "in.txt").write_text("\n1 2\n\n\n3\r\n\n4 5")
    for unit in ("paragraph", "line"):
        run(tmp_path, tmp_path / "in.txt", unit, text_unit=unit)
        assert documents(tmp_path, unit) == [[1, 2], [3], [4, 5]]


def test_plain_text_keeps_line_ends(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = "one two\nthree four\n\nfive six\n"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 50),
        model_prefix=str(tmp_path / "m"),
        vocab_size=30,
        minloglevel=2,
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )
    model = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(tmp_path / "m.model")}
    decoder = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    (tmp_path / "in.txt").write_text(text)
    for unit, texts in {"paragraph": ["one two\nthree four", "five six"], "file": [text.rstrip("\n")]}.items():
        run(tmp_path, tmp_path / "in.txt", unit, model, text_unit=unit)
        assert decoder.decode(documents(tmp_path, unit)) == texts


@pytest.mark.parametrize(
    ("line", "message", "workers"),
    [
        ('{"text": "1"', "line 4: not JSON .*; files that end in .txt are read as plain text", 1),
        ('["1"]', "line 4: needed a JSON object, found list", 1),
        ('{"body": "1"}', 'line 4: no key "text" .--json-keys.; found body', 2),
        ('{"text": 1}', 'line 4: the value of "text" must be a string or a list of strings', 1),
        ('{"text": "x"}', "line 4: NullTokenizer needs ids", 2),
        ('{"text": "70000"}', "token id 70000 does not fit the file's dtype uint16", 2),
        (b'{"text": "\xff"}', "line 4: not UTF-8", 1),
    ],
)
def test_bad_lines_are_named_and_nothing_is_written(tmp_path, workers, line, message):
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n\n{"text": "2"}\n' + raw + b"\n")
    (tmp_path / "out_text_document.bin").write_bytes(b"before")
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path, tmp_path / "in.jsonl", workers=workers)
    assert "in.jsonl" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out_text_document.bin"]
    assert (tmp_path / "out_text_document.bin").read_bytes() == b"before"


def test_invalid_inputs_are_rejected(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    broken = gzip.compress(b'{"text": "1"}\n{"text": "another"}\n')
    (tmp_path / "broken.jsonl.gz").write_bytes(broken[:10] + b"\xff" + broken[11:])
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n' * 99)[:-9])
    for name, message in (
        ("absent", "--input .*absent: no such file"),
        ("", r"is a folder; give its files, for example .*\*\.jsonl"),
        ("empty.jsonl", "no documents in .*empty.jsonl"),
        ("broken.jsonl.gz", "broken.jsonl.gz: cannot be read .*invalid"),
        ("torn.jsonl.gz", "torn.jsonl.gz: cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path, tmp_path / name)


def test_progress_has_rate_and_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_trainer.data.preprocess._CHUNK_DOCUMENTS", 10)
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr("moe_trainer.data.preprocess.time.monotonic", lambda: next(clock))
    write_jsonl(tmp_path / "in.jsonl", [{"text": "1 2 3"}] * 100)
    _, report = run(tmp_path, tmp_path / "in.jsonl", log_interval=20)
    lines = report.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("Processed 20 documents (5 docs/s,") and "ETA 0:" in lines[0]
    assert lines[-1].startswith("Processed 100 documents, 300 tokens in")


def test_a_dead_worker_is_reported(tmp_path, monkeypatch):
    def die(self, chunk):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("moe_trainer.data.preprocess._Encoder.__call__", die)
    write_jsonl(tmp_path / "in.jsonl", [{"text": "1"}] * 3)
    with pytest.raises(ValueError, match="a worker process died"):
        run(tmp_path, tmp_path / "in.jsonl", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_command_line_of_preprocess_data(tmp_path):
    """From any folder, without an installed package; the last line of stdout is the prefix to train on."""
    flags = ["--input", RECORDED / "corpusN.jsonl", *FLAGS, "--workers", 2, "--output-prefix"]
    done = command(*flags, "deep/er/N", "--append-eod", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["deep/er/N_text_document"]
    assert "Processed 40 documents" in done.stderr and "WARNING" not in done.stderr
    recorded = json.loads((RECORDED / "recorded.json").read_text())["preprocessed_md5"]
    assert hashlib.md5(files(tmp_path / "deep" / "er", "N")[0]).hexdigest() == recorded["bin"]
    done = call(*flags, tmp_path / "without")
    assert done.returncode == 0 and "WARNING: without --append-eod no token marks the ends" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer-type NullTokenizer", "NullTokenizer needs --vocab-size"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model absent", "--tokenizer-model absent: no such file"),
        ("--tokenizer-type NullTokenizer --vocab-size 9 --split-sentences", "BERT and T5"),
        ("--tokenizer-type NullTokenizer --vocab-size 9 --workers 0", "--workers 0"),
    ],
)
def test_command_line_errors_exit_with_code_2(tmp_path, flags, message):
    done = call("--input", RECORDED / "corpusN.jsonl", "--output-prefix", tmp_path / "x", *flags.split())
    assert done.returncode == 2 and message in done.stderr and not list(tmp_path.iterdir())


def interrupted_words(folder):
    """The words of a command that is ended before it has finished."""
    paths = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "x")]
    return [SCRIPT, *paths, *FLAGS, "--workers", "2"]


def test_command_killed_during_fork_leaves_no_files(tmp_path):
    """Python drops exceptions that a signal handler raises in fork callbacks; the command used to continue."""
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n')
    code = (
        "import os, runpy, signal, sys; os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM)); "
        f"sys.path.insert(0, {str(ROOT)!r}); sys.argv = {interrupted_words(tmp_path)!r}; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_killed_command_leaves_no_files(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n' * 4_000_000)  # many seconds of work
    process = subprocess.Popen([sys.executable, *interrupted_words(tmp_path)])
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 300)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
