"""Preprocessing in shards: the bytes of one process, after any interruption."""

import dataclasses
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_pipeline.corpora import data_args
from data_pipeline.test_preprocess import FLAGS, NULL, ROOT, call, command, files, run, write_jsonl

from moe_trainer.data import preprocess_shards as shards_module
from moe_trainer.data.preprocess import PreprocessOptions
from moe_trainer.data.preprocess_shards import merge_shards, plan_shards, preprocess_shards

EOD = [*FLAGS, "--append-eod"]
DIFFERENT = "were made with different inputs"


@pytest.fixture
def inputs(tmp_path):
    rows = [{"text": " ".join(str((i * j) % 500) for j in range(1, 2 + i % 40)), "n": str(i % 9)} for i in range(300)]
    paths = [write_jsonl(tmp_path / "a.jsonl", rows[:100]), tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"]
    paths[1].write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[100:150]).encode()))
    write_jsonl(paths[2], rows[150:])
    (tmp_path / "empty.jsonl").write_text("")
    return [str(path) for path in (*paths, tmp_path / "empty.jsonl")]


def make(tmp_path, inputs, num_shards, only=None, name="out", **options):
    chosen = PreprocessOptions(tuple(inputs), str(tmp_path / name), append_eod=True, **options)
    return chosen, preprocess_shards(chosen, data_args(**NULL), num_shards, only, io.StringIO())


def merge(options, num_shards, report=None):
    return merge_shards(options, data_args(**NULL), num_shards, report or io.StringIO())


def shards_of(folder):
    return [path.name for path in folder.iterdir() if "-of-" in path.name]


@pytest.mark.parametrize("first", [0, 1])  # a file that is divided, or one that is not
@pytest.mark.parametrize("num_shards", [1, 2, 7, 40])
def test_merged_shards_are_the_files_of_one_process(tmp_path, inputs, num_shards, first):
    inputs = inputs[first:] + inputs[:first]
    keys = {"json_keys": ("text", "n")}
    expected, _ = run(tmp_path, inputs, "whole", append_eod=True, **keys)
    for number in reversed(range(num_shards)):
        options, made = make(tmp_path, inputs, num_shards, number, **keys)
        assert len(made) == 2
    totals = merge(options, num_shards)
    for key in ("text", "n"):
        assert files(tmp_path, key=key) == files(tmp_path, "whole", key)
    assert (totals.documents, totals.tokens) == (expected.documents, expected.tokens)
    assert shards_of(tmp_path) == []


@pytest.mark.parametrize("num_shards", [1, 3, 10])
def test_the_first_of_equal_documents_stays(tmp_path, num_shards):
    rows = [{"text": str((i * i) % 50), "n": str(i % 2), "other": i} for i in range(200)]
    rows[30]["n"] = ["1", "0"]  # a document of two sequences, once
    rows[31:33] = [{"text": "7", "n": "10"}, {"text": "7", "n": ["1", "0"]}]  # not the same
    rows[33:36] = [{"text": "71", "n": "1"}, {"text": "7", "n": "11"}, {"text": ["7", "1"], "n": "0"}]
    by_content = {}
    for row in rows:
        by_content.setdefault((str(row["text"]), str(row["n"])), row)
    first = list(by_content.values())
    assert 2 < len(first) < 60
    keys = {"json_keys": ("text", "n")}
    run(tmp_path, write_jsonl(tmp_path / "first.jsonl", first), "whole", append_eod=True, **keys)
    inputs, report = [str(write_jsonl(tmp_path / "a.jsonl", rows))], io.StringIO()
    options, _ = make(tmp_path, inputs, num_shards, drop_duplicates=True, **keys)
    assert merge(options, num_shards, report).documents == len(first)
    assert report.getvalue() == f"Dropped {200 - len(first)} documents that repeat earlier ones; {len(first)} stay\n"
    for key in ("text", "n"):
        assert files(tmp_path, key=key) == files(tmp_path, "whole", key)
    assert shards_of(tmp_path) == []


def test_dropping_duplicates_as_a_command(tmp_path):
    rows = [{"text": "1 2"}, {"text": "1 3 2"}, {"text": "1 2"}]
    common = ["--input", write_jsonl(tmp_path / "a.jsonl", rows), "--output-prefix", tmp_path / "out", *EOD]
    assert call(*common, "--drop-duplicates").returncode == 0
    run(tmp_path, write_jsonl(tmp_path / "b.jsonl", rows[:2]), "whole", append_eod=True)
    assert files(tmp_path) == files(tmp_path, "whole")
    for flags in (["--drop-duplicates"], []):  # the digests of the first are not those of the second
        for number in range(2):
            assert call(*common, "--num-shards", 2, "--shard-id", number, *flags).returncode == 0
    done = call(*common, "--num-shards", 2, "--merge", "--drop-duplicates")
    assert done.returncode == 2 and "2 of 2 shards (the first is 0) were made with different" in done.stderr


def test_shards_have_about_the_same_size(inputs):
    plan = plan_shards(inputs, 5)
    sizes = [sum(0 if part.end is None else part.end - part.begin for part in shard) for shard in plan]
    total = sum(map(os.path.getsize, inputs))
    assert max(sizes) <= total / 5 + 1
    assert [part.path for shard in plan for part in shard if part.end is None] == [inputs[1]]
    assert sum(sizes) == total - os.path.getsize(inputs[1])


def test_a_repeated_command_makes_only_what_is_missing(tmp_path, inputs, monkeypatch):
    made = []
    write = shards_module.write_token_files

    def record(parts, prefixes, *more):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(prefixes[0][-len("00000-of-00006_text_document") :][:5])
        return write(parts, prefixes, *more)

    monkeypatch.setattr(shards_module, "write_token_files", record)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, inputs, 6)
    assert made == ["00000", "00001", "00002"]
    made.clear()
    make(tmp_path, inputs, 6)
    assert made == ["00003", "00004", "00005"]
    made.clear()
    options, _ = make(tmp_path, inputs, 6)
    assert made == []
    os.utime(inputs[0], (1, 1))  # another input
    make(tmp_path, inputs, 6, 4)
    assert made == ["00004"]
    with pytest.raises(ValueError, match=rf"5 of 6 shards \(the first is 0\) {DIFFERENT}"):
        merge(options, 6)
    with pytest.raises(ValueError, match=r"7 of 7 shards are not complete \(the first is 0\)"):
        merge(options, 7)


def test_a_merge_compares_the_shards_with_its_own_flags(tmp_path, inputs):
    options, _ = make(tmp_path, inputs, 2)
    changes = ({"append_eod": False}, {"drop_duplicates": True}, {"inputs": (inputs[0],)})
    for other in (dataclasses.replace(options, **change) for change in changes):
        with pytest.raises(ValueError, match=rf"2 of 2 shards \(the first is 0\) {DIFFERENT}"):
            merge(other, 2)
    with pytest.raises(ValueError, match=f"{DIFFERENT}, tokenizers"):
        merge_shards(options, data_args(**{**NULL, "vocab_size": 600}), 2)


def test_a_tokenizer_that_changed_in_place_makes_shards_again(tmp_path, inputs):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    data = data_args(**NULL, tokenizer_model=str(folder))
    options = PreprocessOptions(tuple(inputs), str(tmp_path / "out"), append_eod=True)
    preprocess_shards(options, data, 2, None, io.StringIO())
    (folder / "tokenizer.json").write_text('{"changed": 1}')
    with pytest.raises(ValueError, match="2 of 2 shards .* were made with different inputs, tokenizers"):
        merge_shards(options, data, 2)
    report = io.StringIO()
    preprocess_shards(options, data, 2, 0, report)
    assert "is complete" not in report.getvalue()


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_damaged_shard_is_made_again(tmp_path, inputs, ending):
    run(tmp_path, inputs, "whole", append_eod=True)
    options, _ = make(tmp_path, inputs, 2)
    os.truncate(tmp_path / f"out-00001-of-00002_text_document.{ending}", 10)
    with pytest.raises(ValueError, match=r"1 of 2 shards are not complete \(the first is 1\)"):
        merge(options, 2)
    make(tmp_path, inputs, 2)
    merge(options, 2)
    assert files(tmp_path) == files(tmp_path, "whole")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_finished_command_does_not_start_over(tmp_path, inputs, monkeypatch, is_interrupted):
    options, _ = make(tmp_path, inputs, 3)
    unlink = Path.unlink

    def interrupt(path, **more):
        if "00001-of" in path.name:
            raise KeyboardInterrupt
        unlink(path, **more)

    if is_interrupted:
        monkeypatch.setattr(Path, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            merge(options, 3)
        monkeypatch.undo()
    else:
        expected = merge(options, 3)
    monkeypatch.setattr(shards_module, "write_token_files", lambda *_: pytest.fail("a shard was made"))
    assert make(tmp_path, inputs, 3)[1] == ()
    totals = merge(options, 3)
    assert is_interrupted or totals == expected
    assert shards_of(tmp_path) == []
    monkeypatch.undo()
    before = files(tmp_path)
    run(tmp_path, inputs[:1], "out", append_eod=True)  # other files of the same name
    assert files(tmp_path) != before and len(make(tmp_path, inputs, 3)[1]) == 3
    merge(options, 3)
    assert files(tmp_path) == before


def test_shards_that_cannot_be_removed_are_named(tmp_path, inputs, monkeypatch):
    options, _ = make(tmp_path, inputs, 1)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    report = io.StringIO()
    merge(options, 1, report)
    assert "out-00000-of-00001_text_document.bin cannot be removed (Permission denied)" in report.getvalue()


def test_commands_of_slurm_tasks(tmp_path, inputs):
    common = ["--input", *inputs, "--output-prefix", tmp_path / "out", *EOD, "--num-shards", 3]
    for number in (2, 0):
        done = call(*common, "--shard-id", number, "--workers", 2)
        assert done.returncode == 0 and done.stdout == f"{tmp_path}/out-0000{number}-of-00003_text_document\n"
    early = call(*common, "--merge")
    assert early.returncode == 2 and "1 of 3 shards are not complete (the first is 1)" in early.stderr
    whole = command(*common)  # the rest, and the merge
    assert whole.returncode == 0 and whole.stdout == f"{tmp_path}/out_text_document\n"
    assert whole.stderr.count("is complete") == 2
    run(tmp_path, inputs, "whole", append_eod=True)
    assert files(tmp_path) == files(tmp_path, "whole")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-shards 0", "--num-shards 0 must be at least 1"),
        ("--shard-id 0", "need --num-shards"),
        ("--merge", "need --num-shards"),
        ("--num-shards 2 --shard-id 2", "--shard-id 2 must be from 0 to 1"),
        ("--num-shards 2 --shard-id 1 --merge", "cannot be combined with --merge"),
    ],
)
def test_wrong_flags_of_shards(tmp_path, flags, message):
    done = call("--input", "absent", "--output-prefix", tmp_path / "out", *EOD, *flags.split())
    assert done.returncode == 2 and message in done.stderr


def test_preprocessing_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import moe_trainer.data.preprocess_shards, moe_trainer.data.statistics"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_documents_and_bad_lines(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n" * 50)
    options, _ = make(tmp_path, [str(tmp_path / "none.jsonl")], 2)
    with pytest.raises(ValueError, match="no documents in any shard"):
        merge(options, 2)
    (tmp_path / "bad.jsonl").write_text('{"text": "1"}\n' * 20 + "no\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl from 141 to 283, line \d+: not JSON"):
        make(tmp_path, [str(tmp_path / "bad.jsonl")], 2, name="bad")
    assert (tmp_path / "bad-00000-of-00002.done.json").exists()
    assert not (tmp_path / "bad-00001-of-00002_text_document.bin").exists()
