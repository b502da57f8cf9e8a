"""Legal mappings and models from a seed. The same seed gives the same cases on every machine.

A draw picks the number of ranks, a factorization, a model and options as plain flags, and applies the trainer's rules;
rejected draws are repeated. So this module only knows which combinations are likely to be legal. No torch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from arguments.container import OPTIONS
from arguments.demands import demands
from arguments.mechanisms.dispatchers import (
    ALLTOALL,
    BACKEND,
    DEEPEP,
    TYPE,
    TYPES,
    DispatcherCapability,
    DispatcherDeclaration,
    find_dispatcher,
)
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import LOCAL_LAYERS, selecting
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import find_optimizer
from arguments.mechanisms.schedule_kinds.declaration import PIPELINE_SCHEDULE
from arguments.mechanisms.schedules import SCHEDULES
from arguments.mechanisms.selection_kinds.declaration import (
    BALANCING,
    ExpertSplit,
    SelectionCapability,
    SelectionDeclaration,
)
from arguments.mechanisms.selections import LOSSES, NO_BALANCING, SELECTIONS, SPLITS, of_balancing
from arguments.mechanisms.shardings import MEGATRON_FSDP, TORCH_FSDP2
from arguments.mechanisms.sublayers import SPARSE_ATTENTION, SUBLAYERS, VARIANT
from arguments.mtp import num_mtp_depths
from moe_trainer.verification.low_precision import comparable_fp8_options
from moe_trainer.verification.mapping import ParallelMapping
from moe_trainer.verification.shrink import (
    LARGE_EPSILON,
    LEARNING_RATE,
    SMALL_TRAINING,
    ParityCase,
    ShrinkError,
    make_case,
)
from moe_trainer.verification.sizes import PACKED_SEQUENCES, packed_sizes

_MAX_DRAWS = 40
Draw = Callable[[random.Random, ParallelMapping, dict[str, Any]], dict[str, Any]]


def draw_cases(count: int, ranks: int, seed: int) -> list[ParityCase]:
    """Draw `count` cases of 2 to `ranks` ranks, most of them large."""
    rng = random.Random(seed)
    cases: list[ParityCase] = []
    while len(cases) < count:
        worlds = [world for world in (2, 4, 8, 16) if world <= ranks]
        world = rng.choices(worlds, [2.0**number for number in range(len(worlds))])[0]
        mapping = rng.choice(list(factorizations(world)))
        case = next(filter(None, (draw(rng, mapping) for _ in range(_MAX_DRAWS))), None)
        if case is not None and case not in cases:
            cases.append(case)
    return cases


def matrix(world: int, models: int) -> list[ParityCase]:
    """Return `models` cases for every factorization of `world` ranks, always the same ones."""
    cases: list[ParityCase] = []
    for mapping in factorizations(world):
        rng = random.Random(str(mapping))
        drawn = filter(None, (draw(rng, mapping) for _ in range(models * _MAX_DRAWS)))
        cases += itertools.islice(drawn, models)
    return cases


def draw(rng: random.Random, mapping: ParallelMapping) -> ParityCase | None:
    """Draw a model and options for a mapping; None if the rules reject them."""
    values: dict[str, Any] = {**SMALL_TRAINING, **_model(rng, mapping), **_router(rng)}
    values |= _sample_parallel_options(rng, mapping) | _batch(rng, mapping)

    def separate_rng() -> random.Random:  # for options that were added later, so that all other draws are unchanged
        return random.Random(repr(sorted(values.items())))

    values |= _stages(rng, mapping, values)
    values |= _context(rng, mapping, values["num_layers"])
    values |= _sample_uncommon_options(separate_rng(), mapping, values)
    for selection in (each for each in SELECTIONS if each.balancing is not None and each.draws):
        values |= _drawn_balancing(separate_rng(), selection, values)
    values |= _sharded(rng, mapping) or _overlapped(rng, mapping, values)
    values |= _fp8(rng, mapping, values)
    values |= _memory(rng, values)
    values |= _optimizer_state(separate_rng(), values)
    values |= _scaled_widths(separate_rng(), values)
    values |= _packed_sequences(separate_rng(), mapping, values)
    values |= _multipliers(separate_rng(), values)
    values |= _chunks(separate_rng(), values)
    values |= _norms_of_layers(separate_rng())
    values |= _head_gates(separate_rng(), values)
    values |= _declared(separate_rng())
    set_values = {dest: value for dest, value in values.items() if value is not None}
    try:
        return make_case(mapping, set_values, bool(values.get("bf16")))
    except ShrinkError:
        return None


def factorizations(world: int) -> Iterator[ParallelMapping]:
    """Yield all mappings of `world` ranks, a power of two; vpp is 1 or 2 with pipeline stages."""
    powers = [1 << bit for bit in range(world.bit_length()) if 1 << bit <= world]
    for tp, cp, pp, etp, ep in itertools.product(powers, repeat=5):
        if max(tp, etp) <= 4 and max(tp * cp, etp * ep) * pp <= world:
            for vpp in (1, 2) if pp > 1 else (1,):
                yield ParallelMapping(tp, cp, pp, vpp, world // (tp * cp * pp), ep, etp)


def _chance(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def _model(rng: random.Random, mapping: ParallelMapping) -> dict[str, Any]:
    """Draw sizes and kind of attention, with enough heads for tensor and context ranks."""
    heads = max(4, mapping.tp * mapping.cp)
    values: dict[str, Any] = {
        "num_attention_heads": heads,
        "hidden_size": 4 * heads,
        "kv_channels": 4,
        "ffn_hidden_size": 24,
        "normalization": "RMSNorm",
        "swiglu": _chance(rng, 0.8),
        "position_embedding_type": "rope",
        "moe_ffn_hidden_size": rng.choice((16, 24)),
        "untie_embeddings_and_output_weights": _chance(rng, 0.6),
        "add_bias_linear": True,
        "num_experts": rng.choice((8, 16)),
    }
    kind = rng.choice(("plain", "grouped", "latent"))
    if _chance(rng, 0.85) or kind == "latent" or mapping.etp > 1:
        values["add_bias_linear"] = False
    if kind == "grouped":
        values |= {"group_query_attention": True, "num_query_groups": rng.choice((1, heads // 2, heads))}
    if kind == "latent":
        values |= {"multi_latent_attention": True, "q_lora_rank": rng.choice((None, 12)), "kv_lora_rank": 8}
        values |= {"qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": rng.choice((4, 6))}
        values["rotary_scaling_factor"] = 4.0
    values["qk_layernorm"] = _chance(rng, 0.4)
    values["attention_output_gate"] = not values.get("multi_latent_attention") and _chance(rng, 0.3)
    values["softmax_type"] = rng.choice(("vanilla", "vanilla", "learnable", "off-by-one"))
    if _chance(rng, 0.3) and not values["add_bias_linear"]:
        values |= {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": _chance(rng, 0.5)}
        values["moe_shared_expert_overlap"] = _chance(rng, 0.3)
    if _chance(rng, 0.3):
        values |= {"mtp_num_layers": rng.choice((1, 1, 2)), "mtp_use_repeated_layer": _chance(rng, 0.2)}
    elif kind != "latent" and _chance(rng, 0.2):
        values["position_embedding_type"] = "learned_absolute"
    if _chance(rng, 0.3):
        values["normalization"] = "LayerNorm"
    if _chance(rng, 0.15) and values["position_embedding_type"] == "rope":
        values |= {"window_size": (5, 0)} if _chance(rng, 0.5) else {"no_rope_freq": 2}
    return values


def _sample_uncommon_options(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    """Draw kinds of attention and experts that few models have, without unsupported combinations."""
    if values.get("multi_latent_attention"):
        draw_attention = rng.choice((_no_options, _sparse_attention, _sparse_attention))
    else:
        draw_attention = rng.choice((_no_options, _no_options, _delta_net))
    options = draw_attention(rng, mapping, values)
    draws = (_no_options, _no_options, *map(_split_experts, SPLITS), _latent_experts)
    return options | rng.choice(draws)(rng, mapping, values)


def _no_options(*_: object) -> dict[str, Any]:
    return {}


def _sparse_attention(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        VARIANT: SPARSE_ATTENTION.variant,
        "dsa_indexer_n_heads": rng.choice((1, 2, 4)),
        "dsa_indexer_head_dim": rng.choice((4, 8)),
        "dsa_indexer_topk": rng.choice((3, 5, 64)),
        "dsa_indexer_loss_coeff": rng.choice((None, 1.0, 1.0)),
        "softmax_type": "vanilla",
        "dsa_indexer_rope_interleaved": _chance(rng, 0.3),
        "dsa_indexer_rotate_activation": _chance(rng, 0.7),
        "window_size": None,
        "dsa_indexer_scoring_relu": _chance(rng, 0.8),
        "dsa_indexer_k_norm_epsilon": rng.choice((None, 1e-3)),
    }
    stage = rng.choice(("dsa_indexer_use_sparse_loss", "dsa_indexer_warmup", None))
    if options["dsa_indexer_loss_coeff"] is not None and stage is not None:
        options[stage] = True
    if options["dsa_indexer_loss_coeff"] is None or options.get("dsa_indexer_use_sparse_loss"):
        options["dsa_attention_form"] = rng.choice(("gathered", "masked"))
    if mapping.cp > 1:
        options |= {"cp_comm_type": ["allgather"], "hierarchical_context_parallel_sizes": None}
    return options


def _delta_net(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    keys = max(2, mapping.tp * mapping.cp)
    pattern = [rng.choice((0, 1)) for _ in range(int(str(values["num_layers"])))]
    variant = rng.choice([each for each in SUBLAYERS if each.has_delta_rule])
    return {
        VARIANT: variant.variant,
        **{dest: rng.choice(values) for dest, values in variant.draws},
        "linear_attention_freq": rng.choice((2, 3, pattern)),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice((1, 2)),
        "linear_key_head_dim": 16,
        "linear_value_head_dim": rng.choice((8, 16)),
        "swiglu": True,
        "layernorm_epsilon": LARGE_EPSILON,
    }


def _latent_experts(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    return {"moe_latent_size": rng.choice((8, 12)), "moe_shared_expert_overlap": False}


def _split_experts(split: ExpertSplit) -> Draw:
    return lambda rng, mapping, values: split.draw(rng, mapping.ep, values)


def _router(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {
        "moe_router_topk": rng.choice((2, 2, 4)),
        TYPE: rng.choice(sorted((*TYPES, ALLTOALL.key))),
        "moe_grouped_gemm": _chance(rng, 0.8),
        "moe_router_dtype": rng.choice((None, "fp32", "fp64")),
    }
    score = rng.choice(("softmax", "softmax", "sigmoid"))
    values["moe_router_score_function"] = score
    if score == "softmax":
        values["moe_router_pre_softmax"] = _chance(rng, 0.4)
    else:
        values["moe_router_enable_expert_bias"] = _chance(rng, 0.6)
        values["moe_router_topk_scaling_factor"] = rng.choice((None, 2.5))
    if _chance(rng, 0.3):
        values |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    # kinds with flags are drawn later, with them
    by_choice = ([each.balancing] for each in SELECTIONS if each.balancing is not None and not each.draws)
    balance = rng.choice((*([loss] for loss in LOSSES), ["aux_loss", "seq_aux_loss"], [NO_BALANCING], *by_choice))
    values[BALANCING] = balance
    values["moe_aux_loss_coeff"] = [1e-2 if kind in LOSSES else 0.0 for kind in balance]
    values["moe_z_loss_coeff"] = rng.choice((None, 1e-3))
    if _chance(rng, 0.25):
        values["moe_expert_capacity_factor"] = rng.choice((0.7, 1.5))
        values["moe_pad_expert_input_to_capacity"] = _chance(rng, 0.5)
        values["moe_token_drop_policy"] = rng.choice(("probs", "position"))
    return values


def _drawn_balancing(rng: random.Random, selection: SelectionDeclaration, values: dict[str, Any]) -> dict[str, Any]:
    """Draw a kind of balancing that has flags sometimes, if the model allows it."""
    excluded_by = [dest for dest, capability in demands(SelectionCapability).items() if selection.rejects(capability)]
    if selection.rejects(SelectionCapability.CAPACITY):
        excluded_by.append("moe_expert_capacity_factor")
    if any(values.get(dest) not in (None, OPTIONS[dest].default) for dest in excluded_by) or not _chance(rng, 0.2):
        return {}
    return {
        "moe_router_load_balancing_type": [selection.balancing],
        "moe_aux_loss_coeff": [0.0],
        **{dest: rng.choice(choices) for dest, choices in selection.draws},
    }


def _sample_parallel_options(rng: random.Random, mapping: ParallelMapping) -> dict[str, Any]:
    """Draw the flags of the mapping and of data parallelism."""
    distributed, overlap = _chance(rng, 0.5), _chance(rng, 0.5)
    has_even_ranks = (mapping.dp * mapping.cp) % 2 == 0 and mapping.edp % 2 == 0
    instances = 2 if distributed and has_even_ranks and _chance(rng, 0.2) else None
    return {
        "tensor_model_parallel_size": mapping.tp,
        "context_parallel_size": mapping.cp,
        "pipeline_model_parallel_size": mapping.pp,
        "expert_model_parallel_size": mapping.ep,
        "expert_tensor_parallel_size": mapping.etp,
        "sequence_parallel": mapping.tp > 1 and _chance(rng, 0.7),
        "use_tp_pp_dp_mapping": mapping.edp == mapping.dp and _chance(rng, 0.4),
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": distributed and overlap,
        "ddp_bucket_size": 3000 if overlap else None,
        "num_distributed_optimizer_instances": instances,
        **LOCAL_LAYERS.selected_by,
    }


def _optimizer_state(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Draw formats and placement of the optimizer's state sometimes."""
    has_formats = find_optimizer(values["optimizer"]).supports(OptimizerCapability.STATE_FORMATS)
    if not has_formats or not _chance(rng, 0.3):
        return {}
    options: dict[str, Any] = {"use_precision_aware_optimizer": True}
    if _chance(rng, 0.7):
        options |= {"exp_avg_dtype": rng.choice(("fp32", "fp16")), "exp_avg_sq_dtype": "fp16"}
    placement = rng.choice(("", "optimizer_cpu_offload", "chunked_optimizer_state_offload"))
    if placement:
        is_offload = placement == "optimizer_cpu_offload"
        fraction = "optimizer_offload_fraction" if is_offload else "optimizer_state_offload_fraction"
        options |= {placement: True, fraction: rng.choice((0.5, 1.0))}
    return options


def _scaled_widths(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Draw maximal update parametrization sometimes, from a narrower or wider base."""
    if not _chance(rng, 0.15):
        return {}
    return {
        "use_mup": True,
        "mup_base_hidden_size": int(str(values["hidden_size"])) * 2 // rng.choice((1, 4, 5)),
        "mup_embedding_mult": rng.choice((1.0, 3.0)),
        "mup_output_mult": rng.choice((1.0, 0.7)),
        "mup_base_head_dim": rng.choice((None, 4.0)),
        "mup_attn_scale_power": rng.choice((1.0, 0.5)),
    }


def _multipliers(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Draw Granite's multipliers sometimes."""
    if not _chance(rng, 0.1):
        return {}
    free = not values.get("multi_latent_attention") and not values.get("use_mup")
    return {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
        "attention_multiplier": rng.choice((None, 0.3)) if free else None,
    }


def _chunks(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Draw chunks of attention and temperatures of queries sometimes."""
    is_free = not values.get("window_size") and values.get(VARIANT) != SPARSE_ATTENTION.variant
    if not is_free or _chance(rng, 0.9):  # where no multipliers are drawn, this number is the one that they drew
        return {}
    return {
        "attention_chunk_size": 6,
        "window_attn_skip_freq": rng.choice((None, 2)),
        "attn_temperature_tuning": "mistral4",
        "attn_temperature_scale": 1.0,
        "attn_temperature_floor": 5,
    }


def _norms_of_layers(rng: random.Random) -> dict[str, Any]:
    """Draw norms after attention, after the MLP, or both sometimes; and sometimes these alone."""
    attention, mlp = rng.choice(((True, False), (False, True), (True, True)))
    if not _chance(rng, 0.15):  # not the first number, which the generators of several options have in common
        return {}
    alone = attention and mlp and _chance(rng, 0.5)
    return {"post_self_attn_layernorm": attention, "post_mlp_layernorm": mlp, "pre_layernorm": not alone}


def _head_gates(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Draw gates of whole heads of latent attention sometimes."""
    gates = rng.choice((False, False, True)) and values.get("multi_latent_attention")
    return {"head_wise_attn_gate": True} if gates and not values.get(VARIANT) else {}


def _declared(rng: random.Random) -> dict[str, Any]:
    """Draw flags sometimes whose fields say which values."""
    drawn = (option for option in OPTIONS.values() if option.draws and _chance(rng, 0.2))
    return {option.dest: rng.choice(option.draws) for option in drawn}


def _batch(rng: random.Random, mapping: ParallelMapping) -> dict[str, Any]:
    micro, accumulation = rng.choice((1, 2)), rng.choice((1, 2, 4))
    if mapping.pp > 1 and accumulation < mapping.pp and _chance(rng, 0.7):
        accumulation = 2 * mapping.pp
    length = max(16, 2 * mapping.cp * mapping.tp)
    return {
        "micro_batch_size": micro,
        "global_batch_size": micro * accumulation * mapping.dp,
        "seq_length": length,
        "max_position_embeddings": length,
        "clip_grad": rng.choice((0.5, 1.0)),
        "decoupled_lr": rng.choice((None, None, 2 * LEARNING_RATE)),
        "optimizer": rng.choice(("adam", "adam", "adam", "sgd")),
        "calculate_per_token_loss": _chance(rng, 0.25),
        "reset_position_ids": _chance(rng, 0.15),
        "reset_attention_mask": _chance(rng, 0.15),
        "dataloader_inter_document_masking": _chance(rng, 0.05),
        "eod_mask_loss": _chance(rng, 0.15),
    }


def _packed_sequences(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    """Draw samples of different lengths sometimes, which are packed into microbatches."""
    balancing = of_balancing(values["moe_router_load_balancing_type"])
    is_excluded = values.get("fp8") or any(each.rejects(SelectionCapability.PADDING) for each in balancing)
    if is_excluded or not _chance(rng, 0.3):
        return {}
    sizes = packed_sizes(mapping, by_tensor_ranks=True)
    return sizes | {
        "use_varlen_dataset": True,
        "sequence_packing_scheduler": rng.choice(("dp_balanced", "cost_balanced")),
        "pad_packed_seq_alignment": rng.choice((None, "max", sizes["pad_packed_seq_alignment"])),
        "thd_tail_padding_policy": rng.choice((None, "append_dummy_seq", "extend_last")),
        "thd_max_packed_sequences": rng.choice((None, PACKED_SEQUENCES)),
        "global_batch_size": int(str(values["global_batch_size"])) * PACKED_SEQUENCES,
        **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking"), False),
    }


def _stages(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    pp, vpp, mtp = mapping.pp, mapping.vpp, num_mtp_depths(values)
    layers = max(pp * vpp, rng.choice((2, 3)) if pp == 1 else 2)
    options: dict[str, Any] = {}
    kind = rng.choice(("even", "even", "first", "account", "layout")) if pp > 1 else "even"
    if vpp > 1 and kind != "layout":
        options["num_virtual_stages_per_pipeline_rank"] = vpp
    for schedule in (each for each in SCHEDULES if each.is_drawn):
        if pp > 1 and _chance(rng, 0.25):
            options[PIPELINE_SCHEDULE] = schedule.key
    if kind == "first":
        options["decoder_first_pipeline_num_layers"] = 2 * vpp
        layers = 2 * vpp + vpp * (pp - 1)
    elif kind == "account" and pp * vpp > 2:
        options |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        layers = 2 * pp * vpp - 2 if pp * vpp < 4 else pp * vpp - 2
    elif kind == "layout":
        stages = ["t" * rng.choice((0, 1, 1, 2)) for _ in range(pp * vpp)]
        stages[0] = stages[0] or "t"
        alone = mtp and pp > 2 and _chance(rng, 0.5)
        stages[-1] = "" if alone else stages[-1]
        stages[-2 if alone else -1] += "m" * mtp
        layers = max("".join(stages).count("t"), 1)
        options["pipeline_model_parallel_layout"] = "|".join(["E" + stages[0], *stages[1:]]) + "L"
    options["num_layers"] = layers
    if layers > 1 and _chance(rng, 0.4):
        options["moe_layer_freq"] = rng.choice((2, [0] + [1] * (layers - 1)))
    return options


def _context(rng: random.Random, mapping: ParallelMapping, layers: int) -> dict[str, Any]:
    if mapping.cp == 1:
        return {}
    kinds = ["p2p", "allgather", "a2a"] + (["a2a+p2p"] if mapping.cp >= 4 else [])
    chosen = [rng.choice(kinds)] if _chance(rng, 0.7) else [rng.choice(kinds) for _ in range(layers)]
    nested = {"hierarchical_context_parallel_sizes": [2, mapping.cp // 2]} if "a2a+p2p" in chosen else {}
    return {"cp_comm_type": chosen, **nested}


def _sharded(rng: random.Random, mapping: ParallelMapping) -> dict[str, Any]:
    if mapping.dp == 1 or not _chance(rng, 0.2):
        return {}
    options: dict[str, Any] = {"use_distributed_optimizer": False, "overlap_param_gather": False}
    options["num_distributed_optimizer_instances"] = None
    if _chance(rng, 0.4):
        return options | TORCH_FSDP2.selected_by | {"overlap_grad_reduce": False, "ddp_bucket_size": None}
    sharding = rng.choice([each for each in MEGATRON_FSDP if each.shards_flat_state])
    return options | sharding.selected_by | {"ckpt_format": sharding.ckpt_format}


def _memory(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    kind = rng.choice(("none", "none", "full", "selective", "selective"))
    if kind == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": rng.choice(("uniform", "block")),
            "recompute_num_layers": rng.choice((1, 2)),
            "distribute_saved_activations": values["tensor_model_parallel_size"] > 1
            and not values["sequence_parallel"],
        }
    if kind == "selective":
        parts = ["core_attn", "layernorm", "moe", "shared_experts", "mlp"]
        parts += ["mla_up_proj"] * bool(values.get("multi_latent_attention"))
        options |= {"recompute_granularity": kind, "recompute_modules": rng.sample(parts, rng.choice((1, 2, 3)))}
    if _chance(rng, 0.3):
        parts = ["attn_norm", "qkv_linear", "core_attn", "mlp_norm"]
        parts += [] if "moe" in options.get("recompute_modules", ()) else ["expert_fc1", "moe_act"]
        options |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": rng.sample(parts, rng.choice((1, 3, len(parts)))),
            "min_offloaded_tensor_size": 1,
            **selecting(ImplementationCapability.ACTIVATION_OFFLOAD),
        }
    return options


def _dispatcher(values: Mapping[str, Any]) -> DispatcherDeclaration:
    return find_dispatcher(str(values[TYPE]), str(values.get(BACKEND, DEEPEP.key)))


def _fp8(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    """Draw fp8 sometimes, as far as one process can compute it."""
    if not _chance(rng, 0.2):
        return {}
    options: dict[str, Any] = {
        "fp8": rng.choice(("e4m3", "hybrid")),
        "fp8_recipe": rng.choice(("delayed", "tensorwise", "blockwise", "mxfp8")),
        "fp8_amax_history_len": rng.choice((1, 2)),
        "fp8_amax_compute_algo": rng.choice(("most_recent", "max")),
        "first_last_layers_bf16": _chance(rng, 0.2),
        "moe_router_padding_for_quantization": not _dispatcher(values).rejects(DispatcherCapability.QUANTIZED_PADDING)
        and _chance(rng, 0.3),
        "fp8_param_gather": bool(values.get("use_distributed_optimizer")),
    }
    return options | comparable_fp8_options(values | options, mapping, int(str(values["num_layers"])))[0]


def _overlapped(rng: random.Random, mapping: ParallelMapping, values: dict[str, Any]) -> dict[str, Any]:
    """Draw the overlapped token exchange sometimes. It requires --bf16; the check computes in fp32 anyway."""
    cannot_overlap = _dispatcher(values).rejects(DispatcherCapability.EXCHANGE_OVERLAP)
    if mapping.ep == 1 or cannot_overlap or not _chance(rng, 0.3):
        return {}
    options: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
    if _chance(rng, 0.5):
        options |= {"delay_wgrad_compute": True, **selecting(ImplementationCapability.DELAYED_WGRAD)}
    return options
