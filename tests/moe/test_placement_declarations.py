"""Declarations of placements: complete, equal to modules, chosen by flags that nothing else reads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from moe.layers import sections
from structure.declared import classes_of, leave_out
from structure.source import ROOT, source_files

from arguments.container import OPTIONS
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import OWN, PLACEMENTS, get_placement
from arguments.mechanisms.support import rejected_flags
from moe_trainer.declared_module import load_module
from moe_trainer.moe import placement
from moe_trainer.moe.placement.build import build_placement
from moe_trainer.moe.placement.own import ExpertPlacement
from moe_trainer.parallel.state import Group, ParallelState

PLANS = "moe_trainer/estimate/pieces.py"
"""Worth of features, each with its flags."""


def test_every_placement_has_a_module():
    found = {each for each in classes_of(placement) if issubclass(each, ExpertPlacement)}
    assert {each.declaration.key for each in found} == {each.key for each in PLACEMENTS}
    for each in PLACEMENTS:
        assert each.dest is None or each.dest in OPTIONS
        assert callable(load_module(each).make_placement)


def test_layers_have_the_placement_that_the_flags_select():
    """One expert-parallel rank has its own experts, whatever the flags say."""
    single = ParallelState.single()
    two = replace(single, ep=Group("ep", (0, 1), 0, 2))
    for each in PLACEMENTS:
        moe = sections(**({} if each.dest is None else {each.dest: 2})).moe
        assert get_placement(moe, 2) is each and get_placement(moe, 1) is OWN
        assert build_placement(moe, two).declaration is each
        assert type(build_placement(moe, single)) is ExpertPlacement


def test_only_its_own_modules_read_the_flag_of_a_placement():
    for each in (each for each in PLACEMENTS if each.dest is not None):
        own = {f"{folder}/{each.key}.py" for folder in ("arguments/mechanisms/placement_kinds", "arguments/rules")}
        own |= {"arguments/moe.py", f"moe_trainer/moe/placement/{each.key}.py", PLANS}
        paths = {path.relative_to(ROOT).as_posix(): path for path in source_files("arguments", "moe_trainer")}
        reading = {name for name, path in paths.items() if each.dest in path.read_text(encoding="utf-8")}
        assert reading <= own


def test_declarations_leave_no_capability_out():
    for capability in PlacementCapability:
        with pytest.raises(TypeError, match=capability.name):
            leave_out(OWN, capability)
        for dest, reason in rejected_flags(PLACEMENTS, capability):
            assert dest in OPTIONS and reason


def test_own_experts_need_no_plan():
    moe = SimpleNamespace()
    assert not OWN.slots(moe) and not OWN.plan_kernels(moe) and OWN.held_elements(moe, 8.0, 2, 4) == 0.0
