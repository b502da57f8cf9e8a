"""Declarations of implementations of layers and of backends of attention: complete, equal to flags and modules."""

import re

import pytest
import torch
from structure.declared import leave_out
from structure.source import ROOT, source_files
from torch.nn.attention import SDPBackend
from training.layouts import make_argv

from arguments.container import OPTIONS
from arguments.mechanisms import attention_backends, implementations
from arguments.mechanisms.attention_backend_kinds.declaration import ATTENTION_BACKEND, AttentionBackendCapability
from arguments.mechanisms.attention_backends import ATTENTION_BACKENDS, AUTO, UNFUSED, get_attention_backend
from arguments.mechanisms.implementation_kinds.declaration import IMPLEMENTATION, ImplementationCapability
from arguments.mechanisms.implementations import (
    IMPLEMENTATIONS,
    LOCAL_LAYERS,
    OTHER,
    TRANSFORMER_ENGINE,
    find_implementation,
    get_implementation,
    needs_support,
)
from arguments.needs import unmet
from arguments.parse import parse_args, resolve_command_line
from arguments.precision import PrecisionArgs
from moe_trainer.layers import layer_factory
from moe_trainer.layers.core_attention import BACKENDS, CoreAttention, backend_problem
from tests.arguments.rule_lines import base_line

DEMANDS = {
    ImplementationCapability.DELAYED_WGRAD: "--delay-wgrad-compute",
    ImplementationCapability.ACTIVATION_OFFLOAD: "--fine-grained-activation-offloading --offload-modules core_attn",
    ImplementationCapability.OP_FUSER: "--use-transformer-engine-op-fuser",
}
READ_BY = {
    IMPLEMENTATION: ["arguments/mechanisms/implementations.py", "moe_trainer/commands/convert.py"],
    ATTENTION_BACKEND: ["arguments/mechanisms/attention_backends.py"],
}
"""Files that read the flags; `convert` has an option with the name of one."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda each: each.key)
def test_flag_selects_the_implementation_and_meets_what_it_does_not_support(implementation):
    assert get_implementation(PrecisionArgs(**implementation.selected_by)) is implementation
    for capability, demand in DEMANDS.items():
        words = [*base_line(), f"--{IMPLEMENTATION.replace('_', '-')}", implementation.key, *demand.split()]
        settings, violations = resolve_command_line(words, 8)
        flag = demand.split()[0]
        found = [each.message for each in violations if set(each.flags) == {flag, settings.flag(IMPLEMENTATION)}]
        assert bool(found) == implementation.rejects(capability), (capability, found)
        has_no_effect = settings.flag(IMPLEMENTATION) in unmet(settings, flag[2:].replace("-", "_"), {})
        assert has_no_effect == implementation.ignores(capability), capability


def test_values_of_the_flags_are_declared():
    assert OPTIONS[IMPLEMENTATION].choices == implementations.NAMES
    assert OPTIONS[ATTENTION_BACKEND].choices == attention_backends.NAMES
    assert {layer_factory.LOCAL.name, TRANSFORMER_ENGINE.key} == {each.key for each in IMPLEMENTATIONS}
    assert ["".join(each.switches.values()) for each in ATTENTION_BACKENDS] == ["100", "010", "001", "", ""]
    assert all(find_implementation(name) is OTHER for name in (*implementations.UNBUILT, None))
    assert needs_support(ImplementationCapability.OP_FUSER) == "transformer_impl=transformer_engine"


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS, ids=lambda each: each.key)
def test_kernel_of_torch_is_what_a_backend_declares(backend):
    """A kernel is fused where no scores are stored, in blocks too, and takes fp32 or is rejected with it."""
    model = parse_args([*make_argv("plain"), "--attention-backend", backend.key], 1).model
    assert get_attention_backend(model) is backend and (backend.key in BACKENDS) == (backend is not AUTO)
    kernel = BACKENDS.get(backend.key)
    assert (kernel == SDPBackend.MATH) == backend.stores_scores
    core = CoreAttention(model, 1, head_dim=8, backend=kernel)
    assert core.block_mask(None, torch.device("cpu")).fused != backend.stores_scores
    assert (backend_problem(model, "fp32", cuda=True) or "") == backend.reason(AttentionBackendCapability.FP32)
    assert backend_problem(model, "bf16", cuda=True) is None
    assert bool(backend_problem(model, "bf16", cuda=False)) == (backend.key in BACKENDS)


def test_nothing_but_the_selecting_functions_reads_the_flags():
    sources = {path.relative_to(ROOT).as_posix(): path for path in source_files("arguments", "moe_trainer")}
    for dest, readers in READ_BY.items():
        read = re.compile(rf"\.{dest}\b")
        assert [name for name, path in sources.items() if read.search(path.read_text(encoding="utf-8"))] == readers


def test_declarations_leave_no_capability_out():
    for capability in ImplementationCapability:
        with pytest.raises(TypeError, match=capability.name):
            leave_out(LOCAL_LAYERS, capability)
    for each in AttentionBackendCapability:
        with pytest.raises(TypeError, match=each.name):
            leave_out(UNFUSED, each)
