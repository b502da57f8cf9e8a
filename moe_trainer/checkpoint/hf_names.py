"""Which tensors of a Hugging Face model are which of ours: one table per family, and its expansion for a model.

A rule relates one tensor of ours to those of theirs, with the layout of each and a transform between them. Rules stand for a layer;
`links` repeats them for the layers, experts and multi-token-prediction depths that the flags describe. Several spellings of a rule
are read (files of the hub name every expert; transformers may stack them), the first one is written. Everything else follows: shapes,
what is missing, what is left over.

Symbols of the layouts: H hidden size, N heads, V vocabulary, D head dim, Q and K rows of queries and of keys, F dense feed-forward, E expert and
S shared feed-forward, X experts, M hidden size twice; latent attention: A query and C key-value rank, R rotary part, T C + R,
P rows of queries, U rows of keys and values, O columns of values; linear attention: LK key and LV value heads, LKD and LVD their sizes,
LO outputs, LZ, LB and LC rows of its two projections and of its convolution, LW width of that. Numbers stand for themselves.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.shape.layers import linear_layer_pattern, moe_layer_pattern, mtp_is_moe

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Transform:
    """join: theirs -> ours; part: ours -> theirs. Both take the model's sizes and may be given tensors without storage. Where several
    tensors of ours are made of the same ones, join gives and part takes a sequence."""

    join: Callable[[Sequence[Tensor], Sizes], Tensor | Sequence[Tensor]]
    part: Callable[[Tensor | Sequence[Tensor], Sizes], Sequence[Tensor]]


def _join_groups(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    return torch.cat([part.unflatten(0, (sizes["groups"], -1)) for part in parts], 1).flatten(0, 1)


def _part_groups(whole: Tensor, sizes: Sizes) -> Sequence[Tensor]:
    head, groups = sizes["D"], sizes["groups"]
    grouped = whole.unflatten(0, (groups, -1))
    return [part.flatten(0, 1) for part in grouped.split([sizes["Q"] // groups, head, head], 1)]


def _join_gated_groups(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    queries, *others = parts
    head, groups = sizes["D"], sizes["groups"]
    both = queries.unflatten(0, (groups, -1, 2, head))
    return torch.cat([*(each.flatten(1, 2) for each in both.unbind(2)), *(part.unflatten(0, (groups, -1)) for part in others)], 1).flatten(0, 1)


def _part_gated_groups(whole: Tensor, sizes: Sizes) -> Sequence[Tensor]:
    head, groups, rows = sizes["D"], sizes["groups"], sizes["Q"] // sizes["groups"]
    *both, key, value = whole.unflatten(0, (groups, -1)).split([rows, rows, head, head], 1)
    queries = torch.stack([each.unflatten(1, (-1, head)) for each in both], 2).flatten(0, 3)
    return queries, key.flatten(0, 1), value.flatten(0, 1)


def _delta_rows(sizes: Sizes) -> tuple[list[int], list[int]]:
    """Rows of query, key, value and gate, and of beta and alpha, of one key head."""
    values = sizes["LV"] // sizes["LK"]
    return [sizes["LKD"], sizes["LKD"], values * sizes["LVD"], values * sizes["LVD"]], [values, values]


def _join_delta(parts: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
    split = (part.unflatten(0, (sizes["LK"], -1)).split(rows, 1) for part, rows in zip(parts, _delta_rows(sizes), strict=True))
    return [each.flatten(0, 1) for group in split for each in group]


def _part_delta(whole: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
    grouped = [each.unflatten(0, (sizes["LK"], -1)) for each in whole]
    return torch.cat(grouped[:4], 1).flatten(0, 1), torch.cat(grouped[4:], 1).flatten(0, 1)


def _delta_widths(sizes: Sizes) -> list[int]:
    return [sizes["LK"] * sizes["LKD"], sizes["LK"] * sizes["LKD"], sizes["LV"] * sizes["LVD"]]


def _join_interleaved(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    del sizes
    rows = parts[0].t()  # a bias is its own transpose
    return torch.cat([rows[0::2], rows[1::2]])


def _part_interleaved(whole: Tensor, sizes: Sizes) -> Sequence[Tensor]:
    del sizes
    return (torch.stack(whole.chunk(2), 1).flatten(0, 1).t(),)


SAME = Transform(lambda parts, _: parts[0], lambda whole, _: (whole,))
HALVES = Transform(lambda parts, _: torch.cat(tuple(parts)), lambda whole, _: whole.chunk(2))
"""Gate above up."""
GROUPS = Transform(_join_groups, _part_groups)
"""[q..q, k, v] per key-value group."""
GATED_GROUPS = Transform(_join_gated_groups, _part_gated_groups)
"""[q..q, g..g, k, v] per key-value group; theirs: [q, g] per head."""
DELTA = Transform(_join_delta, _part_delta)
"""query, key, value, gate, beta and alpha of all heads; theirs: of every key head one behind the other, the last two apart."""
DELTA_PARTS = Transform(lambda parts, sizes: parts[0].split(_delta_widths(sizes)), lambda whole, _: (torch.cat(tuple(whole)),))
"""The channels of query, key and value."""
TRANSPOSED = Transform(lambda parts, _: parts[0].t(), lambda whole, _: (whole.t(),))
"""Inputs times outputs, as theirs are multiplied from the right."""
INTERLEAVED = Transform(_join_interleaved, _part_interleaved)
"""Gate above up; theirs: transposed, gate and up in turns."""
MINUS_ONE = Transform(lambda parts, _: parts[0] - 1, lambda whole, _: (whole + 1,))
"""A gain around zero; theirs: around one."""


@dataclass(frozen=True)
class Rules:
    """Rules with one transform, one per line: OURS = SPELLING [| SPELLING ...], a spelling being NAME LAYOUT [, NAME LAYOUT ...].

    OURS: the name inside the layer, or several, joined by " & ". `{e}`: expert; a spelling without it, whose layout begins with X, is a stack over experts. needs: a
    flag (or, behind "-", its absence) without which they do not hold.
    """

    text: str
    how: Transform
    needs: str = ""

    def hold(self, flags: Mapping[str, Any]) -> bool:
        return not self.needs or bool(flags.get(self.needs.lstrip("-"))) != self.needs.startswith("-")

    def lines(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(name of ours, spellings)."""
        for line in filter(None, map(str.strip, self.text.splitlines())):
            ours, _, theirs = line.partition(" = ")
            yield ours.strip(), tuple(map(str.strip, theirs.split("|")))


@dataclass(frozen=True)
class Ref:
    """A tensor of theirs, or slice `index` along its first dimension. shape: of the tensor or the slice; stack: slices there are."""

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    stack: int = 0


@dataclass(frozen=True)
class Link:
    """One tensor of ours and what it is made of. shape: of ours. pieces: where several of ours are made of the same, all their names."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[Ref, ...]
    how: Transform
    pieces: tuple[str, ...] = ()

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """The tensor of ours."""
        whole = self.how.join(parts, sizes)
        return whole[self.pieces.index(self.ours)] if self.pieces else whole

    @property
    def keeps_fp32(self) -> bool:
        """A bias of the router's choice is fp32 whatever the weights are."""
        return self.ours.endswith("expert_bias")


_MODEL = (Rules("embedding.word_embeddings.weight = model.embed_tokens.weight V H", SAME),)
_HEAD = (
    Rules("decoder.final_layernorm.weight = model.norm.weight H", SAME),
    Rules("output_layer.weight = lm_head.weight V H", SAME, "untie_embeddings_and_output_weights"))
_GROUPED = (
    Rules("""
        input_layernorm.weight = input_layernorm.weight H
        pre_mlp_layernorm.weight = post_attention_layernorm.weight H
        self_attention.linear_proj.weight = self_attn.o_proj.weight H Q""", SAME),
    Rules("self_attention.linear_qkv.weight = self_attn.q_proj.weight Q H, self_attn.k_proj.weight K H, self_attn.v_proj.weight K H", GROUPS),
    Rules("self_attention.linear_qkv.bias = self_attn.q_proj.bias Q, self_attn.k_proj.bias K, self_attn.v_proj.bias K", GROUPS, "add_qkv_bias"),
    Rules("""
        self_attention.q_layernorm.weight = self_attn.q_norm.weight D
        self_attention.k_layernorm.weight = self_attn.k_norm.weight D""", SAME, "qk_layernorm"))
_LATENT = (
    Rules("""
        input_layernorm.weight = input_layernorm.weight H
        pre_mlp_layernorm.weight = post_attention_layernorm.weight H
        self_attention.linear_kv_down_proj.weight = self_attn.kv_a_proj_with_mqa.weight T H
        self_attention.kv_layernorm.weight = self_attn.kv_a_layernorm.weight C
        self_attention.linear_kv_up_proj.weight = self_attn.kv_b_proj.weight U C
        self_attention.linear_proj.weight = self_attn.o_proj.weight H O""", SAME),
    Rules("self_attention.linear_q_proj.weight = self_attn.q_proj.weight P H", SAME, "-q_lora_rank"),
    Rules("""
        self_attention.linear_q_down_proj.weight = self_attn.q_a_proj.weight A H
        self_attention.q_layernorm.weight = self_attn.q_a_layernorm.weight A
        self_attention.linear_q_up_proj.weight = self_attn.q_b_proj.weight P A""", SAME, "q_lora_rank"))
_DENSE = (
    Rules("mlp.linear_fc1.weight = mlp.gate_proj.weight F H, mlp.up_proj.weight F H", HALVES),
    Rules("mlp.linear_fc2.weight = mlp.down_proj.weight H F", SAME))
_EXPERTS = (
    Rules("mlp.router.weight = mlp.gate.weight X H", SAME),
    Rules("mlp.router.expert_bias = mlp.gate.e_score_correction_bias X", SAME, "moe_router_enable_expert_bias"),
    Rules("""mlp.experts.local_experts.{e}.linear_fc1.weight = mlp.experts.{e}.gate_proj.weight E H, mlp.experts.{e}.up_proj.weight E H \
        | mlp.experts.gate_up_proj X 2E H""", HALVES),
    Rules("mlp.experts.local_experts.{e}.linear_fc2.weight = mlp.experts.{e}.down_proj.weight H E | mlp.experts.down_proj X H E", SAME))
_MIXTRAL = (
    Rules("mlp.router.weight = block_sparse_moe.gate.weight X H | mlp.gate.weight X H", SAME),
    Rules("""mlp.experts.local_experts.{e}.linear_fc1.weight = block_sparse_moe.experts.{e}.w1.weight E H, \
        block_sparse_moe.experts.{e}.w3.weight E H | mlp.experts.gate_up_proj X 2E H""", HALVES),
    Rules("""mlp.experts.local_experts.{e}.linear_fc2.weight = block_sparse_moe.experts.{e}.w2.weight H E \
        | mlp.experts.down_proj X H E""", SAME))
_BIASED = (Rules("""
    self_attention.linear_proj.bias = self_attn.o_proj.bias H
    self_attention.core_attention.softmax_offset = self_attn.sinks N""", SAME),)
_BIASED_EXPERTS = (
    Rules("""
        mlp.router.weight = mlp.router.weight X H
        mlp.router.bias = mlp.router.bias X
        mlp.experts.local_experts.{e}.linear_fc2.bias = mlp.experts.down_proj_bias X H""", SAME),
    Rules("""
        mlp.experts.local_experts.{e}.linear_fc1.weight = mlp.experts.gate_up_proj X H 2E
        mlp.experts.local_experts.{e}.linear_fc1.bias = mlp.experts.gate_up_proj_bias X 2E""", INTERLEAVED),
    Rules("mlp.experts.local_experts.{e}.linear_fc2.weight = mlp.experts.down_proj X E H", TRANSPOSED))
_GATED_SHARED = (
    Rules("""mlp.shared_experts.linear_fc1.weight = mlp.shared_expert.gate_proj.weight S H, mlp.shared_expert.up_proj.weight S H""", HALVES),
    Rules("""
        mlp.shared_experts.linear_fc2.weight = mlp.shared_expert.down_proj.weight H S
        mlp.shared_experts.gate_weight = mlp.shared_expert_gate.weight 1 H""", SAME))
_SHARED = (
    Rules("mlp.shared_experts.linear_fc1.weight = mlp.shared_experts.gate_proj.weight S H, mlp.shared_experts.up_proj.weight S H", HALVES),
    Rules("mlp.shared_experts.linear_fc2.weight = mlp.shared_experts.down_proj.weight H S", SAME))
_GATED = (
    Rules("""
        input_layernorm.weight = input_layernorm.weight H
        pre_mlp_layernorm.weight = post_attention_layernorm.weight H
        self_attention.linear_proj.weight = self_attn.o_proj.weight H Q
        self_attention.q_layernorm.weight = self_attn.q_norm.weight D
        self_attention.k_layernorm.weight = self_attn.k_norm.weight D""", SAME),
    Rules("self_attention.linear_qkv.weight = self_attn.q_proj.weight 2Q H, self_attn.k_proj.weight K H, self_attn.v_proj.weight K H", GATED_GROUPS))
_LINEAR = (
    Rules("""
        input_layernorm.weight = input_layernorm.weight H
        pre_mlp_layernorm.weight = post_attention_layernorm.weight H
        self_attention.A_log = linear_attn.A_log LV
        self_attention.dt_bias = linear_attn.dt_bias LV
        self_attention.out_proj.weight = linear_attn.out_proj.weight H LO""", SAME),
    Rules("""self_attention.in_proj.weight.query & self_attention.in_proj.weight.key & self_attention.in_proj.weight.value \
        & self_attention.in_proj.weight.z & self_attention.in_proj.weight.beta & self_attention.in_proj.weight.alpha \
        = linear_attn.in_proj_qkvz.weight LZ H, linear_attn.in_proj_ba.weight LB H""", DELTA),
    Rules("""self_attention.conv1d.weight.query & self_attention.conv1d.weight.key & self_attention.conv1d.weight.value \
        = linear_attn.conv1d.weight LC 1 LW""", DELTA_PARTS),
    Rules("self_attention.out_norm.weight = linear_attn.norm.weight LVD", MINUS_ONE))
_NEXT_MTP = (Rules("""
    enorm.weight = pre_fc_norm_embedding.weight H
    hnorm.weight = pre_fc_norm_hidden.weight H
    eh_proj.weight = fc.weight H M
    final_layernorm.weight = norm.weight H""", SAME),)
_MTP = (Rules("""
    enorm.weight = enorm.weight H
    hnorm.weight = hnorm.weight H
    eh_proj.weight = eh_proj.weight H M
    final_layernorm.weight = shared_head.norm.weight H""", SAME),)


@dataclass(frozen=True)
class Names:
    """The rules of a family. layer: of every layer; dense, moe: of one or the other feed-forward part; mtp: of a depth besides its layer;
    linear: instead of layer, of a layer with linear attention. depth: where the tensors of a multi-token-prediction depth and those of its
    layer stand; {l} counts on from the layers, {d} from zero."""

    layer: tuple[Rules, ...]
    moe: tuple[Rules, ...] = ()
    dense: tuple[Rules, ...] = _DENSE
    mtp: tuple[Rules, ...] = ()
    linear: tuple[Rules, ...] = ()
    depth: tuple[str, str] = ("model.layers.{l}.", "model.layers.{l}.")


NAMES = MappingProxyType({
    "llama": Names(_GROUPED), "mistral": Names(_GROUPED), "qwen2": Names(_GROUPED), "qwen3": Names(_GROUPED),
    "mixtral": Names(_GROUPED, _MIXTRAL),
    "qwen2_moe": Names(_GROUPED, _EXPERTS + _GATED_SHARED),
    "qwen3_moe": Names(_GROUPED, _EXPERTS),
    "gpt_oss": Names(_GROUPED + _BIASED, _BIASED_EXPERTS),
    "qwen3_next": Names(_GATED, _EXPERTS + _GATED_SHARED, mtp=_NEXT_MTP, linear=_LINEAR, depth=("mtp.", "mtp.layers.{d}.")),
    "deepseek_v2": Names(_LATENT, _EXPERTS + _SHARED),
    "deepseek_v3": Names(_LATENT, _EXPERTS + _SHARED, mtp=_MTP),
})
_MTP_COPIES = (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight"))


def model_sizes(flags: Mapping[str, Any]) -> dict[str, int]:
    """The symbols of a model that its flags, by destination, describe."""
    heads, hidden = flags["num_attention_heads"], flags["hidden_size"]
    groups = flags.get("num_query_groups") if flags.get("group_query_attention") else heads
    head = flags.get("kv_channels") or hidden // heads
    ffn, expert = flags.get("ffn_hidden_size") or 0, flags.get("moe_ffn_hidden_size") or flags.get("ffn_hidden_size") or 0
    sizes = {"H": hidden, "N": heads, "M": 2 * hidden, "V": flags["rows"], "D": head, "groups": groups, "Q": heads * head, "2Q": 2 * heads * head, "K": groups * head, "F": ffn,
             "E": expert, "2E": 2 * expert, "S": flags.get("moe_shared_expert_intermediate_size") or 0, "X": flags.get("num_experts") or 0}
    if flags.get("experimental_attention_variant") == "gdn":
        keys, values = flags["linear_num_key_heads"], flags["linear_num_value_heads"]
        key, value = flags["linear_key_head_dim"], flags["linear_value_head_dim"]
        sizes |= {"LK": keys, "LV": values, "LKD": key, "LVD": value, "LO": values * value, "LZ": 2 * (keys * key + values * value),
                  "LB": 2 * values, "LC": 2 * keys * key + values * value, "LW": flags["linear_conv_kernel_dim"]}
    if flags.get("multi_latent_attention"):
        nope, rope, value = flags["qk_head_dim"], flags["qk_pos_emb_head_dim"], flags["v_head_dim"]
        rank = flags["kv_lora_rank"]
        sizes |= {"A": flags.get("q_lora_rank") or 0, "C": rank, "R": rope, "T": rank + rope, "P": heads * (nope + rope),
                  "U": heads * (nope + value), "O": heads * value}
    return sizes


def links(family: str, flags: Mapping[str, Any], present: Callable[[str], bool] | None = None) -> list[Link]:
    """All tensors of the model that `flags` (and "rows", of the embedding) describe, in order.

    present: which names of theirs there are, to choose among spellings; None takes those that are written.
    """
    names, sizes = NAMES[family], model_sizes(flags)
    layers, depths = flags["num_layers"], flags.get("mtp_num_layers") or 0
    pattern = moe_layer_pattern(layers, flags.get("num_experts"), flags.get("moe_layer_freq") or 1)
    linear = linear_layer_pattern(layers, flags.get("experimental_attention_variant"), flags.get("linear_attention_freq"))
    found = list(_expand(_MODEL, "", "", flags, sizes, present))
    for layer in range(layers):
        rules = (names.linear if linear[layer] else names.layer) + (names.moe if pattern[layer] else names.dense)
        found += _expand(rules, f"decoder.layers.{layer}.", f"model.layers.{layer}.", flags, sizes, present)
    found += _expand(_HEAD, "", "", flags, sizes, present)
    for depth in range(depths):
        own, theirs = (place.format(l=layers + depth, d=depth) for place in names.depth)
        found += _expand(names.mtp, f"mtp.layers.{depth}.", own, flags, sizes, present)
        rules = (names.linear if linear[-1] else names.layer) + (names.moe if mtp_is_moe(pattern) else names.dense)
        found += _expand(rules, f"mtp.layers.{depth}.mtp_model_layer.", theirs, flags, sizes, present)
    return found


def copies(family: str, flags: Mapping[str, Any]) -> dict[str, str]:
    """Names of theirs that repeat another tensor, with its name: every multi-token-prediction depth has the embedding and the head."""
    tied = not flags.get("untie_embeddings_and_output_weights")
    layers, depths = flags["num_layers"], flags.get("mtp_num_layers") or 0
    found = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    for depth in range(depths if NAMES[family].depth[0].startswith("model.") else 0):
        for name, original in _MTP_COPIES:
            found[f"model.layers.{layers + depth}.{name}"] = found.get(original, original)
    return found


def _expand(tables: Sequence[Rules], ours: str, theirs: str, flags: Mapping[str, Any], sizes: Sizes,
            present: Callable[[str], bool] | None) -> Iterator[Link]:
    for rules in filter(lambda rules: rules.hold(flags), tables):
        for name, spellings in rules.lines():
            parts, shapes, pieces = _choose(spellings, theirs, present).split(","), (), name.replace(" ", "").split("&")
            for expert in range(sizes["X"]) if "{e}" in name else (None,):
                refs = tuple(_ref(part, theirs, expert, sizes) for part in parts)
                how = SAME if rules.how is HALVES and len(refs) == 1 else rules.how  # a stack holds both halves already
                if not shapes:  # every expert's
                    whole = how.join([torch.empty(ref.shape, device="meta") for ref in refs], sizes)
                    shapes = [tuple(each.shape) for each in (whole if len(pieces) > 1 else (whole,))]
                names = tuple(ours + piece.format(e=expert) for piece in pieces)
                for each, shape in zip(names, shapes, strict=True):
                    yield Link(each, shape, refs, how, names if len(names) > 1 else ())


def _choose(spellings: Sequence[str], prefix: str, present: Callable[[str], bool] | None) -> str:
    """The spelling whose first tensor is there; where none is, the one that is written."""
    if present is not None:
        for spelling in spellings:
            if present(prefix + spelling.split()[0].format(e=0)):
                return spelling
    return spellings[0]


def _ref(part: str, prefix: str, expert: int | None, sizes: Sizes) -> Ref:
    name, *layout = part.split()
    shape = tuple(sizes[symbol] if symbol in sizes else int(symbol) for symbol in layout)
    if expert is not None and "{e}" not in name:
        return Ref(prefix + name, shape[1:], expert, shape[0])
    return Ref(prefix + name.format(e=expert), shape)


def check_source(found: Sequence[Link], shape_of: Callable[[str], tuple[int, ...] | None], names: Sequence[str], repeated: Mapping[str, str],
                 dropped: Callable[[str], bool] = lambda name: False) -> None:
    """Every tensor that a model needs is there with its shape, and none is left over.

    shape_of: None where there is no such tensor. repeated: as `copies`. dropped: what may be left over.
    Raises: CheckpointError naming the tensors.
    """
    problems, used = [], set(repeated)
    for ref in (ref for link in found for ref in link.theirs):
        used.add(ref.name)
        shape, needed = shape_of(ref.name), (ref.stack, *ref.shape) if ref.index is not None else ref.shape
        if shape is None:
            problems.append(f"{ref.name} is missing; {list(needed)} is needed")
        elif tuple(shape) != needed:
            problems.append(f"{ref.name} has the shape {list(shape)}, and {list(needed)} is needed")
    problems += [f"{name} is there, and no tensor of the model is made of it" for name in names if name not in used and not dropped(name)]
    refuse(problems)


def refuse(problems: Sequence[str], shown: int = 12) -> None:
    """Raise a CheckpointError that lists the problems, each once, if there are any."""
    lines = list(dict.fromkeys(problems))
    if lines:
        more = [f"... and {len(lines) - shown} more"] if len(lines) > shown else []
        raise CheckpointError("\n  ".join(["the tensors do not fit the model that config.json or the flags describe:", *lines[:shown], *more]))


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
