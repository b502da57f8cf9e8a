"""Model FLOPs of one training step, counted as Megatron-LM counts them.

FLOPs of a batch = 3 * 2 * batch * seq * (multiply-adds of one token's forward pass): the backward pass costs two
forward passes, a multiply-add is two operations. With h hidden, n heads, d channels per head, g query groups, s
sequence length, f feed-forward width, v padded vocabulary, the multiply-adds of one token are the sum of

* GQA, per layer:       h * d*(n + 2g)  +  n*d * h  +  s * n*d      (scores and values, halved by the causal mask)
* MLA, per layer:       query  h * n*(nope + rope), or with a q-LoRA of rank r  r * (h + n*(nope + rope) + 1)
                        kv     k * (h + n*(nope + v) + 1) + h * rope, k the kv-LoRA rank
                        output n*v * h;  attention  s * n*(nope + rope + v) / 2
* feed-forward, per layer: h * f * m, m = 3 with SwiGLU and 2 without; an MoE layer counts
                        f = topk * expert width + shared width
* MTP, per depth:       one more layer of the last layer's kind, 2*h*h for its projection and 3*h for its norms
* logits:               h * v * (1 + number of MTP layers)

Recomputation, the router and the norms of the layers are not counted.
Source: the throughput figure that Megatron-LM prints; formula rederived from its published definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_trainer.shape.layers import moe_layer_pattern, mtp_is_moe

if TYPE_CHECKING:
    from arguments import Arguments


def _attention_macs(args: Arguments, seq_length: int) -> float:
    """Multiply-adds of one attention, per token."""
    model = args.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        query_size = heads * model.kv_channels
        key_size = model.query_groups * model.kv_channels
        return hidden * (query_size + 2 * key_size) + query_size * hidden + query_size * seq_length
    query_dim = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.q_lora_rank is None:
        query = hidden * heads * query_dim
    else:
        query = model.q_lora_rank * (hidden + heads * query_dim + 1)
    key_value = model.kv_lora_rank * (hidden + heads * (model.qk_head_dim + model.v_head_dim) + 1)
    key_value += hidden * model.qk_pos_emb_head_dim
    core = seq_length * heads * (query_dim + model.v_head_dim) / 2
    return query + key_value + heads * model.v_head_dim * hidden + core


def training_flops(args: Arguments, batch_size: int, seq_length: int, padded_vocab_size: int) -> float:
    """Return the floating-point operations of forward and backward over batch_size sequences of seq_length tokens.

    The formula stands at the head of this module.
    """
    model, moe = args.model, args.moe
    pattern = moe_layer_pattern(model.num_layers, moe.num_experts, moe.moe_layer_freq)
    num_mtp = model.mtp_num_layers or 0
    num_moe = sum(pattern) + (num_mtp if mtp_is_moe(pattern) else 0)
    num_layers = model.num_layers + num_mtp

    moe_width = 0
    if moe.num_experts:
        moe_width = moe.moe_router_topk * (moe.moe_ffn_hidden_size or model.ffn_hidden_size)
        moe_width += moe.moe_shared_expert_intermediate_size or 0
    ffn_width = (num_layers - num_moe) * model.ffn_hidden_size + num_moe * moe_width
    ffn = model.hidden_size * ffn_width * (3 if model.swiglu else 2)
    mtp = num_mtp * (2 * model.hidden_size**2 + 3 * model.hidden_size)
    logits = model.hidden_size * padded_vocab_size * (1 + num_mtp)
    macs = ffn + num_layers * _attention_macs(args, seq_length) + mtp + logits
    return 6.0 * batch_size * seq_length * macs


def routed_layer_share(args: Arguments, seq_length: int, padded_vocab_size: int) -> float:
    """The share of one MoE layer's routed experts in the model's FLOPs; 0 without experts."""
    model, moe = args.model, args.moe
    if not moe.num_experts:
        return 0.0
    width = moe.moe_router_topk * (moe.moe_ffn_hidden_size or model.ffn_hidden_size)
    return 6.0 * seq_length * model.hidden_size * width * (3 if model.swiglu else 2) / training_flops(args, 1, seq_length, padded_vocab_size)
