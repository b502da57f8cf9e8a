"""Declarations of modules of a layer that are recomputed, offloaded or captured: complete, and what rules ask."""

import pytest
from structure.declared import leave_out

from arguments.container import OPTIONS
from arguments.flag_status import NOT_IMPLEMENTED
from arguments.help import help_lines
from arguments.mechanisms.captured_modules import CAPTURED_MODULES, LAYER, OF_FULL_LAYERS, GraphCapability
from arguments.mechanisms.layer_modules import named
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES, OffloadCapability, offloaded_parts
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.parse import resolve_command_line
from moe_trainer.layers.layer_factory import TENSORS_OF_EXPERTS
from tests.arguments.rule_lines import base_line

KINDS = (
    (RECOMPUTED_MODULES, ["--recompute-granularity", "selective"]),
    (
        OFFLOADED_MODULES,
        ["--fine-grained-activation-offloading", "--transformer-impl", "transformer_engine"],
    ),
    (CAPTURED_MODULES, ["--cuda-graph-impl", "local"]),
)
DEMANDS = {
    RecomputeCapability.NARROW_INPUTS: "--fp8-format hybrid --fp8-recipe delayed",
    RecomputeCapability.EXCHANGE_OVERLAP: "--overlap-moe-expert-parallel-comm",
    RecomputeCapability.SHARED_EXPERT_OVERLAP: "--moe-shared-expert-overlap",
    RecomputeCapability.ADAPTER_DROPOUT: "--lora-dim 4 --lora-dropout 0.1",
    RecomputeCapability.COMPRESSED_KEYS: "--experimental-attention-variant dsv4_hybrid",
    RecomputeCapability.ROUTER_GRAPH: "--cuda-graph-impl local --cuda-graph-modules moe_router",
    OffloadCapability.PAGED_STASH: "--moe-paged-stash",
    OffloadCapability.MLP_CHUNKS: "--mlp-chunks-for-training 2",
    OffloadCapability.EXPERTS_RECOMPUTED: "--recompute-granularity selective --recompute-modules moe",
    GraphCapability.MLP_CHUNKS: "--mlp-chunks-for-training 2",
}
"""Flags that demand a capability, where the violation names them and the flag of the modules, or graphs."""


def violations(*words):
    return resolve_command_line([*base_line(), *words], 8)[1]


@pytest.mark.parametrize(("modules", "on"), KINDS, ids=("recompute", "offload", "graphs"))
def test_declared_names_are_those_that_the_flag_takes(modules, on):
    flag = OPTIONS[modules[0].dest].spellings[0]
    known = [each.key for each in modules if each.is_built]
    (message,) = (each.message for each in violations(*on, flag, "no_module") if "no_module" in each.message)
    assert message.endswith(f"{flag} no_module: the values must be among {', '.join(known)}.")
    (message,) = (each.message for each in violations(*on, flag, f"{known[-1]}x") if "must be among" in each.message)
    assert message.endswith(f"(did you mean {known[-1]}?).")
    assert f": {', '.join(known)}." in " ".join(" ".join(help_lines(options=frozenset({modules[0].dest}))).split())
    missing = NOT_IMPLEMENTED.get(modules[0].dest)
    assert (missing.values if missing else ()) == tuple(each.key for each in modules if not each.is_built)


@pytest.mark.parametrize(("modules", "on"), KINDS, ids=("recompute", "offload", "graphs"))
def test_what_a_module_rejects_is_rejected(modules, on):
    flag = OPTIONS[modules[0].dest].spellings[0]
    asked = {flag, "--cuda-graph-impl"} if modules is CAPTURED_MODULES else {flag}
    for module in (each for each in modules if each.is_built):
        plain = [*on, flag, module.key, *([module.after[0]] if module.after else [])]
        for capability in (each for each in module.declares if each in DEMANDS):
            demand = DEMANDS[capability].split()
            new = {each.message for each in violations(*plain, *demand)}
            new -= {each.message for each in violations(*plain)} | {each.message for each in violations(*demand)}
            found = [
                each.message
                for each in violations(*plain, *demand)
                if each.message in new and asked.intersection(each.flags) and set(demand).intersection(each.flags)
            ]
            assert bool(found) == module.rejects(capability), (module.key, capability, found)


def test_declarations_leave_no_capability_out():
    for modules, _on in KINDS:
        for capability in modules[0].declares:
            with pytest.raises(TypeError, match=capability.name):
                leave_out(modules[0], capability)


def test_modules_stand_for_others():
    names = {each.key for each in OFFLOADED_MODULES}
    assert offloaded_parts(["fused_group_mlp", "attn_norm"]) == {
        "fused_group_mlp",
        "expert_fc1",
        "moe_act",
        "attn_norm",
    }
    assert {"expert_fc1", "moe_act"} == TENSORS_OF_EXPERTS
    for each in OFFLOADED_MODULES:
        assert names.issuperset(each.stands_for)
        for other in named(OFFLOADED_MODULES, each.stands_for):
            rejected = {capability for capability in OffloadCapability if other.rejects(capability)}
            assert rejected <= {capability for capability in OffloadCapability if each.rejects(capability)}


def test_full_layers_have_all_modules_but_those_that_extend_another():
    captured = {each.key: each for each in CAPTURED_MODULES}
    assert {LAYER, *captured} - OF_FULL_LAYERS == {"moe_preprocess"}
    assert all(each.after is None or each.after[0] in captured for each in CAPTURED_MODULES)
