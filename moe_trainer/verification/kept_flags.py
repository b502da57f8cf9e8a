"""Flags of a user's command line that a small command line keeps (shrink.py), as lists by destination.

A flag is kept if it acts and determines what is computed. Sizes are chosen again. Outputs and flags of the machine
compute nothing. Noise and half precision could hide a mistake. NOT_IN_REFERENCE lists what the reference must not have,
so that it computes by other means.
"""

from __future__ import annotations

from types import MappingProxyType

from arguments.container import OPTIONS
from arguments.flag_status import get_flag_status
from arguments.settings import Settings
from moe_trainer.verification import low_precision

# destinations that shrink.py sets, or that only make sense with the user's sizes
_REPLACED = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention num_query_groups
    window_num_query_groups value_channels
    max_position_embeddings make_vocab_size_divisible_by window_size q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim mtp_num_layers init_method_std embedding_init_method_std hidden_dropout
    attention_dropout num_experts moe_layer_freq mup_base_hidden_size moe_latent_size finermoe_intermediate_granularity
    finermoe_output_granularity finermoe_intermediate_expansion finermoe_output_expansion moe_use_upcycling
    moe_upcycling_granularity moe_upcycling_expert_init moe_ffn_hidden_size moe_shared_expert_intermediate_size
    moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_group_score_topk
    tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank microbatch_group_size_per_vp_stage
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split mtp_standalone cp_comm_type
    hierarchical_context_parallel_sizes num_distributed_optimizer_instances ddp_bucket_size micro_batch_size
    global_batch_size train_iters train_samples lr min_lr lr_decay_style adam_eps decoupled_lr decoupled_min_lr
    seq_length recompute_num_layers overlap_p2p_comm align_param_gather overlap_moe_expert_parallel_comm
    delay_wgrad_compute linear_attention_freq linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads hybrid_layer_pattern mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
    dsa_attention_form attention_chunk_size attn_temperature_floor no_rope_freq rotary_base_per_layer
    window_attn_skip_freq use_tp_pp_dp_mapping transformer_impl pipeline_schedule
    sequence_packing_scheduler max_seqlen_per_dp_cp_rank pad_packed_seq_alignment thd_tail_padding_policy
    thd_max_packed_sequences hybrid_context_parallel dynamic_context_parallel min_dynamic_context_parallel_size
    moe_enable_routing_replay moe_routing_replay_path moe_n_hash_layers csa_compress_ratios
    csa_window_size o_groups o_lora_rank kda_gate_rank
    """.split()
)
_KEPT_TRAINING = frozenset(
    """
    calculate_per_token_loss recompute_granularity recompute_method recompute_modules distribute_saved_activations seed
    fine_grained_activation_offloading offload_modules activation_offload_fraction delta_offload_bytes_across_pp_ranks
    fine_grained_offloading_max_inflight_offloads mlp_chunks_for_training spec
    """.split()
)
_KEPT_OPTIMIZER = frozenset(
    """
    optimizer freeze_backbone adam_beta1 adam_beta2 sgd_momentum clip_grad weight_decay apply_wd_to_qk_layernorm
    use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction
    overlap_cpu_optimizer_d2h_h2d chunked_optimizer_state_offload optimizer_state_offload_fraction lion_beta1
    lion_beta2 muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_coefficient_type
    muon_num_ns_steps muon_tp_mode muon_scalar_optimizer
    """.split()
)
_KEPT_DATA = frozenset(
    """
    reset_position_ids reset_attention_mask eod_mask_loss dataloader_inter_document_masking
    create_attention_mask_in_dataloader use_varlen_dataset
    """.split()
)
_KEPT = MappingProxyType(
    {
        "training": _KEPT_TRAINING,
        "optimizer": _KEPT_OPTIMIZER,
        "data": _KEPT_DATA,
        "output": ("ckpt_format",),
        "precision": ("fp4", "logit_dtype", *low_precision.FP8_FLAGS),
    }
)
_MACHINE = frozenset(
    """
    distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init local_rank world_size
    on_missing_backend triton_kernels fake_process_group pipeline_model_parallel_comm_backend grad_reduce_in_bf16
    ddp_pad_buckets_for_high_nccl_busbw megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype
    megatron_fsdp_main_params_dtype fp32_residual_connection high_priority_a2a_comm_stream high_priority_stream_groups
    nccl_communicator_config_path
    """.split()
)
NOT_IN_REFERENCE = frozenset(
    """
    recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations bf16
    ckpt_format fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
    activation_offload_fraction cpu_offloading_num_layers delta_offload_bytes_across_pp_ranks
    fine_grained_offloading_max_inflight_offloads optimizer_cpu_offload optimizer_offload_fraction
    overlap_cpu_optimizer_d2h_h2d chunked_optimizer_state_offload optimizer_state_offload_fraction
    moe_token_dispatcher_type moe_flex_dispatcher_backend moe_shared_expert_overlap moe_grouped_gemm
    moe_expert_rank_capacity_factor moe_clone_hot_experts moe_paged_stash moe_paged_stash_page_size
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu fp8_param_gather fp4_param_gather
    dsa_attention_form attention_backend mla_down_proj_fusion mlp_chunks_for_training
    """.split()
)
NOISE = MappingProxyType(
    {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "lora_dropout": 0.0,
        "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
        "moe_router_force_biased": None,
    }
)
# destinations that old spellings set
_SET_BY_OLD_SPELLINGS = frozenset(
    """
    moe_router_padding_for_quantization position_embedding_type moe_flex_dispatcher_backend apply_wd_to_qk_layernorm
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    """.split()
)


def get_kept_flags(s: Settings) -> dict[str, object]:
    values = {}
    for dest, option in OPTIONS.items():
        derived = dest in _SET_BY_OLD_SPELLINGS and s.source[dest] == "derived"
        if not (s.given(dest) or derived) or dest in _REPLACED or dest in _MACHINE or dest in NOISE:
            continue
        if option.section in _KEPT and dest not in _KEPT[option.section]:
            continue
        if get_flag_status(dest)[0] == "acts" and s.values[dest] != s.default(dest):
            values[dest] = s.values[dest]
    return values
