"""--triton-kernels where its kernels cannot run.

Plain torch with a line in the log, or an error with a remedy.
"""

import importlib
import importlib.util
import logging
import types
from dataclasses import replace

import pytest
import torch

from arguments import parse_args
from arguments.container import OPTIONS
from arguments.mechanisms.sublayers import SUBLAYERS, VARIANT
from arguments.model import ModelArgs
from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.layers import kernels
from moe_trainer.layers.kernels import Kernels, select_kernels, with_delta_rule
from moe_trainer.ops.pointwise import Activation
from tests.arguments.test_tokens import TOY

ATTRIBUTES = [attribute for fields in kernels._SOURCES.values() for _, _, attribute in fields]


def test_default_kernels_on_a_device_with_triton(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "import_problem", lambda name: None)
    monkeypatch.setattr(kernels, "_load", lambda name: {})
    with caplog.at_level(logging.INFO):
        select_kernels(OPTIONS["triton_kernels"].default, BackendPolicy(cuda=True))
    assert caplog.messages == [
        "Triton kernels: activation, norm, rope, permute, router, cross-entropy, expert-wgrad, quantize, "
        "sparse-attention, paged-stash"
    ]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], {"add_weight_grad"}),
        (["norm"], set()),
        (["expert-wgrad"], {"add_weight_grad"}),
        (["grouped-gemm"], {"add_weight_grad", "grouped_gemms"}),
    ],
)
def test_expert_gemms_are_triton_kernels_only_by_name(names, found, monkeypatch):
    monkeypatch.setattr(kernels, "import_problem", lambda name: None)
    monkeypatch.setattr(
        kernels.importlib, "import_module", lambda name: types.SimpleNamespace(**dict.fromkeys(ATTRIBUTES, name))
    )
    made = select_kernels(names, BackendPolicy(cuda=True))
    assert {field for field in ("add_weight_grad", "grouped_gemms") if getattr(made, field) is not None} == found


@pytest.mark.parametrize(
    ("names", "flags", "left_out"),
    [
        ("", "--no-rope-fusion", "rope"),
        ("", "--swiglu --no-bias-swiglu-fusion", "activation"),
        ("", "--no-bias-swiglu-fusion", ""),  # of another activation
        ("--triton-kernels rope", "--no-rope-fusion", ""),
        ("--triton-kernels all", "--no-rope-fusion --swiglu --no-bias-swiglu-fusion", ""),
    ],
)
def test_fusion_flags_change_the_default_only(names, flags, left_out, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "import_problem", lambda name: None)
    monkeypatch.setattr(kernels, "_load", lambda name: {})
    args = parse_args([*TOY, *names.split(), *flags.split()], 1)
    with caplog.at_level(logging.INFO):
        select_kernels(args.precision.triton_kernels, BackendPolicy(cuda=True), args.model.unfused_operations)
    without_flags = names.split()[1:] or list(kernels.DEFAULT)
    expected = list(kernels.NAMES) if without_flags == ["all"] else without_flags
    assert caplog.messages[-1] == f"Triton kernels: {', '.join(name for name in expected if name != left_out)}"


def test_default_without_triton_logs_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert select_kernels([], BackendPolicy(cuda=True)) == Kernels()
    assert [message.partition("; ")[0].partition(": ")[2] for message in caplog.messages] == [
        "the package triton is not installed"
    ]


def test_no_kernels_and_no_log_for_none_or_cpu(caplog):
    with caplog.at_level(logging.INFO):
        assert select_kernels(["none"], BackendPolicy(cuda=True)) == Kernels() == select_kernels([])
    assert not caplog.messages


def test_cpu_fallback_is_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        assert select_kernels(["norm", "rope"], BackendPolicy(typed=frozenset({"triton_kernels"}))) == Kernels()
    assert [record.message for record in caplog.records] == [
        "--triton-kernels norm rope: the kernels run on CUDA devices, and this rank computes on a CPU; using plain torch, with the same "
        "results"
    ]


def test_requested_kernels_without_triton_are_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingBackendError, match="triton is not installed.*pip install triton"):
        select_kernels(["all"], BackendPolicy(typed=frozenset({"triton_kernels"}), cuda=True))


def test_only_supported_operations_get_a_kernel():
    """A clamped or shifted SwiGLU is another function."""
    made = Kernels(
        activations=((Activation("silu", gated=True), "dense", "block"), (Activation("gelu"), None, "gelu block"))
    )
    assert (
        made.dense_activation(Activation("silu", gated=True)),
        made.expert_activation(Activation("silu", gated=True)),
    ) == (
        "dense",
        "block",
    )
    for other in (
        Activation("silu", gated=True, clamp=7.0),
        Activation("silu", gated=True, linear_offset=1.0),
        Activation("gelu_tanh"),
    ):
        assert made.dense_activation(other) is other and made.expert_activation(other) is None
    gelu = Activation("gelu")
    assert made.dense_activation(gelu) is gelu and made.expert_activation(gelu) == "gelu block"


def test_flag_choices_are_the_existing_kernels():
    assert set(OPTIONS["triton_kernels"].choices) == {"all", "none", kernels.DELTA_RULE, *kernels.NAMES}


RULES = types.SimpleNamespace(load_fla=lambda: print, gated_delta=repr)
OURS = "gated DeltaNet: the delta rule of our own Triton kernels"


@pytest.mark.parametrize(
    ("names", "cuda", "installed", "made", "logged"),
    [
        ([], True, {"triton", "fla"}, print, "gated DeltaNet: the delta rule of flash-linear-attention"),
        ([], True, {"triton"}, repr, f"{OURS} (the package fla is not installed)"),
        (["all"], True, {"triton"}, repr, OURS),
        (["delta-rule"], True, {"triton"}, repr, OURS),
        ([], True, {"fla"}, None, "the package triton is not installed"),
        (["delta-rule"], False, {"triton", "fla"}, None, "this rank computes on a CPU"),
        ([], False, {"triton", "fla"}, None, None),
        (["none"], True, {"triton", "fla"}, None, None),
        (["norm"], True, {"triton", "fla"}, None, None),
    ],
)
def test_choice_of_delta_rule_implementation(names, cuda, installed, made, logged, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib, "import_module", lambda name: RULES)
    model = ModelArgs(linear_key_head_dim=128, linear_value_head_dim=128)
    with caplog.at_level(logging.INFO):
        found = with_delta_rule(Kernels(), names, model, torch.bfloat16, BackendPolicy(cuda=cuda))
    assert found.gated_delta is (made or Kernels().gated_delta)
    assert logged in caplog.text if logged else not caplog.messages
    assert (
        with_delta_rule(
            Kernels(), names, replace(model, linear_key_head_dim=512), torch.bfloat16, BackendPolicy(cuda=cuda)
        )
        == Kernels()
    )


def test_decays_by_channel_have_no_kernels(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: RULES)

    def select(variant):
        model = ModelArgs(**{VARIANT: variant})
        return with_delta_rule(Kernels(), [], model, torch.bfloat16, BackendPolicy(cuda=True))

    assert select(None).gated_delta is repr
    assert all(select(each.variant) == Kernels() for each in SUBLAYERS if each.decays_by_channel)


@pytest.mark.parametrize("version", ["0.5.2", None])
def test_old_flash_linear_attention_is_not_used(version, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: RULES)
    if version:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with caplog.at_level(logging.INFO):
        assert with_delta_rule(Kernels(), [], ModelArgs(), torch.bfloat16, BackendPolicy(cuda=True)).gated_delta is repr
    assert OURS in caplog.text and "is not 0.6 or later" in caplog.text


def test_requested_delta_rule_not_installed_is_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingBackendError, match="pip install triton"):
        with_delta_rule(
            Kernels(),
            ["delta-rule"],
            ModelArgs(),
            torch.bfloat16,
            BackendPolicy(typed=frozenset({"triton_kernels"}), cuda=True),
        )
    assert select_kernels(["delta-rule"], BackendPolicy(cuda=True)) == Kernels()
