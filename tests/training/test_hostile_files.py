"""Untrusted small files: every reader raises its own error that names the file, and executes nothing from it.

Checkpoints: checkpoint/test_hostile.py. Token files and presets: the fault table. Records, dashboards and caches: here.
"""

import functools
import io
import json
import os
import pickle
import signal
import struct
from pathlib import Path

import numpy
import pytest
import torch
from bad_input import DEEP, RUNS, TEXTS, error_of, safetensors, write_files
from data_pipeline.test_tokenizers import build, write_json_tokenizer

from arguments import ArgumentError, parse_args
from arguments.blend import read_blend_file, read_split_blends_file
from moe_trainer.checkpoint.directory import INDEX, TRACKER, read_tracker
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import files as hf_files
from moe_trainer.checkpoint.index import read_index
from moe_trainer.data.index_cache import IndexCache
from moe_trainer.data.preprocess import _Chunk, _Encoder, expand_inputs
from moe_trainer.debug.routing_trace import RoutingTraceReader
from moe_trainer.debug.step_record import _OWN_HASH, FORMAT, HEAD, Record, _hash_head, random_file
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.estimate.hardware import HardwareError, find_hardware
from moe_trainer.io import resume_offset
from moe_trainer.metrics.dashboard import open_dashboard
from moe_trainer.metrics.run_files import read_run
from moe_trainer.metrics.wandb_run import _read
from moe_trainer.optim.loss_scale import DynamicLossScale
from moe_trainer.quantization.precision_file import PrecisionFile
from moe_trainer.quantization.recipe import make_recipe
from moe_trainer.resilience.rejection import LossHistory, PendingFaultReport, _report_file
from moe_trainer.training.routing_replay import SampleFolder
from moe_trainer.training.setup import read_safetensors


def _moved(path: Path, name: str) -> Path:
    (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
    return path.rename(path.parent / name)


def _fault_report(path: Path) -> None:
    _moved(path, os.path.relpath(_report_file(str(path.parent)), path.parent))
    PendingFaultReport.read(str(path.parent))


def _special_tokens(path: Path) -> None:
    write_json_tokenizer(path.parent / "tokenizer", {})
    build("HuggingFaceTokenizer", _moved(path, "tokenizer/tokenizer_config.json").parent)


def _gpt2(path: Path) -> None:
    (path.parent / "merges.txt").write_text("#version\na b\n")
    build("GPT2BPETokenizer", vocab_file=str(path), merge_file=str(path.parent / "merges.txt"))


def _preprocess(path: Path) -> None:
    line, encoder = path.read_bytes(), object.__new__(_Encoder)
    encoder._keys = ["text"]
    _Encoder.__call__(encoder, _Chunk(str(path), [1], [line], True, len(line)))


def _weights(path: Path) -> None:
    with as_user_error(f"--load-weights {path}"):
        read_safetensors(str(path))


def _shard(path: Path) -> None:
    (path.parent / "config.json").write_text("{}")
    hf_files.SafetensorsFolder(_moved(path, "model.safetensors").parent)


def _precision(path: Path) -> None:
    PrecisionFile.load(str(path), make_recipe("delayed", wgrad=True))


def _routing_trace(path: Path) -> None:
    RoutingTraceReader(_moved(path, "router_trace_rank0.jsonl").parent, 0, 1, 2).experts(1, "decoder.layers.0.mlp", 0)


READERS = {
    "config.json": (hf_files.read_json, CheckpointError),
    "--hardware": (lambda path: find_hardware(str(_moved(path, "given.yaml"))), HardwareError),
    "--te-precision-config-file": (_precision, UserError),
    "--per-split-data-args-path": (lambda path: read_split_blends_file(str(path)), ValueError),
    "--tokenizer-metadata": (lambda path: build("HuggingFaceTokenizer", path, metadata_path=str(path)), ValueError),
    "tokenizer.json": (lambda path: build("HuggingFaceTokenizer", _moved(path, "tokenizer.json").parent), ValueError),
    "tokenizer_config.json": (_special_tokens, ValueError),
    "GPT-2": (_gpt2, ValueError),
    "tiktoken": (lambda path: build("TikTokenizer", path), ValueError),
    "tiktoken.json": (lambda path: build("TikTokenizer", _moved(path, "given.json")), ValueError),
    "SentencePiece": (lambda path: build("SentencePieceTokenizer", _moved(path, "given.model")), ValueError),
    "--record-step": (lambda path: Record.open(_moved(path, HEAD).parent), ValueError),
    "fault report": (_fault_report, ValueError),
    "jsonl": (_preprocess, UserError),
    "--load-weights": (_weights, UserError),
    "--moe-routing-replay-path": (_routing_trace, UserError),
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


PIPES = {
    name: reader for name, reader in READERS.items() if name not in ("jsonl", "fault report", "tokenizer_config.json")
} | {
    "--data-args-path": (lambda path: read_blend_file(str(path)), ValueError),
    "--preset": (lambda path: parse_args(["--preset", str(path)], world_size=1), ArgumentError),
    "tracker": (lambda path: read_tracker(_moved(path, TRACKER).parent), CheckpointError),
    ".metadata": (lambda path: read_index(_moved(path, INDEX).parent), CheckpointError),
    "safetensors": (_shard, CheckpointError),
    "--input": (lambda path: expand_inputs([str(path)]), UserError),
    ".npz": (lambda path: SampleFolder(_moved(path, "0.npz").parent), UserError),
}


def test_readers_refuse_a_named_pipe_without_blocking(tmp_path, monkeypatch):
    try:
        for number, (read, kind) in enumerate(PIPES.values()):
            signal.alarm(60)  # ends a test that waits
            folder = tmp_path / str(number)
            folder.mkdir()
            monkeypatch.chdir(folder)
            os.mkfifo(folder / "given")
            error_of(kind, read, folder / "given", words=[str(folder)])
    finally:
        signal.alarm(0)


HEADERS = (
    *(safetensors(b"{}", length=length) for length in (2**63, 2**64 - 1, 200_000_000)),
    safetensors(DEEP),
    safetensors(b"null"),
    safetensors(b""),
)
ENTRIES = (
    {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}, {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "text", None, [1],
    {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": [1], "data_offsets": [float("nan"), 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
)  # fmt: skip


def test_invalid_safetensors_header_is_refused(tmp_path):
    write_files(tmp_path, {"config.json": "{}", "model.safetensors": safetensors({})})
    assert hf_files.SafetensorsFolder(tmp_path).names == []
    contents = [(header, "damaged") for header in HEADERS]
    for content, words in contents + [(safetensors({"x": entry}, bytes(4)), "damaged: x ") for entry in ENTRIES]:
        (tmp_path / "model.safetensors").write_bytes(content)
        error_of(CheckpointError, hf_files.SafetensorsFolder, tmp_path, words=[f"model.safetensors is {words}"])


def test_safetensors_index_cannot_name_files_outside_its_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        text = error_of(CheckpointError, hf_files.SafetensorsFolder, tmp_path)
        assert "outside its folder" in text or "Is a directory" in text, name


def test_invalid_index_cache_arrays_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = IndexCache(str(tmp_path), "GPTDataset", "train", {"a": 1}, {"document": None})
    path = Path(cache._array_path("document"))
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 70)
    for content in (
        pickle.dumps(RUNS),
        b"\x93NUMPY",
        header + b"{'descr': '<i4', 'fortran_order': False, 'shape': (10**12,), }".ljust(70),
        header + b"[" * 70,
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
        *TEXTS.values(),
        numpy.array([RUNS], dtype=object),
        numpy.zeros(3),
        numpy.zeros((1, 2, 3), numpy.int32),
        numpy.array(5),
        numpy.array(["x"]),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            numpy.save(path, content, allow_pickle=True)
        error_of(ValueError, cache.read, words=["delete it and start again"])
    assert not (tmp_path / "ran").exists()


def test_step_record_names_no_files_outside_its_folder_and_executes_nothing(tmp_path, monkeypatch):
    """Its random states are read by torch itself, which then runs nothing."""
    monkeypatch.chdir(tmp_path)
    outside = {"format": FORMAT, "files": {"../secret": {"bytes": 1, "blake2b": "0"}}}
    head = json.dumps(outside | {_OWN_HASH: _hash_head(outside)})
    write_files(tmp_path, {"secret": "x", f"record/{HEAD}": head})
    error_of(ValueError, Record.open, tmp_path / "record", words=["'../secret', outside its folder"])
    number = io.BytesIO()
    torch.save(torch.ones(1), number)
    for content in (pickle.dumps(RUNS), b"", b"PK\x03\x04 no archive", pickle.dumps([1], 2), number.getvalue()):
        (tmp_path / random_file(0)).write_bytes(content)
        words = [f"{random_file(0)}: this is no file of random states"]
        error_of(ValueError, Record(tmp_path, {}).generators, 0, words=words)
    assert not (tmp_path / "ran").exists()
    torch.save({"a": torch.zeros(2)}, tmp_path / random_file(0))
    assert Record(tmp_path, {}).generators(0)["a"].shape == (2,)


VALUES = (
    *({"lm loss": value} for value in ("text", [1], {"a": 1}, True, 10**400)),
    {"grad_norm": "x", "lm loss": 2.0},
    *({"iteration": value} for value in (10**400, True)),
    {"validation": 7, "lm loss": 1.0}, {"validation": "validation", "lm loss": "x"},
    *({"rejected": value} for value in ("x", [1, {"iteration": "x"}])),
    {"resumed_from": "x"}, {"saved": ["x", 3]},
    *({"routing": value} for value in ("x", {"layers": [0], "tokens_per_expert": []})),
    *({"routing": {"layers": [0], "tokens_per_expert": [value], "straggler_cost": 0.1}} for value in ([], [1, "x"])),
    *({"own_time_ms": value} for value in ({"max": "x"}, 3, {"ranks": [None, 1.0, 2.0]})),
    *({"run": {"started": value}} for value in (1e300, float("nan"))),
    {"run": {"settings": functools.reduce(lambda inner, _: {"a": inner}, range(900), 1)}},
    {"run": {"model": 3, "mapping": "x", "settings": [1], "train_iters": "x"}},
)  # fmt: skip


def test_invalid_metrics_values_do_not_break_the_dashboard(tmp_path):
    """The page draws numbers: text in the place of one would stop its script, and everything would be missing."""
    good = {"iteration": 1, "lm loss": 3.0, "tokens_per_s": 10.0}
    for number, line in enumerate(VALUES):
        folder = tmp_path / str(number)
        lines = (good, {"iteration": 2} | line, good | {"iteration": 3})
        write_files(folder, {"metrics.jsonl": "\n".join(map(json.dumps, lines))})
        assert open_dashboard(folder / "metrics.jsonl").write()
        page = (folder / "dashboard.html").read_text()
        (run,) = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"]
        records = run["records"]
        assert [each for each in records["iteration"] if each != 2] == [1, 3], line
        values = [value for column in records["series"].values() for value in column]
        values += [value for each in run["validations"] for name, value in each.items() if name != "set"]
        assert all(value is None or type(value) in (int, float) for value in values), line
        assert "routing" not in run and "ranks" not in run, line


def test_malformed_lines_of_earlier_runs_are_skipped(tmp_path, caplog):
    """By the dashboard; and the run id of Weights & Biases and the metrics lines of a resumed run start from scratch."""
    for name, content in TEXTS.items():
        write_files(tmp_path, {"id": content, "lines": content + b"\n"})
        assert _read(tmp_path / "id", {"project": "x"}) is None, name
        assert resume_offset(tmp_path / "lines", "iteration", 5) == 0, name
        write_files(tmp_path, {"metrics.jsonl": content + b'\n{"iteration": 1, "lm loss": 3.0}\n'})
        assert read_run(tmp_path)._newest["iteration"] == 1, name


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
        error_of(ValueError, LossHistory.from_dict, saved, words=["the history"])
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="loss scale"):
            DynamicLossScale().load_state_dict({"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert LossHistory.from_dict(LossHistory(losses=3, recent=[1.0, 2]).as_dict()).losses == 3
