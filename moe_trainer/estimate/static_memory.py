"""The memory line of --validate-only: weights, gradients and optimizer state of the fullest rank, for every mapping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    has_attention,
    has_mlp,
    is_linear,
    layer_letter,
    model_of_layer,
    moe_layer_pattern,
    mtp_layers,
)
from arguments.mechanisms.formats import quantized_format
from arguments.mechanisms.placements import get_placement
from arguments.stage_layout import ChunkLayout, chunk_layouts, parallel_sizes
from arguments.vocabulary import padded_vocab_size_from_flags
from moe_trainer.estimate.hardware import GIB, Hardware, find_hardware
from moe_trainer.estimate.linear_attention import linear_attention_params
from moe_trainer.estimate.parameters import LayerParams, ParamsPerRank, indexer_params, mamba_params
from moe_trainer.estimate.state_bytes import StateBytes, has_known_state, rank_state_bytes

if TYPE_CHECKING:
    from arguments import Arguments


def stage_states(
    args: Arguments, world_size: int, vocab_rows: int, hardware: Hardware | None = None
) -> list[StateBytes]:
    """Return the bytes of a rank of every pipeline stage, first to last; all ranks of a stage hold the same.

    Weights include their quantized casts, if these are kept between microbatches. `hardware`: None for a device before
    Blackwell.
    """
    params, plain = LayerParams(args, vocab_rows), matrices_only(args, vocab_rows)
    states = []
    for chunks in chunk_layouts(args.model, args.parallel):
        held = params.stage(chunks)
        stored = quantized_params_on_rank(plain, chunks) if args.has_quantized_params else ParamsPerRank(0, 0)
        if (form := args.stored_weight_format) is not None and form.is_gathered_wide:
            linears, experts = args.te_quantizes  # Transformer Engine's layers keep theirs in the model's format
            stored = ParamsPerRank(0 if linears else stored.dense, 0 if experts else stored.expert)
        if args.model.dsa_indexer_warmup or args.model.lora_dim is not None or args.optimizer.freeze_backbone:
            state = _frozen_state(args, world_size, held, trained_params(args, chunks, held))
        else:
            tables, narrow = sum(map(params.tables, chunks)), (stored.dense, stored.expert)
            state = rank_state_bytes(args, world_size, held.dense, held.expert, narrow, tables)
        casts = cast_bytes(args, chunks, plain, hardware) + expert_cast_bytes(args, world_size, chunks, plain)
        states.append(replace(state, weights=state.weights + casts))
    return states


def cast_bytes(args: Arguments, chunks: Sequence[ChunkLayout], plain: LayerParams, hardware: Hardware | None) -> float:
    """Return what Transformer Engine's layers keep of their weights between microbatches.

    Each weight is cast by rows for the forward GEMM and by columns for the gradient of the input (quantization/
    iteration.py: WeightCastCache). With a single scale per weight, Blackwell needs the first only. Weights that are
    stored in a form that they take are the first; else these layers hold the model's format, and cast both.
    """
    linears, experts = args.te_quantizes
    fmt, stored = quantized_format(args.precision), args.stored_weight_format
    if fmt is None or args.parallel.has_sharded_params or args.training.captured_modules - {"iteration"}:
        return 0.0
    if not (linears or experts):
        return 0.0
    transposes = fmt.tokens_per_scale is None and not fmt.is_custom
    copies = 2 - (args.has_frozen_weights or (transposes and hardware is not None and hardware.is_blackwell))
    copies -= stored is not None and stored.library_takes  # the weights themselves are the first
    held = quantized_params_on_rank(plain, chunks)
    return max(0, copies) * fmt.copy_bytes * (linears * held.dense + experts * held.expert)


def expert_cast_bytes(args: Arguments, world_size: int, chunks: Sequence[ChunkLayout], plain: LayerParams) -> float:
    """Return what experts of ours keep of their weights between microbatches, by rows and by columns.

    Those whose counts are on the device (quantization/gemms.py: QuantizedGemms.cached_weights), if their own weights
    are in high precision. Weights that are not the same in every microbatch are cast in each of them.
    """
    parallel, training = args.parallel, args.training
    fmt = quantized_format(args.precision)
    casts = args.stored_weight_format is None and args.moe.moe_expert_rank_capacity_factor
    varies = get_placement(args.moe, parallel.expert_model_parallel_size).is_planned
    if (
        fmt is None
        or not fmt.keeps_expert_casts
        or not casts
        or varies
        or args.te_quantizes[1]
        or not args.caches_expert_casts
    ):
        return 0.0
    sizes = parallel_sizes(args)
    data_ranks = world_size // (sizes["tp"] * sizes["cp"] * sizes["pp"])
    if training.global_batch_size == training.micro_batch_size * data_ranks:
        return 0.0
    return 2 * fmt.flags.bits / 8 * quantized_params_on_rank(plain, chunks).expert


def trained_params(args: Arguments, chunks: Sequence[ChunkLayout], held: ParamsPerRank) -> ParamsPerRank:
    """Return those of the parameters that a rank holds of these chunks that are trained."""
    if args.model.lora_dim is not None:
        layers = LayerParams(args, 0)
        return sum((layers.adapters(number) for chunk in chunks for number in chunk.layers), ParamsPerRank(0, 0))
    if args.optimizer.freeze_backbone:
        return held + ParamsPerRank(-_backbone_params(args, chunks), 0)
    if not args.model.dsa_indexer_warmup:
        return held
    model = args.model
    ahead = mtp_layers(model, moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq))
    depths = [number for depth in (ahead[:1] if model.mtp_use_repeated_layer else ahead) for number, _ in depth]
    numbers = [number for chunk in chunks for number in (*chunk.layers, *(depths if chunk.mtp else ()))]
    return ParamsPerRank(sum(indexer_params(model_of_layer(model, number + 1)) for number in numbers), 0)


def _backbone_params(args: Arguments, chunks: Sequence[ChunkLayout]) -> int:
    """Return the parameters that --freeze-backbone freezes.

    They are attention, shared experts, dense networks, hyper-connections, and an own head.
    """
    rows = padded_vocab_size_from_flags(args) or 0
    layers = LayerParams(replace(args, model=replace(args.model, qk_layernorm=False)), rows)  # norms are trained
    model, connection = layers.model, layers.hyper_connection()
    rest = {False: layers.layers[False].dense - layers.attention() - layers.around_mixer() - layers.around_mlp()}
    rest[True] = layers.shared() + layers.projections()
    count = 0
    for number in (number for chunk in chunks for number in chunk.layers):
        count += layers.attention(number) + connection if has_attention(model, number) else 0
        count += rest[layers.pattern[number]] + connection if has_mlp(model, number) else 0
    if any(chunk.has_final_norm for chunk in chunks):
        count += layers.final_norm() - layers.norm(model.hidden_size)
    has_head = model.untie_embeddings_and_output_weights and any(chunk.has_loss for chunk in chunks)
    return count + (layers.table() if has_head else 0)


def _frozen_state(args: Arguments, world_size: int, held: ParamsPerRank, trained: ParamsPerRank) -> StateBytes:
    """Return the state of a rank that trains some of the parameters that it holds; the others have weights only."""
    state = rank_state_bytes(args, world_size, trained.dense, trained.expert)
    width = 4.0 if args.precision.params_dtype_name == "fp32" else 2.0
    return replace(state, weights=state.weights + (held.total - trained.total) * width)


def matrices_only(args: Arguments, vocab_rows: int) -> LayerParams:
    """Return the parameters of the same model without biases, sinks and the norms of queries and keys."""
    model = replace(args.model, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False)
    model = replace(model, add_attention_output_bias=False, add_output_layer_bias=False)
    model = replace(model, softmax_type="vanilla", window_softmax_type=None)
    return LayerParams(replace(args, model=model), vocab_rows)


def quantized_params_on_rank(plain: LayerParams, chunks: Sequence[ChunkLayout]) -> ParamsPerRank:
    """Return the weights of quantized layers, which may be stored in a form of their own."""
    model, precision = plain.model, plain.args.precision
    first = last = 0
    if precision.first_last_layers_bf16:
        first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    held = ParamsPerRank(0, 0)
    for chunk in chunks:
        for number in chunk.layers:
            if first <= number < model.num_layers - last:
                held += _quantized_matrices(plain, plain.pattern[number], number)
        if chunk.mtp:
            depths = 1 if model.mtp_use_repeated_layer else model.num_mtp_depths
            one = ParamsPerRank(2 * model.hidden_size**2 // plain.tp, 0)
            for number, is_moe in enumerate(plain.mtp_pattern, start=model.num_layers):
                one += _quantized_matrices(plain, is_moe, number)
            held += one.scale(depths)
    return held


def _quantized_matrices(plain: LayerParams, is_moe: bool, number: int) -> ParamsPerRank:
    """Return the quantized matrices of a layer: all but norms, router, indexer and the gate of shared experts."""
    model, moe = plain.model, plain.moe
    around = plain.around_mixer() + plain.around_mlp()
    matrices = plain.layers[is_moe] + ParamsPerRank(-around - plain.attention(), 0)
    if is_moe:
        has_gate = moe.moe_shared_expert_intermediate_size and moe.moe_shared_expert_gate
        matrices += ParamsPerRank(-(plain.num_experts + (1 if has_gate else 0)) * model.hidden_size, 0)
    if not has_mlp(model, number):
        matrices = ParamsPerRank(0, 0)
    if layer_letter(model, number) == MAMBA:
        return matrices + ParamsPerRank(mamba_params(model, matrices=True) // plain.tp, 0)
    if is_linear(model, number):
        return matrices + ParamsPerRank(linear_attention_params(model, plain.tp, matrices=True), 0)
    if not has_attention(model, number):
        return matrices
    return matrices + ParamsPerRank(plain.attention(number) - indexer_params(model_of_layer(model, number + 1)), 0)


def state_report(args: Arguments, world_size: int | None, padded_vocab_size: int | None = None) -> list[str]:
    """Return the line, or nothing if the vocabulary size or the optimizer's state is unknown.

    Without `world_size`, one replica of the model and its experts is assumed.
    """
    rows = padded_vocab_size or padded_vocab_size_from_flags(args)
    if rows is None or not has_known_state(args):
        return []
    sizes = parallel_sizes(args)
    dense, expert = sizes["tp"] * sizes["cp"] * sizes["pp"], sizes["etp"] * sizes["ep"] * sizes["pp"]
    world_size = world_size or math.lcm(dense, expert)
    hardware = find_hardware(args.output.hardware) if args.output.hardware else None
    stages = stage_states(args, world_size, rows, hardware)
    most = max(stages, key=lambda state: state.total)
    parts = ", ".join(
        f"{name.replace('_', ' ')} {getattr(most, name) / GIB:.2f}"
        for name in ("weights", "gradients", "main_params", "moments")
    )
    host = where = ""
    if most.host:
        host = f"; {most.host / GIB:.2f} GiB of it on the host, {most.device / GIB:.2f} on the device"
    least = min(state.total for state in stages)
    if least < most.total:
        stage = f"stage {stages.index(most)} of {len(stages)}"
        where = f" on pipeline {stage}, where it is most (least: {least / GIB:.2f})"
    return [
        f"memory per rank: {most.total / GIB:.2f} GiB of weights, gradients and optimizer state{where} "
        f"({parts}){host}; activations are counted by --dry-run"
    ]
