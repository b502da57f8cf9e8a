"""Ranges of single flags: what no value of another flag can make right.

Rules between flags leave values out of range alone, so that each mistake is reported once, here.
"""

import math
from collections.abc import Iterator

from arguments.rules.derived_sizes import MAX_LAYERS, DerivedSizes, as_list
from arguments.settings import Settings, Violation

POSITIVE = tuple(
    """
    num_layers hidden_size num_attention_heads max_position_embeddings seq_length micro_batch_size
    ffn_hidden_size moe_ffn_hidden_size kv_channels vocab_size padded_vocab_size make_vocab_size_divisible_by
    kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    ddp_num_buckets ddp_bucket_size max_seqlen_per_dp_cp_rank thd_max_packed_sequences num_query_groups
    linear_num_key_heads
    linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    dsa_indexer_topk_freq dsa_indexer_k_norm_epsilon
    yarn_original_max_position_embeddings moe_router_num_groups moe_router_group_score_topk
    finermoe_intermediate_granularity
    finermoe_output_granularity moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size
    suggested_communication_unit_size world_size model_parallel_size batch_size
    hierarchical_context_parallel_sizes min_dynamic_context_parallel_size fp8_amax_history_len replication_factor
    rotary_base rotary_scaling_factor rope_scaling_factor rotary_seq_len_interpolation_factor rotary_percent
    rotary_base_per_layer window_rotary_percent window_num_query_groups value_channels attention_value_scale
    moe_router_topk_scaling_factor layernorm_epsilon attention_latent_norm_epsilon mamba_step_size_max
    loss_scale initial_loss_scale min_loss_scale
    loss_scale_window hysteresis seed moe_upcycling_granularity moe_expert_rank_capacity_factor
    moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda activation_func_clamp_value yarn_beta_fast
    yarn_beta_slow qk_clip_threshold muon_extra_scale_factor muon_num_ns_steps mup_base_hidden_size
    mup_width_mult mup_embedding_mult mup_output_mult mup_base_head_dim embedding_multiplier residual_multiplier
    attention_multiplier logits_scaling
    moe_hierarchical_domain_size moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
    moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing num_dataset_builder_threads
    dist_ckpt_workers
    log_interval eval_interval tensorboard_log_interval exit_interval log_memory_interval save_params_interval
    save_activations_interval save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval
    distributed_timeout_minutes distributed_timeout_seconds_after_init tensorboard_queue_size
    train_sync_interval fp8_interval moe_routing_trace_max_training_iters straggler_ctrlr_port
    straggler_minmax_count object_storage_cache_gb document_streams mlp_chunks_for_training
    stream_weights_interval eval_tasks_interval eval_tasks_limit sample_interval sample_max_new_tokens lora_dim
    lora_alpha save_total_limit
    num_residual_streams mhc_sinkhorn_iterations csa_window_size csa_compress_rotary_base o_groups o_lora_rank
    kda_gate_rank attention_chunk_size attn_temperature_floor rope_scaling_high_freq_factor
    """.split()
)
NOT_NEGATIVE = tuple(
    """
    train_iters train_samples lr_decay_iters lr_warmup_iters lr_wsd_decay_iters lr_decay_samples
    lr_warmup_samples lr_wsd_decay_samples eval_iters manual_gc_interval exit_duration_in_mins num_workers
    mup_attn_scale_power lr min_lr decoupled_lr decoupled_min_lr lr_warmup_init clip_grad weight_decay
    init_method_std embedding_init_method_std moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
    moe_router_bias_update_rate mtp_loss_scaling_factor mtp_num_layers ckpt_step profile_step_start
    profile_step_end dsa_indexer_loss_coeff wgrad_deferral_limit cuda_graph_warmup_steps num_experts
    optimizer_offload_fraction optimizer_state_offload_fraction optimizer_state_offload_chunk_size_mb
    activation_offload_fraction min_offloaded_tensor_size start_eval_at_iter iterations_to_skip
    moe_clone_hot_experts finermoe_intermediate_expansion finermoe_output_expansion
    moe_paged_stash_buffer_size_factor_cpu mscale mscale_all_dim qk_clip_alpha moe_router_quantile_balancing_ema
    dsa_indexer_skip_topk_offset recompute_num_layers delta_offload_bytes_across_pp_ranks
    fine_grained_offloading_max_inflight_offloads num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    fp8_margin mid_level_dataset_surplus tiktoken_num_special_tokens local_rank logging_level profile_ranks
    error_injection_rate fim_rate fim_spm_rate fim_fragment_rate flight_recorder_trace_buffer_size
    replication_jump object_storage_read_ahead moe_n_hash_layers mhc_init_gating_factor
    attn_temperature_scale moe_router_sparsemixer_jitter mamba_step_size_min adam_eps
    """.split()
)
MAX_SAMPLES = 10**12
MAX_SEED = 2**32 - 1
COUNTS = ("train_iters", "train_samples", "eval_iters", "seq_length", "global_batch_size", "micro_batch_size")
MAX_SIZE = 2**31 - 1
MAX_EXPERTS = 1_000_000
MAX_MINUTES = 500_000
MAX_WORKERS = 1024
MAX_FP32 = 3.4028234663852886e38
ZERO_IN_FP32 = 2.0**-150
"""The largest number that fp32 rounds to 0."""
MAX_STD = 1e6
LOSS_SCALES = ("loss_scale", "initial_loss_scale", "min_loss_scale")
SIZES = tuple(
    """
    hidden_size ffn_hidden_size moe_ffn_hidden_size moe_shared_expert_intermediate_size num_attention_heads
    num_query_groups window_num_query_groups kv_channels value_channels
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim vocab_size
    padded_vocab_size make_vocab_size_divisible_by mtp_num_layers
    """.split()
)
BELOW_ONE = tuple(
    """
    hidden_dropout attention_dropout lora_dropout adam_beta1 adam_beta2 sgd_momentum lr_warmup_fraction muon_momentum
    lion_beta1 lion_beta2
    """.split()
)
AT_MOST_ONE = tuple(
    """
    rotary_percent window_rotary_percent optimizer_offload_fraction optimizer_state_offload_fraction
    activation_offload_fraction
    qk_clip_alpha moe_router_quantile_balancing_ema fim_rate fim_spm_rate fim_fragment_rate
    """.split()
)


def _numbers(s: Settings, dest: str) -> list:
    """The values of a flag that can be compared; NaN is reported by `check_finite`."""
    return [v for v in as_list(getattr(s, dest)) if isinstance(v, int | float) and not math.isnan(v)]


def check_positive(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in POSITIVE:
        least = min(_numbers(s, dest), default=math.inf)
        if least <= ZERO_IN_FP32:
            yield s.violation(f"{{}} must be above 0{' in fp32, so at least 1.4e-45' if least > 0 else ''}.", dest)


def check_not_negative(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in NOT_NEGATIVE:
        if any(value < 0 for value in _numbers(s, dest)):
            yield s.violation("{} must not be negative.", dest)


def check_adam_eps(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Gradients that are zero in all iterations so far would be divided by zero; a run without updates divides none."""
    uses_adam = s.optimizer == "adam" or s.optimizer in ("muon", "dist_muon") and s.muon_scalar_optimizer == "adam"
    updates = not (s.skip_train or s.freeze_all_layers)
    if uses_adam and updates and any(0 <= value <= ZERO_IN_FP32 for value in _numbers(s, "adam_eps")):
        yield s.violation("{adam_eps} must be above 0 in fp32, so at least 1.4e-45: Adam divides by it.")


def check_fractions(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in BELOW_ONE:
        if not all(0 <= value < 1 for value in _numbers(s, dest)):
            yield s.violation("{} must be at least 0 and below 1.", dest)
    for dest in AT_MOST_ONE:
        if any(value > 1 for value in _numbers(s, dest)):
            yield s.violation("{} must be at most 1.", dest)


def check_finite(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest, value in s.values.items():
        if isinstance(value, float | list | tuple) and any(
            isinstance(item, float) and not math.isfinite(item) for item in as_list(value)
        ):
            yield s.violation("{} must be a finite number.", dest)


def check_num_layers(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if any(value > MAX_LAYERS for value in _numbers(s, "num_layers")):
        yield s.violation("{num_layers} must be at most {most}.", most=MAX_LAYERS)


def limits() -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (destinations, largest value): limits of kernel indices, memory, timers and fp32 scales."""
    yield SIZES, MAX_SIZE
    yield ("num_experts",), MAX_EXPERTS
    yield ("num_workers",), MAX_WORKERS
    yield LOSS_SCALES, MAX_FP32
    yield ("init_method_std", "embedding_init_method_std"), MAX_STD
    yield ("distributed_timeout_minutes",), MAX_MINUTES
    yield ("distributed_timeout_seconds_after_init",), MAX_MINUTES * 60


def check_size_limits(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dests, most in limits():
        for dest in dests:
            if any(value > most for value in _numbers(s, dest)):
                yield s.violation(
                    f"{s.describe(dest)} must be at most {most:g}."
                    if isinstance(most, float)
                    else f"{s.describe(dest)} must be at most {most}.",
                    dest,
                )


def check_count_limits(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Beyond this, sample counts no longer fit the 64-bit index of a dataset, whatever the batch size."""
    for dest in COUNTS:
        if any(value > MAX_SAMPLES for value in _numbers(s, dest)):
            yield s.violation("{} must be at most {most}.", dest, most=MAX_SAMPLES)


def check_seed(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if any(value > MAX_SEED for value in _numbers(s, "seed")):
        yield s.violation("{seed} must be at most {most}: the shuffle of the data takes 32 bits.", most=MAX_SEED)


def check_dump_step(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.dump_step is not None and not (s.dump_step[0].isdigit() and int(s.dump_step[0]) > 0):
        yield s.violation("{dump_step}: the first value is the number of an iteration, from 1 on.")


def check_record_step(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.record_step is None:
        return
    if s.record_step < 1:
        yield s.violation("{record_step}: the number of an iteration, from 1 on.")
    if s.save is None:
        yield s.violation(
            "{record_step} needs --save DIR: the record is written to DIR/recorded_step_{record_step:value}."
        )


def check_exit_signal(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.exit_signal_handler and s.exit_signal in ("SIGKILL", "SIGSTOP"):
        yield s.violation("{exit_signal}: no program can catch this signal; use SIGTERM or SIGUSR1.")
