"""ParallelArgs: how work is split over ranks, and how ranks talk.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arguments.flag_properties import MAX_MINUTES
from arguments.mechanisms.schedules import NAMES, get_schedule
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import get_sharding, needs_support
from arguments.schema import Section, flag

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[NAMES]


def sequence_padding_multiple(cp: int, tp: int, by_tensor_ranks: bool) -> int:
    """Return the multiple to which packed sequences are padded, so that ranks can shard each of them.

    `by_tensor_ranks`: tensor ranks shard tokens, for sequence parallelism or experts.
    """
    return (2 * cp if cp > 1 else 1) * (tp if by_tensor_ranks else 1)


def packed_alignment(text: str | None, capacity: int | None) -> int | None:
    """Return the multiple to which the microbatches of a rank are padded; None without one.

    Args:
        text: --pad-packed-seq-alignment, a number or max.
        capacity: --max-seqlen-per-dp-cp-rank.
    """
    if text == "max":
        return capacity
    return int(text) if text is not None and text.isdecimal() else None


def dynamic_cp_sizes(num_ranks: int, smallest: int) -> tuple[int, ...]:
    """Return the sizes of the groups of --dynamic-context-parallel: powers of two, and all ranks.

    Args:
        num_ranks: dp x cp.
        smallest: --min-dynamic-context-parallel-size.
    """
    powers = [2**exponent for exponent in range(num_ranks.bit_length())]
    return (*(size for size in powers if smallest <= size < num_ranks and num_ranks % size == 0), num_ranks)


_PLANS = "validate_only or dry_run or fake_process_group"
_VIRTUAL_STAGES = (
    "num_virtual_stages_per_pipeline_rank or num_layers_per_virtual_pipeline_stage or pipeline_model_parallel_layout"
)
_BF16_GRADS = "grad_reduce_in_bf16 or main_grads_dtype=bf16"


@dataclass(frozen=True, repr=False, eq=False)
class ParallelArgs(Section):
    """How work is split over ranks, and how ranks talk."""

    # ---- sizes
    tensor_model_parallel_size: int = flag(1, restore="mapping", role="mapping")
    """Number of ranks that shard the matrices of each layer (TP)."""
    pipeline_model_parallel_size: int = flag(1, restore="mapping", role="mapping")
    """Number of pipeline stages that the layers are divided into (PP)."""
    context_parallel_size: int = flag(1, role="mapping")
    """Number of ranks that shard each sequence (CP)."""
    expert_model_parallel_size: int = flag(1, restore="mapping", role="mapping")
    """Number of ranks that shard the experts of a layer (EP)."""
    expert_tensor_parallel_size: int | None = flag(None, restore="mapping", role="mapping")
    """Number of ranks that shard the matrices of each expert (ETP). Unset: the tensor-parallel size."""
    sequence_parallel: bool = flag(False, role="mapping")
    """Shard activations along the sequence over tensor-parallel ranks, outside the GEMMs."""
    use_tp_pp_dp_mapping: bool = flag(False, needs="pipeline_model_parallel_size", role="mapping")
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""
    world_size: int | None = flag(None, needs=_PLANS, bounds=">0", role="launch")
    """Number of ranks for --validate-only and --dry-run. Unset: the environment's WORLD_SIZE."""
    model_parallel_size: int | None = flag(None, bounds=">0")
    """Deprecated spelling of --tensor-model-parallel-size."""
    tensor_parallel_num_weight_shards: int | None = None
    """Number of shards of tensor-parallel weights over data-parallel ranks."""
    expert_tensor_parallel_num_weight_shards: int | None = None
    """Number of shards of tensor-parallel expert weights over data-parallel ranks."""

    # ---- pipeline
    decoder_first_pipeline_num_layers: int | None = flag(
        None, needs="pipeline_model_parallel_size", restore="mapping", role="mapping"
    )
    """Number of decoder layers of the first pipeline stage."""
    decoder_last_pipeline_num_layers: int | None = flag(
        None, needs="pipeline_model_parallel_size", restore="mapping", role="mapping"
    )
    """Number of decoder layers of the last pipeline stage."""
    pipeline_model_parallel_layout: str | None = flag(None, restore="mapping", role="mapping")
    """Layers of each (virtual) pipeline stage, such as "Et*3|(tt|)*28m|L": E embedding, t decoder layer, m
    multi-token prediction, L loss, | next stage."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, needs="pipeline_model_parallel_size", restore="mapping", role="mapping"
    )
    """Number of layers of one virtual pipeline stage. Unset: no virtual stages."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, needs="pipeline_model_parallel_size", restore="mapping", role="mapping"
    )
    """Number of virtual stages of one pipeline rank (VPP). Unset: no virtual stages."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "--microbatch-group-size-per-virtual-pipeline-stage", needs=_VIRTUAL_STAGES, role="mapping"
    )
    """Number of consecutive microbatches that a virtual stage runs. Unset: the pipeline size."""
    pipeline_schedule: ScheduleName | None = flag(None, needs="pipeline_model_parallel_size", role="mapping")
    """Order of forward and backward passes over the stages. Unset: 1f1b, or interleaved with virtual stages.
    zero-bubble computes weight gradients separately, where a stage would wait; in half precision those of a microbatch
    are then rounded before they are added up, so that results differ by roundings."""
    account_for_embedding_in_pipeline_split: bool = flag(
        False, needs="pipeline_model_parallel_size", restore="mapping", role="mapping"
    )
    """Count the embedding as a layer when layers are divided into stages."""
    account_for_loss_in_pipeline_split: bool = flag(
        False, needs="pipeline_model_parallel_size", restore="mapping", role="mapping"
    )
    """Count the loss as a layer when layers are divided into stages."""
    mtp_standalone: bool = flag(False, role="mapping")
    """Put the multi-token-prediction layers on a separate stage."""
    overlap_p2p_comm: bool = flag(True, off=("--no-overlap-p2p-communication",), needs=_VIRTUAL_STAGES, role="mapping")
    """Overlap messages between stages with computation, with virtual stages."""
    overlap_p2p_comm_warmup_flush: bool = flag(False, "--overlap-p2p-communication-warmup-flush")
    """Overlap messages between stages in warm-up and flush as well."""
    use_ring_exchange_p2p: bool = False
    """Exchange messages between stages with a ring exchange."""
    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None = flag(None, role="runtime")
    """Communication library between pipeline stages."""
    defer_embedding_wgrad_compute: bool = False
    """Compute the output layer's weight gradient in the flush of the pipeline. Rounding: as with the schedule
    zero-bubble."""
    wgrad_deferral_limit: int = flag(0, needs="defer_embedding_wgrad_compute", bounds=">=0")
    """Number of microbatches whose output-layer weight gradient may be deferred; 0: all."""

    # ---- context
    cp_comm_type: list[str] = flag(["p2p"], needs="context_parallel_size or dynamic_context_parallel", role="mapping")
    """How ranks that share a sequence exchange keys and values: p2p, a2a, allgather or a2a+p2p; one value, or one per
    layer (the last one serves multi-token prediction too)."""
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, needs="context_parallel_size or dynamic_context_parallel", bounds=">0", role="mapping"
    )
    """Sizes of the two levels of --cp-comm-type a2a+p2p: neighbors that exchange heads, and number of such groups
    in the ring."""
    hybrid_context_parallel: bool = flag(False, role="mapping")
    """Deprecated spelling of --dynamic-context-parallel, without pipeline parallelism."""
    dynamic_context_parallel: bool = flag(False, role="mapping")
    """Choose for each packed microbatch which ranks of dp x cp share its sequences: long ones get large groups, others
    run in small groups at the same time."""
    min_dynamic_context_parallel_size: int = flag(1, needs="dynamic_context_parallel", bounds=">0", role="mapping")
    """Smallest group of --dynamic-context-parallel. Groups have powers of two of ranks, and all of dp x cp."""
    max_seqlen_per_dp_cp_rank: int | None = flag(None, needs="use_varlen_dataset or sft", bounds=">0", role="mapping")
    """Largest number of packed tokens of a microbatch on one context-parallel rank. Unset: enough for one sequence of
    --seq-length."""
    sequence_packing_scheduler: Literal["dp_balanced", "cost_balanced", "default_dynamic_cp"] | None = flag(
        None, role="mapping"
    )
    """How sequences of different lengths are packed into microbatches: dp_balanced fills them in order, cost_balanced
    (not in Megatron-LM) balances their FLOPs, default_dynamic_cp chooses the ranks that share them too. Unset:
    dp_balanced with --use-varlen-dataset, default_dynamic_cp with --dynamic-context-parallel."""
    pad_packed_seq_alignment: str | None = flag(None, needs="use_varlen_dataset or sft", role="mapping")
    """Pad packed microbatches to multiples of this number of tokens per context-parallel rank, or to
    --max-seqlen-per-dp-cp-rank (max)."""
    thd_tail_padding_policy: Literal["append_dummy_seq", "extend_last"] | None = flag(
        None, needs="pad_packed_seq_alignment", role="mapping"
    )
    """What the padding of --pad-packed-seq-alignment is: a separate sequence, or a part of the last one. Unset:
    append_dummy_seq."""
    thd_max_packed_sequences: int | None = flag(None, needs="use_varlen_dataset or sft", bounds=">0", role="mapping")
    """Largest number of sequences in a packed microbatch, with the one that append_dummy_seq adds."""

    # ---- expert communication
    overlap_moe_expert_parallel_comm: bool = flag(False, role="mapping")
    """Overlap the token exchange of one microbatch with the computation of another."""
    delay_wgrad_compute: bool = flag(False, role="mapping")
    """Compute weight gradients later, so that the exchange of tokens overlaps with them. Rounding: as with the
    schedule zero-bubble."""
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    """Overlap the backward of dispatch with the experts' weight gradients. Rounding: as with the schedule
    zero-bubble."""
    ep_overlap_early_attn_memory_release: bool = False
    """Free attention memory earlier if --overlap-moe-expert-parallel-comm is set."""
    high_priority_a2a_comm_stream: bool = flag(
        False, needs=("num_experts", "expert_model_parallel_size", "cuda"), role="runtime"
    )
    """Exchange tokens on a high-priority stream: that of NCCL's communicators of expert-parallel ranks, and HybridEP's.
    DeepEP always has such a stream."""

    # ---- tensor-parallel communication
    tp_comm_overlap: bool = False
    """Overlap the communication of sequence parallelism with the GEMMs, in chunks."""
    tp_comm_overlap_cfg: str | None = flag(None, needs="tp_comm_overlap", path="read")
    """YAML file with settings of --tp-comm-overlap by GEMM, as TransformerEngine reads them; the local layers read the
    numbers of chunks of reduce-scatters."""
    tp_comm_bulk_wgrad: bool = flag(
        True, off=("--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad"), needs="tp_comm_overlap"
    )
    """Overlap the weight-gradient GEMM with the reduce-scatter, in TransformerEngine's layers. Local ones always do."""
    tp_comm_bulk_dgrad: bool = flag(
        True, off=("--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad"), needs="tp_comm_overlap"
    )
    """Overlap the input-gradient GEMM with the all-gather, in TransformerEngine's layers. Local ones always do."""
    tp_comm_overlap_ag: bool = flag(
        True, off=("--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag"), needs="tp_comm_overlap"
    )
    """Overlap the all-gather before a GEMM with it, as a ring."""
    tp_comm_overlap_rs: bool = flag(
        True, off=("--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs"), needs="tp_comm_overlap"
    )
    """Overlap the reduce-scatter after a GEMM with it, in chunks."""
    tp_comm_overlap_rs_dgrad: bool = flag(False, needs="tp_comm_overlap")
    """Overlap the reduce-scatter with the input-gradient GEMM, in chunks."""
    tp_comm_split_ag: bool = flag(True, off=("--no-tp-comm-split-ag", "--disable-tp-comm-split-ag"))
    """Split the all-gather into pieces."""
    tp_comm_split_rs: bool = flag(True, off=("--no-tp-comm-split-rs", "--disable-tp-comm-split-rs"))
    """Split the reduce-scatter into pieces."""
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = flag("nccl", needs="tp_comm_overlap")
    """Communication library that sets up the buffers of TransformerEngine's layers."""
    clone_scatter_output_in_embedding: bool = flag(
        True, off=("--no-clone-scatter-output-in-embedding", "--disable-clone-scatter-output-in-embedding")
    )
    """Copy the scattered embedding, so that the full one can be freed."""

    # ---- data parallel
    use_distributed_optimizer: bool = False
    """Shard optimizer states and main parameters over data-parallel ranks."""
    num_distributed_optimizer_instances: int = flag(
        1, needs=needs_support(ShardingCapability.INSTANCES), role="mapping"
    )
    """Number of replicas of the sharded optimizer state: it is sharded within a part of the data-parallel ranks."""
    overlap_grad_reduce: bool = flag(False, needs="data_ranks")
    """Reduce gradients bucket by bucket during the backward pass."""
    overlap_param_gather: bool = False
    """Gather parameters bucket by bucket during the forward pass."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Start gathering the first virtual stage's parameters while the optimizer still updates the others."""
    align_grad_reduce: bool = flag(True, off=("--no-align-grad-reduce", "--disable-align-grad-reduce"))
    """Let all stages start their gradient reductions together."""
    align_param_gather: bool = flag(True, off=("--no-align-param-gather",), role="mapping")
    """Let all stages start their parameter gathers together."""
    ddp_num_buckets: int | None = flag(None, needs="overlap_grad_reduce", bounds=">0")
    """Number of gradient buckets with --overlap-grad-reduce. Unset: --ddp-bucket-size decides."""
    ddp_bucket_size: int | None = flag(None, needs="overlap_grad_reduce", bounds=">0", role="mapping")
    """Size of a gradient bucket with --overlap-grad-reduce, in elements. Unset: chosen from the number of ranks."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False, needs="data_ranks", role="runtime")
    """Pad buckets to sizes at which NCCL reaches a high bandwidth."""
    ddp_average_in_collective: bool = flag(False, needs="data_ranks")
    """Let the collective average gradients instead of scaling them before it."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(
        False, needs=("use_distributed_optimizer", "data_ranks", _BF16_GRADS)
    )
    """Reduce bf16 gradients with accumulation in fp32."""
    ddp_param_name_patterns_for_fp32_local_accumulation: list[str] = flag([], needs=_BF16_GRADS)
    """Name patterns of parameters whose gradients accumulate locally in fp32."""
    gradient_reduce_div_fusion: bool = flag(True, off=("--no-gradient-reduce-div-fusion",))
    """Let the reduction divide by the number of ranks (fully sharded data parallel)."""
    use_layer_wise_param_layout: bool = flag(True, off=("--no-use-layer-wise-param-layout",))
    """Lay parameters out layer by layer for layer-wise optimizers."""

    # ---- fully sharded data parallel
    use_megatron_fsdp: bool = False
    """Shard parameters, gradients and optimizer states over data-parallel ranks (Megatron's FSDP)."""
    use_torch_fsdp2: bool = False
    """Shard parameters, gradients and optimizer states over data-parallel ranks (torch's fully_shard)."""
    torch_fsdp2_reshard_after_forward: bool = flag(
        True, off=("--torch-fsdp2-no-reshard-after-forward",), needs="use_torch_fsdp2"
    )
    """Free gathered parameters after the forward pass."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = flag(
        "optim_grads_params", needs="use_megatron_fsdp"
    )
    """What --use-megatron-fsdp shards: nothing, optimizer states, gradients too, or parameters too."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = flag(
        "no_shard", needs=("use_megatron_fsdp", "num_distributed_optimizer_instances")
    )
    """What Megatron's FSDP shards over the instances of the distributed optimizer, besides inside each: nothing, or
    optimizer states."""
    megatron_fsdp_version: Literal[1, 2] = 1
    """Generation of Megatron's FSDP."""
    megatron_fsdp_main_params_dtype: Literal["fp32", "bf16", "fp16", "auto"] = flag(
        "fp32", needs=("use_megatron_fsdp", "bf16 or fp16"), role="precision"
    )
    """Format of main parameters in Megatron's FSDP: fp32, or that of the model (auto, or its name)."""
    megatron_fsdp_main_grads_dtype: Literal["fp32", "bf16", "fp16", "auto"] = flag(
        "auto", needs=("use_megatron_fsdp", "bf16 or fp16"), role="precision"
    )
    """Format of main gradients in Megatron's FSDP."""
    megatron_fsdp_grad_comm_dtype: Literal["fp32", "fp16", "bf16", "auto"] = flag(
        "auto", needs="use_megatron_fsdp", role="precision"
    )
    """Format in which Megatron's FSDP reduces gradients."""
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    """Gather fully sharded parameters module by module."""
    megatron_fsdp_max_pool_double_buffer: bool = False
    """--fsdp-double-buffer with buffers of the largest layer's size, for all layers."""
    fsdp_double_buffer: bool = False
    """Communicate parameters and gradients of Megatron's FSDP through two persistent buffers."""
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    """Persistent buffers also for parameters that do not fit --fsdp-double-buffer."""
    fsdp_manual_registration: bool = False
    """Register all buffers of --use-nccl-ub at once, after the first iteration."""
    suggested_communication_unit_size: int | None = flag(None, bounds=">0")
    """Size of one communication of Megatron's FSDP, in elements."""
    keep_fp8_transpose_cache: bool = False
    """Cache transposed fp8 weights."""
    enable_full_sharding_in_hsdp: bool = flag(
        False,
        needs=(
            "use_megatron_fsdp",
            "num_distributed_optimizer_instances",
            "data_parallel_sharding_strategy=optim_grads_params",
        ),
    )
    """The same as --outer-dp-sharding-strategy optim."""
    create_all_gather_group: bool = False
    """Create a separate group for parameter gathers."""

    # ---- processes
    distributed_backend: Literal["nccl", "gloo"] = flag("nccl", role="runtime")
    """Communication library. Ranks on CPUs always use gloo."""
    distributed_timeout_minutes: int = flag(10, needs="ranks", bounds=">0", most=MAX_MINUTES, role="runtime")
    """Timeout of a collective, in minutes."""
    distributed_timeout_seconds_after_init: int | None = flag(
        None, needs="ranks", bounds=">0", most=60 * MAX_MINUTES, role="runtime"
    )
    """Timeout of a collective once the first iteration is done, in seconds. Unset: --distributed-timeout-minutes."""
    print_groups: bool = flag(False, role="launch")
    """Print every process group of the mapping at start-up."""
    local_rank: int = flag(0, bounds=">=0", role="launch")
    """Rank within the node, as the launcher passes it."""
    lazy_mpu_init: bool = False
    """Leave group creation to an outer framework."""
    use_gloo_process_groups: bool = flag(True, off=("--disable-gloo-process-groups",))
    """Create gloo groups in addition to the NCCL ones."""
    fake_process_group: bool = flag(False, role="launch")
    """Pretend to be one rank of many, without communication: the same as --dry-run."""
    nccl_communicator_config_path: str | None = flag(None, needs="cuda", path="read", role="runtime")
    """YAML file with options of NCCL communicators, below the names of their groups: cga_cluster_size, max_ctas,
    min_ctas, net_name, is_high_priority_stream."""
    nccl_ub: bool = flag(False, "--use-nccl-ub")
    """Allocate the communication buffers of Megatron's FSDP in memory that is registered with NCCL."""
    disable_symmetric_registration: bool = False
    """Do not register NCCL user buffers symmetrically."""
    use_sharp: bool = False
    """Reduce in the network switches (SHARP)."""
    sharp_enabled_group: Literal["dp", "dp_replica"] | None = None
    """Group of ranks that uses SHARP."""
    high_priority_stream_groups: list[str] = flag([], needs="cuda", role="runtime")
    """Groups of ranks whose NCCL communicators run on high-priority streams (tp, cp, pp, dp, dp_cp, ep, ep_dp, ...);
    groups with the same ranks and kind of traffic share a communicator."""
    disable_jit_fuser: bool = False
    """Do not compile groups of small operations."""
    flight_recorder_dump_path: str | None = flag(None, needs="cuda", path="write", role="output")
    """File or directory for the dumps of NCCL's flight recorder. Unset: no recording."""
    flight_recorder_trace_buffer_size: int = flag(2000, needs="flight_recorder_dump_path", bounds=">=0", role="output")
    """Number of events that the flight recorder stores."""
    flight_recorder_dump_on_timeout: bool = flag(
        True,
        off=("--no-flight-recorder-dump-on-timeout", "--disable-flight-recorder-dump-on-timeout"),
        needs="flight_recorder_dump_path",
        role="output",
    )
    """Write the flight recorder when a collective times out."""
    flight_recorder_include_stack_trace: bool = flag(False, needs="flight_recorder_dump_path", role="output")
    """Record stack traces in the flight recorder."""
    flight_recorder_include_only_active: bool = flag(
        True,
        off=("--no-flight-recorder-include-only-active", "--disable-flight-recorder-include-only-active"),
        needs="flight_recorder_dump_path",
        role="output",
    )
    """Write only unfinished collectives to the flight recorder's file."""
    flight_recorder_extra_dump_on_exec: bool = flag(
        True,
        off=("--no-flight-recorder-extra-dump-on-exec", "--disable-flight-recorder-extra-dump-on-exec"),
        needs="flight_recorder_dump_path",
        role="output",
    )
    """Write the flight recorder's file once more when a program is executed."""

    @property
    def high_priority_groups(self) -> frozenset[str]:
        """Groups whose communicators run on high-priority streams."""
        exchanging = ("ep", "tp_ep") if self.high_priority_a2a_comm_stream else ()
        return frozenset({*self.high_priority_stream_groups, *exchanging})

    @property
    def has_wgrad_in_ep_overlap(self) -> bool:
        """Whether all weight gradients are computed while tokens are exchanged in backward."""
        return self.delay_wgrad_compute or self.overlap_dispatch_backward_with_experts_wgrad

    @property
    def etp_size(self) -> int:
        """Tensor-parallel ranks of experts: those of the other layers unless --expert-tensor-parallel-size is given."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def has_deferred_wgrad(self) -> bool:
        """Whether the weight gradients of all layers are computed after their backward (parallel/weight_grads.py)."""
        return get_schedule(self).splits_backward or self.has_wgrad_in_ep_overlap

    @property
    def has_deferred_head_wgrad(self) -> bool:
        """Whether only the output layer's weight gradient is deferred."""
        return self.defer_embedding_wgrad_compute and not self.has_deferred_wgrad

    @property
    def shards_outer(self) -> bool:
        """Whether the instances of the distributed optimizer share the optimizer state of fully sharded parameters."""
        # a search asks before the rules have set the number of instances
        is_hybrid = (self.num_distributed_optimizer_instances or 1) > 1
        return (
            get_sharding(self).supports(ShardingCapability.OUTER)
            and is_hybrid
            and (self.outer_dp_sharding_strategy == "optim" or self.enable_full_sharding_in_hsdp)
        )

    def has_fp32_main_params(self, params_dtype: str) -> bool:
        """Return whether main parameters are fp32, whatever the model computes in ("bf16", ...)."""
        dtype = self.megatron_fsdp_main_params_dtype
        return not get_sharding(self).has_formats or params_dtype == "fp32" or dtype not in ("auto", params_dtype)

    @property
    def has_sharded_params(self) -> bool:
        """Whether the parameters themselves are sharded over the data-parallel ranks, so that there are no replicas."""
        return get_sharding(self).shards_params

    @property
    def has_gathered_params(self) -> bool:
        """Whether full parameters stay resident between forward and backward, in addition to the shards."""
        sharding = get_sharding(self)
        is_freed = sharding.gathers_each_pass and (sharding.has_formats or self.torch_fsdp2_reshard_after_forward)
        return sharding.shards_params and not is_freed

    @property
    def has_bf16_main_grads(self) -> bool:
        """Whether main gradients of parameters that are not fp32 are bf16 by a flag of the sharding."""
        return get_sharding(self).has_formats and self.megatron_fsdp_main_grads_dtype == "bf16"

    @property
    def grad_comm_dtype(self) -> str:
        """Format of gradients in messages by a flag of the sharding; auto if there is none."""
        return self.megatron_fsdp_grad_comm_dtype if get_sharding(self).has_formats else "auto"
