"""Model FLOPs of one training step, counted as Megatron-LM counts them.

FLOPs of a batch = 3 * 2 * batch * seq * (multiply-adds of one token's forward pass): the backward pass costs two
forward passes, a multiply-add is two operations. With h hidden, n heads, d channels per head, g query groups, s
sequence length, f feed-forward width, v padded vocabulary, the multiply-adds of one token are the sum of

* GQA, per layer:       h * d*(n + 2g)  +  n*d * h  +  s * n*d      (scores and values, halved by the causal mask);
                        gates of the output add h * n*d
* MLA, per layer:       query  h * n*(nope + rope), or with a q-LoRA of rank r  r * (h + n*(nope + rope) + 1)
                        kv     k * (h + n*(nope + v) + 1) + h * rope, k the kv-LoRA rank
                        output n*v * h;  attention  s * n*(nope + rope + v) / 2;  gates of heads add h * n
* sparse attention (of t keys, an index of i heads of e channels), per layer: MLA's, with the number of keys that a
                        query attends to, t - t*t / (2s) where s > t, for s/2; and
                        (r or h) * i*e  +  h * (e + i)  +  s * i*(e + 1) / 2
* compressed attention (heads of e channels, query latents of rank r, outputs of rank o in g groups), per layer:
                        n*e * (r + o)  +  h * (r + e + g*o), the matrices of compressors and indexers, and n * 2e for
                        each key: of a window w - w*w / (2s), of s / c compressed keys half, or as in sparse attention
* gated DeltaNet, per layer, with k channels of keys, n heads of w value channels each, v = n*w, and a convolution of c:
                        h * (2k + 3v + 2n)  +  c * (2k + v)  +  4 * n * w^2
* Mamba, per layer, of i channels of all heads, w groups of heads and a state of e channels:
                        h * (2i + 2w*e + heads)  +  i * h  +  3.5 * i * e; layers of a hybrid model count what they have
* feed-forward, per layer: h * f * m, m = 3 with SwiGLU and 2 without; an MoE layer counts
                        f = topk * expert width + shared width; experts of latents of l channels take l for h, and their
                        projections 2*h*l; those that make a slice of w channels take (h*(m-1) + w) for h * m
* MTP, per depth:       one more layer of the last layer's kind, or those of a hybrid pattern after a /, 2*h*h for its
                        projection and 3*h for its norms
* logits:               h * v * (1 + number of MTP layers)

Not counted: recomputation, the router, the norms of the layers, hyper-connections; of sparse attention, its loss and
what kernels multiply beyond the selected keys. During the warm-up of indexers (--dsa-indexer-warmup) attention is
dense, and everything but the indexers runs forward only: a third. With low-rank adapters (--lora-dim) a frozen weight
has no gradient: its GEMMs count twice, not three times, and an adapter of dim d from i to o features adds d * (i + o)
multiply-adds.
Source: the throughput figure that Megatron-LM prints; formula rederived from its published definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    OVERLAPPING_RATIO,
    compress_ratio,
    has_attention,
    has_mlp,
    is_linear,
    layer_letter,
    model_of_layer,
    moe_layer_pattern,
    mtp_layer_pattern,
)
from arguments.mechanisms.sublayers import variant_of
from moe_trainer.estimate.linear_attention import conv_channels, is_short_conv, linear_attention_params
from moe_trainer.estimate.lora import adapter_macs
from moe_trainer.estimate.parameters import (
    compressed_attention_params,
    indexer_params,
    mamba_params,
)

if TYPE_CHECKING:
    from arguments import Arguments


def _attention_macs(args: Arguments, seq_length: int) -> float:
    """Return the multiply-adds of one attention per token, the mean over layers."""
    model = args.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if variant_of(model).compresses_keys:
        ratios = [compress_ratio(model, number) for number in range(model.num_layers)]
        matrices = sum(compressed_attention_params(model, ratio, matrices=True) for ratio in ratios)
        return matrices / len(ratios) + core_attention_macs(args, seq_length)
    if not model.multi_latent_attention:
        query_size = heads * model.kv_channels
        key_value_size = model.query_groups * (model.kv_channels + model.value_width)
        gate_size = query_size if model.attention_output_gate else 0
        projections = hidden * (query_size + gate_size + key_value_size + heads * model.value_width)
        return projections + core_attention_macs(args, seq_length)
    query_dim = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.q_lora_rank is None:
        query = hidden * heads * query_dim
    else:
        query = model.q_lora_rank * (hidden + heads * query_dim + 1)
    key_value = model.kv_lora_rank * (hidden + heads * (model.qk_head_dim + model.v_head_dim) + 1)
    key_value += hidden * (model.qk_pos_emb_head_dim + (heads if model.head_wise_attn_gate else 0))
    return query + key_value + heads * model.v_head_dim * hidden + core_attention_macs(args, seq_length)


def core_attention_macs(args: Arguments, seq_length: int) -> float:
    """Return the multiply-adds of the scores and values of one attention per token."""
    model = args.model
    if variant_of(model).compresses_keys:
        return sum(_compressed_macs(args, number, seq_length) for number in range(model.num_layers)) / model.num_layers
    if not model.multi_latent_attention:
        return model.num_attention_heads * (model.kv_channels + model.value_width) / 2 * seq_length
    width = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    return _keys(args, seq_length) * model.num_attention_heads * width


def _keys(args: Arguments, seq_length: int) -> float:
    """Return the mean number of keys that a query attends to."""
    model = args.model
    is_dense = not variant_of(model).selects_keys or model.dsa_indexer_warmup
    return _mean_keys(seq_length, float("inf") if is_dense else model.dsa_indexer_topk)


def _compressed_macs(args: Arguments, number: int, seq_length: int) -> float:
    """Return the multiply-adds of scores and values of DeepSeek-V4's attention in a layer (from 0) per token."""
    model, ratio = args.model, compress_ratio(args.model, number)
    keys, index = _mean_keys(seq_length, model.csa_window_size), 0.0
    if ratio:
        compressed, topk = seq_length / ratio, float("inf")
        if ratio == OVERLAPPING_RATIO and not model.csa_dense_mode:
            topk = model.dsa_indexer_topk
            index = compressed * model.dsa_indexer_n_heads * (model.dsa_indexer_head_dim + 1) / 2
        keys += _mean_keys(compressed, topk)
    return keys * model.num_attention_heads * 2 * model.v_head_dim + index


def _mean_keys(length: float, most: float) -> float:
    """Return the mean number of keys of a causal query among `length`, of which it sees at most `most`."""
    return length / 2 if length <= most else most - most * most / (2 * length)


def _indexer_macs(args: Arguments, seq_length: int) -> float:
    """Return the multiply-adds of one indexer per token: its matrices, and the scores of all keys."""
    model = args.model
    scores = seq_length * model.dsa_indexer_n_heads * (model.dsa_indexer_head_dim + 1) / 2
    return indexer_params(model, matrices=True) + scores


def _linear_macs(args: Arguments) -> int:
    """Return the multiply-adds of one layer's linear attention per token."""
    model = args.model
    convolution = model.linear_conv_kernel_dim * conv_channels(model)
    return linear_attention_params(model, matrices=True) + convolution + _delta_rule_macs(args)


def _delta_rule_macs(args: Arguments) -> int:
    """Return the multiply-adds of the state of linear attention per token."""
    if is_short_conv(args.model):
        return 0
    return 4 * args.model.linear_num_value_heads * args.model.linear_value_head_dim**2


def _mamba_macs(args: Arguments) -> float:
    """Return the multiply-adds of one Mamba mixer per token."""
    model = args.model
    return mamba_params(model, matrices=True) + 3.5 * model.mamba_heads * model.mamba_head_dim * model.mamba_state_dim


def _routed_macs(args: Arguments) -> int:
    """Return the multiply-adds of the routed experts of one layer per token."""
    model, moe = args.model, args.moe
    if not moe.num_experts:
        return 0
    reads, makes = moe.expert_widths(model.hidden_size)
    width = moe.moe_router_topk * (moe.moe_ffn_hidden_size or model.ffn_hidden_size)
    return width * (reads * (2 if model.swiglu else 1) + makes)


def _args_of_layer(args: Arguments, number: int) -> Arguments:
    """Return the flags with the attention of a layer (from 0)."""
    model = model_of_layer(args.model, number + 1)
    return args if model is args.model else replace(args, model=model)


def training_flops(args: Arguments, batch_size: float, seq_length: int, padded_vocab_size: int) -> float:
    """Return the floating-point operations of forward and backward over `batch_size` sequences.

    The head of this module states the formula.
    """
    model, moe = args.model, args.moe
    pattern = moe_layer_pattern(model.num_layers, moe.num_experts, moe.moe_layer_freq)
    num_mtp = model.num_mtp_depths
    ahead = mtp_layer_pattern(pattern, model.hybrid_layer_pattern)
    num_moe = sum(pattern) + num_mtp * sum(ahead)
    num_layers = model.num_layers + num_mtp * len(ahead)

    shared = moe.moe_shared_expert_intermediate_size or 0 if moe.num_experts else 0
    numbers = range(num_layers)
    without_mlp = sum(not has_mlp(model, number) for number in numbers)
    ffn_width = (num_layers - num_moe - without_mlp) * model.ffn_hidden_size + num_moe * shared
    ffn = model.hidden_size * ffn_width * (3 if model.swiglu else 2) + num_moe * _routed_macs(args)
    ffn += num_moe * 2 * model.hidden_size * (moe.moe_latent_size or 0)
    ffn += num_moe * model.hidden_size**2 if moe.output_projection is not None else 0
    mtp = num_mtp * (2 * model.hidden_size**2 + 3 * model.hidden_size)
    logits = model.hidden_size * padded_vocab_size * (1 + num_mtp)
    linear = sum(is_linear(model, number) for number in numbers)
    softmax = [
        _args_of_layer(args, number)
        for number in numbers
        if has_attention(model, number) and not is_linear(model, number)
    ]
    attention: float = linear * _linear_macs(args) + sum(_attention_macs(each, seq_length) for each in softmax)
    attention += sum(layer_letter(model, number) == MAMBA for number in numbers) * _mamba_macs(args)
    macs: float = ffn + attention + mtp + logits
    core_attention = sum(core_attention_macs(each, seq_length) for each in softmax)
    if variant_of(model).selects_keys:
        macs /= 3 if model.dsa_indexer_warmup else 1
        macs += sum(variant_of(each.model).selects_keys for each in softmax) * _indexer_macs(args, seq_length)
    if model.lora_dim is not None:  # two of three GEMMs of a frozen weight, all of attention and of the adapters
        core = linear * _delta_rule_macs(args) + core_attention
        macs = (macs - core) * 2 / 3 + core + adapter_macs(args)
    if args.optimizer.freeze_backbone:  # likewise, and all of the routed experts
        trained = num_moe * _routed_macs(args) + core_attention
        macs = (macs - trained) * 2 / 3 + trained
    return 6.0 * batch_size * seq_length * macs


def routed_layer_share(args: Arguments, seq_length: int, padded_vocab_size: int) -> float:
    """Return the share of one MoE layer's routed experts in the model's FLOPs; 0 without experts."""
    if not args.moe.num_experts:
        return 0.0
    return 6.0 * seq_length * _routed_macs(args) / training_flops(args, 1, seq_length, padded_vocab_size)
