"""The features that a parity case exercises, and a small set of cases that exercises all of them."""

import functools

from arguments import Arguments, parse_args
from moe_trainer.verification.shrink import ParityCase

FEATURES = {
    "TP with SP": lambda a: a.parallel.sequence_parallel,
    "TP without SP": lambda a: a.parallel.tensor_model_parallel_size > 1 and not a.parallel.sequence_parallel,
    "EP above DP": lambda a: a.parallel.expert_model_parallel_size > _dp(a),
    "EP with expert data ranks": lambda a: a.parallel.expert_model_parallel_size > 1 and _edp(a) > 1,
    "ETP above TP": lambda a: a.parallel.expert_tensor_parallel_size > a.parallel.tensor_model_parallel_size,
    "ETP below TP": lambda a: a.parallel.expert_tensor_parallel_size < a.parallel.tensor_model_parallel_size,
    "ETP with EP": lambda a: a.parallel.expert_tensor_parallel_size > 1 and a.parallel.expert_model_parallel_size > 1,
    "order tp-cp-ep-pp-dp": lambda a: a.parallel.use_tp_pp_dp_mapping and a.parallel.pipeline_model_parallel_size > 1,
    "middle stages": lambda a: a.parallel.pipeline_model_parallel_size > 2,
    "virtual stages": lambda a: a.parallel.num_virtual_stages_per_pipeline_rank,
    "uneven first stage": lambda a: a.parallel.decoder_first_pipeline_num_layers,
    "embedding and loss count": lambda a: a.parallel.account_for_loss_in_pipeline_split,
    "layout": lambda a: a.parallel.pipeline_model_parallel_layout,
    "zero bubble": lambda a: a.parallel.pipeline_schedule == "zero-bubble",
    "tied head over stages": lambda a: (
        a.parallel.pipeline_model_parallel_size > 1 and not a.model.untie_embeddings_and_output_weights
    ),
    "CP p2p": lambda a: _cp(a, "p2p"),
    "CP allgather": lambda a: _cp(a, "allgather"),
    "CP a2a": lambda a: _cp(a, "a2a"),
    "CP a2a+p2p": lambda a: _cp(a, "a2a+p2p"),
    "CP type per layer": lambda a: a.parallel.context_parallel_size > 1 and len(set(a.parallel.cp_comm_type)) > 1,
    "CP with MLA": lambda a: a.parallel.context_parallel_size > 1 and a.model.multi_latent_attention,
    "CP with grouped queries": lambda a: a.parallel.context_parallel_size > 1 and a.model.group_query_attention,
    "CP with MTP": lambda a: a.parallel.context_parallel_size > 1 and a.model.mtp_num_layers,
    "CP with documents": lambda a: a.parallel.context_parallel_size > 1 and a.data.reset_attention_mask,
    "distributed optimizer": lambda a: a.parallel.use_distributed_optimizer and _dp(a) > 1,
    "overlapped gathers": lambda a: a.parallel.overlap_param_gather and _dp(a) > 1,
    "optimizer instances": lambda a: a.parallel.num_distributed_optimizer_instances > 1,
    "fully sharded": lambda a: a.parallel.use_torch_fsdp2 or a.parallel.use_megatron_fsdp,
    "overlapped exchange": lambda a: a.parallel.overlap_moe_expert_parallel_comm,
    "deferred weight gradients": lambda a: a.parallel.delay_wgrad_compute,
    "allgather": lambda a: _dispatched(a, "allgather"),
    "alltoall": lambda a: _dispatched(a, "alltoall"),
    "flex": lambda a: _dispatched(a, "flex"),
    "aux loss": lambda a: "aux_loss" in _balancing(a),
    "seq aux loss": lambda a: "seq_aux_loss" in _balancing(a),
    "global aux loss": lambda a: "global_aux_loss" in _balancing(a),
    "z-loss": lambda a: a.moe.moe_z_loss_coeff,
    "expert bias": lambda a: a.moe.moe_router_enable_expert_bias,
    "groups": lambda a: a.moe.moe_router_group_topk,
    "capacity": lambda a: a.moe.moe_expert_capacity_factor,
    "capacity under TP": lambda a: a.moe.moe_expert_capacity_factor and a.parallel.tensor_model_parallel_size > 1,
    "capacity under CP": lambda a: a.moe.moe_expert_capacity_factor and a.parallel.context_parallel_size > 1,
    "padded capacity": lambda a: a.moe.moe_pad_expert_input_to_capacity,
    "drop by position": lambda a: a.moe.moe_expert_capacity_factor and a.moe.moe_token_drop_policy == "position",
    "router in fp64": lambda a: a.moe.moe_router_dtype == "fp64",
    "MTP": lambda a: a.model.mtp_num_layers,
    "MTP over stages": lambda a: a.model.mtp_num_layers and a.parallel.pipeline_model_parallel_size > 1,
    "MTP on a separate stage": lambda a: a.parallel.mtp_standalone,
    "learned positions": lambda a: a.model.position_embedding_type == "learned_absolute",
    "sliding window": lambda a: a.model.window_size,
    "sliding window under CP": lambda a: a.model.window_size and a.parallel.context_parallel_size > 1,
    "layers without positions": lambda a: a.model.no_rope_freq,
    "decoupled learning rate": lambda a: a.optimizer.decoupled_lr,
    "two MTP depths": lambda a: a.model.mtp_num_layers == 2,
    "MLA": lambda a: a.model.multi_latent_attention,
    "MLA under TP": lambda a: a.model.multi_latent_attention and a.parallel.tensor_model_parallel_size > 1,
    "grouped queries": lambda a: a.model.group_query_attention and a.model.num_query_groups > 1,
    "one query group": lambda a: a.model.group_query_attention and a.model.num_query_groups == 1,
    "qk norm": lambda a: a.model.qk_layernorm,
    "norms after sublayers": lambda a: a.model.post_self_attn_layernorm and a.model.pre_layernorm,
    "norms after sublayers only": lambda a: not a.model.pre_layernorm,
    "shared expert": lambda a: a.moe.moe_shared_expert_intermediate_size,
    "shared expert with gate under TP": lambda a: (
        a.moe.moe_shared_expert_gate and a.parallel.tensor_model_parallel_size > 1
    ),
    "shared expert overlap": lambda a: a.moe.moe_shared_expert_overlap,
    "tied head": lambda a: not a.model.untie_embeddings_and_output_weights,
    "biases": lambda a: a.model.add_bias_linear,
    "no gate": lambda a: not a.model.swiglu,
    "dense layer first": lambda a: isinstance(a.moe.moe_layer_freq, list),
    "per-token loss": lambda a: a.training.calculate_per_token_loss,
    "accumulation 1": lambda a: _microbatches(a) == 1,
    "accumulation 2": lambda a: _microbatches(a) == 2,
    "accumulation 4": lambda a: _microbatches(a) >= 4,
    "uniform recompute": lambda a: a.training.recompute_method == "uniform",
    "block recompute": lambda a: a.training.recompute_method == "block",
    **{
        f"recompute of {part}": lambda a, part=part: part in (a.training.recompute_modules or ())
        for part in ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
    },
    "saved inputs spread over TP": lambda a: a.training.distribute_saved_activations,
    "recompute over stages": lambda a: a.training.recompute_granularity and a.parallel.pipeline_model_parallel_size > 1,
    "offload": lambda a: a.training.fine_grained_activation_offloading,
    "offload and recompute": lambda a: (
        a.training.fine_grained_activation_offloading and a.training.recompute_granularity
    ),
    "moments in fp16": lambda a: a.optimizer.exp_avg_sq_dtype == "fp16",
    "optimizer on the host": lambda a: a.optimizer.optimizer_cpu_offload,
    "optimizer states on the host between steps": lambda a: a.optimizer.chunked_optimizer_state_offload,
    "sparse attention": lambda a: a.model.experimental_attention_variant == "dsa",
    "gated DeltaNet": lambda a: a.model.experimental_attention_variant == "gdn",
    "FineRMoE": lambda a: a.moe.finermoe_intermediate_granularity,
    "latent experts": lambda a: a.moe.moe_latent_size,
    "documents": lambda a: a.data.reset_attention_mask or a.data.dataloader_inter_document_masking,
}


def _dp(a: Arguments) -> int:
    p = a.parallel
    return a.world_size // (p.tensor_model_parallel_size * p.context_parallel_size * p.pipeline_model_parallel_size)


def _edp(a: Arguments) -> int:
    p = a.parallel
    return a.world_size // (
        p.expert_tensor_parallel_size * p.expert_model_parallel_size * p.pipeline_model_parallel_size
    )


def _cp(a: Arguments, kind: str) -> bool:
    return a.parallel.context_parallel_size > 1 and kind in a.parallel.cp_comm_type


def _dispatched(a: Arguments, kind: str) -> bool:
    return a.parallel.expert_model_parallel_size > 1 and a.moe.moe_token_dispatcher_type == kind


def _balancing(a: Arguments) -> list[str]:
    kinds = a.moe.moe_router_load_balancing_type
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _microbatches(a: Arguments) -> int:
    return a.training.global_batch_size // (a.training.micro_batch_size * _dp(a))


@functools.cache
def _parse(case: ParityCase) -> Arguments:
    return parse_args(list(case.argv), case.world_size)


def features(case: ParityCase) -> frozenset[str]:
    """Names of the features of a case; none with fp8, which tests/verification/test_fp8.py checks separately."""
    args = _parse(case)
    return frozenset() if args.precision.fp8 else frozenset(name for name, holds in FEATURES.items() if holds(args))


def _work(case: ParityCase) -> float:
    """Roughly, layers that the one process and the ranks compute; exchanges cost a rank more than its sums."""
    args, m = _parse(case), case.mapping
    layers = 2 + args.model.num_layers + (args.model.mtp_num_layers or 0)
    return (1 + m.world * m.tp * m.cp / m.pp) * _microbatches(args) * layers


def choose_covering_cases(cases: list[ParityCase]) -> list[ParityCase]:
    """Choose few cheap cases that exercise all features: greedy, by new features and work."""
    exercised = {case: features(case) for case in cases}
    missing, chosen = frozenset().union(*exercised.values()), []
    while missing:
        best = max(exercised, key=lambda case: len(exercised[case] & missing) ** 1.5 / (160 + _work(case)))
        chosen.append(best)
        missing -= exercised[best]
    return chosen
