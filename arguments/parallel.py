"""ParallelArgs: how work is split over ranks, and how ranks talk.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag


@dataclass(frozen=True)
class ParallelArgs:
    """How work is split over ranks, and how ranks talk."""

    # ---- flags
    tensor_model_parallel_size: int = 1
    tensor_parallel_num_weight_shards: int | None = None
    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None = None
    pipeline_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    max_seqlen_per_dp_cp_rank: int | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = flag(True, off=("--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad",))
    tp_comm_bulk_dgrad: bool = flag(True, off=("--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad",))
    tp_comm_overlap_ag: bool = flag(True, off=("--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag",))
    tp_comm_overlap_rs: bool = flag(True, off=("--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs",))
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = flag(True, off=("--no-tp-comm-split-ag", "--disable-tp-comm-split-ag",))
    tp_comm_split_rs: bool = flag(True, off=("--no-tp-comm-split-rs", "--disable-tp-comm-split-rs",))
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = "nccl"
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    use_ring_exchange_p2p: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    overlap_p2p_comm_warmup_flush: bool = flag(False, "--overlap-p2p-communication-warmup-flush")
    microbatch_group_size_per_vp_stage: int | None = flag(None, "--microbatch-group-size-per-virtual-pipeline-stage")
    mtp_standalone: bool = False
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    high_priority_a2a_comm_stream: bool = False
    clone_scatter_output_in_embedding: bool = flag(
        True, off=("--no-clone-scatter-output-in-embedding", "--disable-clone-scatter-output-in-embedding",)
    )
    tp_comm_overlap_cfg: str | None = None
    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    distributed_timeout_minutes: int = 10
    align_grad_reduce: bool = flag(True, off=("--no-align-grad-reduce", "--disable-align-grad-reduce",))
    local_rank: int = 0
    lazy_mpu_init: bool = False
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False
    nccl_communicator_config_path: str | None = None
    use_tp_pp_dp_mapping: bool = False
    use_gloo_process_groups: bool = flag(True, off=("--disable-gloo-process-groups",))
    use_sharp: bool = False
    sharp_enabled_group: Literal["dp", "dp_replica"] | None = None
    high_priority_stream_groups: list[str] = flag([])
    distributed_timeout_seconds_after_init: int | None = None
    flight_recorder_dump_path: str | None = None
    flight_recorder_trace_buffer_size: int = 2000
    flight_recorder_dump_on_timeout: bool = flag(
        True, off=("--no-flight-recorder-dump-on-timeout", "--disable-flight-recorder-dump-on-timeout",)
    )
    flight_recorder_include_stack_trace: bool = False
    flight_recorder_include_only_active: bool = flag(
        True, off=("--no-flight-recorder-include-only-active", "--disable-flight-recorder-include-only-active",)
    )
    flight_recorder_extra_dump_on_exec: bool = flag(
        True, off=("--no-flight-recorder-extra-dump-on-exec", "--disable-flight-recorder-extra-dump-on-exec",)
    )
    disable_jit_fuser: bool = False
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    pipeline_model_parallel_layout: str | None = None
    model_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    overlap_p2p_comm: bool = flag(True, off=("--no-overlap-p2p-communication",))
    overlap_grad_reduce: bool = False
    ddp_num_buckets: int | None = None
    ddp_bucket_size: int | None = None
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    ddp_param_name_patterns_for_fp32_local_accumulation: list[str] = flag([])
    ddp_average_in_collective: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    align_param_gather: bool = flag(True, off=("--no-align-param-gather",))
    use_distributed_optimizer: bool = False
    megatron_fsdp_version: Literal[1, 2] = 1
    use_layer_wise_param_layout: bool = flag(True, off=("--no-use-layer-wise-param-layout",))
    nccl_ub: bool = flag(False, "--use-nccl-ub")
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    create_all_gather_group: bool = False
    data_parallel_sharding_strategy: Literal[
        "no_shard", "optim", "optim_grads", "optim_grads_params",
    ] = "optim_grads_params"
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    gradient_reduce_div_fusion: bool = flag(True, off=("--no-gradient-reduce-div-fusion",))
    fsdp_double_buffer: bool = False
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    enable_full_sharding_in_hsdp: bool = False
    num_distributed_optimizer_instances: int = 1
    torch_fsdp2_reshard_after_forward: bool = flag(True, off=("--torch-fsdp2-no-reshard-after-forward",))
    cp_comm_type: list[str] = flag(["p2p"])
    fake_process_group: bool = False
    megatron_fsdp_main_params_dtype: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    megatron_fsdp_main_grads_dtype: Literal["fp32", "bf16", "fp16", "auto"] = "auto"
    megatron_fsdp_grad_comm_dtype: Literal["fp32", "fp16", "bf16", "auto"] = "auto"
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False

    # ---- this program's own flags
    world_size: int | None = None
    on_missing_backend: Literal["error", "fallback"] | None = None
