"""Whether a model keeps weights in 8 bits (--fp8-param-gather), and how many, from flags alone: for its builder, who does it, and for sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moe_trainer.shape.counts import count_parameters, gated_delta_net, indexer
from moe_trainer.shape.layers import is_linear, moe_layer_pattern, mtp_is_moe

if TYPE_CHECKING:
    from arguments import Arguments

BLOCK = 128 * 128
SCALE_BYTES = 12
"""Of a block: its scale, the inverse of it, and the largest magnitude that it follows from."""


def keeps_8_bits(args: Arguments) -> bool:
    """Whether the weights of quantised layers are kept so.

    Not those that are fully sharded, on however many ranks: then one process computes with the same weights. MXFP8's blocks cannot be
    stored for both products (ops/stored_weight.py: can_store).
    """
    precision, parallel = args.precision, args.parallel
    sharded = parallel.use_torch_fsdp2 or parallel.use_megatron_fsdp and parallel.data_parallel_sharding_strategy != "optim"
    return bool(precision.fp8 and precision.fp8_param_gather and precision.fp8_recipe not in ("mxfp8", "custom")
                and parallel.use_distributed_optimizer and not sharded)


def bytes_of_a_weight(args: Arguments) -> float:
    """Of an element that is kept in 8 bits, with its share of the scales; one scale for a whole weight is not counted."""
    return 1.0 + (SCALE_BYTES / BLOCK if args.precision.fp8_recipe == "blockwise" else 0.0)


def stored_weights(args: Arguments, padded_vocab_size: int | None = None) -> tuple[int, int]:
    """Elements of the whole model that are kept in 8 bits: (dense, of experts). Arguments and errors of count_parameters."""
    if not keeps_8_bits(args):
        return 0, 0
    model, moe, precision = args.model, args.moe, args.precision
    plain = replace(args, model=replace(model, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False))
    counts, experts = count_parameters(plain, padded_vocab_size), moe.num_experts or 0
    gate = model.hidden_size if moe.moe_shared_expert_intermediate_size and moe.moe_shared_expert_gate else 0
    shared = counts.moe_ffn_per_layer - experts * (counts.per_expert + model.hidden_size) - gate
    first, last = (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) if precision.first_last_layers_bf16 else (0, 0)
    pattern = moe_layer_pattern(model.num_layers, moe.num_experts, moe.moe_layer_freq)
    linear = gated_delta_net(model, matrices=True)
    attention = [linear if is_linear(model, number) else counts.attention_per_layer - indexer(model) for number in range(model.num_layers + 1)]
    covered = list(zip(pattern, attention))[first:len(pattern) - last]
    depths = model.mtp_num_layers or 0
    depths = min(depths, 1) if model.mtp_use_repeated_layer else depths
    covered += [(mtp_is_moe(pattern), attention[-1])] * depths
    dense = depths * 2 * model.hidden_size**2
    dense += sum(mixing + (shared if is_moe else counts.dense_ffn_per_layer) for is_moe, mixing in covered)
    return dense, sum(experts * counts.per_expert for is_moe, _ in covered if is_moe)
