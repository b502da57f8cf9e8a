"""What of fp8 and fp4 a proof can keep: recipes whose numbers one process can compute, for the mapping in question.

moe/balancing.py lists what depends on the mapping. emulate.py cuts every linear as the ranks do, so that scales of a rank's own tensors
and blocks that begin with a rank's part are those of the ranks. What is left are the rows of an expert: where they come from several
microbatches, or in another order, no single pass of one process has them together. There, scales per tensor are replaced by delayed
ones, which are the same on all ranks, and blocks along the rows (weights' gradients) are left out. The wiring - what is quantised, where,
in which order - is that of the user's recipe in any case.

Rounding to 8 bits turns a difference in the last digit into one of several per cent, now and then. So these proofs compute in fp64,
router included, and the weights stay as they are: a step as small as fp32 allows for would turn roundings, too. Steps of the optimizer are
proven by a further case without 8 bits. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from types import MappingProxyType

from arguments.settings import Settings
from moe_trainer.proof.mapping import Mapping

HOW = "--fp8-format: proven in fp64 and with weights that stay, since a last digit can turn a rounding to 8 bits"
STILL = 1e-12
"""Learning rate at which a weight in fp32 does not move."""

KEPT = (
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_output_proj", "moe_router_padding_for_quantization", "fp8_param_gather",
)  # fmt: skip
ROWS = ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
_ROWS_HOW = "rows in 8 bits ({}): proven in fp64 and with weights that stay, since a last digit can turn a rounding to 8 bits"
_SHARDED = ("use_torch_fsdp2", "use_megatron_fsdp")
_BLOCKS = ("blockwise", "mxfp8")
NONE = MappingProxyType(dict.fromkeys((*KEPT, "moe_router_padding_for_fp8", "reuse_grad_buf_for_mxfp8_param_ag", "te_precision_config_file")))


def provable(values: MappingOf[str, object], mapping: Mapping, num_layers: int) -> tuple[dict[str, object], list[str]]:
    """What to set beside `values` (a command line by destination) so that fp8 can be proven, and sentences about what is changed.

    Returns: values that replace the given ones; without fp8 none. Where it cannot be kept its flags are None.
    """
    rows = [dest for dest in ROWS if values.get(dest) == "mxfp8"]
    if rows and (values.get("fp4") or not values.get("fp8") or any(values.get(dest) for dest in _SHARDED)):
        flags, without = ", ".join(f"--{dest.replace('_', '-')}" for dest in rows), dict.fromkeys(rows)
        others, notes = provable({**values, **without}, mapping, num_layers)
        if values.get("fp4") or any(values.get(dest) for dest in _SHARDED):
            return {**others, **without}, [*notes, f"{flags}: left out; rows in 8 bits are proven in fp64, which {'--fp4-format' if values.get('fp4') else 'full sharding'} does not allow"]
        return {**others, "lr": STILL, "decoupled_lr": None, "moe_router_dtype": "fp64"}, [*notes, _ROWS_HOW.format(flags)]
    if values.get("fp4"):
        return {**NONE, "fp4": None, "fp4_recipe": None}, ["--fp4-format: left out; gradients are rounded at random, on every rank otherwise"]
    if not values.get("fp8"):
        return dict(NONE), []
    if any(values.get(dest) for dest in _SHARDED):
        return dict(NONE), ["--fp8-format: left out; its proof computes in fp64, and fully sharded parameters are fp32"]
    notes = [HOW]
    if values.get("te_precision_config_file"):
        notes.append("--te-precision-config-file: left out; its names are those of the run's layers, so all have the recipe of the flags")
    found: dict[str, object] = {"lr": STILL, "decoupled_lr": None, "te_precision_config_file": None, "reuse_grad_buf_for_mxfp8_param_ag": None}
    recipe = str(values.get("fp8_recipe") or "delayed")
    if values.get("num_experts") or values.get("finermoe_output_granularity"):  # whose number of experts follows
        found["moe_router_dtype"] = "fp64"
        recipe = _of_experts(found, values, recipe, mapping, notes)
    found["fp8_recipe"] = recipe
    ends = [dest for dest in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16") if values.get("first_last_layers_bf16")]
    found |= {dest: min(int(values.get(dest) if values.get(dest) is not None else 1), max(num_layers - 1, 0) // 2) for dest in ends}
    return found, notes


def _of_experts(found: dict[str, object], values: MappingOf[str, object], recipe: str, mapping: Mapping, notes: list[str]) -> str:
    """Settle what experts can have; returns the recipe."""
    whole = mapping.etp * mapping.ep == mapping.tp * mapping.cp
    if values.get("moe_router_padding_for_quantization") and mapping.tp * mapping.cp > 1:
        found |= {"moe_router_padding_for_quantization": None, "moe_router_padding_for_fp8": None}
        notes.append("--moe-router-padding-for-quantization: left out; every rank pads what its own tokens choose")
    if recipe == "tensorwise" and not whole:
        notes.append("--fp8-recipe tensorwise: delayed instead; an expert's rows, whose maximum is taken, come from several microbatches")
        return "delayed"
    if recipe in _BLOCKS and not (whole and mapping.cp == 1) and values.get("fp8_wgrad") is not False:
        found["fp8_wgrad"] = False
        notes.append("--no-fp8-wgrad: in the small command line; blocks along an expert's rows lie over several microbatches or shards")
    return recipe


def of_reference(values: MappingOf[str, object]) -> dict[str, object]:
    """What one process needs beside fp8's flags: padded and rounded rows belong to a dispatcher, although there is nothing to dispatch."""
    needs = values.get("moe_router_padding_for_quantization") or any(values.get(dest) == "mxfp8" for dest in ROWS)
    return {"moe_token_dispatcher_type": "alltoall"} if needs else {}


def is_wide(values: MappingOf[str, object]) -> bool:
    """Whether a proof of these values computes in fp64."""
    return bool(values.get("fp8")) or any(values.get(dest) == "mxfp8" for dest in ROWS)


def is_how(note: str) -> bool:
    """Whether a sentence tells how something is proven, and not that it is changed."""
    return note == HOW or note.startswith(_ROWS_HOW.split("(")[0])


def moments(s: Settings, notes: list[str]) -> dict[str, object]:
    """Formats of the optimizer's moments: fp16 in place of those in which the rounding of a single element shows in the weights."""
    coarse = [dest for dest in ("exp_avg_dtype", "exp_avg_sq_dtype") if s.use_precision_aware_optimizer and s.values[dest] in ("bf16", "fp8")]
    if coarse:
        notes.append(f"{', '.join(s.shown(dest) for dest in coarse)}: fp16, whose rounding is too fine to look like a mistake")
    return dict.fromkeys(coarse, "fp16")
