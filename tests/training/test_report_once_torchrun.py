"""The error that ends a run is written to the file from which torchrun prints its final report."""

import io
import json
import sys

import pytest

import arguments
import moe_trainer.training.pretrain
from moe_trainer.commands import train_process
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel.trace import CommunicationError
from moe_trainer.resilience.rejection import ResultRejectedError


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ResultRejectedError("the loss is nan", 16), 16, "the loss is nan"),
        (FloatingPointError("too large"), 1, "too large"),
        (CommunicationError("rank 0 has ended"), 3, "rank 1: rank 0 has ended"),
    ],
)
def test_error_message_is_written_for_torchrun(tmp_path, monkeypatch, error, code, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(moe_trainer.training.pretrain, "pretrain", fail)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    args = arguments.parse_args(["--preset", "mixtral_tiny", "--mock-data"], 2)
    assert train_process._train(args, LaunchEnv(1, 2, 1, None, None, "test"), None) == code
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == message
