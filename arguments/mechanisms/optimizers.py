"""Optimizers: one declaration each, of everything that other code asks of them.

An optimizer is selected by --optimizer; `get_optimizer` is the only place that reads it. The declarations are in
optimizer_kinds/. The module of an optimizer's update rule is moe_trainer/optim/update_rules/<key>.py, with `make_rule`,
and with `make_matrix_rule` if it updates full matrices. A declaration states for every `OptimizerCapability` that it
acts, or that the flags that demand it are rejected and why.
"""

from types import MappingProxyType
from typing import Any

from arguments.mechanisms.optimizer_kinds.adam import ADAM, record_adam_group
from arguments.mechanisms.optimizer_kinds.declaration import OPTIMIZER, OptimizerCapability, OptimizerDeclaration
from arguments.mechanisms.optimizer_kinds.lion import LION
from arguments.mechanisms.optimizer_kinds.muon import MUON
from arguments.mechanisms.optimizer_kinds.sgd import SGD
from arguments.mechanisms.support import Rejected

OPTIMIZERS: tuple[OptimizerDeclaration, ...] = (
    ADAM,
    SGD,
    MUON,
    LION,
)
OTHER = OptimizerDeclaration(
    key="other",
    name="other optimizers of Megatron-LM",
    states=(),
    is_layer_wise=True,
    record_group=record_adam_group,
    capabilities=MappingProxyType(dict.fromkeys(OptimizerCapability, Rejected("the optimizer is not supported"))),
)
"""What is said of a value of --optimizer that this program rejects, in a command line or a checkpoint."""

NAMES = tuple(name for each in OPTIMIZERS for name in (each.key, *each.old_names)) + tuple(
    name for each in OPTIMIZERS for name in each.relatives
)
"""Values of --optimizer."""

_BY_NAME = MappingProxyType({name: each for each in OPTIMIZERS for name in (each.key, *each.old_names)})


def find_optimizer(name: Any) -> OptimizerDeclaration:
    """Return the optimizer of a value of --optimizer, `OTHER` if this program has none."""
    return _BY_NAME.get(name, OTHER)


def get_optimizer(optimizer: Any) -> OptimizerDeclaration:
    """Return the optimizer that the flags select.

    Args:
        optimizer: has the fields of OptimizerArgs.
    """
    return find_optimizer(getattr(optimizer, OPTIMIZER))


def get_element_rule(optimizer: Any) -> OptimizerDeclaration:
    """Return the optimizer whose rule updates vectors and embeddings, element by element.

    Args:
        optimizer: has the fields of OptimizerArgs.
    """
    found = get_optimizer(optimizer)
    return find_optimizer(getattr(optimizer, found.others_follow)) if found.others_follow else found


def needs_rule(key: str) -> tuple[str, ...]:
    """Return the conditions, as arguments/needs.py reads them, without which flags of an update rule have no effect."""
    also = [each for each in OPTIMIZERS if key in each.others]
    selected = f"{OPTIMIZER}={key}"
    if not also:
        return (selected,)
    return (
        " or ".join((selected, *(f"{OPTIMIZER}={each.key}" for each in also))),
        " or ".join((selected, *(f"{each.others_follow}={key}" for each in also))),
    )
