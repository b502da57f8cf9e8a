"""--triton-kernels where its kernels cannot run: plain torch with a line in the log, or an error that says what to do."""

import importlib.util
import logging

import pytest

from arguments.container import OPTIONS
from moe_trainer.backends import Backends, MissingBackend
from moe_trainer.layers import kernels
from moe_trainer.layers.kernels import Kernels, choose_kernels
from moe_trainer.ops.pointwise import Activation


def test_the_default_on_a_device_that_has_triton(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "import_problem", lambda name: None)
    monkeypatch.setattr(kernels, "_load", lambda name: {})
    with caplog.at_level(logging.INFO):
        choose_kernels(OPTIONS["triton_kernels"].default, Backends(cuda=True))
    assert caplog.messages == ["Triton kernels: activation, norm, rope, permute, router, cross-entropy, quantize, sparse-attention"]


def test_the_default_tells_why_a_device_has_none(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert choose_kernels([], Backends(cuda=True)) == Kernels()
    assert [message.partition("; ")[0].partition(": ")[2] for message in caplog.messages] == ["the package triton is not installed"]


def test_none_and_a_cpu_have_none_and_say_nothing(caplog):
    with caplog.at_level(logging.INFO):
        assert choose_kernels(["none"], Backends(cuda=True)) == Kernels() == choose_kernels([])
    assert not caplog.messages


def test_a_cpu_falls_back_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO):
        assert choose_kernels(["norm", "rope"], Backends(typed=frozenset({"triton_kernels"}))) == Kernels()
    assert [record.message for record in caplog.records] == [
        "--triton-kernels norm rope: the kernels run on CUDA devices, and this rank computes on a CPU; using plain torch, with the same "
        "results"]


def test_without_triton_a_device_that_was_to_use_it_stops(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingBackend, match="triton is not installed.*pip install triton"):
        choose_kernels(["all"], Backends(typed=frozenset({"triton_kernels"}), cuda=True))


def test_only_what_has_a_kernel_gets_one():
    """A clamped or shifted SwiGLU is another function."""
    made = Kernels(activations=((Activation("silu", gated=True), "dense", "block"), (Activation("gelu"), None, "gelu block")))
    assert (made.dense(Activation("silu", gated=True)), made.block(Activation("silu", gated=True))) == ("dense", "block")
    for other in (Activation("silu", gated=True, clamp=7.0), Activation("silu", gated=True, linear_offset=1.0), Activation("gelu_tanh")):
        assert made.dense(other) is other and made.block(other) is None
    gelu = Activation("gelu")
    assert made.dense(gelu) is gelu and made.block(gelu) == "gelu block"


def test_the_flag_names_the_kernels_there_are():
    assert set(OPTIONS["triton_kernels"].choices) == {"all", "none", *kernels.NAMES}
