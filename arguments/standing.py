"""What becomes of every flag: it acts, it is idle, it is part of something else, it comes later, or it is refused.

A field of the sections acts unless a table here says otherwise; `tests/arguments/test_no_dead_flags.py` holds us to
that: whatever acts is read by name somewhere. Spellings that are no fields stand in retired.py (old and dev-branch
names) and in products.py (flags of other products).

* IDLE (idle.py): accepted in every value; nothing that is computed or saved depends on it here. The reason is printed when it is
  set.
* LATER: changes what is computed, saved or needed, and this version does not do it yet. Refused by name, unless the
  value is one that asks for nothing.
* PART_OF: tunes a parent flag that comes later. Without the parent it has no effect (and says so); with it, the parent
  is refused.
* OTHER: will not come; the text says what to use instead.
* OLD: old spellings that are still fields, because rules judge them; the text says what they became.
* NEEDS, NEEDS_VALUE: flags that act, but only together with another one, or with one value of another one.

The tables are read by verdict.py.
"""

from dataclasses import dataclass
from types import MappingProxyType

from arguments.idle import IDLE

PARALLEL = "parallel dimensions"
MEMORY = "memory, precision and kernels"
CLUSTER = "planning, launch and survival"
MODELS = "architectures and conversion"


@dataclass(frozen=True)
class Later:
    """What a flag asks for, the feature it comes with, and the values that are refused.

    `values` None: every value but the default and the `harmless` ones. `also`: destinations that can set this one.
    """

    what: str
    feature: str
    harmless: tuple = ()
    values: tuple | None = None
    also: tuple[str, ...] = ()

    def refuses(self, value: object, default: object) -> bool:
        if self.values is not None:
            return any(item in self.values for item in (value if isinstance(value, list) else [value]))
        return value != default and value not in self.harmless


_FSDP_OUTER = "sharding over the instances of fully sharded data parallelism"

LATER = MappingProxyType(
    {
        # ---- parallel dimensions
        "tensor_parallel_num_weight_shards": Later("weight-sharded tensor parallelism", PARALLEL, harmless=(1,)),
        "expert_tensor_parallel_num_weight_shards": Later("weight-sharded tensor parallelism", PARALLEL, harmless=(1,)),
        "outer_dp_sharding_strategy": Later(_FSDP_OUTER, PARALLEL),
        "enable_full_sharding_in_hsdp": Later(_FSDP_OUTER, PARALLEL),
        "megatron_fsdp_main_params_dtype": Later("main parameters in another format than fp32", MEMORY),
        "megatron_fsdp_main_grads_dtype": Later("main gradients in fp16", MEMORY, values=("fp16",)),
        "moe_flex_dispatcher_backend": Later("NCCL's own token exchange", MEMORY, values=("ncclep",)),
        # ---- memory, precision and kernels
        "optimizer_cuda_graph": Later(
            "a graph of the optimizer step: its rates, its step count and whether gradients overflowed are numbers of the host", MEMORY),
        "fp8_recipe": Later("quantisers of the user's own, which are TransformerEngine's", MEMORY, values=("custom",)),
        "fp4_recipe": Later("quantisers of the user's own, which are TransformerEngine's", MEMORY, values=("custom",)),
        "fp4_param_gather": Later("parameters kept in fp4", MEMORY),
        # ---- architectures and conversion
        "experimental_attention_variant": Later("this kind of attention", MODELS, values=("gdn2",)),
        "dsa_indexer_topk_freq": Later("layers that reuse the selection of an earlier one", MODELS),
        "dsa_indexer_skip_topk_offset": Later("layers that reuse the selection of an earlier one", MODELS),
        "recompute_modules": Later("the layers that have these parts", MODELS, values=("gdp_in_proj", "gdp_qkv", "mhc")),
        "offload_modules": Later("the layers that have this part", MODELS, values=("gdp_qkv",)),
        "mtp_hsm": Later("hidden-state matching", MODELS),
        "hybrid_context_parallel": Later("hybrid context parallelism", MODELS),
        "phase_transition_iterations": Later("data blends that change during the run", MODELS),
        "position_embedding_type": Later("this kind of positions", MODELS, values=("mrope", "relative")),
        "object_storage_cache_path": Later("data in object storage", MODELS),
    }
)

PART_OF = MappingProxyType(
    {
        "hybrid_context_parallel": "max_seqlen_per_dp_cp_rank",
        "moe_flex_dispatcher_backend": "moe_ncclep_zero_copy",
        "fp8_recipe": "fp8_quantizer_factory",
        "fp4_recipe": "fp4_quantizer_factory",
    }
)
"""Parent destination -> the destinations that only tune it."""

_ONE_KIND = (
    "checkpoints of this program are all of one kind: complete in the shared folder, or not there. Save more often (--save-interval, --async-save) "
    "and keep fewer of them (--save-retain-interval)"
)

OTHER = MappingProxyType(
    {
        "ckpt_format": "torch_dcp has no form of a pipeline's layers that every layout reads: --ckpt-format torch_dist or torch",
        "ckpt_convert_update_legacy_dist_opt_format": "buckets that are stored one by one (before 2024) are read by Megatron-LM only: load and save them "
        "there once",
        "dist_ckpt_save_pre_mcore_014": "checkpoints are written as Megatron-Core 0.14 and later do; for an older one, --ckpt-format torch",
        "non_persistent_save_interval": _ONE_KIND,
        "non_persistent_ckpt_type": _ONE_KIND,
        "non_persistent_global_ckpt_dir": _ONE_KIND,
        "non_persistent_local_ckpt_dir": _ONE_KIND,
        "non_persistent_local_ckpt_algo": _ONE_KIND,
        "replication": _ONE_KIND,
        "replication_jump": _ONE_KIND,
        "replication_factor": _ONE_KIND,
        "spec": "layers are chosen by flags, not by a Python path: drop --spec and set the architecture's flags",
        "transformer_impl": "this program trains: --transformer-impl local or transformer_engine",
        "dataloader_type": "this program feeds itself: --dataloader-type single or cyclic",
        "tokenizer_type": "this program reads text: choose another --tokenizer-type",
        "optimizer": "soap and adaptive_muon are not built: their published versions differ, and Megatron-LM has no flags that say which is "
        "meant. Use --optimizer muon",
    }
)
OTHER_VALUES = MappingProxyType(
    {
        "ckpt_format": ("torch_dcp",),
        "transformer_impl": ("inference_optimized",),
        "dataloader_type": ("external",),
        "optimizer": ("soap", "adaptive_muon"),
        "tokenizer_type": (
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
    }
)

OLD = MappingProxyType(
    {
        "use_rotary_position_embeddings": "--position-embedding-type rope",
        "moe_enable_deepep": "--moe-flex-dispatcher-backend deepep",
        "moe_layer_recompute": "--recompute-granularity selective --recompute-modules moe",
        "moe_router_padding_for_fp8": "--moe-router-padding-for-quantization",
        "moe_deepep_num_sms": "--moe-flex-dispatcher-num-sms",
        "moe_hybridep_num_sms": "--moe-flex-dispatcher-num-sms",
        "recompute_activations": "--recompute-granularity selective",
        "checkpoint_activations": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "external_cuda_graph": "--cuda-graph-impl transformer_engine",
        "enable_cuda_graph": "--cuda-graph-impl local",
        "cuda_graph_scope_deprecated": "--cuda-graph-modules",
        "no_weight_decay_cond_type": "--apply-wd-to-qk-layernorm",
        "batch_size": "--micro-batch-size",
        "model_parallel_size": "--tensor-model-parallel-size",
        "warmup": "--lr-warmup-fraction",
    }
)

VALUES = MappingProxyType(
    {
        ("moe_token_dispatcher_type", "alltoall_seq"): "alltoall",
        ("no_weight_decay_cond_type", "qwen3_next"): "apply_wd_to_qk_layernorm",
        ("experimental_attention_variant", "gated_delta_net"): "gdn",
    }
)
"""(destination, old value) -> the value it became."""

NEEDS = (
    (("qk_clip",), "qk_clip_alpha qk_clip_threshold"),
    (("validate_only", "dry_run", "fake_process_group"), "report world_size"),
    (("validate_only", "dry_run", "fake_process_group"), "hardware"),
    (("mtp_num_layers",), "mtp_loss_scaling_factor mtp_detach_heads"),
    (("moe_router_enable_expert_bias",), "moe_router_bias_update_rate"),
    (("group_query_attention",), "num_query_groups"),
    (
        ("fim_data",),
        "fim_rate fim_spm_rate fim_split_sample fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token",
    ),
    (("fim_split_sample",), "fim_fragment_rate"),
    (
        ("multi_latent_attention",),
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
    ),
    (("multi_latent_attention", "position_embedding_type=yarn"), "rotary_scaling_factor mscale_all_dim"),
    (("use_rope_scaling",), "rope_scaling_factor"),
    (
        ("num_experts",),
        "moe_router_topk moe_grouped_gemm moe_layer_freq moe_router_score_function moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_apply_probs_on_input "
        "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_dtype "
        "moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_force_biased moe_input_jitter_eps "
        "moe_router_padding_for_quantization moe_router_load_balancing_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
        "moe_token_drop_policy moe_expert_rank_capacity_factor moe_per_layer_logging moe_token_dispatcher_type moe_dispatch_fwd_dtype "
        "moe_combine_bwd_dtype moe_permute_fusion moe_router_fusion moe_paged_stash moe_routing_trace_path save_tokens_per_expert_interval",
    ),
    (
        ("moe_routing_trace_path",),
        "moe_routing_trace_max_training_iters moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states "
        "moe_routing_trace_dump_weights",
    ),
    (("finermoe_intermediate_granularity", "finermoe_output_granularity"), "finermoe_intermediate_expansion finermoe_output_expansion"),
    (("moe_use_upcycling",), "moe_upcycling_granularity"),
    (("moe_paged_stash",), "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu"),
    (("fp8",), "fp8_recipe fp8_wgrad fp8_margin fp8_amax_history_len fp8_amax_compute_algo"),
    (("fp4",), "fp4_recipe"),
    (("fp8", "fp4"), "first_last_layers_bf16 te_precision_config_file"),
    (("first_last_layers_bf16",), "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
    (("use_torch_fsdp2",), "torch_fsdp2_reshard_after_forward"),
    (("use_megatron_fsdp",), "data_parallel_sharding_strategy megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype"),
    (("fp16",), "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
    (("use_mup",), "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power"),
    (("decoupled_lr",), "decoupled_min_lr"),
    (("optimizer_cpu_offload",), "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads"),
    (("optimizer_cpu_offload", "chunked_optimizer_state_offload"), "pin_cpu_params"),
    (("chunked_optimizer_state_offload",), "optimizer_state_offload_chunk_size_mb optimizer_state_offload_fraction"),
    (("use_distributed_optimizer",), "ddp_reduce_scatter_with_fp32_accumulation"),
    (("context_parallel_size",), "cp_comm_type hierarchical_context_parallel_sizes"),
    (("use_distributed_optimizer", "use_megatron_fsdp"), "num_distributed_optimizer_instances"),
    (("profile",), "profile_step_start profile_step_end profile_ranks use_pytorch_profiler pytorch_profiler_collect_chakra"),
    (("record_memory_history",), "memory_snapshot_path"),
    (("error_injection_rate",), "error_injection_type"),
    (("check_for_nan_in_loss_and_grad",), "on_nan"),
    (("validate_only",), "check_files"),
    (("check_for_spiky_loss",), "loss_spike_factor"),
    (("check_for_spiky_loss", "check_for_large_grads"), "on_loss_spike"),
    (("check_for_nan_in_loss_and_grad", "check_for_spiky_loss", "check_for_large_grads"), "error_injection_rate result_rejected_tracker_filename"),
    (
        ("flight_recorder_dump_path",),
        "flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace "
        "flight_recorder_include_only_active flight_recorder_extra_dump_on_exec",
    ),
    (("exit_signal_handler", "auto_resume"), "exit_signal"),
    (("wandb_project",), "wandb_exp_name wandb_save_dir wandb_entity"),
    (("log_straggler",), "straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup"),
    (("tensorboard_dir",), "log_timers_to_tensorboard log_memory_to_tensorboard log_validation_ppl_to_tensorboard"),
    (("load", "pretrained_checkpoint"), "dist_ckpt_strictness"),
    (("save",), "async_save save_retain_interval no_save_optim no_save_rng"),
    (("load", "pretrained_checkpoint"), "finetune no_load_optim no_load_rng"),
    (("load", "pretrained_checkpoint", "auto_resume"), "use_checkpoint_args"),
    (("use_checkpoint_args",), "use_mp_args_from_checkpoint_args"),
    (("load", "auto_resume"), "override_ckpt_iteration"),
    (("defer_embedding_wgrad_compute",), "wgrad_deferral_limit"),
    (("manual_gc",), "manual_gc_interval manual_gc_eval"),
    (("recompute_granularity",), "recompute_method recompute_num_layers"),
    (
        ("fine_grained_activation_offloading",),
        "offload_modules min_offloaded_tensor_size activation_offload_fraction delta_offload_bytes_across_pp_ranks "
        "fine_grained_offloading_max_inflight_offloads",
    ),
)
"""(any of these must be on, or have the value behind "=", for these to have an effect)."""

NEEDS_VALUE = (
    (
        "optimizer",
        "muon",
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_fp32_matmul_prec muon_coefficient_type "
        "muon_num_ns_steps muon_tp_mode muon_scalar_optimizer",
    ),
    (
        "experimental_attention_variant",
        "gdn",
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads",
    ),
    (
        "experimental_attention_variant",
        "dsa",
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_warmup dsa_indexer_use_sparse_loss "
        "dsa_kernel_backend dsa_attention_form dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon",
    ),
    ("fp8_recipe", "delayed", "fp8_margin fp8_amax_history_len fp8_amax_compute_algo"),
    ("moe_router_load_balancing_type", "quantile_balancing", "moe_router_quantile_balancing_ema"),
    ("moe_token_dispatcher_type", "flex", "moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms"),
    (
        "moe_flex_dispatcher_backend",
        "hybridep",
        "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
        "moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion_into_hybridep",
    ),
)
"""(destination, value, flags that have an effect only with that value)."""

ARCHITECTURE = (
    "experimental_attention_variant",
    "mtp_hsm",
)
"""What comes later and changes the number of parameters."""

PARENT = MappingProxyType({child: parent for parent, children in PART_OF.items() for child in children.split()})


def standing_of(dest: str) -> tuple[str, str]:
    """(acts | idle | later | renamed | refused, reason) of a field; single values may stand differently."""
    if dest in OLD:
        return "renamed", OLD[dest]
    if dest in IDLE:
        return "idle", IDLE[dest]
    if dest in PARENT:
        return "later", f"part of {PARENT[dest]}"
    if dest in LATER:
        entry = LATER[dest]
        return ("later" if entry.values is None else "acts"), f"{entry.what} ({entry.feature})"
    if dest in OTHER and dest not in OTHER_VALUES:
        return "refused", OTHER[dest]
    return "acts", ""
