"""Every flag that acts is read by name somewhere in the program; the status explains all others."""

import ast
from functools import cache
from pathlib import Path

from arguments import flag_status
from arguments.container import OPTIONS
from arguments.mechanisms.formats import FLAGS, SELECTING_FLAGS
from arguments.mechanisms.optimizers import OPTIMIZERS
from arguments.mechanisms.shardings import SHARDINGS

ROOT = Path(__file__).parents[2]
READ_BY_ARGUMENTS = {
    "validate_only", "use_tokenizer_model_from_checkpoint_args", "flight_recorder_dump_path",
    "flight_recorder_trace_buffer_size", "flight_recorder_dump_on_timeout",
    "flight_recorder_include_stack_trace", "flight_recorder_include_only_active",
    "flight_recorder_extra_dump_on_exec", "moe_upcycling_granularity", "hybrid_context_parallel",
    "mtp_hybrid_override_pattern",
}  # fmt: skip
"""Read while the command line is resolved (parse.py, apply_flag_status.py, checkpoint_args.py, report.py, rules/) or when the
environment is set (machine.py)."""
USED_BY_THE_PROGRAM = (
    "blend layer_pattern mechanisms/dispatchers mechanisms/dispatcher_kinds/declaration mechanisms/selection_kinds/hash_routing mup sparse_attention stage_layout "
    "stored_weights vocabulary".split()
)
"""Modules of `arguments` that compute what the model is built from, and where its data are."""
READ_BY_PATTERN = {"train_data_path", "valid_data_path", "test_data_path", "moe_upcycling_expert_init"}
"""Read as f"{split}_data_path" in arguments/blend.py, and by key in checkpoint/upcycling.py."""
READ_BY_DECLARATION = (
    {each.others_follow for each in OPTIMIZERS}
    | {dest for each in SHARDINGS for dest in each.selected_by}
    | set(SELECTING_FLAGS)
    | {dest for each in FLAGS for dest in (each.recipe, each.factory, each.param_gather, each.wgrad)}
)
"""Read by the name that a declaration has; see also `named_by_declarations`."""
READ_FOR_THE_RECORD = {
    "use_gigatoken",  # part of the tokenizer's identity in the names of index files, as in Megatron
    "local_rank",  # what is read is the launch environment's attribute of this name
}


NO_RUNS = frozenset(("estimate", "verification"))
"""Packages that read flags only to predict what a run does, and to write smaller command lines."""


@cache
def read_attribute_names(left_out: frozenset[str] = NO_RUNS) -> dict[str, set[str]]:
    """Attribute names that the program reads, with the files that read them.

    A flag that a property of a section reads counts if the property is read.

    Args:
        left_out: packages whose files do not count.
    """
    names: dict[str, set[str]] = {}
    paths = [path for path in sorted((ROOT / "moe_trainer").rglob("*.py")) if left_out.isdisjoint(path.parts)]
    paths += [ROOT / "arguments" / f"{name}.py" for name in USED_BY_THE_PROGRAM]
    for path in [ROOT / "pretrain_moe.py", *paths]:
        for name in loaded_attributes(ast.parse(path.read_text(encoding="utf-8"))):
            names.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    pending = {name: reads for path in (ROOT / "arguments").glob("*.py") for name, reads in section_properties(path)}
    while ready := [name for name in pending if name in names]:
        for name in ready:
            for read in pending.pop(name):
                names.setdefault(read, set()).update(names[name])
    return names


def loaded_attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def section_properties(path: Path) -> list[tuple[str, set[str]]]:
    """Properties and methods of the section that a file declares, with the attributes they read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    sections = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith(("Args", "Arguments"))
    ]
    return [
        (node.name, loaded_attributes(node))
        for cls in sections
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    ]


def named_by_declarations() -> set[str]:
    """Destinations that are constants in modules of declarations (NAME = "dest"), which read flags by them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "arguments/mechanisms").rglob("*.py")]
    values = [node.value for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    items = [item for value in values for item in (value.elts if isinstance(value, ast.Tuple) else [value])]
    return {item.value for item in items if isinstance(item, ast.Constant) and item.value in OPTIONS}


def test_flags_that_act_are_read_by_the_program():
    read = {*read_attribute_names(), *named_by_declarations()}
    acting = {dest for dest in OPTIONS if flag_status.get_flag_status(dest)[0] == "acts"}
    dead = acting - read - READ_BY_ARGUMENTS - READ_BY_PATTERN - READ_BY_DECLARATION
    assert sorted(dead) == [], "these flags are said to act, and nothing reads them: see arguments/flag_status.py"


def test_flags_without_effect_are_not_read():
    """A flag that the program reads would be reported wrongly as having no effect."""
    read = read_attribute_names(left_out=frozenset(("verification",)))
    unread = {dest for dest in OPTIONS if flag_status.get_flag_status(dest)[0] == "no effect"} - READ_FOR_THE_RECORD
    assert {dest: sorted(read[dest]) for dest in sorted(unread) if dest in read} == {}


def test_exception_lists_are_still_needed():
    read = read_attribute_names()
    assert [dest for dest in (*READ_BY_ARGUMENTS, *READ_BY_PATTERN) if dest in read] == []
    assert [dest for dest in READ_FOR_THE_RECORD if dest not in read] == []
