"""Files of a run: --check-files reports all that are missing before the job is submitted, a resumed run those replaced.

`--validate-only --check-files` writes nothing. The data and the tokenizer are compared with those of the checkpoint.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import run
from data_pipeline.corpora import train_byte_level_bpe
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from training.injected_faults import train_with
from training.tiny import TINY

from arguments.data import DataArgs
from arguments.mechanisms.formats import FLAGS
from moe_trainer.commands import train_process
from moe_trainer.data.fingerprint import compare_fingerprints, make_fingerprint, warn_of_training_text
from moe_trainer.data.indexed import write_indexed_dataset
from moe_trainer.data.preprocess import PreprocessOptions, preprocess
from moe_trainer.data.preprocess_shards import merge_shards, preprocess_shards
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.data.tokenizer_record import TokenizerCheck, recorded_tokenizer
from moe_trainer.errors import UserError
from moe_trainer.metrics.run_files import read_run

ROOT = Path(train_process.__file__).parents[2]
NULL_TOKENIZER = {"tokenizer_type": "NullTokenizer", "vocab_size": 120}
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


@pytest.fixture
def check(folder, capsys):
    """Run the check with these flags, which are split at spaces; returns the exit code, the report and the errors."""

    def check(flags, base=NULL):
        code = train_process.main([*CHECK, *base, *flags.split()])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return check


def test_report_lists_tokens_epochs_and_planned_checkpoints(folder, check):
    before = {path.name for path in folder.iterdir()}
    code, out, err = check("--data-path 0.75 a 0.25 b --split 80,20,0 --save new/ck --save-interval 20 --eval-iters 1")
    assert (code, err) == (0, "")
    assert "data: 2 of 2 prefixes can be read, 6,000 tokens in 60 sequences" in out
    assert "train: 4,800 tokens; 6,400 are read, 1.33 epochs" in out  # 50 iterations of 4 samples of 32
    assert "a: 4,000 tokens, weight 0.75: 1.20 epochs" in out and "b: 800 tokens, weight 0.25: 2.00 epochs" in out
    assert "tokenizer: NullTokenizer, 120 tokens, padded to 128" in out
    assert "--save new/ck: can be written" in out and "3 are planned" in out
    assert {path.name for path in folder.iterdir()} == before


def test_planned_checkpoints_are_at_most_those_of_the_total_limit(folder, check, monkeypatch):
    monkeypatch.setattr("moe_trainer.training.check_files.checkpoint_bytes", lambda *_: 1 << 60)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=5 << 60, f_frsize=1))
    flags = "--data-path a --split 80,20,0 --eval-iters 1 --save ck --save-interval 5"
    assert "WARNING: 10 checkpoints take about" in check(flags)[1]
    out = check(f"{flags} --save-total-limit 4")[1]
    assert "10 are planned, the last 4 are kept" in out and "WARNING" not in out
    assert "WARNING: 6 checkpoints take about" in check(f"{flags} --save-total-limit 5")[1]
    out = check(f"{flags} --save-retain-interval 25")[1]  # 25, 50; and while 45 is written, 40
    assert "10 are planned, 2 are kept (--save-retain-interval)" in out and "WARNING" not in out
    out = check(f"{flags} --save-retain-interval 10")[1]
    assert "5 are kept" in out and "WARNING: 7 checkpoints take about" in out


def test_phases_are_counted_one_by_one(folder, check):
    (folder / "first").write_text("a")
    (folder / "second").write_text("0.5 a 0.5 b")
    phases = "--phase-transition-iterations 20 --phase-data-args-path first"
    code, out, err = check(f"{phases} second")
    assert (code, err) == (0, "")
    assert "phase 1 of training: 5,000 tokens; 2,560 are read, 0.51 epochs" in out
    assert "phase 2 of training: 6,000 tokens; 3,840 are read, 0.64 epochs" in out
    assert "b: 1,000 tokens, weight 0.5: 1.92 epochs" in out
    code, out, err = check(f"{phases} third")
    assert code == 2 and "--phase-data-args-path third: cannot be read" in out + err
    code, out, err = check(phases)
    assert code == 2 and "names 1 files; --phase-transition-iterations 20 divides the run into 2 phases" in out + err
    assert "phase 1 of training: 5,000 tokens" in out
    assert err.startswith("pretrain_moe.py: 1 problem with the arguments or their files:")
    (folder / "third").write_text("absent")
    code, out, err = check(f"{phases} third")
    assert code == 2 and "absent.idx: no such file" in out + err


def test_streamed_text_is_opened(folder, check):
    (folder / "text.jsonl").write_text('{"text": "1 2"}')
    flags = "--dataloader-type external --valid-data-path text.jsonl --train-data-path 1 *.jsonl"
    code, out, err = check(flags)
    assert (code, err) == (0, "")
    assert "train: *.jsonl: 1 parts of streamed text" in out and "valid: text.jsonl: 1 parts" in out
    code, out, err = check(f"{flags} 1 absent.jsonl")
    assert code == 2 and "--train-data-path: absent.jsonl: no such file" in out + err


def test_all_missing_files_are_reported_together(folder, check):
    (folder / "file").write_text("")
    (folder / "cut.idx").write_bytes((folder / "a.idx").read_bytes())
    (folder / "cut.bin").write_bytes((folder / "a.bin").read_bytes()[:100])
    (folder / "torn").mkdir()
    (folder / "torn" / "latest_checkpointed_iteration.txt").write_text("7")
    code, out, err = check(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model none.model --data-path a cut nix --load torn --save file/ck "
        "--save-interval 5 --export-weights . --init-from no.safetensors --moe-router-topk 9",
        base=(),
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
    assert code == 2 and out.startswith("not valid: 8 problems")


OVERLAP = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-cfg"
FORMATS = "--fp8-format e4m3 --fp8-recipe mxfp8 --bf16 --te-precision-config-file"


SETTINGS = (
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
)


def test_files_of_settings_are_read(folder, check):
    for flags, content, text in SETTINGS:
        (folder / "f.yaml").unlink(missing_ok=True)
        if content is not None:
            (folder / "f.yaml").write_text(content)
        code, _, err = check(f"--data-path a --eval-iters 0 {flags} f.yaml")
        assert code == (2 if text else 0) and (text in " ".join(err.split()) if text else not err), (text, err)


def test_functions_that_choose_formats_are_imported(folder, check):
    (folder / "chooser.py").write_text("def formats(role):\n    return 'mxfp8'\n")
    for each in FLAGS:
        flag = f"--{each.factory.replace('_', '-')}"
        given = f"--{each.name}-format {each.values[0]} --{each.name}-recipe custom {flag}"
        flags = f"--data-path a --eval-iters 0 --bf16 {given} chooser"
        code, _, err = check(f"{flags}.absent")
        assert code == 2 and f"{flag} chooser.absent: module chooser has no function absent" in err
        assert check(f"{flags}.formats")[::2] == (0, "")
    code, _, err = check("--data-path a --eval-iters 0 --spec chooser:layers")
    assert code == 2 and "--spec chooser:layers: module chooser has no function layers" in err


FILES = (
    ("--vocab-size 90 --data-path other", "holds the id 99"),
    ("--data-path short --split 100,0,0", None),
    ("--data-path short --split 0.1,99,1",
     "the train split of short (0 tokens in 0 of 1 sequences) holds less than one sample of --seq-length 32 (+ 1) tokens; give it a "
     "larger share (now --split 0.1,99,1), or add data"),
    ("--data-path short --split 99,0.1,0 --eval-iters 3", "or do not evaluate (now --eval-iters 3; --eval-iters 0)"),
    ("--data-path a --load none --exit-on-missing-checkpoint", "--load none: there is no such folder"),
    ("--data-path a --load new --save new --save-interval 5", None),
    ("--data-path a --load none", None),
    ("--data-path a --load none --skip-train", "--load none: there is no such folder"),
    ("--data-path a --export-weights none/w", "--export-weights none/w: the folder none does not exist"),
    ("--valid-data-path a", "samples are asked of the train split, which has no data"),
)  # fmt: skip


def test_each_file_problem_is_reported(check):
    for flags, text in FILES:
        code, _, err = check(f"--make-vocab-size-divisible-by 1 {flags}")
        assert (code == 0) == (text is None) and (text or "") in err, (flags, err)


def test_start_from_random_weights_is_a_warning(folder, check):
    (folder / "empty").mkdir()
    _, out, _ = check("--data-path a --load empty")
    assert (
        "WARNING: --load empty: there is no checkpoint in this folder; the run starts from RANDOM WEIGHTS (--exit-on-missing-checkpoint"
        in out
    )
    _, out, err = check("--data-path a --load empty --exit-on-missing-checkpoint --pretrained-checkpoint absent")
    assert (
        "--load empty: there is no checkpoint in this folder; the run starts from --pretrained-checkpoint absent" in out
    )
    assert "--load" not in err


def test_split_smaller_than_one_sample_warns_or_fails(folder, check):
    with write_indexed_dataset(str(folder / "three"), np.uint16) as builder:
        for _ in range(3):
            builder.add_document(np.arange(20), [20])
    flags = "--data-path three --split 34,33,33 --eval-iters 1"
    code, out, _ = check(flags)
    where = "three (20 tokens in 1 of 3 sequences)"
    assert code == 0 and f"WARNING: less than one sample of --seq-length 32 (+ 1) tokens: {where}" in out
    code, _, err = check(f"{flags} --full-validation")
    assert code == 2 and f"the valid split of {where} holds less than one sample" in err
    assert "now --full-validation" in err


def test_parameters_are_counted_with_the_padded_vocabulary(folder, check):
    words = folder / "words"
    words.mkdir()
    vocabulary = {chr(97 + number): number for number in range(20)} | {"<|endoftext|>": 20}
    (words / "vocab.json").write_text(json.dumps(vocabulary))
    (words / "merges.txt").write_text("#version: 0.2\n")
    flags = (
        "--tokenizer-type GPT2BPETokenizer --vocab-file words/vocab.json --merge-file words/merges.txt --data-path a"
    )
    counts = []
    for more in ("--vocab-size 1000", "--padded-vocab-size 128", ""):
        _, out, _ = check(f"{flags} {more}", base=())
        counts.append(next(line for line in out.splitlines() if line.startswith("parameters: ")))
    assert "tokenizer: GPT2BPETokenizer words/vocab.json, 21 tokens, padded to 128" in out
    assert counts[0] == counts[1] == counts[2] and "not counted" not in counts[2]


def test_insufficient_disk_space_is_an_error(check, monkeypatch):
    stat = namedtuple("stat", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: stat(10, 1000))
    code, _, err = check("--data-path a --save ck --save-interval 5")
    assert code == 2 and "--save ck: 10 kB are free, one checkpoint takes about" in err


def test_check_files_without_load_does_not_import_torch(folder):
    code = (
        "import sys\nfrom moe_trainer.commands import train_process\n"
        f"assert train_process.main({[*CHECK, *NULL, '--data-path', 'a']!r}) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


# ---- files that were replaced since the checkpoint was saved


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
        *f"--data-path {tmp_path}/text --split 100,0,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tok".split(),
        *f"--save {tmp_path}/ckpt --save-interval 1 --auto-resume --override-opt_param-scheduler".split(),
    ]

    def warnings(iterations):
        ended = run([*argv, "--train-iters", str(iterations)], tmp_path)
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stderr.splitlines() if "is not that of the checkpoint" in line]

    assert warnings(1) == warnings(2) == []
    write_tokens(tmp_path / "text", seed=2)
    write_tokenizer(tmp_path / "tok", "b")
    data, tokenizer = warnings(3)
    assert f"--data-path: the data is not that of the checkpoint (other content in {tmp_path / 'text'})" in data
    assert (
        "--tokenizer-model: the tokenizer is not that of the checkpoint" in tokenizer and "tokenizer.json" in tokenizer
    )
    assert warnings(4) == []  # said once: the new checkpoint was trained on these


def copy_tokens(source, target):
    for ending in ("bin", "idx"):
        shutil.copy(f"{source}.{ending}", f"{target}.{ending}")


def test_fingerprints_depend_on_contents_and_not_on_names(tmp_path):
    write_tokens(tmp_path / "one", seed=1)
    write_tokens(tmp_path / "two", seed=2)
    copy_tokens(tmp_path / "one", tmp_path / "moved")

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


def test_validation_text_that_is_training_text_is_named(folder):
    copy_tokens("a", "copy")
    os.symlink("b.bin", "link.bin")
    os.symlink("b.idx", "link.idx")
    Path("splits.json").write_text('{"train": ["0.7", "a", "0.3", "b"], "valid": ["other", "b"], "test": "copy"}')
    Path("first.txt").write_text("short")
    Path("second.txt").write_text("b")

    def warnings(**flags):
        data = DataArgs(**{name: tuple(value.split()) for name, value in flags.items()})
        return warn_of_training_text(data, make_fingerprint(data, ())["data"])

    assert warnings(data_path="a copy") == [], "the splits of a file share no document"
    assert warnings(train_data_path="a b", valid_data_path="other", test_data_path="short") == []
    assert warnings(train_data_path="0.5 a 0.5 b", valid_data_path="copy ./b", test_data_path="link") == [
        "--valid-data-path: validation text is training text (--train-data-path): copy (the content of a), ./b (the "
        "content of b). Its loss does not tell how the model does on text that it has not seen",
        "--test-data-path: test text is training text (--train-data-path): link (the content of b). Its loss does not "
        "tell how the model does on text that it has not seen",
    ]
    (warning,) = warnings(phase_data_args_path="first.txt second.txt", valid_data_path="a b")
    assert warning.startswith("--valid-data-path: validation text is training text (--phase-data-args-path): b. ")
    data = DataArgs(per_split_data_args_path="splits.json")
    assert [each.partition(". ")[0] for each in warn_of_training_text(data, {})] == [
        "--per-split-data-args-path splits.json: validation text is training text (--per-split-data-args-path "
        "splits.json): b"
    ]


def test_check_warns_of_validation_text_that_is_training_text(folder, check):
    words = "  WARNING: --valid-data-path: validation text is training text (--train-data-path): a. "
    code, out, _ = check("--train-data-path a --valid-data-path a --eval-iters 1 --test-data-path b")
    assert code == 0 and words in out
    Path("text.jsonl").write_text('{"text": "1 2 3"}\n')
    streamed = "--dataloader-type external --train-data-path text.jsonl --valid-data-path ./text.jsonl --eval-iters 1"
    code, out, err = check(streamed)
    assert code == 0 and "validation text is training text (--train-data-path): ./text.jsonl (the content of" in out, (
        err
    )


def test_run_warns_of_validation_text_that_is_training_text(folder):
    copy_tokens("a", "copy")
    argv = [*TINY, *NULL, "--train-iters", "1", *"--eval-iters 1 --train-data-path a --valid-data-path copy".split()]
    first, second = train_with([*argv, "--test-data-path", "b"], folder, 2)
    warning = "--valid-data-path: validation text is training text (--train-data-path): copy (the content of a). "
    assert f"WARNING: {warning}" in first.log and warning not in second.log
    findings = read_run(folder / "metrics.jsonl").as_page()["findings"]
    assert [each["severity"] for each in findings if each["text"].startswith(warning)] == ["warn"]


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
    signal.alarm(120)  # ends a test that waits
    try:
        found = make_fingerprint(DataArgs(data_path=(str(tmp_path / "text"),)), [tmp_path / "tokenizer.json"])
    finally:
        signal.alarm(0)
    assert found == {"data": {}, "tokenizer": {}, "samples": {"flags": ""}}


def test_tokens_of_another_tokenizer_are_refused(folder, check):
    """Ids that fit into the vocabulary say nothing; the record next to the files does."""
    corpora = {"boats": ["the red boat on the river"], "foxes": ["a quick brown fox jumps over the lazy dog"]}
    for name, corpus in corpora.items():
        (folder / name).mkdir()
        train_byte_level_bpe(corpus * 9, ["</s>"]).save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "text.jsonl").write_text('{"text": "the lazy dog jumps into the river, and the boat follows"}\n' * 200)
    options = PreprocessOptions(("text.jsonl",), "made", append_eod=True)
    of_boats = DataArgs(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="boats")
    preprocess(options, of_boats, report=io.StringIO())
    words = "made_text_document.tokenizer.json: these tokens are of boats"
    flags = "--data-path made_text_document --split 60,20,20 --tokenizer-type"
    shutil.copytree("boats", "moved")
    for tokenizer, is_other in (
        ("HuggingFaceTokenizer --tokenizer-model moved", False),
        ("NullTokenizer --vocab-size 500", False),
        ("HuggingFaceTokenizer --tokenizer-model foxes", True),
    ):
        code, out, err = check(f"{flags} {tokenizer}", base=())
        assert (code == 2, words in out + err) == (is_other, is_other), out + err
    started = run([*TINY, "--train-iters", "1", *flags.split(), *tokenizer.split()], folder)
    assert started.returncode == 2 and f"--data-path: {words}" in started.stderr
    (folder / "made_text_document.tokenizer.json").unlink()
    assert check(f"{flags} {tokenizer}", base=())[0] == 0, "as Megatron-LM's files, it says nothing"


def test_record_of_the_tokenizer_follows_the_files(folder):
    """Also that of merged shards; one of earlier files does not stay."""
    (folder / "text.jsonl").write_text('{"text": "1 2 3"}\n' * 9)
    record = folder / "made_text_document.tokenizer.json"
    record.write_text("of earlier files")
    preprocess(PreprocessOptions(("text.jsonl",), "made"), DataArgs(**NULL_TOKENIZER), report=io.StringIO())
    assert not record.exists(), "ids of numbers are of no tokenizer"
    (folder / "words").mkdir()
    train_byte_level_bpe(["one"], ["</s>"]).save(str(folder / "words" / "tokenizer.json"))
    data = DataArgs(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="words")
    options = PreprocessOptions(("text.jsonl",), "made")
    preprocess_shards(options, data, 2, None, report=io.StringIO())
    merge_shards(options, data, 2, report=io.StringIO())
    assert json.loads(record.read_text())["tokenizer"]["tokenizer_path"] == "words"
    assert [path.name for path in folder.glob("*.tokenizer.json")] == [record.name]
    record.write_text("{}")
    with pytest.raises(UserError, match="is no record of a tokenizer"):
        TokenizerCheck(build_tokenizer(data)).check("made_text_document")


class _CountedTokenizer:
    """One id per word, between `bos` and `eod`; `unknown` is the id of one word of the sample."""

    unique_identifiers, vocab_size, bos, eod, unknown = {}, 100, 1, 2, 3

    def __init__(self, pad=None, error=None):
        self.pad, self.error, self.num_calls = pad, error, 0

    def tokenize(self, text):
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        words = text.split()
        return [self.bos, *(self.unknown if word == "fox" else 4 + len(word) for word in words), self.eod]


def test_same_tokenizer_with_another_pad_is_recognized(folder):
    """A pad may be the unknown token, whose place in a text counts."""
    with recorded_tokenizer("made", _CountedTokenizer(pad=3)):
        pass
    for pad in (None, 0, 3):
        check = TokenizerCheck(_CountedTokenizer(pad))
        check.check("made")
        num_calls = check._tokenizer.num_calls
        check.check("made")
        assert check._tokenizer.num_calls == num_calls > 0, "the sample is read once for all files"
    other = _CountedTokenizer()
    other.unknown = 5
    with pytest.raises(UserError, match="makes other ids of the same text"):
        TokenizerCheck(other).check("made")


def test_tokenizer_that_does_not_read_the_sample_is_not_compared(folder, caplog):
    with recorded_tokenizer("made", _CountedTokenizer()):
        pass
    TokenizerCheck(_CountedTokenizer(error=KeyError("fox"))).check("made")
    assert "token files are not compared with the tokenizer, which does not read the sample: KeyError" in caplog.text
