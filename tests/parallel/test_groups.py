"""--print-groups: every group of a layout, from arithmetic alone."""

from dataclasses import fields

import pytest
from commands import run
from training.tiny import MOCK, TINY

from moe_trainer.parallel.grid import make_layout
from moe_trainer.parallel.groups import group_table, plan_groups
from moe_trainer.parallel.state import Group, ParallelState


def test_table_lists_every_group_of_a_parallel_state():
    table = group_table(plan_groups(make_layout(8, tp=2, pp=2, ep=4))).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=4)[4] for line in table}
    assert set(rows) == {field.name for field in fields(ParallelState) if field.type is Group} - {"world"}
    assert rows["tp"] == "[0 1] [2 3] [4 5] [6 7]"
    assert rows["pp"] == "[0 4] [1 5] [2 6] [3 7]"
    assert rows["ep"] == "[0-3] [4-7]"
    assert rows["edp"] == "each rank alone"


def test_groups_of_context_ranks():
    table = group_table(plan_groups(make_layout(8, tp=2, cp=2))).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=4)[4] for line in table}
    assert {name: rows[name] for name in ("dp", "cp", "dp_cp", "tp_cp", "tp_dp_cp")} == {
        "dp": "[0 4] [1 5] [2 6] [3 7]",
        "cp": "[0 2] [1 3] [4 6] [5 7]",
        "dp_cp": "[0-6/2] [1-7/2]",
        "tp_cp": "[0-3] [4-7]",
        "tp_dp_cp": "[0-7]",
    }


def test_table_lists_dynamic_groups_of_every_size():
    table = group_table(plan_groups(make_layout(8, tp=2), dynamic_cp_sizes=(1, 2, 4))).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=4)[4] for line in table}
    assert {name: row for name, row in rows.items() if name.startswith("dynamic_cp")} == {
        "dynamic_cp_1": "each rank alone",
        "dynamic_cp_2": "[0 2] [1 3] [4 6] [5 7]",
        "dynamic_cp_4": "[0-6/2] [1-7/2]",
    }


@pytest.mark.parametrize(
    ("world", "sizes", "ranks_per_node", "intra", "inter"),
    [
        (8, {"ep": 8}, 4, "[0-3] [4-7]", "[0 4] [1 5] [2 6] [3 7]"),
        (8, {"ep": 8}, None, "[0-7]", "each rank alone"),
        (8, {"ep": 4}, 4, "[0-3] [4-7]", "each rank alone"),
        (8, {"ep": 4, "etp": 2}, 4, "[0 2] [1 3] [4 6] [5 7]", "[0 4] [1 5] [2 6] [3 7]"),
        (12, {"ep": 12}, 8, "[0-3] [4-7] [8-11]", "[0-8/4] [1-9/4] [2-10/4] [3-11/4]"),
        (6, {"ep": 3}, 2, "each rank alone", "[0-2] [3-5]"),
    ],
)
def test_expert_groups_are_split_at_nodes(world, sizes, ranks_per_node, intra, inter):
    table = group_table(plan_groups(make_layout(world, **sizes), ranks_per_node=ranks_per_node)).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=4)[4] for line in table}
    assert (rows["ep_intra"], rows["ep_inter"]) == (intra, inter)


def test_table_of_1024_ranks_shows_strides():
    rows = group_table(plan_groups(make_layout(1024, tp=8, pp=8, ep=16))).splitlines()
    assert rows[0].split()[:4] == ["dp", "64", "x", "16"] and "[0-120/8]" in rows[0]


def test_print_groups_on_the_command_line(tmp_path):
    finished = run([*TINY, *MOCK, "--train-iters", "1", "--print-groups"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "groups of 1 ranks:\n  dp " in finished.stdout


def test_print_groups_of_another_world_size(tmp_path):
    finished = run(
        [
            *TINY,
            *MOCK,
            "--validate-only",
            "--world-size",
            "64",
            "--print-groups",
            "--global-batch-size",
            "128",
            "--train-iters",
            "1",
            "--expert-model-parallel-size",
            "4",
        ],
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout
    assert "groups of 64 ranks:\n  dp " in finished.stdout and "[0-3] [4-7]" in finished.stdout
