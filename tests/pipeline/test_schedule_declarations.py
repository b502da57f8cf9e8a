"""Declarations of schedules: complete, equal to orders and the flag, and what they reject is rejected."""

import re

import pytest
from structure.declared import leave_out
from structure.source import ROOT, source_files

from arguments.container import OPTIONS
from arguments.mechanisms.schedule_kinds.declaration import PIPELINE_SCHEDULE, ScheduleCapability
from arguments.mechanisms.schedules import (
    NAMES,
    ONE_F_ONE_B,
    SCHEDULES,
    asked_schedule,
    default_schedule,
    get_schedule,
)
from arguments.parallel import ParallelArgs
from arguments.parse import resolve_command_line
from moe_trainer.pipeline.orders import ORDERS, ScheduleKind
from moe_trainer.pipeline.simulate import WEIGHT, step_actions
from tests.arguments.rule_lines import base_line

DEMANDS = {
    ScheduleCapability.VIRTUAL_STAGES: "--num-virtual-stages-per-pipeline-rank 2",
    ScheduleCapability.EXCHANGE_OVERLAP: "--overlap-moe-expert-parallel-comm",
    ScheduleCapability.WGRAD_OVERLAP: "--overlap-dispatch-backward-with-experts-wgrad",
    ScheduleCapability.HEAD_WGRAD: "--defer-embedding-wgrad-compute",
    ScheduleCapability.SHARDED_GRADS: "--use-megatron-fsdp",
    ScheduleCapability.MLP_CHUNKS: "--mlp-chunks-for-training 2",
}
"""Flags that demand a capability."""
STAGES = "--pipeline-model-parallel-size 2"
SPELLING = OPTIONS[PIPELINE_SCHEDULE].spellings[0]


def parallel_args(schedule, stages=2, **changes):
    return ParallelArgs(**{PIPELINE_SCHEDULE: schedule.key}, pipeline_model_parallel_size=stages, **changes)


def test_every_schedule_has_an_order_and_a_value_of_the_flag():
    assert OPTIONS[PIPELINE_SCHEDULE].choices == NAMES == tuple(ORDERS)
    assert len(SCHEDULES) == len(NAMES)
    for each in SCHEDULES:
        orders = ScheduleKind(each, 2 if each.needs_virtual_stages else 1).orders(2, 4)
        kinds = {action.kind for order in orders for step in order for action in step_actions(step)}
        assert (WEIGHT in kinds) == each.splits_backward


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.key)
def test_flags_that_demand_a_capability_are_rejected_as_declared(schedule):
    assert set(DEMANDS) == set(ScheduleCapability)
    for capability, demand in DEMANDS.items():
        line = [*base_line(), *STAGES.split(), SPELLING, schedule.key, *demand.split()]
        flag = demand.split()[0]
        found = [each.message for each in resolve_command_line(line, 8)[1] if {flag, SPELLING} <= set(each.flags)]
        assert bool(found) == schedule.rejects(capability), (capability, found)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.key)
def test_what_has_no_effect_is_left_out(schedule):
    parallel = parallel_args(schedule, defer_embedding_wgrad_compute=True)
    assert parallel.has_deferred_wgrad == schedule.splits_backward
    assert parallel.has_deferred_head_wgrad == schedule.supports(ScheduleCapability.HEAD_WGRAD)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.key)
def test_flag_selects_the_declaration_where_there_are_stages(schedule):
    assert get_schedule(parallel_args(schedule)) is schedule
    one = parallel_args(schedule, stages=1)
    assert asked_schedule(one) is schedule and get_schedule(one) is ONE_F_ONE_B and not one.has_deferred_wgrad


def test_virtual_stages_decide_without_the_flag():
    for num_chunks in (1, 2):
        schedule = default_schedule(num_chunks)
        assert get_schedule(ParallelArgs(), num_chunks) is schedule and schedule.runs(num_chunks)
        assert schedule.needs_virtual_stages == (num_chunks > 1) and not schedule.splits_backward


def test_only_declarations_and_the_section_name_the_flag_and_its_values():
    words = re.compile(rf"\b{PIPELINE_SCHEDULE}\b|{SPELLING}\b|" + "|".join(f'"{name}"' for name in NAMES))
    paths = {path.relative_to(ROOT).as_posix(): path for path in source_files("arguments", "moe_trainer")}
    naming = {name for name, path in paths.items() if words.search(path.read_text(encoding="utf-8"))}
    declared = {name for name in naming if name.startswith("arguments/mechanisms/schedule")}
    assert declared and naming - declared <= {
        "arguments/parallel.py",
        "arguments/mechanisms/sharding_kinds/declaration.py",
        "moe_trainer/estimate/parallel_configs.py",
    }


def test_declarations_leave_no_capability_out():
    for capability in ScheduleCapability:
        with pytest.raises(TypeError, match=capability.name):
            leave_out(ONE_F_ONE_B, capability)
