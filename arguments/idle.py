"""Flags that are accepted in every value, and nothing that is computed or saved depends on them here: each with the reason.

The reason is printed when the flag is set. What else may become of a flag stands in standing.py.
"""

from types import MappingProxyType

_KERNEL = "this version computes the same without that kernel"
_NCCL = "a transport setting of NCCL; results do not depend on it"
_SHAPE = "a storage layout of TransformerEngine; results and checkpoint names do not depend on it"
_ORDER = ("the order of gate and up in memory for a kernel of TransformerEngine; checkpoints hold [gate; up] with and without it, in "
          "Megatron-LM too, and results are the same")
_FSDP = "a buffer setting of Megatron's FSDP; torch's fully_shard manages its own, and results do not depend on it"
_READ = "reading is planned by the checkpoint library"
_OVERLAP = "a setting of TransformerEngine's own overlap; results do not depend on it"
_ASYNC = "the background writer needs no such tuning here"

IDLE = MappingProxyType(
    {
        # ---- the model and its kernels
        "use_fused_weighted_squared_relu": _KERNEL,
        "masked_softmax_fusion": _KERNEL,
        "bias_swiglu_fusion": _KERNEL,
        "bias_dropout_fusion": _KERNEL,
        "apply_rope_fusion": _KERNEL,
        "no_persist_layer_norm": _KERNEL,
        "fused_residual_rmsnorm": _KERNEL,
        "use_transformer_engine_op_fuser": _KERNEL,
        "use_te_activation_func": _KERNEL,
        "use_grouped_gemm_for_shared_expert": _KERNEL,
        "use_grouped_gemm_for_dense_mlp": _KERNEL,
        "disable_jit_fuser": _KERNEL,
        "dsa_indexer_k_norm_fp32": "norms are computed in fp32, whatever format their input has",
        "mla_down_proj_fusion": "the two down projections are computed, stored and saved one by one",
        "cross_entropy_loss_fusion": "the loss never makes a full fp32 copy of the logits, with or without this flag",
        "cross_entropy_fusion_impl": "there is one implementation of the loss, and both names give its numbers",
        "fp16_lm_cross_entropy": "the loss reads half-precision logits as they are and computes in fp32, a block at a time, without a copy of them",
        "use_torch_optimizer_for_cpu_offload": "host and device run torch's own fused update in any case",
        "attention_backend": "every backend computes the same attention; TransformerEngine's layers take the named one, the local ones pick for the device",
        "flash_attention_version": "every version computes the same attention",
        "use_flash_attn": "every backend computes the same attention; nothing reads this flag any more",
        "accumulate_allreduce_grads_in_fp32": "gradients are always accumulated in fp32, unless --grad-reduce-in-bf16 or --main-grads-dtype bf16",
        "attention_softmax_in_fp32": "the attention softmax is always taken in fp32",
        "apply_query_key_layer_scaling": "its two factors cancel, and the softmax is always taken in fp32 here",
        "perform_initialization": "weights are always initialised; a checkpoint then replaces them",
        "use_cpu_initialization": "initial weights depend on the seed and the parameter's name, not on the device",
        "deprecated_use_mcore_models": "there is one kind of models",
        "enable_experimental": "nothing waits behind this switch",
        "te_rng_tracker": "random streams are named, and need no tracker",
        "cpu_offloading_retain_pinned_cpu_buffers": "torch keeps pinned host memory that has been used once",
        "delay_offload_until_cuda_graph": "what goes to the host stands outside CUDA graphs, and is sent from the first iteration on",
        "fp8_interval": "delayed scales are new in every iteration, as in Megatron-LM, which ignores it",
        "reuse_grad_buf_for_mxfp8_param_ag": "MXFP8 weights are kept and gathered in the model's format, in a buffer of their own; products quantise them",
        "moe_mlp_glu_interleave_size": _ORDER,
        "moe_shared_expert_glu_interleave_size": _ORDER,
        "moe_use_grouped_tensor": _SHAPE,
        "moe_single_grouped_weight": _SHAPE,
        "moe_single_grouped_bias": _SHAPE,
        "muon_use_syrk": _KERNEL,
        "moe_enable_routing_replay": "it lets another program hand in the experts of every token, and pretraining has none; a layer that is "
        "recomputed takes the experts of its first pass, with and without this flag",
        # ---- communication
        "tp_comm_overlap": "the gathers and scatters of backward run beside its products in any case",
        "tp_comm_overlap_cfg": _OVERLAP,
        "tp_comm_bulk_wgrad": _OVERLAP,
        "tp_comm_bulk_dgrad": _OVERLAP,
        "tp_comm_overlap_ag": _OVERLAP,
        "tp_comm_overlap_rs": _OVERLAP,
        "tp_comm_overlap_rs_dgrad": _OVERLAP,
        "tp_comm_split_ag": _OVERLAP,
        "tp_comm_split_rs": _OVERLAP,
        "tp_comm_bootstrap_backend": _OVERLAP,
        "clone_scatter_output_in_embedding": "each rank's rows of the embedding are a tensor of their own in any case",
        "ep_overlap_early_attn_memory_release": "attention's memory is freed as its backward runs; nothing holds it longer",
        "high_priority_a2a_comm_stream": "token exchange runs on the stream of its communicator; results do not depend on it",
        "mtp_standalone": "where the multi-token-prediction layers stand is drawn in --pipeline-model-parallel-layout",
        "use_ring_exchange_p2p": "stages exchange the same messages by sending and receiving",
        "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication covers warm-up and flush here",
        "pipeline_model_parallel_comm_backend": "stages talk over --distributed-backend; results do not depend on it",
        "use_gloo_process_groups": "gloo groups are made where they are needed",
        "use_layer_wise_param_layout": "parameters that are updated as whole matrices always lie whole with the rank that updates them",
        "align_grad_reduce": "every stage reduces a bucket of gradients as soon as it is complete",
        "align_param_gather": "every stage gathers its parameters right behind its optimizer step, in order of use",
        "data_parallel_random_init": "all data ranks begin with the weights of the first, as in Megatron-LM; dropout differs anyway",
        "lazy_mpu_init": "no outer framework takes part",
        "nccl_communicator_config_path": _NCCL,
        "nccl_ub": _NCCL,
        "disable_symmetric_registration": _NCCL,
        "use_sharp": _NCCL,
        "sharp_enabled_group": _NCCL,
        "high_priority_stream_groups": _NCCL,
        # ---- fully sharded data parallelism
        "megatron_fsdp_version": "there is one implementation, torch's fully_shard",
        "fsdp_double_buffer": _FSDP,
        "megatron_fsdp_max_pool_double_buffer": _FSDP,
        "fsdp_db_use_persist_buf_on_alloc_fail": _FSDP,
        "fsdp_manual_registration": _FSDP,
        "suggested_communication_unit_size": _FSDP,
        "create_all_gather_group": _FSDP,
        "megatron_fsdp_enable_fine_grained_param_gather": "parameters are gathered layer by layer, experts apart",
        "keep_fp8_transpose_cache": "fully sharded parameters are gathered in the model's format; nothing is kept transposed",
        "strict_fsdp_dtensor_load": "--dist-ckpt-strictness says what a checkpoint may lack",
        "init_model_with_meta_device": "a model is always laid out on the meta device first",
        "gradient_reduce_div_fusion": "the mean is taken in one pass over the reduced shards",
        # ---- the run
        "test_mode": "it adds checks of Megatron-LM's own test suite",
        "empty_unused_memory_level": "cached device memory stays with the process; results do not depend on it",
        "train_sync_interval": "the loop synchronises when it logs",
        "exit_signal_handler_for_training": "it tidies the traceback of a stopped run; --exit-signal-handler saves first",
        "exit_signal_handler_for_dataloader": "data workers end with their rank",
        "nvtx_ranges": "marks for nsys; use --use-pytorch-profiler for a profile",
        "record_shapes": "marks for nsys; use --pytorch-profiler-collect-shapes for a profile",
        "barrier_with_L1_time": "timers never wait for other ranks here",
        # ---- data
        "per_dataset_sequences_path": "the number of sequences is read from the index files, which is quick",
        "num_dataset_builder_threads": "index building is vectorised and needs no threads",
        "dataloader_fast_cache_load": "index files are opened without a check of the text behind them already",
        "dataloader_defer_npy_index_mmap": "index files are mapped, and read on first use",
        "use_gigatoken": "the tokenizer's own library is used",
        # ---- checkpoints
        "async_strategy": "there is one background writer",
        "use_persistent_ckpt_worker": _ASYNC,
        "async_ckpt_cpu_priority": _ASYNC,
        "async_ckpt_io_priority": _ASYNC,
        "async_ckpt_use_cpu_shm": _ASYNC,
        "ckpt_fully_parallel_load_exchange_algo": _READ,
        "ckpt_fully_parallel_load_per_rank_objects": _READ,
        "ckpt_fully_parallel_load_process_group": _READ,
        "ckpt_fully_parallel_save_process_group": "writing is shared over all ranks that hold a tensor",
        "ckpt_load_validate_sharding_integrity": "that every tensor is covered exactly is always checked",
        "dist_ckpt_workers": "each rank writes with one thread",
        "dist_ckpt_optim_fully_reshardable": "optimizer states are always stored so that any layout can load them",
        "ckpt_drop_redundant_extra_state": "the local layers have no extra state",
        "ckpt_pg_tensors_cache_path": "group tensors are not cached",
        "ckpt_pg_tensors_cache_create": "group tensors are not cached",
        "distrib_optim_fully_reshardable_mem_efficient": "no rank gathers a whole optimizer state",
        "use_dist_ckpt_deprecated": "checkpoints are distributed already",
        "auto_detect_ckpt_format": "which format a checkpoint has is always seen from its files",
        "dist_ckpt_format_deprecated": "--ckpt-format names the format",
        "ckpt_fully_parallel_save_deprecated": "writing is shared among the ranks already",
    }
)
