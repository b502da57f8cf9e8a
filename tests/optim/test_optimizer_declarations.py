"""Declarations of optimizers: complete, and equal to flags, modules, states and what the program rejects."""

import pytest
from structure.declared import classes_of, leave_out
from structure.source import source_files
from toy import Toy, build_training, train_step

from arguments.container import OPTIONS
from arguments.mechanisms.optimizer_kinds.adam import ADAM
from arguments.mechanisms.optimizer_kinds.declaration import OPTIMIZER, OptimizerCapability
from arguments.mechanisms.optimizers import NAMES, OPTIMIZERS, OTHER, find_optimizer, get_element_rule
from arguments.optimizer import OptimizerArgs
from arguments.parse import resolve_command_line
from moe_trainer.declared_module import load_module
from moe_trainer.optim import update_rules

FLAGS = {
    OptimizerCapability.FSDP: "--use-megatron-fsdp --ckpt-format fsdp_dtensor",
    OptimizerCapability.EARLY_GATHER: "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--overlap-param-gather-with-optimizer-step",
    OptimizerCapability.STATE_FORMATS: "--use-precision-aware-optimizer",
    OptimizerCapability.HOST_UPDATE: "--optimizer-cpu-offload",
    OptimizerCapability.HOST_UPDATE_8_BITS: "--optimizer-cpu-offload --fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather "
    "--use-distributed-optimizer",
    OptimizerCapability.LEGACY_FORMAT: "--ckpt-format torch",
    OptimizerCapability.OTHER_FORMATS: "--use-distributed-optimizer --ckpt-format torch_dcp",
}
SAID = {
    OptimizerCapability.FSDP: "--use-megatron-fsdp needs --optimizer",
    OptimizerCapability.EARLY_GATHER: "cannot be combined with --optimizer other than",
    OptimizerCapability.STATE_FORMATS: "--use-precision-aware-optimizer needs --optimizer",
    OptimizerCapability.HOST_UPDATE: "--optimizer-cpu-offload needs --",
    OptimizerCapability.HOST_UPDATE_8_BITS: "needs --fp8-recipe delayed",
    OptimizerCapability.LEGACY_FORMAT: "torch has the state of --optimizer",
    OptimizerCapability.OTHER_FORMATS: "with --use-distributed-optimizer needs --ckpt-format",
}
REJECTED = {
    "adam": "HOST_UPDATE HOST_UPDATE_8_BITS",
    "sgd": "STATE_FORMATS HOST_UPDATE HOST_UPDATE_8_BITS",
    "muon": "FSDP EARLY_GATHER STATE_FORMATS LEGACY_FORMAT OTHER_FORMATS",
    "lion": "FSDP EARLY_GATHER STATE_FORMATS HOST_UPDATE HOST_UPDATE_8_BITS LEGACY_FORMAT OTHER_FORMATS",
}
"""What Megatron-LM, or for EARLY_GATHER and LEGACY_FORMAT this program, rejects with each."""


def test_every_optimizer_has_a_module_with_a_rule_and_a_value_of_its_flag():
    found = {each.__module__: each.declaration for each in classes_of(update_rules) if "declaration" in vars(each)}
    assert found == {load_module(each).__name__: each for each in OPTIMIZERS}
    assert OPTIONS[OPTIMIZER].choices == NAMES and OPTIONS[OPTIMIZER].default == OPTIMIZERS[0].key
    for each in OPTIMIZERS:
        module = load_module(each)
        assert hasattr(module, "make_matrix_rule") == each.updates_matrices == bool(each.others_follow)
        assert hasattr(module, "make_rule") != each.updates_matrices
        if each.others_follow:
            assert OPTIONS[each.others_follow].choices == each.others


def test_capability_that_a_declaration_leaves_out_is_an_error():
    with pytest.raises(TypeError, match="Adam leaves out FSDP"):
        leave_out(ADAM, OptimizerCapability.FSDP)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.key)
def test_declared_states_are_those_that_a_checkpoint_stores(optimizer):
    model = Toy()
    grads, built = build_training(model, optimizer=optimizer.key)
    assert train_step(model, grads, built, [0], lr=1e-2).updated
    other = get_element_rule(OptimizerArgs(optimizer=optimizer.key))
    assert {each.state_name for each in built.tensors()} == {*optimizer.states, *other.states}
    assert built.scalars()["optimizer"] == optimizer.key


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.key)
def test_flags_that_demand_a_capability_are_rejected_as_declared(optimizer):
    assert set(FLAGS) == set(OptimizerCapability)
    for capability, flags in FLAGS.items():
        argv = ["--optimizer", optimizer.key, "--bf16", *flags.split()]
        messages = [each.message for each in resolve_command_line(argv, 8)[1]]
        said = capability in SAID and any(SAID[capability] in each for each in messages)
        is_rejected = capability.name in REJECTED[optimizer.key].split()
        assert said == is_rejected == optimizer.rejects(capability), (capability, messages)


def test_every_capability_that_some_optimizer_lacks_is_asked_by_a_rule():
    rules = "".join(path.read_text() for path in source_files("arguments/rules"))
    lacking = {each for each in OptimizerCapability if any(optimizer.rejects(each) for optimizer in OPTIMIZERS)}
    assert (
        {each for each in OptimizerCapability if f"(OptimizerCapability.{each.name})" in rules} == lacking == set(SAID)
    )


def test_values_that_no_optimizer_has_are_not_taken_for_one():
    for name in (None, "", "toy", *(name for each in OPTIMIZERS for name in each.relatives)):
        assert find_optimizer(name) is OTHER and not OTHER.states
