"""How routers choose experts: one declaration each, of everything that other code asks of a selection.

`get_selection` is the only place that reads the flags that select. The module of a selection is
moe_trainer/moe/selections/<key>.py, with `make_selection` and a class whose `declaration` it is. A declaration, in
selection_kinds/, states for every `SelectionCapability` that it acts, that the flags that demand it are rejected and
why, or that they have no effect and why.
"""

from collections.abc import Mapping
from typing import Any

from arguments.mechanisms.selection_kinds.declaration import ExpertSplit, SelectionCapability, SelectionDeclaration
from arguments.mechanisms.selection_kinds.finermoe import FINERMOE
from arguments.mechanisms.selection_kinds.hash_routing import HASH
from arguments.mechanisms.selection_kinds.quantile_balancing import QUANTILE_BALANCING
from arguments.mechanisms.selection_kinds.replay import REPLAY
from arguments.mechanisms.selection_kinds.sinkhorn import SINKHORN
from arguments.mechanisms.selection_kinds.sparsemixer import SPARSEMIXER
from arguments.mechanisms.selection_kinds.topk import TOPK

SELECTIONS: tuple[SelectionDeclaration, ...] = (
    HASH,
    SINKHORN,
    QUANTILE_BALANCING,
    FINERMOE,
    REPLAY,
    SPARSEMIXER,
    TOPK,
)
"""Where flags ask for several, as only some layers are hash-routed, the first one is taken."""

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
NO_BALANCING = "none"
SELECTING = tuple(each.balancing for each in SELECTIONS if each.balancing is not None)
"""Kinds of balancing that choose experts and weigh them by themselves, in evaluations too."""
BALANCING_KINDS = (*LOSSES, *SELECTING, NO_BALANCING)
"""Values of --moe-router-load-balancing-type."""
TABLES = tuple(name for each in SELECTIONS for name in each.tables)
"""Names in the router of tables of experts by token id."""
SAVED_NAMES = tuple(name for each in SELECTIONS for name in (*each.biases, *each.tables))
"""Names in the router of what a checkpoint stores of a selection."""
SPLITS = tuple(each.split for each in SELECTIONS if each.split is not None)
PROJECTIONS = tuple(each.projection_name for each in SPLITS)
"""Names of square matrices that multiply the output of MoE layers."""


def get_selection(moe: Any, layer_number: int | None = None) -> SelectionDeclaration:
    """Return the selection that the flags ask for.

    Args:
        moe: has the fields of MoEArgs.
        layer_number: of the layer, from 1; None: that of the layers without a table.
    """
    for each in SELECTIONS:
        last = None if each.num_layers is None else each.num_layers(moe)
        if each.asked(moe) and (last is None or layer_number is not None and layer_number <= last):
            return each
    raise AssertionError("top-k is always asked for")


def expert_split(moe: Any) -> ExpertSplit | None:
    """Return how experts divide what a dense layer computes; None if each makes the full output."""
    return next((each.split for each in SELECTIONS if each.split is not None and each.asked(moe)), None)


def output_slices(flags: Mapping[str, Any]) -> int:
    """Return the number of slices of the output, one of which an expert makes; `flags` are by destination."""
    return next((number for split in SPLITS if (number := flags.get(split.slices))), 1)


def named_selections(moe: Any) -> tuple[SelectionDeclaration, ...]:
    """Return the selections that flags ask for, excluded ones included."""
    return tuple(each for each in SELECTIONS if each.is_named(moe))


def of_balancing(kinds: Any) -> tuple[SelectionDeclaration, ...]:
    """Return the selections that values of --moe-router-load-balancing-type name."""
    return tuple(each for each in SELECTIONS if each.balancing is not None and each.balancing in (kinds or ()))


def balancing_with(capability: SelectionCapability) -> tuple[str, ...]:
    """Return the values of --moe-router-load-balancing-type with which flags that demand a capability are accepted."""
    rejecting = {each.balancing for each in SELECTIONS if each.rejects(capability)}
    return tuple(kind for kind in BALANCING_KINDS if kind not in rejecting)
