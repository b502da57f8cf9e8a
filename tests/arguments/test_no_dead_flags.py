"""A flag acts, or its standing explains why not: whatever acts is read by name somewhere in the program."""

import ast
from pathlib import Path

from arguments import standing
from arguments.container import OPTIONS

ROOT = Path(__file__).parents[2]
READ_BY_ARGUMENTS = {
    "preset", "world_size", "report", "validate_only", "check_files", "on_missing_backend", "use_checkpoint_args",
    "use_tokenizer_model_from_checkpoint_args", "use_mp_args_from_checkpoint_args", "group_query_attention", "num_query_groups",
    "flight_recorder_dump_path", "flight_recorder_trace_buffer_size", "flight_recorder_dump_on_timeout", "flight_recorder_include_stack_trace",
    "finermoe_intermediate_granularity", "finermoe_output_granularity", "finermoe_intermediate_expansion", "finermoe_output_expansion",
    "moe_upcycling_granularity", "flight_recorder_include_only_active", "flight_recorder_extra_dump_on_exec",
    "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power",
}  # fmt: skip
"""Read while the command line is understood (parse.py, verdict.py, checkpoint_args.py, report.py), when the environment is set
(machine.py), or through a property of a section (query_groups, finermoe, width_mult, softmax_scale), or
for the width of experts (rules/sizes.py)."""
READ_BY_PATTERN = {"train_data_path", "valid_data_path", "test_data_path"}
"""Read as f"{split}_data_path" in moe_trainer/data/build.py."""
READ_FOR_THE_RECORD = {
    "use_gigatoken",  # part of the tokenizer's identity in the names of index files, as in Megatron
}


def names_read() -> dict[str, set[str]]:
    """Attribute names that are read under moe_trainer and in the door, with the files that read them.

    The proof reads flags in order to make smaller command lines of them; nothing acts there.
    """
    found: dict[str, set[str]] = {}
    paths = [path for path in sorted((ROOT / "moe_trainer").rglob("*.py")) if "proof" not in path.parts]
    for path in [ROOT / "pretrain_moe.py", *paths]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(str(path.relative_to(ROOT)))
    return found


def test_what_acts_is_read():
    read = names_read()
    acting = {dest for dest in OPTIONS if standing.standing_of(dest)[0] == "acts"}
    dead = acting - set(read) - READ_BY_ARGUMENTS - READ_BY_PATTERN
    assert sorted(dead) == [], "these flags are said to act, and nothing reads them: see arguments/standing.py"


def test_what_does_not_act_is_not_read():
    """Standing and code agree: an idle flag that the program reads after all would be announced wrongly."""
    read = names_read()
    idle = {dest for dest in OPTIONS if standing.standing_of(dest)[0] == "idle"} - READ_FOR_THE_RECORD
    assert {dest: sorted(read[dest]) for dest in sorted(idle) if dest in read} == {}


def test_exceptions_are_still_needed():
    read = names_read()
    assert [dest for dest in READ_BY_PATTERN if dest in read] == []
    assert [dest for dest in READ_FOR_THE_RECORD if dest not in read] == []
