"""Options of quantized formats that a parity check can keep: those whose numbers one process can compute.

emulate_formats.py shards every linear as the ranks do, so scales and blocks of a rank's shard are those of the ranks.
What remains are the tokens of an expert: if they come from several microbatches or in another order, no single pass of
one process has them together. Then scales per tensor are replaced by delayed ones, which are equal on all ranks, and
blocks along the tokens (gradients of weights) are left out. What is quantized, where and in which order stays as in
the recipe.

Rounding to fp8 occasionally turns a difference in the last digit into one of several percent. These checks therefore
compute in fp64, router included, with constant weights: even small steps would change roundings. A further case without
fp8 checks the optimizer. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from arguments.container import flags_of
from arguments.mechanisms.dispatchers import ALLTOALL
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import BY_KEY, FLAGS, TRANSPORT, UNPROVABLE, of_width
from arguments.mechanisms.selections import SPLITS
from arguments.mechanisms.shardings import WRAPPED_FLAGS
from arguments.settings import Settings
from moe_trainer.verification.mapping import ParallelMapping

FP8_NOTE = "--fp8-format: checked in fp64 with constant weights, since a last digit can change a rounding to fp8"
FROZEN_LR = 1e-12
"""Learning rate that leaves fp32 weights unchanged."""

TRANSPORT_FLAGS = ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
_TRANSPORT_NOTE = (
    "tokens sent in fp8 ({}): checked in fp64 with constant weights, since a last digit can change a rounding to fp8"
)
_OTHERS = tuple(dest for flags in UNPROVABLE for dest in (flags.name, flags.recipe, flags.param_gather))
WITHOUT_FP8 = MappingProxyType(dict.fromkeys(flags_of("quantization").difference(_OTHERS, TRANSPORT_FLAGS)))


def comparable_fp8_options(
    values: Mapping[str, Any], mapping: ParallelMapping, num_layers: int
) -> tuple[dict[str, Any], list[str]]:
    """Return options with which fp8 can be compared, and notes on what they change.

    The options replace those in `values`, a command line by destination. Flags that cannot be kept are None.
    """
    transport = [dest for dest in TRANSPORT_FLAGS if values.get(dest) == TRANSPORT.key]
    is_sharded = any(values.get(dest) for dest in WRAPPED_FLAGS)
    other = next((flags for flags in UNPROVABLE if values.get(flags.name)), None)
    if transport and (other or not values.get("fp8") or is_sharded):
        flags, without = ", ".join(f"--{dest.replace('_', '-')}" for dest in transport), dict.fromkeys(transport)
        others, notes = comparable_fp8_options({**values, **without}, mapping, num_layers)
        if other or is_sharded:
            reason = f"--{other.name}-format" if other else "full sharding"
            note = f"{flags}: left out; tokens in fp8 are checked in fp64, which excludes {reason}"
            return {**others, **without}, [*notes, note]
        fixed = {"lr": FROZEN_LR, "decoupled_lr": None, "moe_router_dtype": "fp64"}
        return {**others, **fixed}, [*notes, _TRANSPORT_NOTE.format(flags)]
    if values.get("use_varlen_dataset") and (other or values.get("fp8")):
        names = ", ".join(f"--{flags.name}-format" for flags in FLAGS)
        note = f"{names}: left out; scales and blocks of packed sequences depend on their padding"
        return {**WITHOUT_FP8, **dict.fromkeys((*_OTHERS, *transport))}, [note]
    if other:
        reason = of_width(other)[0].reason(FormatCapability.PROOF)
        return {**WITHOUT_FP8, **dict.fromkeys(_OTHERS)}, [f"--{other.name}-format: left out; {reason}"]
    if not values.get("fp8"):
        return dict(WITHOUT_FP8), []
    if is_sharded:
        note = "--fp8-format: left out; it is checked in fp64, and fully sharded parameters are fp32"
        return dict(WITHOUT_FP8), [note]
    recipe = str(values.get("fp8_recipe") or "delayed")
    if reason := BY_KEY[recipe].reason(FormatCapability.PROOF):
        return dict(WITHOUT_FP8), [f"--fp8-recipe {recipe}: left out; {reason}"]
    notes = [FP8_NOTE]
    if values.get("te_precision_config_file"):
        reason = "it names layers of the full model, so all use the recipe of the flags"
        notes.append(f"--te-precision-config-file: left out; {reason}")
    options: dict[str, Any] = {
        "lr": FROZEN_LR,
        "decoupled_lr": None,
        "te_precision_config_file": None,
        "reuse_grad_buf_for_mxfp8_param_ag": None,
    }
    if any(values.get(dest) for dest in ("num_experts", *(split.slices for split in SPLITS))):  # or it follows
        options["moe_router_dtype"] = "fp64"
        recipe = _set_expert_options(options, values, recipe, mapping, notes)
    options["fp8_recipe"] = recipe
    if values.get("first_last_layers_bf16"):
        for dest in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            count = 1 if values.get(dest) is None else int(values[dest])
            options[dest] = min(count, max(num_layers - 1, 0) // 2)
    return options, notes


def _set_expert_options(
    options: dict[str, Any], values: Mapping[str, Any], recipe: str, mapping: ParallelMapping, notes: list[str]
) -> str:
    """Set the options that experts allow, and return the recipe."""
    has_one_microbatch = mapping.etp * mapping.ep == mapping.tp * mapping.cp
    if values.get("moe_router_padding_for_quantization") and mapping.tp * mapping.cp > 1:
        options |= {"moe_router_padding_for_quantization": None, "moe_router_padding_for_fp8": None}
        notes.append("--moe-router-padding-for-quantization: left out; every rank pads for its own tokens")
    if recipe == "tensorwise" and not has_one_microbatch:
        notes.append("--fp8-recipe tensorwise: delayed instead; the maximum is over tokens of several microbatches")
        return "delayed"
    if (
        BY_KEY[recipe].tokens_per_scale
        and not (has_one_microbatch and mapping.cp == 1)
        and values.get("fp8_wgrad") is not False
    ):
        options["fp8_wgrad"] = False
        notes.append(
            "--no-fp8-wgrad: set in the small command line; blocks along an expert's tokens span microbatches or shards"
        )
    return recipe


def reference_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the reference: padding and rounding of tokens require a dispatcher, even in one process."""
    needs_dispatcher = values.get("moe_router_padding_for_quantization") or _sends_fp8(values)
    return ALLTOALL.selected_by if needs_dispatcher else {}


def needs_fp64(values: Mapping[str, Any]) -> bool:
    """Return whether a check of these values computes in fp64."""
    return bool(values.get("fp8")) or _sends_fp8(values)


def _sends_fp8(values: Mapping[str, Any]) -> bool:
    return any(values.get(dest) == TRANSPORT.key for dest in TRANSPORT_FLAGS)


def is_method_note(note: str) -> bool:
    """Whether a note describes the method of the check, as opposed to a change."""
    return note == FP8_NOTE or note.startswith(_TRANSPORT_NOTE.split("(")[0])


def comparable_moment_dtypes(s: Settings, notes: list[str]) -> dict[str, Any]:
    """Return fp16 for those formats of the optimizer's moments whose rounding is visible in the weights."""
    coarse = [
        dest
        for dest in ("exp_avg_dtype", "exp_avg_sq_dtype")
        if s.use_precision_aware_optimizer and s.values[dest] in ("bf16", "fp8")
    ]
    if coarse:
        notes.append(f"{', '.join(s.shown(dest) for dest in coarse)}: fp16, whose rounding is below the tolerance")
    return dict.fromkeys(coarse, "fp16")
