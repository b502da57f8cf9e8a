"""Declarations of selections: complete, and equal to flags and modules."""

import importlib
import inspect
import pkgutil
from dataclasses import replace

import pytest
from moe.layers import build_layer, sections

from arguments.container import OPTIONS
from arguments.mechanisms import selections as declared
from arguments.mechanisms.selection_kinds.declaration import BALANCING, DEMANDED_BY, RoutingCapability
from arguments.mechanisms.selections import HASH, REPLAY, SELECTIONS, TOPK, get_selection
from arguments.moe import MoEArgs
from moe_trainer.moe import selections
from moe_trainer.moe.selections.build import load_module
from moe_trainer.moe.selections.selection import ExpertSelection


def test_every_selection_has_a_module_with_a_class_and_a_value_of_its_flag():
    modules = [
        importlib.import_module(f"{selections.__name__}.{info.name}")
        for info in pkgutil.iter_modules(selections.__path__)
    ]
    classes = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    made = {each for each in classes if issubclass(each, ExpertSelection) and "declaration" in vars(each)}
    found = {each.__module__: each.declaration for each in made}
    assert found == {load_module(each).__name__: each for each in SELECTIONS} and len(made) == len(found)
    assert OPTIONS[BALANCING].choices == declared.BALANCING_KINDS
    for each in SELECTIONS:
        assert list(inspect.signature(load_module(each).make_selection).parameters) == ["context"]
        if each.balancing is not None:
            assert get_selection(MoEArgs(num_experts=8, **{BALANCING: each.balancing})) is each


def test_capability_that_a_declaration_leaves_out_is_an_error():
    capabilities = dict(TOPK.capabilities)
    del capabilities[RoutingCapability.GROUPS]
    with pytest.raises(TypeError, match="selection topk leaves out GROUPS"):
        replace(TOPK, capabilities=capabilities)


def test_only_the_first_layers_are_those_of_the_table():
    moe = MoEArgs(num_experts=8, moe_n_hash_layers=2, moe_enable_routing_replay=True)
    assert [get_selection(moe, number) for number in (1, 2, 3, None)] == [HASH, HASH, REPLAY, REPLAY]


@pytest.mark.parametrize("selection", [each for each in SELECTIONS if each.balancing], ids=lambda each: each.key)
def test_declared_biases_are_those_that_a_checkpoint_stores(selection):
    router = build_layer(sections(**{BALANCING: selection.balancing, "moe_aux_loss_coeff": 0.0})).router
    assert router.selection.declaration is selection
    assert tuple(name for name, _ in router.state_buffers()) == selection.biases


def test_flags_of_the_demands_exist():
    assert set(DEMANDED_BY) <= set(OPTIONS)
