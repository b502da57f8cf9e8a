"""Kinds of sublayers: one declaration each, of everything that other code asks of them.

Letters of --hybrid-layer-pattern select them, or --experimental-attention-variant and --multi-latent-attention. The
functions of this module and of arguments/layer_pattern.py are the only ones that read these flags; all others ask the
declaration that they return. Its class is found by `built_by` (moe_trainer/model/block.py).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from arguments.mechanisms.sublayer_kinds.compressed_attention import COMPRESSED_ATTENTION
from arguments.mechanisms.sublayer_kinds.declaration import VARIANT, SublayerDeclaration
from arguments.mechanisms.sublayer_kinds.feed_forward import EXPERTS, MLP
from arguments.mechanisms.sublayer_kinds.gated_delta_net import GATED_DELTA_NET
from arguments.mechanisms.sublayer_kinds.kimi_delta_attention import KIMI_DELTA_ATTENTION
from arguments.mechanisms.sublayer_kinds.latent_attention import LATENT_ATTENTION
from arguments.mechanisms.sublayer_kinds.mamba import MAMBA
from arguments.mechanisms.sublayer_kinds.short_convolution import SHORT_CONVOLUTION
from arguments.mechanisms.sublayer_kinds.softmax_attention import SOFTMAX_ATTENTION
from arguments.mechanisms.sublayer_kinds.sparse_attention import SPARSE_ATTENTION

SUBLAYERS: tuple[SublayerDeclaration, ...] = (
    MAMBA,
    GATED_DELTA_NET,
    SOFTMAX_ATTENTION,
    SPARSE_ATTENTION,
    COMPRESSED_ATTENTION,
    LATENT_ATTENTION,
    KIMI_DELTA_ATTENTION,
    SHORT_CONVOLUTION,
    MLP,
    EXPERTS,
)
BY_LETTER = MappingProxyType({each.letter: each for each in SUBLAYERS if each.letter})
LATENT_LETTERS = tuple(letter for letter, each in BY_LETTER.items() if each.reads_latents)
VARIANT_LETTERS = MappingProxyType({letter: each.variant for letter, each in BY_LETTER.items() if each.variant})
UNBUILT_VARIANTS = tuple(value for each in SUBLAYERS for value in each.unbuilt_variants)
OLD_VARIANTS = MappingProxyType({(VARIANT, old): str(each.variant) for each in SUBLAYERS for old in each.old_variants})
"""(destination, old value) -> its new name."""

_NAMED = tuple(each for each in SUBLAYERS if each.variant is not None)
_BY_VARIANT = MappingProxyType({each.variant: each for each in _NAMED})
_UPSTREAM = tuple(value for each in _NAMED if each.is_upstream for value in (str(each.variant), *each.unbuilt_variants))
_OTHERS = tuple(str(each.variant) for each in _NAMED if not each.is_upstream)
VARIANTS = (*_UPSTREAM, *tuple(old for _, old in OLD_VARIANTS), *_OTHERS)
"""Values of --experimental-attention-variant, in Megatron-LM's order."""
_UNBUILT = MappingProxyType({value: each for each in SUBLAYERS for value in each.unbuilt_variants})


def list_letters() -> str:
    """Return the letters of --hybrid-layer-pattern, with what they stand for."""
    *first, last = (each.lettered for each in BY_LETTER.values())
    return f"{', '.join(first)} or {last}"


def find_variant(value: object) -> SublayerDeclaration:
    """Return the sublayer of a value of --experimental-attention-variant.

    Softmax attention stands for no value, and for one that is not built.
    """
    return _BY_VARIANT.get(value, SOFTMAX_ATTENTION) if isinstance(value, str) else SOFTMAX_ATTENTION


def _value(flags: Any, dest: str) -> Any:
    """Return the value of a flag of ModelArgs, or of a record, which may lack it."""
    return flags.get(dest) if isinstance(flags, Mapping) else getattr(flags, dest)


def variant_of(flags: Any) -> SublayerDeclaration:
    """Return the sublayer that --experimental-attention-variant selects in all layers, or in some.

    Args:
        flags: has the fields of ModelArgs, or is a record of flags by destination.
    """
    return find_variant(_value(flags, VARIANT))


def relative_of(flags: Any) -> SublayerDeclaration:
    """Return `variant_of`, or the sublayer whose rules hold for a variant that is not built."""
    return _UNBUILT.get(getattr(flags, VARIANT)) or variant_of(flags)


def attention_of(model: Any) -> SublayerDeclaration:
    """Return the attention of the layers in which no other sublayer mixes positions."""
    variant = variant_of(model)
    if variant.variant is None or variant.in_some_layers:
        return LATENT_ATTENTION if model.multi_latent_attention else SOFTMAX_ATTENTION
    return variant


def always_rotates(flags: Any) -> bool:
    """Whether latent attention rotates whatever --position-embedding-type is, as Megatron-LM's does.

    Args:
        flags: has the fields of ModelArgs, or is a record of flags by destination.
    """
    variant = variant_of(flags)
    return bool(_value(flags, "multi_latent_attention")) and variant.is_upstream and not variant.compresses_keys


def needs_variant(has_trait: Callable[[SublayerDeclaration], bool]) -> str:
    """Return the condition that a flag acts with the variants that have a trait, as `flag(needs=...)` takes it."""
    return " or ".join(f"{VARIANT}={value}" for value, each in _BY_VARIANT.items() if has_trait(each))
