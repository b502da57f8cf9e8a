"""Small sizes for a model that keep its features and their relations. Of ranks only the counts matter here.

Every function returns new values by destination. Equal sizes stay equal, larger ones stay larger, one stays one: a
model with more heads than groups, with dense layers first or with a wider shared expert keeps all of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arguments.layer_pattern import MOE, hybrid_letters, variants_of
from arguments.mechanisms.formats import quantized_format
from arguments.mechanisms.selections import expert_split
from arguments.mechanisms.sublayers import variant_of
from arguments.mtp import DEPTH, mtp_depths, mtp_letters, num_mtp_depths
from arguments.parallel import dynamic_cp_sizes, sequence_padding_multiple
from arguments.rules.derived_sizes import as_list, moe_pattern
from arguments.rules.layout_grammar import DECODER, EMBEDDING, LOSS, MTP, PipelineLayout, read_layout
from arguments.rules.packing import is_packed
from arguments.settings import Settings
from arguments.sparse_attention import gather_unsupported_reason
from moe_trainer.verification.mapping import ParallelMapping

HEAD_DIM = 8
PACKED_SEQUENCES = 4
"""Sequences of a packed microbatch, on average."""
MTP_DEPTHS = 2
"""The most depths of multi-token prediction."""
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def stages(s: Settings, old: ParallelMapping, new: ParallelMapping) -> dict[str, Any]:
    """Return the number of layers and their distribution over the stages."""
    if s.pipeline_model_parallel_layout is not None:
        return _layout(s, old, new)
    values = _mtp_sizes(s)
    values |= {"num_virtual_stages_per_pipeline_rank": new.vpp} if new.vpp > 1 else {}
    first, last = getattr(s, FIRST), getattr(s, LAST)
    if new.pp > 1 and (first or last):
        return values | _uneven(s, old, new, first, last)
    counted = sum(getattr(s, dest) for dest in ACCOUNT) if new.pp > 1 else 0
    layers = new.pp * new.vpp - counted
    # at least a dense and a MoE layer, and a layer in the smallest stage
    while layers < max(2, _fewest_layers(s)):
        layers += new.pp * new.vpp
    return values | {dest: True for dest in ACCOUNT if getattr(s, dest) and new.pp > 1} | {"num_layers": layers}


def _mtp_sizes(s: Settings) -> dict[str, Any]:
    depths = min(num_mtp_depths(s.values), MTP_DEPTHS)
    return {"mtp_num_layers": depths} if depths else {}


def _fewest_layers(s: Settings) -> int:
    if s.hybrid_layer_pattern:
        return len(set(hybrid_letters(s.hybrid_layer_pattern)))
    if variant_of(s).compresses_keys:
        return max(2, len(set(s.csa_compress_ratios[: s.num_layers])))
    pattern = moe_pattern(s.moe_layer_freq, s.num_layers) if s.num_experts else None
    return 3 if pattern is not None and len(set(pattern)) > 1 else 2


def _uneven(
    s: Settings, old: ParallelMapping, new: ParallelMapping, first: int | None, last: int | None
) -> dict[str, Any]:
    """Return first and last stages that are smaller or larger than the middle ones, as in the original."""
    ends = [end for end in (first, last) if end]
    middle = (s.num_layers - sum(ends)) // max(old.pp - len(ends), 1)
    base = 2 * new.vpp if middle > min(ends) else new.vpp
    sizes = {}
    for dest, end in ((FIRST, first), (LAST, last)):
        if end:
            sizes[dest] = base + new.vpp * ((end > middle) - (end < middle))
    return {**sizes, "num_layers": sum(sizes.values()) + base * max(new.pp - len(ends), 0)}


def _layout(s: Settings, old: ParallelMapping, new: ParallelMapping) -> dict[str, Any]:
    """Return a layout with the first and last stage of the original, and middle ones including that with MTP layers."""
    layout = read_layout(s.pipeline_model_parallel_layout)
    ranks = [0] * (new.pp > 1) + _ranks_between(layout, old.pp, new.pp - 2) + [old.pp - 1]
    chunks = [0] * (new.vpp > 1) + [old.vpp - 1]
    depths = min(num_mtp_depths(s.values), MTP_DEPTHS)
    # of the selected stages the largest have two layers and the others one, so that uneven stages stay uneven
    most = max(layout.stages[chunk * old.pp + rank].count(DECODER) for chunk in chunks for rank in ranks)
    texts: list[str] = []
    for chunk in chunks:
        for rank in ranks:
            stage = layout.stages[chunk * old.pp + rank]
            count = min(stage.count(DECODER), 2 if stage.count(DECODER) == most > 1 else 1)
            texts.append(DECODER * count + (MTP * depths if MTP in stage and MTP not in "".join(texts) else ""))
    if depths and MTP not in "".join(texts):
        texts[-1] += MTP * depths
    if "".join(texts).count(DECODER) < 2:
        texts[0] = DECODER * 2 + texts[0].replace(DECODER, "")
    texts[0], texts[-1] = EMBEDDING + texts[0], texts[-1] + LOSS
    values = _mtp_sizes(s) | {"num_layers": "".join(texts).count(DECODER)}
    return values | ({"pipeline_model_parallel_layout": "|".join(texts)} if new.pp > 1 else {})


def _ranks_between(layout: PipelineLayout, old_pp: int, count: int) -> list[int]:
    """Return pipeline ranks that represent the middle ones, including the one with the MTP layers."""
    holder = next((index % old_pp for index in layout.stages_with(MTP)), 0)
    if not 0 < holder < old_pp - 1 or count < 1:
        return [1 + i % (old_pp - 2) for i in range(count)] if old_pp > 2 else []
    before = [1 + i % (holder - 1) for i in range(count - 1)] if holder > 1 else []
    return [*sorted(before), holder, *range(holder + 1, holder + count - len(before))]


def pattern(freq: int | list[int], old_layers: int, layers: int) -> int | list[int]:
    """Return a per-layer pattern for fewer layers; dense layers first stay first, and both kinds stay."""
    if not isinstance(freq, list):
        return min(freq, layers)
    if freq[0] != freq[-1] and freq == sorted(freq):  # one kind, then the other
        head = min(freq.index(freq[-1]), max(1, layers // 3))
        return [freq[0]] * head + [freq[-1]] * (layers - head)
    short = [freq[i] for i in range(min(layers, old_layers))]
    if len(set(short)) < len(set(freq)):
        short[-1] = next(entry for entry in freq if entry not in short)
    return short + [short[-1]] * (layers - len(short))


def compress_ratios(ratios: list[int], layers: int) -> list[int]:
    """Return compression ratios of fewer layers: all kinds in turn, with keys of few tokens."""
    kinds = list(dict.fromkeys(min(ratio, 6) for ratio in ratios))
    return (kinds * layers)[:layers]


def letters(pattern: str, layers: int) -> str:
    """Return the letters of a hybrid model with fewer layers: all kinds, or those that fit, experts first.

    At most two depths of multi-token prediction stay, with one layer of every kind.
    """
    old = hybrid_letters(pattern)
    kinds = sorted(dict.fromkeys(old), key=lambda letter: (letter != MOE, old.index(letter)))[:layers]
    short = [letter for letter in (old * layers)[:layers]]
    for kind in kinds:
        if kind not in short:
            at = max(i for i, letter in enumerate(short) if short.count(letter) > 1 or letter not in kinds)
            short[at] = kind
    inside = "".join(dict.fromkeys(mtp_letters(pattern)))
    return "".join(short) + (DEPTH + inside) * min(len(mtp_depths(pattern)), MTP_DEPTHS)


def attention(s: Settings, new: ParallelMapping) -> dict[str, Any]:
    unit = new.tp * (new.cp if any("a2a" in kind for kind in s.cp_comm_type) else 1)
    heads = groups = max(2, unit)
    values: dict[str, Any] = {}
    if s.group_query_attention:
        old_groups = s.num_query_groups
        if old_groups == 1:
            groups = 1
        elif old_groups < s.tensor_model_parallel_size:
            groups = max(1, new.tp // 2)
        heads = groups if old_groups == s.num_attention_heads else max(2 * groups, unit)
        values = {"group_query_attention": True, "num_query_groups": groups}
        if s.window_num_query_groups:
            values["window_num_query_groups"] = heads if s.window_num_query_groups > old_groups else groups
    if s.value_channels:
        values["value_channels"] = HEAD_DIM if s.value_channels == s.kv_channels else HEAD_DIM // 2
    hidden = heads * HEAD_DIM
    if s.kv_channels and s.kv_channels * s.num_attention_heads != s.hidden_size and not s.multi_latent_attention:
        hidden += 2 * HEAD_DIM
    values |= {"num_attention_heads": heads, "hidden_size": hidden, "kv_channels": HEAD_DIM}
    if s.use_mup:
        values["mup_base_hidden_size"] = max(1, round(hidden / s.mup_width_mult))
    if s.multi_latent_attention:
        values |= {"kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
        values |= {"v_head_dim": 8 if s.v_head_dim == s.qk_head_dim else 6}
        values |= {"q_lora_rank": 12} if s.q_lora_rank else {}
    variant, variants = variant_of(s), variants_of(s)
    if any(each.has_delta_rule for each in variants):
        keys = max(2, new.tp * new.cp)
        value_dim = 16 if s.linear_key_head_dim == s.linear_value_head_dim else 8
        values |= {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * min(2, s.linear_num_value_heads // s.linear_num_key_heads),
            "linear_key_head_dim": 16,
            "linear_value_head_dim": value_dim,
        }
        values |= {dest: size for dest, size in variant.toy_sizes if s.values[dest]}
    if s.hybrid_layer_pattern:
        groups = max(2, new.tp * new.cp)
        values |= {"mamba_num_groups": groups, "mamba_num_heads": 2 * groups}
        values |= {"mamba_head_dim": 8, "mamba_state_dim": 12}
    if variant.compresses_keys:
        values |= {"v_head_dim": 12, "o_groups": max(2, new.tp), "o_lora_rank": 6, "csa_window_size": 5}
        if s.dsa_indexer_topk:
            values |= {"dsa_indexer_n_heads": 16, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 2}
    if variant.selects_keys:
        values |= {"dsa_indexer_n_heads": min(s.dsa_indexer_n_heads, 2), "dsa_indexer_head_dim": 8}
        values |= {"dsa_indexer_topk": 5 if s.dsa_indexer_topk < s.seq_length else _length(new)}
        # the choice at the user's sizes, which differs at the small ones
        num_heads = s.num_attention_heads // s.tensor_model_parallel_size
        masked = gather_unsupported_reason(s, num_heads, s.seq_length, quantized_format(s) is not None)
        values |= {"dsa_attention_form": "masked" if masked else "gathered"}
    if s.window_size is not None:
        values["window_size"] = tuple(min(side, 5) for side in s.window_size)
    if s.attention_chunk_size is not None:
        values["attention_chunk_size"] = 5 if s.attention_chunk_size < s.seq_length else _length(new)
    if s.attn_temperature_tuning is not None:  # a factor that small sequences have too
        values["attn_temperature_floor"] = min(s.attn_temperature_floor, 7)
    return values


def experts(s: Settings, new: ParallelMapping) -> dict[str, Any]:
    ffn = 24
    values: dict[str, Any] = {"ffn_hidden_size": ffn}
    if not s.num_experts:
        return values
    if s.moe_latent_size:
        values["moe_latent_size"] = HEAD_DIM
    if (split := expert_split(s)) is not None:
        return values | split.shrink(s, new.ep, ffn)
    wide = s.moe_ffn_hidden_size is None or s.moe_ffn_hidden_size == s.ffn_hidden_size
    values["moe_ffn_hidden_size"] = expert_ffn = ffn if wide else 16
    shared = s.moe_shared_expert_intermediate_size
    if shared:
        is_wider = shared > (s.moe_ffn_hidden_size or ffn)
        values["moe_shared_expert_intermediate_size"] = (1 + is_wider) * expert_ffn
    topk, groups, allowed, scored = min(s.moe_router_topk, 3), 1, 1, 1
    if s.moe_router_num_groups:
        groups = min(s.moe_router_num_groups, 4)
        values["moe_router_num_groups"] = groups
    if s.moe_router_group_topk:
        allowed = groups if s.moe_router_group_topk == s.moe_router_num_groups else max(1, groups // 2)
        topk = allowed * min(max(s.moe_router_topk // s.moe_router_group_topk, 1), 2)
        values["moe_router_group_topk"] = allowed
        if s.moe_router_group_score_topk:
            values["moe_router_group_score_topk"] = scored = min(s.moe_router_group_score_topk, 2)
    lone = s.num_experts == s.expert_model_parallel_size and new.ep > 1
    number = new.ep if lone else max(8, 2 * new.ep)
    if lone and groups == 1:
        topk = min(topk, max(2, number // 2))
    while number % new.ep or number % groups or number < 2 * topk or number // groups < max(topk // allowed, scored):
        number += new.ep if lone else 4
    return values | {"num_experts": number, "moe_router_topk": topk}


def batch(s: Settings, old: ParallelMapping, new: ParallelMapping) -> dict[str, Any]:
    """Return sequence length and batch sizes, with enough microbatches for the steady state of the schedule."""
    micro = min(s.micro_batch_size, 2)
    count = max(1, (s.global_batch_size or 0) // (s.micro_batch_size * old.dp))
    # a running mean over microbatches has an effect from the third one
    microbatches = min(count, 3 if "global_aux_loss" in as_list(s.moe_router_load_balancing_type) else 2)
    if new.pp > 1:
        if count >= 2 * old.pp or new.vpp > 1:
            microbatches = 2 * new.pp
        else:
            microbatches = new.pp if count >= old.pp else min(count, new.pp)
    group = s.microbatch_group_size_per_vp_stage
    values: dict[str, Any] = {}
    if s.given("microbatch_group_size_per_vp_stage") and new.vpp > 1 and group:
        values["microbatch_group_size_per_vp_stage"] = new.pp if group == old.pp else min(2 * new.pp, microbatches)
    length = _length(new)
    return values | {
        "micro_batch_size": micro,
        "global_batch_size": micro * new.dp * microbatches,
        "seq_length": length,
        "max_position_embeddings": length,
    }


def packing(s: Settings, new: ParallelMapping, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of packed microbatches, which hold several sequences; about as many as without packing."""
    if not is_packed(s):
        return {"use_varlen_dataset": None}
    sizes = packed_sizes(new, bool(values["sequence_parallel"] or s.num_experts))
    alignment = s.pad_packed_seq_alignment
    is_dynamic = s.dynamic_context_parallel and new.dp * new.cp % 2 == 0
    if is_dynamic:  # a rank holds half of the longest sequence, so that there are groups of several ranks
        sizes |= {
            "dynamic_context_parallel": True,
            "min_dynamic_context_parallel_size": max(
                size for size in dynamic_cp_sizes(new.dp * new.cp, 1) if size <= s.min_dynamic_context_parallel_size
            ),
            "max_seqlen_per_dp_cp_rank": _length(new) // 2,
        }
    scheduler = "dp_balanced" if s.dynamic_context_parallel and not is_dynamic else s.sequence_packing_scheduler
    return sizes | {
        "global_batch_size": int(str(values["global_batch_size"])) * PACKED_SEQUENCES,
        "use_varlen_dataset": True,
        "sequence_packing_scheduler": scheduler,
        "pad_packed_seq_alignment": alignment if alignment in (None, "max") else sizes["pad_packed_seq_alignment"],
        "thd_tail_padding_policy": s.thd_tail_padding_policy,
        "thd_max_packed_sequences": PACKED_SEQUENCES if s.thd_max_packed_sequences else None,
    }


def packed_sizes(new: ParallelMapping, by_tensor_ranks: bool) -> dict[str, Any]:
    """Return the capacity and alignment of small microbatches of packed sequences."""
    multiple = sequence_padding_multiple(new.cp, new.tp, by_tensor_ranks)
    capacity = PACKED_SEQUENCES // 2 * _length(new)  # the mean length is half of --seq-length
    capacity += -capacity % multiple
    return {
        "max_seqlen_per_dp_cp_rank": capacity // new.cp,
        "pad_packed_seq_alignment": str(4 * multiple // new.cp),
    }


def _length(new: ParallelMapping) -> int:
    unit = 2 * new.cp * new.tp
    return -(-16 // unit) * unit


def context(s: Settings, new: ParallelMapping, layers: int) -> dict[str, Any]:
    """Return the communication types of context parallelism that the number of ranks allows."""
    if new.cp == 1:
        return {}
    kinds = as_list(s.cp_comm_type)
    values: dict[str, Any] = {}
    if "a2a+p2p" in kinds:
        if new.cp >= 4:
            values["hierarchical_context_parallel_sizes"] = [2, new.cp // 2]
        else:
            kinds = ["a2a" if kind == "a2a+p2p" else kind for kind in kinds]
    if len(kinds) > 1:
        order = list(dict.fromkeys(kinds))
        kinds = [order[min(i, len(order) - 1)] for i in range(layers)]
    return {**values, "cp_comm_type": kinds}
