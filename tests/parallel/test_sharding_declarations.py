"""Declarations of shardings: complete, chosen by flags that nothing else reads, and what they reject is rejected."""

import pytest
from structure.declared import leave_out
from structure.source import ROOT, source_files

from arguments.container import OPTIONS
from arguments.mechanisms.sharding_kinds.declaration import STRATEGY, ShardingCapability
from arguments.mechanisms.shardings import DISTRIBUTED_OPTIMIZER, SHARDINGS, WRAPPED_FLAGS, get_sharding
from arguments.parallel import ParallelArgs
from arguments.parse import resolve_command_line
from tests.arguments.rule_lines import base_line

DEMANDS = {
    ShardingCapability.PIPELINE: "--pipeline-model-parallel-size 2",
    ShardingCapability.EXPERT_PARALLEL: "--expert-model-parallel-size 2",
    ShardingCapability.OUTER: "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    ShardingCapability.MAIN_FORMATS: "--use-precision-aware-optimizer --main-grads-dtype bf16",
    ShardingCapability.FP32_SUMS: "--ddp-reduce-scatter-with-fp32-accumulation",
    ShardingCapability.DEFERRED_WGRAD: "--defer-embedding-wgrad-compute",
    ShardingCapability.MODULE_GRAPHS: "--cuda-graph-impl local",
    ShardingCapability.FROZEN: "--freeze-backbone",
    ShardingCapability.QK_CLIP: "--qk-clip",
    ShardingCapability.OUTPUT_BIAS: "--add-output-layer-bias",
    ShardingCapability.DYNAMIC_CONTEXT: "--dynamic-context-parallel",
    ShardingCapability.REPLICA_HASH: "--check-weight-hash-across-dp-replicas-interval 5",
}
"""Flags that demand a capability, where a violation names the flag of the sharding, or of its strategy."""
SECTIONS = ("arguments/parallel.py", "arguments/output.py")


def words(sharding):
    return [
        word
        for dest, value in sharding.selected_by.items()
        for word in (OPTIONS[dest].spellings[0], *([] if value is True else [value]))
    ]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda each: each.key)
def test_flags_select_the_declaration_and_meet_what_it_rejects(sharding):
    assert get_sharding(ParallelArgs(**sharding.selected_by)) is sharding
    own = {OPTIONS[dest].spellings[0] for dest in sharding.selected_by}
    plain = [*base_line(), *words(sharding), *(["--ckpt-format", sharding.ckpt_format] if sharding.ckpt_format else [])]
    for capability, demand in DEMANDS.items():
        violations = resolve_command_line([*plain, *demand.split()], 8)[1]
        flags = {word for word in demand.split() if word.startswith("--")}
        found = [each.message for each in violations if own.intersection(each.flags) and flags.intersection(each.flags)]
        assert bool(found) == sharding.rejects(capability), (capability, found)


def test_strategies_of_the_flag_are_declared():
    assert tuple(each.strategy for each in SHARDINGS if each.strategy) == OPTIONS[STRATEGY].choices
    assert len({each.key for each in SHARDINGS}) == len(SHARDINGS)


def test_full_sharding_turns_the_distributed_optimizer_on_where_the_declaration_says_so():
    for each in (each for each in SHARDINGS if each.is_wrapped):
        settings = resolve_command_line([*base_line(), *words(each)], 8)[0]
        assert settings.use_distributed_optimizer == bool(each.implies) and get_sharding(settings) is each


def test_only_declarations_and_sections_read_the_flags_of_full_sharding():
    paths = {path.relative_to(ROOT).as_posix(): path for path in source_files("arguments", "moe_trainer")}
    reading = {
        name
        for name, path in paths.items()
        if any(dest in path.read_text(encoding="utf-8") for dest in (*WRAPPED_FLAGS, STRATEGY))
    }
    declared = {name for name in reading if name.startswith("arguments/mechanisms/sharding")}
    assert declared and reading - declared <= {*SECTIONS, "arguments/rules/optimizer.py", "arguments/rules/training.py"}


def test_declarations_leave_no_capability_out():
    for capability in ShardingCapability:
        with pytest.raises(TypeError, match=capability.name):
            leave_out(DISTRIBUTED_OPTIMIZER, capability)


def test_only_instances_that_shard_everything_share_the_optimizer_state():
    flags = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
    sharing = [each.key for each in SHARDINGS if ParallelArgs(**each.selected_by, **flags).shards_outer]
    assert sharing == ["megatron_fsdp_optim_grads_params"]
