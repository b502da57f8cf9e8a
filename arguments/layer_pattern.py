"""Which decoder layers are MoE layers, and which have linear attention, a window, or one sublayer only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arguments.mechanisms import sublayers
from arguments.mechanisms.sublayers import BY_LETTER, VARIANT, SublayerDeclaration, attention_of, variant_of
from arguments.mtp import DEPTH, mtp_letters

if TYPE_CHECKING:
    from arguments.model import ModelArgs

MAMBA, ATTENTION = sublayers.MAMBA.letter, sublayers.SOFTMAX_ATTENTION.letter
MLP, MOE = sublayers.MLP.letter, sublayers.EXPERTS.letter
DELTA_NET, SPARSE, LATENT = (
    sublayers.GATED_DELTA_NET.letter,
    sublayers.SPARSE_ATTENTION.letter,
    sublayers.LATENT_ATTENTION.letter,
)
"""Letters of --hybrid-layer-pattern: gated DeltaNet, and latent attention with and without an indexer."""
STAGE = "|"
"""What separates pipeline stages there."""
OVERLAPPING_RATIO = 4
"""The tokens of a compressed key whose windows overlap, and among which an indexer selects, as in Megatron-Core."""


def moe_layer_pattern(
    num_layers: int, num_experts: int | None, moe_layer_freq: int | Sequence[int]
) -> tuple[bool, ...]:
    """Return for every decoder layer, first to last, whether it is an MoE layer.

    An integer N of --moe-layer-freq makes the layers 0, N, 2N, ... MoE layers; a list gives one entry (0 or 1) per
    layer. Without experts every layer is dense.

    Raises:
        ValueError: if the list has not one entry per layer, or entries other than 0 and 1.
    """
    if not num_experts:
        return (False,) * num_layers
    if isinstance(moe_layer_freq, int):
        if moe_layer_freq < 1:
            raise ValueError(f"--moe-layer-freq {moe_layer_freq}: an integer frequency must be at least 1")
        return tuple(layer % moe_layer_freq == 0 for layer in range(num_layers))
    entries = tuple(moe_layer_freq)
    if len(entries) != num_layers:
        raise ValueError(
            f"--moe-layer-freq lists {len(entries)} layers, but --num-layers is {num_layers}; one entry per layer is "
            "needed"
        )
    if any(entry not in (0, 1) for entry in entries):
        raise ValueError(f"--moe-layer-freq {list(entries)}: every entry must be 0 (dense) or 1 (MoE)")
    return tuple(bool(entry) for entry in entries)


def recorded_moe_layers(record: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return `moe_layer_pattern` of recorded flags, by destination; numbers may be text, and flags may be missing.

    Raises:
        TypeError, ValueError: if they are damaged.
    """
    freq = record.get("moe_layer_freq") or 1
    num_layers, num_experts = int(record["num_layers"]), int(record.get("num_experts") or 0)
    return moe_layer_pattern(num_layers, num_experts, freq if isinstance(freq, list | tuple) else int(freq))


def linear_layer_pattern(
    num_layers: int, variant: SublayerDeclaration, linear_attention_freq: int | Sequence[int] | None
) -> tuple[bool, ...]:
    """Return for every decoder layer whether it has linear attention; `variant` is the attention variant.

    An integer N of --linear-attention-freq leaves every N-th layer its softmax attention; a list is per layer.
    """
    if not variant.in_some_layers or linear_attention_freq is None:
        return (False,) * num_layers
    if isinstance(linear_attention_freq, int):
        return tuple((layer + 1) % linear_attention_freq != 0 for layer in range(num_layers))
    return tuple(bool(entry) for entry in linear_attention_freq)


def is_linear(model: ModelArgs, number: int) -> bool:
    """Whether a layer (counted from 0; those of multi-token prediction copy the last one) has linear attention."""
    if letter := layer_letter(model, number):
        return letter in BY_LETTER and BY_LETTER[letter].in_some_layers
    pattern = linear_layer_pattern(model.num_layers, variant_of(model), model.linear_attention_freq)
    return pattern[min(number, model.num_layers - 1)]


def recorded_linear_layers(record: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return `linear_layer_pattern` of recorded flags, by destination."""
    return linear_layer_pattern(num_layers, variant_of(record), record.get("linear_attention_freq"))


def mixing_sublayer(model: ModelArgs, number: int) -> SublayerDeclaration | None:
    """Return the sublayer that mixes positions in a layer (from 0); None if there is none."""
    if letter := layer_letter(model, number):
        return None if letter in (MLP, MOE) else BY_LETTER.get(letter)
    return variant_of(model) if is_linear(model, number) else attention_of(model)


def compress_ratio(model: ModelArgs, number: int) -> int:
    """Return the tokens of a compressed key of a layer (from 0) with compressed attention."""
    assert isinstance(model.csa_compress_ratios, list)
    return model.csa_compress_ratios[min(number, len(model.csa_compress_ratios) - 1)]


def hybrid_letters(pattern: str) -> str:
    """Return one letter per decoder layer of a --hybrid-layer-pattern."""
    return pattern.partition(DEPTH)[0].replace(STAGE, "")


def all_letters(pattern: str) -> str:
    """Return the letters of the decoder's layers in a --hybrid-layer-pattern, then those of a depth."""
    return hybrid_letters(pattern) + mtp_letters(pattern)


def letter_flags(pattern: str, position_embedding_type: object) -> dict[str, object]:
    """Return the flags, by destination, that select in transformer layers what letters of a hybrid pattern stand for.

    Latent attention of a hybrid model rotates by --rope-type whatever the position embedding of the others is.
    """
    letters, flags = all_letters(pattern), dict[str, object]()
    selected = [BY_LETTER[letter] for letter in letters if letter in BY_LETTER]
    if any(each.reads_latents for each in selected):
        flags["multi_latent_attention"] = True
        if position_embedding_type == "none":
            flags["position_embedding_type"] = "rope"
    variants = sorted((each for each in selected if each.variant), key=lambda each: each.in_some_layers)
    for each in variants[:1]:  # of several, one that all transformer layers would have: see `model_of_layer`
        flags[VARIANT] = each.variant
        if each.in_some_layers:
            flags["linear_attention_freq"] = [int(letter == each.letter) for letter in hybrid_letters(pattern)]
    return flags


def letters_that_select(dest: str, values: Sequence[object]) -> str:
    """Return the letters of a hybrid pattern that stand for a flag with one of some values; "" if none does."""
    found = (each.lettered for each in BY_LETTER.values() if letter_flags(each.letter, None).get(dest) in values)
    return " or ".join(found)


def mixing_sublayers(flags: Any) -> frozenset[SublayerDeclaration]:
    """Return the kinds of sublayers that mix positions in a model, also in its depths of multi-token prediction.

    Args:
        flags: has the fields of ModelArgs.
    """
    if pattern := flags.hybrid_layer_pattern:
        letters = set(all_letters(pattern)) - {MLP, MOE}
        return frozenset(BY_LETTER[letter] for letter in letters if letter in BY_LETTER)
    variant, freq = variant_of(flags), flags.linear_attention_freq
    if not variant.in_some_layers:
        return frozenset({attention_of(flags)})
    return frozenset({variant} if isinstance(freq, list) and all(freq) else {variant, attention_of(flags)})


def variants_of(flags: Any) -> frozenset[SublayerDeclaration]:
    """Return `variant_of`, and the sublayers that letters of a hybrid pattern select as its other values would.

    Args:
        flags: has the fields of ModelArgs.
    """
    variant, lettered = variant_of(flags), mixing_sublayers(flags) if flags.hybrid_layer_pattern else frozenset()
    others = [each for each in lettered if each.variant] if variant in lettered else []
    return frozenset({variant, *others})


def mention_delta_rule(flags: Any) -> str:
    """Return what asks for layers with the delta rule, as a template of Settings.violation; "" without such layers."""
    if variant_of(flags).has_delta_rule:
        return f"{{{VARIANT}}}"
    return next((each.mention_of_letter for each in variants_of(flags) if each.has_delta_rule), "")


def layer_letter(model: ModelArgs, number: int) -> str:
    """Return the letter of a layer, counted from 0, in --hybrid-layer-pattern; "" for one of two sublayers.

    The layers of multi-token prediction follow those of the decoder, depth by depth.
    """
    pattern = model.hybrid_layer_pattern or ""
    letters = hybrid_letters(pattern)
    if number < len(letters):
        return letters[number]
    inside = mtp_letters(pattern) or letters[-1:]
    return inside[(number - len(letters)) % len(inside)] if inside else ""


def has_attention(model: ModelArgs, number: int) -> bool:
    """Whether a layer has softmax or linear attention."""
    return layer_letter(model, number) not in (MAMBA, MLP, MOE)


def has_mlp(model: ModelArgs, number: int) -> bool:
    """Whether a layer has a feed-forward sublayer, dense or of experts."""
    return layer_letter(model, number) in ("", MLP, MOE)


def typical_layers(model: ModelArgs, pattern: Sequence[bool], is_moe: bool) -> tuple[int, ...]:
    """Return a layer of every letter that is, or is not, an MoE layer; layer 0 unless the model is hybrid.

    `pattern` is of the decoder, whose layers those of a multi-token-prediction depth follow.
    """
    hybrid = model.hybrid_layer_pattern or ""
    letters, kinds = all_letters(hybrid), [*pattern, *mtp_layer_pattern(pattern, hybrid)]
    first = {letter: letters.index(letter) for letter in letters}
    return tuple(number for number in first.values() if kinds[number] == is_moe) or (0,)


def uses_window(model: ModelArgs, layer_number: int) -> bool:
    """Whether this layer (counted from 1) attends to a window only: --window-size, --window-attn-skip-freq."""
    return model.window_size is not None and _is_local(model, layer_number)


def left_window(model: ModelArgs, layer_number: int) -> int | None:
    """Return how many positions before its own this layer (counted from 1) attends to, -1 or None for all."""
    return model.window_size[0] if model.window_size is not None and uses_window(model, layer_number) else None


def model_of_layer(model: ModelArgs, layer_number: int) -> ModelArgs:
    """Return the model with the attention of a layer (counted from 1).

    Those with a window may have other flags, and those of a hybrid pattern with D another variant.
    """
    if variant_of(model).selects_keys and (letter := layer_letter(model, layer_number - 1)) not in ("", SPARSE):
        model = replace(model, experimental_attention_variant=BY_LETTER[letter].variant)
    groups, softmax = model.window_num_query_groups, model.window_softmax_type
    if (groups is None and softmax is None) or not uses_window(model, layer_number):
        return model
    return replace(
        model,
        num_query_groups=model.num_query_groups if groups is None else groups,
        softmax_type=softmax or model.softmax_type,
    )


def uses_chunks(model: ModelArgs, layer_number: int) -> bool:
    """Whether this layer (counted from 1) attends to a chunk only: --attention-chunk-size, --window-attn-skip-freq."""
    return model.attention_chunk_size is not None and _is_local(model, layer_number)


def _is_local(model: ModelArgs, layer_number: int) -> bool:
    """Whether --window-attn-skip-freq leaves this layer its window or its chunks.

    An integer frequency N makes every N-th layer a full one; a list holds one flag per layer, the last one for
    multi-token prediction too.
    """
    freq = model.window_attn_skip_freq
    if freq is None:
        return True
    if isinstance(freq, int):
        return layer_number % freq != 0
    return bool(freq[min(layer_number, len(freq)) - 1])


def mtp_is_moe(pattern: Sequence[bool]) -> bool:
    """Return whether the multi-token-prediction layers are MoE layers, as the last decoder layer."""
    return bool(pattern) and pattern[-1]


def mtp_layer_pattern(pattern: Sequence[bool], hybrid_pattern: str | None = None) -> tuple[bool, ...]:
    """Return for every layer of a multi-token-prediction depth whether it is an MoE layer.

    Args:
        pattern: of the decoder, whose last layer the only layer of a depth copies.
        hybrid_pattern: --hybrid-layer-pattern, which lists the layers of a depth.
    """
    return tuple(letter == MOE for letter in mtp_letters(hybrid_pattern or "")) or (mtp_is_moe(pattern),)


def mtp_layers(model: ModelArgs, pattern: Sequence[bool]) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return the layers of every depth, each as its number, which continues the decoder's, and whether it is MoE."""
    kinds = mtp_layer_pattern(pattern, model.hybrid_layer_pattern)
    firsts = range(model.num_layers, model.num_layers + model.num_mtp_depths * len(kinds), len(kinds))
    return tuple(tuple(enumerate(kinds, start=first)) for first in firsts)
