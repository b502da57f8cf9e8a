"""The mapping between Hugging Face and native tensors: the rules of a family, expanded for a model.

`tensor_mappings` expands the rules for the layers, experts and multi-token-prediction depths that the flags describe.
Shapes, missing and unexpected tensors follow from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from arguments.container import OPTIONS
from arguments.layer_pattern import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    OVERLAPPING_RATIO,
    hybrid_letters,
    mtp_is_moe,
)
from arguments.mechanisms.selections import TABLES, output_slices
from arguments.mechanisms.sublayers import variant_of
from arguments.mtp import num_mtp_depths
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.hybrid import state_space_heads
from moe_trainer.checkpoint.hf.converters.layer_patterns import expert_layers, linear_layers, sliding_layers
from moe_trainer.checkpoint.hf.rules import Names, Rule
from moe_trainer.checkpoint.hf.transforms import HALVES, SAME, TRANSPOSED, ModelSizes, Transform

ShapeOf = Callable[[str], tuple[int, ...] | None]
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Native tensors whose last rows may be padding."""


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, or slice `index` of `stack` along its first dimension; `shape` is that of the slice."""

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    stack: int = 0


@dataclass(frozen=True)
class TensorMapping:
    """A native tensor and its sources.

    Attributes:
        siblings: all native tensors made of the same sources, if several.
        origin: file and line of its rule.
    """

    native: str
    shape: tuple[int, ...]
    sources: tuple[HFTensor, ...]
    transform: Transform
    siblings: tuple[str, ...] = ()
    origin: str = field(default="", compare=False)

    def join(self, parts: Sequence[Tensor], sizes: ModelSizes) -> Tensor:
        joined = self.transform.to_native(parts, sizes)
        return joined[self.siblings.index(self.native)] if self.siblings else joined

    @property
    def is_expert_table(self) -> bool:
        """Whether it holds the experts of every token id."""
        return self.native.rpartition(".")[2] in TABLES

    @property
    def fixed_dtypes(self) -> tuple[torch.dtype, torch.dtype] | None:
        """The native and the Hugging Face dtype of what is no weight: expert biases, tables of hash routing."""
        if self.is_expert_table:
            return torch.int32, torch.int64
        return (torch.float32, torch.float32) if self.native.endswith("expert_bias") else None


def model_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the layout symbols for these flags."""
    heads, hidden = flags["num_attention_heads"], flags["hidden_size"]
    groups = flags.get("num_query_groups") if flags.get("group_query_attention") else heads
    head = flags.get("kv_channels") or hidden // heads
    value = flags.get("value_channels") or head
    ffn = flags.get("ffn_hidden_size") or 0
    expert = flags.get("moe_ffn_hidden_size") or ffn
    shared = flags.get("moe_shared_expert_intermediate_size") or 0
    sizes = {
        "H": hidden,
        "N": heads,
        "M": 2 * hidden,
        "V": flags["rows"],
        "D": head,
        "DV": value,
        "gated": int(bool(flags.get("attention_output_gate"))),
        "Q": heads * head,
        "2Q": 2 * heads * head,
        "K": groups * head,
        "KV": groups * value,
        "QV": heads * value,
        "F": ffn,
        "2F": 2 * ffn,
        "E": expert,
        "2E": 2 * expert,
        "S": shared,
        "2S": 2 * shared,
        "X": flags.get("num_experts") or 0,
        "W": hidden // output_slices(flags),
        "L": flags.get("moe_latent_size") or hidden,
    }
    for add in (_linear_attention_sizes, _mamba_sizes, _latent_attention_sizes, _compressed_attention_sizes):
        sizes |= add(flags)
    if flags.get("dsa_indexer_n_heads"):
        heads, width = flags["dsa_indexer_n_heads"], flags["dsa_indexer_head_dim"]
        sizes |= {"IH": heads, "ID": width, "IQ": heads * width}
    return sizes


def _linear_attention_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    variant = variant_of(flags)
    if variant.is_convolution:
        return {"3H": 3 * flags["hidden_size"], "LW": flags["linear_conv_kernel_dim"]}
    if not variant.has_delta_rule:
        return {}
    keys, values = flags["linear_num_key_heads"], flags["linear_num_value_heads"]
    key, value = flags["linear_key_head_dim"], flags["linear_value_head_dim"]
    return {
        "LK": keys,
        "LV": values,
        "LKD": key,
        "LVD": value,
        "LO": values * value,
        "LZ": 2 * (keys * key + values * value),
        "LB": 2 * values,
        "LC": 2 * keys * key + values * value,
        "LW": flags["linear_conv_kernel_dim"],
        "LQ": keys * key,
        "LD": values * key,
        "LR": flags.get(variant.gate_rank) or 0,
    }


def _mamba_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    if MAMBA not in hybrid_letters(flags.get("hybrid_layer_pattern") or ""):
        return {}
    inner, states, heads = state_space_sizes(flags)
    return {
        "MH": heads,
        "MI": inner,
        "MG": states,
        "MC": inner + 2 * states,
        "MP": 2 * inner + 2 * states + heads,
    }


def _latent_attention_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    if not flags.get("multi_latent_attention"):
        return {}
    heads = flags["num_attention_heads"]
    nope, rope, value, rank = (
        flags.get(dest, OPTIONS[dest].default)
        for dest in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "kv_lora_rank")
    )
    return {
        "A": flags.get("q_lora_rank") or 0,
        "C": rank,
        "R": rope,
        "T": rank + rope,
        "P": heads * (nope + rope),
        "U": heads * (nope + value),
        "O": heads * value,
    }


def _compressed_attention_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of DeepSeek-V4's attention, hyper-connections and tables of hash routing."""
    if not variant_of(flags).compresses_keys:
        return {}
    heads, width = flags["num_attention_heads"], flags.get("v_head_dim", OPTIONS["v_head_dim"].default)
    streams = flags["num_residual_streams"]
    return {
        "VD": width,
        "OG": heads * width // flags["o_groups"],
        "OR": flags["o_groups"] * flags["o_lora_rank"],
        "TK": flags["moe_router_topk"],
        "ST": streams,
        "SM": streams * (streams + 2),
        "SH": streams * flags["hidden_size"],
    }


def state_space_sizes(flags: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the channels of all heads and those of all states, and the heads, of a Mamba-2 layer."""
    heads = state_space_heads(flags)
    return heads * flags["mamba_head_dim"], flags["mamba_num_groups"] * flags["mamba_state_dim"], heads


def _layer_flags(flags: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return the flags with what lists of layers say of one, counted from 0."""
    ratios = flags.get("csa_compress_ratios")
    own = {"moe_n_hash_layers": layer < (flags.get("moe_n_hash_layers") or 0), **_window_flags(flags, layer)}
    if ratios is None:
        return {**flags, **own}
    has_indexer = ratios[layer] == OVERLAPPING_RATIO and not flags.get("csa_dense_mode")
    topk = flags.get("dsa_indexer_topk") if has_indexer else None
    return {**flags, **own, "csa_compress_ratios": ratios[layer], "dsa_indexer_topk": topk}


def _window_flags(flags: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the flags of layers with a window as one layer, counted from 0, has them."""
    groups, softmax = flags.get("window_num_query_groups"), flags.get("window_softmax_type")
    if not groups and not softmax:
        return {}
    if not flags.get("window_size") or not sliding_layers(flags)[layer]:
        return {"window_num_query_groups": None, "window_softmax_type": None}
    return {"num_query_groups": groups or flags.get("num_query_groups")}


def _layer_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of layout symbols that differ between layers, from the flags of one."""
    if flags.get("window_num_query_groups"):
        sizes = model_sizes(flags)
        return {"K": sizes["K"], "KV": sizes["KV"]}
    ratio = flags.get("csa_compress_ratios")
    if not ratio:
        return {}
    factor = 2 if ratio == OVERLAPPING_RATIO else 1
    return {"CR": ratio, "CW": factor * flags["v_head_dim"], "CI": 2 * (flags.get("dsa_indexer_head_dim") or 0)}


def tensor_mappings(names: Names, flags: Mapping[str, Any], shape_of: ShapeOf | None = None) -> list[TensorMapping]:
    """Return all tensors of the model that `flags` (and "rows", of the embedding) describe, in order.

    `shape_of` returns the shape of a Hugging Face tensor, () if unknown, and None if there is none: it chooses among
    spellings and orders. Without it the written ones are used.

    Raises:
        CheckpointError: naming the rule whose layout or transform does not fit this model.
    """
    sizes = model_sizes(flags)
    layers, depths = flags["num_layers"], num_mtp_depths(flags)
    last = {**flags, **_window_flags(flags, layers - 1)}  # which a layer of multi-token prediction copies
    of_depth = last, sizes | _layer_sizes(last)
    by_layer, mtp_rules = _layer_rules(names, flags)
    mappings = list(_expand(names.model, "", "", flags, sizes, shape_of))
    for layer, rules in enumerate(by_layer):
        prefix, own = names.layer_prefix.format(l=layer // names.native_layers), _layer_flags(flags, layer)
        mappings += _expand(rules, f"decoder.layers.{layer}.", prefix, own, sizes | _layer_sizes(own), shape_of)
    mappings += _expand(names.head, "", "", flags, sizes, shape_of)
    for depth in range(depths):
        depth_prefix, layer_prefix = (place.format(l=layers + depth, d=depth) for place in names.mtp_prefixes)
        mappings += _expand(names.mtp, f"mtp.layers.{depth}.", depth_prefix, flags, sizes, shape_of)
        mappings += _expand(mtp_rules, f"mtp.layers.{depth}.mtp_model_layer.", layer_prefix, *of_depth, shape_of)
    return mappings


def _layer_rules(names: Names, flags: Mapping[str, Any]) -> tuple[list[tuple[Rule, ...]], tuple[Rule, ...]]:
    """Return the rules of every decoder layer, and of the layer of a multi-token-prediction depth."""
    letters = hybrid_letters(flags.get("hybrid_layer_pattern") or "")
    if letters:
        sections = {MAMBA: names.mamba, ATTENTION: names.layer, MLP: names.dense, MOE: names.moe}
        return [sections[letter] for letter in letters], ()
    pattern = expert_layers(flags)
    mixing = [names.linear if is_linear else names.layer for is_linear in linear_layers(flags)]
    rules = [first + (names.moe if is_moe else names.dense) for first, is_moe in zip(mixing, pattern, strict=True)]
    return rules, mixing[-1] + (names.moe if mtp_is_moe(pattern) else names.dense)


def duplicated_tensors(names: Names, flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the Hugging Face names that repeat another tensor, with its name.

    The head repeats a tied embedding; a multi-token prediction depth may have a copy of both.
    """
    embedding, head = embedding_name(names), head_name(names)
    tied = not flags.get("untie_embeddings_and_output_weights")
    layers, depths = flags["num_layers"], num_mtp_depths(flags)
    originals = {head: embedding} if tied and head is not None else {}
    for depth in range(depths):
        prefix = names.mtp_prefixes[0].format(l=layers + depth, d=depth)
        for name, original in names.mtp_copies.items():
            originals[prefix + name] = originals.get(original, original)
    return originals


def embedding_name(names: Names) -> str:
    """Return the Hugging Face name of the embedding."""
    return _written_name(names.model, "embedding.word_embeddings.weight") or "model.embed_tokens.weight"


def head_name(names: Names) -> str | None:
    """Return the Hugging Face name of the output layer, None without a rule for it."""
    return _written_name(names.head, "output_layer.weight")


def _written_name(rules: Sequence[Rule], native: str) -> str | None:
    return next((rule.spellings[0].split()[0] for rule in rules if rule.native == (native,)), None)


def _expand(
    rules: Sequence[Rule],
    native_prefix: str,
    hf_prefix: str,
    flags: Mapping[str, Any],
    sizes: ModelSizes,
    shape_of: ShapeOf | None,
) -> Iterator[TensorMapping]:
    rules = [rule for rule in rules if rule.applies(flags)]
    is_turned = shape_of is not None and _are_turned(rules, hf_prefix, sizes, shape_of)
    for rule in rules:
        shapes: list[tuple[int, ...]] = []
        parts = _select_spelling(rule.spellings, hf_prefix, shape_of).split(",")
        for expert in range(sizes["X"]) if "{e}" in rule.native[0] else (None,):
            refs = tuple(_ref(part, hf_prefix, expert, sizes, rule, shape_of) for part in parts)
            # a stack holds both halves already
            transform = SAME if rule.transform is HALVES and len(refs) == 1 else rule.transform
            if rule.transform is TRANSPOSED and is_turned:
                refs, transform = tuple(replace(ref, shape=ref.shape[::-1]) for ref in refs), SAME
            if not shapes:  # equal for all experts
                joined = _joined_shapes(rule, transform, refs, sizes)
                shapes = [tuple(each.shape) for each in (joined if len(rule.native) > 1 else (joined,))]
            names = tuple(native_prefix + name.format(e=expert) for name in rule.native)
            for name, shape in zip(names, shapes, strict=True):
                yield TensorMapping(name, shape, refs, transform, names if len(names) > 1 else (), rule.origin)


def _are_turned(rules: Sequence[Rule], prefix: str, sizes: ModelSizes, shape_of: ShapeOf) -> bool:
    """Return whether the transposed matrices of a layer are stored as their transposes.

    Some releases of transformers save them so. A square one does not tell, so the others speak for it.
    """
    for rule in (rule for rule in rules if rule.transform is TRANSPOSED):
        expert = 0 if "{e}" in rule.native[0] else None
        ref = _ref(_select_spelling(rule.spellings, prefix, shape_of), prefix, expert, sizes, rule, shape_of)
        stored = shape_of(ref.name)
        if stored is not None and stored[-2:] == ref.shape[::-1] != ref.shape:
            return True
    return False


def _joined_shapes(rule: Rule, transform: Transform, refs: Sequence[HFTensor], sizes: ModelSizes) -> Any:
    """Transform tensors without storage."""
    try:
        return transform.to_native([torch.empty(ref.shape, device="meta") for ref in refs], sizes)
    except (RuntimeError, IndexError, KeyError) as error:
        shapes = ", ".join(f"{ref.name} {list(ref.shape)}" for ref in refs)
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{rule.origin}: the transform of {rule.native[0]} does not take {shapes}: {reason}"
        ) from error


def _select_spelling(spellings: Sequence[str], prefix: str, shape_of: ShapeOf | None) -> str:
    """Return the spelling whose first tensor exists, else the one that is written."""
    if shape_of is not None:
        for spelling in spellings:
            if _found(prefix + spelling.split()[0].format(e=0), shape_of) is not None:
                return spelling
    return spellings[0]


def _found(name: str, shape_of: ShapeOf) -> str | None:
    """Return the name if it is there, or with the prefix that transformers writes before names of published files."""
    return next((each for each in (name, f"model.{name}") if shape_of(each) is not None), None)


def _ref(
    part: str, prefix: str, expert: int | None, sizes: ModelSizes, rule: Rule, shape_of: ShapeOf | None
) -> HFTensor:
    name, *layout = part.split()
    unknown = [symbol for symbol in layout if symbol not in sizes and not symbol.isdigit()]
    if unknown:
        known = ", ".join(symbol for symbol in sizes if symbol.isupper())
        raise CheckpointError(
            f"{rule.origin}: {name} has the layout symbol {unknown[0]}, which this model does not have; there are "
            f"{known}"
        )
    shape = tuple(sizes[symbol] if symbol in sizes else int(symbol) for symbol in layout)
    whole = prefix + name.format(e=expert)
    if shape_of is not None:
        whole = _found(whole, shape_of) or whole
    if expert is not None and "{e}" not in name:
        return HFTensor(whole, shape[1:], expert, shape[0])
    return HFTensor(whole, shape)


def check_source(
    mappings: Sequence[TensorMapping],
    shape_of: Callable[[str], tuple[int, ...] | None],
    names: Sequence[str],
    repeated: Mapping[str, str],
    dropped: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that every tensor of the mappings exists with its shape, and that no other tensor does.

    `shape_of` returns None for a missing tensor. `dropped` tells whether an unused tensor is accepted.

    Raises:
        CheckpointError: naming the tensors.
    """
    problems, used = [], set(repeated)
    for ref in (ref for mapping in mappings for ref in mapping.sources):
        used.add(ref.name)
        shape, needed = shape_of(ref.name), (ref.stack, *ref.shape) if ref.index is not None else ref.shape
        if shape is None:
            problems.append(f"{ref.name} is missing; {list(needed)} is needed")
        elif tuple(shape) != needed:
            problems.append(f"{ref.name} has the shape {list(shape)}, and {list(needed)} is needed")
    problems += [
        f"{name} is there, and no tensor of the model is made of it"
        for name in names
        if name not in used and not dropped(name)
    ]
    raise_problems(problems)


def raise_problems(problems: Sequence[str], shown: int = 12) -> None:
    """Raise a CheckpointError that lists the problems, each once, if there are any."""
    lines = list(dict.fromkeys(problems))
    if lines:
        more = [f"... and {len(lines) - shown} more"] if len(lines) > shown else []
        raise CheckpointError(
            "\n  ".join(
                ["the tensors do not fit the model that config.json or the flags describe:", *lines[:shown], *more]
            )
        )
