"""Quantities of a command line that Megatron-LM defines by the mapping, and the command line without them.

The one process computes such a quantity by its definition (emulate_topology.py, emulate_balancing.py,
emulate_formats.py), which is not the plain program. A parity check therefore names them, and adds a case without any,
in which the reference runs the plain program. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arguments.mechanisms.formats import FLAGS
from arguments.mechanisms.selection_kinds.declaration import SelectionDeclaration
from arguments.mechanisms.selections import of_balancing
from arguments.mtp import num_mtp_depths
from arguments.rules.derived_sizes import as_list
from moe_trainer.verification.mapping import ParallelMapping

_KINDS, _COEFFS = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_PACKING = ("use_varlen_dataset", "sft", "sequence_packing_scheduler")
_CAPACITY = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy")


def defined_by_mapping(values: Mapping[str, Any], mapping: ParallelMapping) -> tuple[str, ...]:
    """Return the names of the quantities that one process computes by their definition.

    `values` is a small command line by destination.
    """
    num_shards, kinds = mapping.tp * mapping.cp, as_list(values.get(_KINDS) or "")
    has_capacity, is_dynamic = values.get("moe_expert_capacity_factor") is not None, _has_groups(values)
    has_other_tokens = num_shards > 1 or bool(values.get("use_varlen_dataset"))  # padding counts as tokens of a rank
    has_data_ranks = mapping.dp > 1 or is_dynamic
    is_defined = {
        "global_aux_loss (token counts of all data ranks)": "global_aux_loss" in kinds and has_data_ranks,
        **{f"{each.name} (over each rank's tokens)": has_other_tokens for each in _counting_by_rank(kinds)},
        "expert capacity and dropped tokens (of each rank's tokens)": has_capacity and has_other_tokens,
        "multi-token prediction's mean (over each context rank's tokens)": _has_mean_of_ranks(values, mapping),
    }
    return tuple(name for name, condition in is_defined.items() if condition)


def _counting_by_rank(kinds: Sequence[str]) -> tuple[SelectionDeclaration, ...]:
    return tuple(each for each in of_balancing(kinds) if each.counts == "rank")


def _has_groups(values: Mapping[str, Any]) -> bool:
    """Return whether ranks share sequences in groups of several sizes; the second flag is the deprecated spelling."""
    return bool(values.get("dynamic_context_parallel") or values.get("hybrid_context_parallel"))


def _has_mean_of_ranks(values: Mapping[str, Any], mapping: ParallelMapping) -> bool:
    """Return whether each context rank takes the mean of multi-token prediction over its tokens."""
    is_per_token = values.get("mtp_loss_per_token") and values.get("calculate_per_token_loss")
    return num_mtp_depths(values) > 0 and mapping.cp > 1 and not is_per_token and not _has_groups(values)


def reference_micro_batch_size(values: Mapping[str, Any], mapping: ParallelMapping) -> int:
    """Return the sequences of a microbatch of the one process: not those of the ranks, where no quantity depends on it.

    A sum over the tokens of an iteration does not. A mean over those of a microbatch does (without
    --calculate-per-token-loss), and so does what is counted in a microbatch. The numbers of microbatches of the one
    process and of a rank stay different.
    """
    micro, size = (values.get(dest) or 1 for dest in ("micro_batch_size", "global_batch_size"))
    assert isinstance(micro, int) and isinstance(size, int)
    kinds, coeffs = as_list(values.get(_KINDS) or "aux_loss"), as_list(values.get(_COEFFS) or 0.0)
    depends = (
        not values.get("calculate_per_token_loss")
        or any(values.get(dest) for dest in _PACKING)
        or any(each.counts for each in of_balancing(kinds))
        or any(coeff for kind, coeff in zip(kinds, coeffs) if kind != "seq_aux_loss")
        or values.get("moe_expert_capacity_factor") is not None
        or (num_mtp_depths(values) and not values.get("mtp_loss_per_token"))
        or any(values.get(flags.name) for flags in FLAGS)
    )
    if depends:
        return micro
    is_whole_step_legal = size > mapping.dp and not values.get("eval_global_batch_size")
    return 1 if micro > 1 or not is_whole_step_legal else size


def plain_values(values: Mapping[str, Any], mapping: ParallelMapping) -> dict[str, Any]:
    """Return the values that remove these quantities.

    They are sequence-wise balancing, no capacity, and no multi-token prediction under context parallelism.
    """
    changes: dict[str, Any] = {}
    kinds = as_list(values.get(_KINDS) or "")
    by_rank = {each.balancing for each in _counting_by_rank(kinds)}
    if "global_aux_loss" in kinds or by_rank:
        coeffs = as_list(values.get(_COEFFS) or 0.0) if not by_rank else [1e-2]
        by_kind = {
            "seq_aux_loss" if kind in ("global_aux_loss", *by_rank) else kind: coeff
            for kind, coeff in zip(kinds, coeffs)
        }
        changes |= {_KINDS: list(by_kind), _COEFFS: list(by_kind.values())}
    if mapping.tp * mapping.cp > 1 or values.get("use_varlen_dataset"):
        changes |= {dest: None for dest in _CAPACITY if dest in values}
    if _has_mean_of_ranks(values, mapping) and not values.get("pipeline_model_parallel_layout"):
        changes |= {dest: None for dest in values if dest.startswith("mtp_")}
    return changes
