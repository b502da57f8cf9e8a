"""Exported weights: safetensors reads the file, and a full disk leaves no partial file."""

import json
import shutil
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moe_trainer.parallel.coordination import drain_on_exit
from moe_trainer.training.export import write_weights


def test_safetensors_reads_exported_weights(tmp_path):
    stack = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4)
    weights = {
        "a": torch.randn(3, 5),
        "b.0": stack[0],
        "b.1": stack[1],
        "t": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "half": torch.randn(7).half(),
    }
    path = tmp_path / "model.safetensors"
    alive = []

    def one_by_one():
        for name, tensor in weights.items():
            alive.append(name)
            yield name, tensor

    assert write_weights(one_by_one(), str(path)) == len(weights) == len(alive)
    read = load_file(path)
    assert list(read) and set(read) == set(weights)
    for name, tensor in weights.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert size % 8 == 0 and list(json.loads(path.read_bytes()[8 : 8 + size])) == ["__metadata__", *weights]
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_failed_export_keeps_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    write_weights([("a", torch.ones(2))], str(path))
    before = path.read_bytes()

    def fails():
        yield "a", torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_weights(fails(), str(path))
    monkeypatch.setattr(shutil, "copyfileobj", lambda *_: list(fails()))
    with pytest.raises(OSError, match="No space left"):
        write_weights([("a", torch.zeros(2))], str(path))
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_drain_on_exit_completes_the_gather_after_a_write_error():
    sent = []
    gathered = (sent.append(number) or number for number in range(4))
    with pytest.raises(OSError, match="full"), drain_on_exit(gathered):
        assert next(gathered) == 0
        raise OSError("full")
    assert sent == [0, 1, 2, 3]
