"""Untrusted small files: every reader raises its own error that names the file, and executes nothing from it.

Checkpoints: checkpoint/test_hostile.py. Token files and presets: the fault table. Records, dashboards and caches: here.
"""

import functools
import json
import os
import pickle
import signal
import struct
from pathlib import Path

import numpy
import pytest
import torch
from data_pipeline.test_tokenizers import build, write_json_tokenizer

from arguments import ArgumentError, parse_args
from arguments.blend import read_blend_file, read_split_blends_file
from moe_trainer.checkpoint.directory import INDEX, TRACKER, read_tracker
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import files as hf_files
from moe_trainer.checkpoint.index import read_index
from moe_trainer.data.index_cache import IndexCache
from moe_trainer.data.preprocess import _Chunk, _Encoder, expand_inputs
from moe_trainer.debug.step_record import HEAD, Record
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.estimate.hardware import HardwareError, find_hardware
from moe_trainer.io import resume_offset
from moe_trainer.metrics.dashboard import open_dashboard
from moe_trainer.metrics.run_files import read_run
from moe_trainer.metrics.wandb_run import _read
from moe_trainer.optim.loss_scale import DynamicLossScale
from moe_trainer.quantization.precision_file import PrecisionFile
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.resilience.rejection import LossHistory, PendingFaultReport
from moe_trainer.training.setup import read_safetensors

DEEP = b"[" * 100_000
# JSON and YAML that its readers meet
TEXTS = {
    "deep lists": DEEP,
    "deep tables": b'{"a":' * 100_000,
    "number": b"7",
    "list": b"[1, 2]",
    "nothing": b"",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\x00",
    "digits": b"9" * 5000,
    "NaN": b"NaN",
    "text": b'"text"',
    "other keys": b'{"a": NaN, "b": Infinity, "c": 1e999}',
    "zeros": bytes(1000),
    "object": b"!!python/object/apply:os.system ['touch ran']",
    "bomb": b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (at + 1, at + 1, at, at) for at in range(97, 121)),
    "a pickle": pickle.dumps({"a": 1}),
}


def _record(path: Path) -> None:
    path.rename(path.with_name(HEAD))
    Record.open(path.parent)


def _fault_report(path: Path) -> None:
    from moe_trainer.resilience.rejection import _report_file

    target = _report_file(str(path.parent))
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    PendingFaultReport.read(str(path.parent))


def _special_tokens(path: Path) -> None:
    write_json_tokenizer(path.parent / "tokenizer", {})
    path.rename(path.parent / "tokenizer/tokenizer_config.json")
    build("HuggingFaceTokenizer", path.parent / "tokenizer")


def _tokenizer_json(path: Path) -> None:
    path.rename(path.parent / "tokenizer.json")
    build("HuggingFaceTokenizer", path.parent)


def _gpt2(path: Path) -> None:
    (path.parent / "merges.txt").write_text("#version\na b\n")
    build("GPT2BPETokenizer", vocab_file=str(path), merge_file=str(path.parent / "merges.txt"))


def _preprocess(path: Path) -> None:
    line = path.read_bytes()
    _Encoder.__call__(_bare_encoder(), _Chunk(str(path), [1], [line], True, len(line)))


def _weights(path: Path) -> None:
    with as_user_error(f"--load-weights {path}"):
        read_safetensors(str(path))


def _bare_encoder() -> _Encoder:
    encoder = object.__new__(_Encoder)
    encoder._keys = ["text"]
    return encoder


def _preset(path: Path) -> None:
    parse_args(["--preset", str(path)], world_size=1)


def _shard(path: Path) -> None:
    path.rename(path.with_name("model.safetensors"))
    (path.parent / "config.json").write_text("{}")
    hf_files.SafetensorsFolder(path.parent)


READERS = {
    "config.json": (hf_files.read_json, CheckpointError),
    "--hardware": (lambda path: find_hardware(str(path.rename(path.with_suffix(".yaml")))), HardwareError),
    "--te-precision-config-file": (
        lambda path: PrecisionFile.load(str(path), make_recipe("delayed", wgrad=True)),
        UserError,
    ),
    "--per-split-data-args-path": (lambda path: read_split_blends_file(str(path)), ValueError),
    "--tokenizer-metadata": (lambda path: build("HuggingFaceTokenizer", path, metadata_path=str(path)), ValueError),
    "tokenizer.json": (_tokenizer_json, ValueError),
    "tokenizer_config.json": (_special_tokens, ValueError),
    "GPT-2": (_gpt2, ValueError),
    "tiktoken": (lambda path: build("TikTokenizer", path), ValueError),
    "tiktoken.json": (lambda path: build("TikTokenizer", path.rename(path.with_suffix(".json"))), ValueError),
    "SentencePiece": (
        lambda path: build("SentencePieceTokenizer", path.rename(path.with_suffix(".model"))),
        ValueError,
    ),
    "--record-step": (_record, ValueError),
    "fault report": (_fault_report, ValueError),
    "jsonl": (_preprocess, UserError),
    "--load-weights": (_weights, UserError),
}
# readable in their form, if nothing else
HARMLESS = {
    ("config.json", "other keys"),
    ("--te-precision-config-file", "nothing"),
    ("--te-precision-config-file", "null"),
    ("--per-split-data-args-path", "other keys"),
    ("tokenizer_config.json", "other keys"),
    ("tiktoken", "nothing"),
}


@pytest.mark.parametrize("reader", READERS)
def test_malformed_text_raises_an_error_that_names_the_file(reader, tmp_path, monkeypatch):
    read, kind = READERS[reader]
    for number, (name, content) in enumerate(TEXTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        (folder / "given").write_bytes(content)
        try:
            read(folder / "given")
        except kind as error:
            assert str(folder) in str(error), (name, str(error)[:300])
            assert len(str(error)) < 4000, name
        else:
            assert (reader, name) in HARMLESS, name
        assert not (folder / "ran").exists()


OPENED = {
    name: reader for name, reader in READERS.items() if name not in ("jsonl", "fault report", "tokenizer_config.json")
} | {
    "--data-args-path": (lambda path: read_blend_file(str(path)), ValueError),
    "--preset": (_preset, ArgumentError),
    "tracker": (lambda path: read_tracker(path.rename(path.with_name(TRACKER)).parent), CheckpointError),
    ".metadata": (lambda path: read_index(path.rename(path.with_name(INDEX)).parent), CheckpointError),
    "safetensors": (_shard, CheckpointError),
    "--input": (lambda path: expand_inputs([str(path)]), UserError),
}


@pytest.mark.parametrize("reader", OPENED)
def test_readers_refuse_a_named_pipe_without_blocking(reader, tmp_path, monkeypatch):
    read, kind = OPENED[reader]
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "given")
    signal.alarm(60)  # ends a test that waits
    try:
        with pytest.raises(kind) as caught:
            read(tmp_path / "given")
    finally:
        signal.alarm(0)
    assert str(tmp_path) in str(caught.value)


def test_resumed_runs_ignore_malformed_id_and_metrics_files(tmp_path, caplog):
    """The run id of Weights & Biases and the metrics lines of a resumed run start from scratch."""
    for content in TEXTS.values():
        (tmp_path / "id").write_bytes(content)
        assert _read(tmp_path / "id", {"project": "x"}) is None
        (tmp_path / "lines").write_bytes(content + b"\n")
        assert resume_offset(tmp_path / "lines", "iteration", 5) == 0


def test_safetensors_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for length, table in (
        (2**63, b"{}"),
        (2**64 - 1, b"{}"),
        (200_000_000, b"{}"),
        (len(DEEP), DEEP),
        (4, b"null"),
        (0, b""),
        (2, b"{}"),
    ):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + table)
        if table == b"{}" and length == 2:
            assert hf_files.SafetensorsFolder(tmp_path).names == []
            continue
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            hf_files.SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        "text",
        None,
        [1],
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1], "data_offsets": [float("nan"), 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    ],
)
def test_invalid_safetensors_header_entry_is_refused(entry, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    table = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(table)) + table + bytes(4))
    with pytest.raises(CheckpointError, match="is damaged: x "):
        hf_files.SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_safetensors_index_cannot_name_files_outside_its_folder(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="outside its folder|Is a directory"):
        hf_files.SafetensorsFolder(tmp_path)


class ExecuteOnUnpickle:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_invalid_index_cache_arrays_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = IndexCache(str(tmp_path), "GPTDataset", "train", {"a": 1}, {"document": None})
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 70)
    for content in (
        pickle.dumps(ExecuteOnUnpickle()),
        b"\x93NUMPY",
        header + b"{'descr': '<i4', 'fortran_order': False, 'shape': (10**12,), }".ljust(70),
        header + b"[" * 70,
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
        *TEXTS.values(),
    ):
        Path(cache._array_path("document")).write_bytes(content)
        with pytest.raises(ValueError, match="delete it and start again"):
            cache.read()
    for array in (
        numpy.array([ExecuteOnUnpickle()], dtype=object),
        numpy.zeros(3),
        numpy.zeros((1, 2, 3), numpy.int32),
        numpy.array(5),
        numpy.array(["x"]),
    ):
        numpy.save(cache._array_path("document"), array, allow_pickle=True)
        with pytest.raises(ValueError, match="delete it and start again"):
            cache.read()
    assert not (tmp_path / "ran").exists()


def test_step_record_cannot_name_files_outside_its_folder(tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "record"
    folder.mkdir()
    (folder / HEAD).write_text(json.dumps({"files": {"../secret": {"bytes": 1, "blake2b": "0"}}}))
    with pytest.raises(ValueError):
        Record.open(folder)


@pytest.mark.parametrize(
    "line",
    [
        {"lm loss": "text"},
        {"lm loss": [1]},
        {"lm loss": {"a": 1}},
        {"lm loss": True},
        {"grad_norm": "x", "lm loss": 2.0},
        {"iteration": 10**400},
        {"iteration": True},
        {"validation": 7, "lm loss": 1.0},
        {"validation": "validation", "lm loss": "x"},
        {"rejected": "x"},
        {"rejected": [1, {"iteration": "x"}]},
        {"resumed_from": "x"},
        {"routing": "x"},
        {"routing": {"layers": [0], "tokens_per_expert": []}},
        {"own_time_ms": {"max": "x"}},
        {"own_time_ms": 3},
        {"own_time_ms": {"ranks": [None, 1.0, 2.0]}},
        {"run": {"started": 1e300}},
        {"run": {"started": float("nan")}},
        {"run": {"settings": functools.reduce(lambda inner, _: {"a": inner}, range(900), 1)}},
        {"run": {"model": 3, "mapping": "x", "settings": [1], "train_iters": "x"}},
        {"saved": ["x", 3]},
        {"routing": {"layers": [0], "tokens_per_expert": [[]], "straggler_cost": 0.1}},
        {"lm loss": 10**400},
        {"routing": {"layers": [0], "tokens_per_expert": [[1, "x"]], "straggler_cost": 0.1}},
    ],
)
def test_invalid_metrics_values_do_not_break_the_dashboard(line, tmp_path):
    """The page draws numbers: text in the place of one would stop its script, and everything would be missing."""
    good = {"iteration": 1, "lm loss": 3.0, "tokens_per_s": 10.0}
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps(each) for each in (good, {"iteration": 2} | line, good | {"iteration": 3}))
    )
    dashboard = open_dashboard(tmp_path / "metrics.jsonl")
    assert dashboard.write(done=True)
    data = json.loads((tmp_path / "dashboard.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    (run,) = data["runs"]
    records = run["records"]
    assert [each for each in records["iteration"] if each != 2] == [1, 3]
    values = [value for column in records["series"].values() for value in column]
    values += [value for each in run["validations"] for name, value in each.items() if name != "set"]
    assert all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    assert "routing" not in run and "ranks" not in run


@pytest.mark.parametrize("content", TEXTS)
def test_dashboard_reads_metrics_with_malformed_lines(content, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(TEXTS[content] + b'\n{"iteration": 1, "lm loss": 3.0}\n')
    assert read_run(tmp_path)._newest["iteration"] == 1


def test_invalid_loss_history_and_loss_scale_state_are_refused():
    for saved in (
        "x",
        [1],
        {"losses": "x"},
        {"recent": ["x"]},
        {"skipped": [1]},
        {"unknown": 1},
        {"largest_loss": [1]},
    ):
        with pytest.raises(ValueError, match="the history"):
            LossHistory.from_dict(saved)
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="loss scale"):
            DynamicLossScale().load_state_dict({"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert LossHistory.from_dict(LossHistory(losses=3, recent=[1.0, 2]).as_dict()).losses == 3


def test_step_record_random_states_cannot_execute_code(tmp_path):
    """The random states of a record are read by torch itself, which then runs nothing."""
    from moe_trainer.debug.step_record import random_file

    for content in (pickle.dumps(ExecuteOnUnpickle()), b"", b"PK\x03\x04 no archive", pickle.dumps([1], 2)):
        (tmp_path / random_file(0)).write_bytes(content)
        with pytest.raises(ValueError, match=f"{random_file(0)}: this is no file of random states"):
            Record(tmp_path, {}).generators(0)
    assert not (tmp_path / "ran").exists()
    torch.save({"a": torch.zeros(2)}, tmp_path / random_file(0))
    assert Record(tmp_path, {}).generators(0)["a"].shape == (2,)
