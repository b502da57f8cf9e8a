"""Tensor rules of every family of Hugging Face models, for one kind of layer.

A rule relates a native tensor to Hugging Face tensors, with the layout of each and a transform between them; names.py
expands the rules for the layers of a model. Several spellings of a rule are read (files of the hub name every expert;
transformers may stack them); the first one is written.

Symbols of the layouts: H hidden size, N heads, V vocabulary, D head dim, Q and K rows of queries and of keys, F dense
FFN width, E expert and S shared FFN width, X experts, M twice the hidden size; latent attention: A query and C
key-value rank, R rotary part, T C + R, P rows of queries, U rows of keys and values, O columns of values; sparse
attention: IH heads of the indexer, ID their size, IQ rows of its queries; linear attention: LK key and LV value heads,
LKD and LVD their sizes, LO outputs, LZ, LB and LC rows of its two projections and of its convolution, LW width of that.
Numbers are literal.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moe_trainer.checkpoint.hf.transforms import TRANSFORMS, Transform


@dataclass(frozen=True)
class Rule:
    """A rule for the tensors of one kind of layer.

    Attributes:
        native: name inside the layer, or several that are made of the same Hugging Face tensors.
        spellings: NAME LAYOUT [, NAME LAYOUT ...] each. `{e}` is the expert; a spelling without it whose layout begins
            with X is a stack over experts.
        needs: flag that the rule requires, after "not " the flag that excludes it.
    """

    native: tuple[str, ...]
    spellings: tuple[str, ...]
    transform: Transform
    needs: str

    def applies(self, flags: Mapping[str, Any]) -> bool:
        return not self.needs or bool(flags.get(self.needs.removeprefix("not "))) != self.needs.startswith("not ")


def _rules(text: str) -> tuple[Rule, ...]:
    """Parse rules, one per line: NATIVE [& NATIVE ...] = SPELLING [| SPELLING ...] [: TRANSFORM] [if [not] FLAG]."""
    parsed = []
    for line in text.strip().splitlines():
        line, _, needs = line.partition(" if ")
        line, _, transform = line.partition(" : ")
        native, spellings = (re.split(r"\s*[&|]\s*", side.strip()) for side in line.split(" = "))
        parsed.append(Rule(tuple(native), tuple(spellings), TRANSFORMS[transform or "SAME"], needs))
    return tuple(parsed)


MODEL = _rules("embedding.word_embeddings.weight = model.embed_tokens.weight V H")
HEAD = _rules("""
    decoder.final_layernorm.weight = model.norm.weight H
    output_layer.weight = lm_head.weight V H if untie_embeddings_and_output_weights
""")
_NORMS = _rules("""
    input_layernorm.weight = input_layernorm.weight H
    pre_mlp_layernorm.weight = post_attention_layernorm.weight H
""")
_WITHOUT_HEAD_NORMS = _NORMS + _rules("""
    self_attention.linear_proj.weight = self_attn.o_proj.weight H Q
    self_attention.linear_qkv.weight = self_attn.q_proj.weight Q H, self_attn.k_proj.weight K H, \
        self_attn.v_proj.weight K H : GROUPS
    self_attention.linear_qkv.bias = self_attn.q_proj.bias Q, self_attn.k_proj.bias K, self_attn.v_proj.bias K \
        : GROUPS if add_qkv_bias
""")
_HEAD_NORMS = _rules("""
    self_attention.q_layernorm.weight = self_attn.q_norm.weight D if qk_layernorm
    self_attention.k_layernorm.weight = self_attn.k_norm.weight D if qk_layernorm
""")
_ALL_HEADS_NORMS = _rules("""
    self_attention.q_layernorm.weight = self_attn.q_norm.weight Q
    self_attention.k_layernorm.weight = self_attn.k_norm.weight K
""")
_GROUPED = _WITHOUT_HEAD_NORMS + _HEAD_NORMS
_GROUPED_ALL_HEADS = _WITHOUT_HEAD_NORMS + _ALL_HEADS_NORMS
_LATENT = _NORMS + _rules("""
    self_attention.linear_kv_down_proj.weight = self_attn.kv_a_proj_with_mqa.weight T H
    self_attention.kv_layernorm.weight = self_attn.kv_a_layernorm.weight C
    self_attention.linear_kv_up_proj.weight = self_attn.kv_b_proj.weight U C
    self_attention.linear_proj.weight = self_attn.o_proj.weight H O
    self_attention.linear_q_proj.weight = self_attn.q_proj.weight P H if not q_lora_rank
    self_attention.linear_q_down_proj.weight = self_attn.q_a_proj.weight A H if q_lora_rank
    self_attention.q_layernorm.weight = self_attn.q_a_layernorm.weight A if q_lora_rank
    self_attention.linear_q_up_proj.weight = self_attn.q_b_proj.weight P A if q_lora_rank
""")
_INDEXER = _rules("""
    self_attention.core_attention.indexer.linear_wq_b.weight = self_attn.indexer.wq_b.weight IQ A
    self_attention.core_attention.indexer.linear_wk.weight = self_attn.indexer.wk.weight ID H
    self_attention.core_attention.indexer.k_norm.weight = self_attn.indexer.k_norm.weight ID
    self_attention.core_attention.indexer.k_norm.bias = self_attn.indexer.k_norm.bias ID
    self_attention.core_attention.indexer.linear_weights_proj.weight = self_attn.indexer.weights_proj.weight IH H
""")
_DENSE = _rules("""
    mlp.linear_fc1.weight = mlp.gate_proj.weight F H, mlp.up_proj.weight F H : HALVES
    mlp.linear_fc2.weight = mlp.down_proj.weight H F
""")
_EXPERT_WEIGHTS = _rules("""
    mlp.router.weight = mlp.gate.weight X H
    mlp.experts.local_experts.{e}.linear_fc1.weight = mlp.experts.{e}.gate_proj.weight E H, \
        mlp.experts.{e}.up_proj.weight E H | mlp.experts.gate_up_proj X 2E H : HALVES
    mlp.experts.local_experts.{e}.linear_fc2.weight = mlp.experts.{e}.down_proj.weight H E | mlp.experts.down_proj X H E
""")
_EXPERTS = _EXPERT_WEIGHTS + _rules("""
    mlp.router.expert_bias = mlp.gate.e_score_correction_bias X if moe_router_enable_expert_bias
""")
_OUTSIDE_BIAS_EXPERTS = _EXPERT_WEIGHTS + _rules("""
    mlp.router.expert_bias = mlp.e_score_correction_bias X | mlp.gate.e_score_correction_bias X
""")
_MIXTRAL = _rules("""
    mlp.router.weight = block_sparse_moe.gate.weight X H | mlp.gate.weight X H
    mlp.experts.local_experts.{e}.linear_fc1.weight = block_sparse_moe.experts.{e}.w1.weight E H, \
        block_sparse_moe.experts.{e}.w3.weight E H | mlp.experts.gate_up_proj X 2E H : HALVES
    mlp.experts.local_experts.{e}.linear_fc2.weight = block_sparse_moe.experts.{e}.w2.weight H E \
        | mlp.experts.down_proj X H E
""")
_MIXTRAL_BIAS = _rules("""
    mlp.router.expert_bias = block_sparse_moe.e_score_correction_bias X | mlp.e_score_correction_bias X
""")
_BIASED = _rules("""
    self_attention.linear_proj.bias = self_attn.o_proj.bias H
    self_attention.core_attention.softmax_offset = self_attn.sinks N
""")
_BIASED_EXPERTS = _rules("""
    mlp.router.weight = mlp.router.weight X H
    mlp.router.bias = mlp.router.bias X
    mlp.experts.local_experts.{e}.linear_fc2.bias = mlp.experts.down_proj_bias X H
    mlp.experts.local_experts.{e}.linear_fc1.weight = mlp.experts.gate_up_proj X H 2E : INTERLEAVED
    mlp.experts.local_experts.{e}.linear_fc1.bias = mlp.experts.gate_up_proj_bias X 2E : INTERLEAVED
    mlp.experts.local_experts.{e}.linear_fc2.weight = mlp.experts.down_proj X E H : TRANSPOSED
""")
_GATED_SHARED = _rules("""
    mlp.shared_experts.linear_fc1.weight = mlp.shared_expert.gate_proj.weight S H, \
        mlp.shared_expert.up_proj.weight S H : HALVES
    mlp.shared_experts.linear_fc2.weight = mlp.shared_expert.down_proj.weight H S
    mlp.shared_experts.gate_weight = mlp.shared_expert_gate.weight 1 H
""")
_SHARED = _rules("""
    mlp.shared_experts.linear_fc1.weight = mlp.shared_experts.gate_proj.weight S H, \
        mlp.shared_experts.up_proj.weight S H : HALVES
    mlp.shared_experts.linear_fc2.weight = mlp.shared_experts.down_proj.weight H S
""")
_GATED = _NORMS + _rules("""
    self_attention.linear_proj.weight = self_attn.o_proj.weight H Q
    self_attention.q_layernorm.weight = self_attn.q_norm.weight D
    self_attention.k_layernorm.weight = self_attn.k_norm.weight D
    self_attention.linear_qkv.weight = self_attn.q_proj.weight 2Q H, self_attn.k_proj.weight K H, \
        self_attn.v_proj.weight K H : GATED_GROUPS
""")
_LINEAR = _NORMS + _rules("""
    self_attention.A_log = linear_attn.A_log LV
    self_attention.dt_bias = linear_attn.dt_bias LV
    self_attention.out_proj.weight = linear_attn.out_proj.weight H LO
    self_attention.conv1d.weight.query & self_attention.conv1d.weight.key & self_attention.conv1d.weight.value \
        = linear_attn.conv1d.weight LC 1 LW : DELTA_PARTS
    self_attention.out_norm.weight = linear_attn.norm.weight LVD : MINUS_ONE
""")
_LINEAR_BY_HEAD = _LINEAR + _rules("""
    self_attention.in_proj.weight.query & self_attention.in_proj.weight.key & self_attention.in_proj.weight.value \
        & self_attention.in_proj.weight.z & self_attention.in_proj.weight.beta & self_attention.in_proj.weight.alpha \
        = linear_attn.in_proj_qkvz.weight LZ H, linear_attn.in_proj_ba.weight LB H : DELTA
""")
_LINEAR_BY_PART = _LINEAR + _rules("""
    self_attention.in_proj.weight.query & self_attention.in_proj.weight.key & self_attention.in_proj.weight.value \
        = linear_attn.in_proj_qkv.weight LC H : DELTA_PARTS
    self_attention.in_proj.weight.z = linear_attn.in_proj_z.weight LO H
    self_attention.in_proj.weight.beta = linear_attn.in_proj_b.weight LV H
    self_attention.in_proj.weight.alpha = linear_attn.in_proj_a.weight LV H
""")
_NEXT_MTP = _rules("""
    enorm.weight = pre_fc_norm_embedding.weight H
    hnorm.weight = pre_fc_norm_hidden.weight H
    eh_proj.weight = fc.weight H M
    final_layernorm.weight = norm.weight H
""")
_MTP = _rules("""
    enorm.weight = enorm.weight H
    hnorm.weight = hnorm.weight H
    eh_proj.weight = eh_proj.weight H M
    final_layernorm.weight = shared_head.norm.weight H
""")


@dataclass(frozen=True)
class Names:
    """Rules of a family.

    Attributes:
        layer: of every layer with softmax attention.
        moe: of MoE layers.
        dense: of dense layers.
        mtp: of a multi-token prediction depth, besides its layer.
        linear: replaces `layer` for layers with linear attention.
        depth: prefixes of the tensors of an MTP depth and of its layer; {l} continues the layers, {d} starts at zero.
    """

    layer: tuple[Rule, ...]
    moe: tuple[Rule, ...] = ()
    dense: tuple[Rule, ...] = _DENSE
    mtp: tuple[Rule, ...] = ()
    linear: tuple[Rule, ...] = ()
    depth: tuple[str, str] = ("model.layers.{l}.", "model.layers.{l}.")


NAMES = MappingProxyType(
    {
        "llama": Names(_GROUPED),
        "mistral": Names(_GROUPED),
        "qwen2": Names(_GROUPED),
        "qwen3": Names(_GROUPED),
        "mixtral": Names(_GROUPED, _MIXTRAL),
        "minimax_m2": Names(_GROUPED_ALL_HEADS, _MIXTRAL + _MIXTRAL_BIAS),
        "olmoe": Names(_GROUPED_ALL_HEADS, _EXPERTS),
        "qwen2_moe": Names(_GROUPED, _EXPERTS + _GATED_SHARED),
        "qwen3_moe": Names(_GROUPED, _EXPERTS),
        "gpt_oss": Names(_GROUPED + _BIASED, _BIASED_EXPERTS),
        "qwen3_next": Names(
            _GATED, _EXPERTS + _GATED_SHARED, mtp=_NEXT_MTP, linear=_LINEAR_BY_HEAD, depth=("mtp.", "mtp.layers.{d}.")
        ),
        "qwen3_5_moe_text": Names(
            _GATED, _EXPERTS + _GATED_SHARED, mtp=_NEXT_MTP, linear=_LINEAR_BY_PART, depth=("mtp.", "mtp.layers.{d}.")
        ),
        "deepseek_v2": Names(_LATENT, _EXPERTS + _SHARED),
        "deepseek_v3": Names(_LATENT, _EXPERTS + _SHARED, mtp=_MTP),
        "glm4_moe": Names(_GROUPED, _EXPERTS + _SHARED, mtp=_MTP),
        "glm4_moe_lite": Names(_LATENT, _EXPERTS + _SHARED, mtp=_MTP),
        "exaone_moe": Names(_GROUPED, _OUTSIDE_BIAS_EXPERTS + _SHARED),
        "solar_open": Names(_GROUPED, _EXPERTS + _SHARED),
        "dots1": Names(_GROUPED, _EXPERTS + _SHARED),
        "deepseek_v32": Names(_LATENT + _INDEXER, _EXPERTS + _SHARED, mtp=_MTP),
    }
)
MTP_COPIES = (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight"))
