"""Checkpoint names that depend on Megatron-Core's layer specs: where norms are stored, and which modules have a state.

Transformer Engine's modules fuse a norm into the following linear and store its weight there. Megatron's local modules
do not, but their checkpoints name the two norms of a layer as if they did (not under MLA). So the names follow
--transformer-impl, whichever modules compute here:

| norm | local | local, MLA | TransformerEngine |
|---|---|---|---|
| input_layernorm | in linear_qkv | alone | in linear_qkv, in_proj of a gated DeltaNet; alone under MLA |
| pre_mlp_layernorm | in mlp.linear_fc1 | alone | in mlp.linear_fc1 of a dense layer, alone before experts |
| MLA's q_layernorm, kv_layernorm | | alone | in linear_q_up_proj, linear_kv_up_proj; alone with dsa, dsv4_hybrid |
| q_layernorm, k_layernorm of heads, all others | alone | alone | alone |

Transformer Engine's norms and attention have an `_extra_state` each, as linears have in both: a separate object,
empty without TransformerEngine's scales, which Megatron's loader requires.

Experimental attention variants and hybrid models have Transformer Engine's spec only. A hybrid model's layer has one
norm: that of a Mamba mixer is in its in_proj, the others are as above. An MTP layer is like the last decoder layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from arguments import layer_pattern
from arguments.layer_pattern import all_letters, recorded_linear_layers, recorded_moe_layers
from arguments.mechanisms.implementation_kinds.declaration import IMPLEMENTATION
from arguments.mechanisms.implementations import find_implementation
from arguments.mechanisms.sublayers import BY_LETTER, VARIANT, variant_of

NormPrefixes = tuple[str, str]
"""Prefix of a norm's names inside a layer, and the one if a linear has it fused."""

INPUT: NormPrefixes = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
IN_PROJ: NormPrefixes = ("input_layernorm.", "self_attention.in_proj.layer_norm_")
MIXER: NormPrefixes = ("norm.", "mixer.in_proj.layer_norm_")
MLP: NormPrefixes = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
LATENT: tuple[NormPrefixes, ...] = (
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
FUSED: tuple[NormPrefixes, ...] = (INPUT, IN_PROJ, MIXER, MLP, *LATENT)


def has_te_names(record: Mapping[str, Any]) -> bool:
    """Return whether the layers of a model with these flags have Transformer Engine's names."""
    return (
        find_implementation(record.get(IMPLEMENTATION)).fuses_norms
        or record.get(VARIANT) is not None
        or bool(record.get("hybrid_layer_pattern"))
    )


def fused_norms(record: Mapping[str, Any], is_moe: bool, linear: bool = False) -> tuple[NormPrefixes, ...]:
    """Return the norms of a layer that have fused names; `is_moe`: MoE layer, `linear`: gated DeltaNet."""
    latent = bool(record.get("multi_latent_attention"))
    if not has_te_names(record):
        return () if latent else (INPUT, MLP)
    if linear:
        attention: tuple[NormPrefixes, ...] = (IN_PROJ,)
    elif latent:
        attention = () if variant_of(record).is_megatron_attention else LATENT
    else:
        attention = (INPUT,)
    return attention if is_moe else (*attention, MLP)


def norms_of_layers(record: Mapping[str, Any]) -> tuple[tuple[NormPrefixes, ...], ...]:
    """Return `fused_norms` of every decoder layer, and then of the layers of a multi-token-prediction depth.

    Raises:
        ValueError: if a list of layers does not have one entry per layer.
    """
    if record.get("hybrid_layer_pattern"):
        by_letter: dict[str, tuple[NormPrefixes, ...]] = {
            layer_pattern.MAMBA: (MIXER,),
            layer_pattern.DELTA_NET: (IN_PROJ,),
            layer_pattern.ATTENTION: (INPUT,),
            layer_pattern.LATENT: LATENT,
            layer_pattern.MLP: (MLP,),
        }
        return tuple(by_letter.get(letter, ()) for letter in all_letters(record["hybrid_layer_pattern"]))
    routed = recorded_moe_layers(record)
    linear = recorded_linear_layers(record, len(routed))
    kinds = [*zip(routed, linear, strict=True)]
    return tuple(fused_norms(record, *each) for each in (*kinds, *kinds[-1:]))


def te_modules_of_layers(record: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return which modules of every layer, as `norms_of_layers` has them, have an `_extra_state` besides linears.

    They are those of Transformer Engine; sparse and compressed attention are Megatron-Core's. One entry is of all
    layers.
    """
    if not has_te_names(record):
        return ((),)
    pattern = record.get("hybrid_layer_pattern") or ""
    attention = (
        [BY_LETTER.get(letter) for letter in all_letters(pattern)]
        if pattern  # Megatron-LM's hybrid models record no variant
        else [variant_of(record)]
    )
    return tuple(("norm",) if each and each.is_megatron_attention else ("norm", "attention") for each in attention)


def te_extra_states(stored: str, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield the `_extra_state` that belongs to a stored weight; `parts` are of its layer in `te_modules_of_layers`.

    That of a norm follows its weight, that of attention the weight of the following linear. The gated norm of a Mamba
    mixer is not Transformer Engine's.
    """
    if "norm" in parts and stored.endswith("norm.weight") and not stored.endswith("mixer.norm.weight"):
        yield stored.removesuffix("weight") + "_extra_state"
    elif "attention" in parts and stored.endswith("self_attention.linear_proj.weight"):
        yield stored.removesuffix("linear_proj.weight") + "core_attention._extra_state"
