"""OutputArgs: checkpoints, logging, profiling, and our own files.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag

_PLANS = "validate_only or dry_run or fake_process_group"
_LOADS = "load or pretrained_checkpoint"
_RESUMES = "load or pretrained_checkpoint or auto_resume"
_TRACKERS = "tensorboard_dir or wandb_project"


@dataclass(frozen=True, repr=False, eq=False)
class OutputArgs(Section):
    """Checkpoints, logging, profiling, and our own files."""

    # ---- this program
    preset: str | None = flag(None, path="read", role="load")
    """Start from a recipe: a name of the model zoo, or a YAML file. Flags on the command line win."""
    validate_only: bool = False
    """Resolve and check the flags, print the result, and exit with code 0 or 2."""
    dry_run: bool = False
    """Print what a run with these flags would need and how fast it would be, without running it: memory of every
    pipeline stage, time of an iteration by cause, the nearest published run. Exit code 0 or 2. Needs --world-size."""
    hardware: str | None = flag(None, needs=_PLANS, path="read")
    """Hardware that --dry-run plans for: a100, h100, h200, h800, b200, gb200, gb300, or a YAML file that describes a
    machine. Unset: h100."""
    length_histogram: str | None = flag(None, needs=_PLANS, path="read")
    """Plan for packed sequences of these lengths: a .csv file (length,count), a .json file ({length: count}), a data
    prefix whose index has them, or the word corpus for the training data. Unset: all are --seq-length long."""
    report: str | None = flag(None, needs=_PLANS, path="write")
    """Write the result of --validate-only or --dry-run to this JSON file."""
    report_html: str | None = flag(None, needs="dry_run or fake_process_group", path="write")
    """Write the plan of --dry-run, as text and as pictures, to this HTML file."""
    check_files: bool = flag(False, needs="validate_only")
    """With --validate-only: open data, tokenizer, the checkpoint to load and the output directories; report what is
    missing, the number of tokens and the number of epochs."""
    log_all_arguments: bool = False
    """Print all settings at the start and with --validate-only, including those at their defaults."""
    metrics_file: str | None = flag(None, path="write")
    """JSONL file for one object per logged iteration. Unset: in --save, else in --tensorboard-dir."""
    init_from: str | None = flag(None, path="read", role="load")
    """Take initial weights from this safetensors file, under Megatron-Core's names."""
    export_weights: str | None = flag(None, path="write")
    """Write the final weights to this safetensors file, under Megatron-Core's names."""
    stream_weights_to: str | None = flag(None, path="write")
    """Directory for the weights during training, as Hugging Face folders that an inference engine loads; shm:NAME is a
    directory in the shared memory of rank 0's host. Unset: none. A flag of this program."""
    stream_weights_interval: int | None = flag(None, bounds=">0")
    """Number of iterations between the writes of --stream-weights-to; the weights at the start and at the end are
    written too. A flag of this program."""
    stream_weights_model_type: str | None = flag(None, needs="stream_weights_to")
    """Hugging Face model type of --stream-weights-to. Unset: the first that expresses the model. A flag of this
    program."""
    dump_step: list[str] | None = flag(None, nargs=2, metavar=("N", "DIR"), path="write")
    """Write gradients, routing maps and probabilities of iteration N to DIR."""
    record_step: int | None = None
    """Record what is needed to replay iteration N, under another mapping or dtype too, in recorded_step_N under --save;
    scripts/replay.py replays it. Size: the weights, their gradients in fp32, and about 72 bytes per token and layer
    (144 with experts)."""

    # ---- saving
    save: str | None = flag(None, path="write")
    """Directory that checkpoints are written to. Unset: none are written."""
    save_interval: int | None = flag(None, "--save-interval", "--persistent-save-interval", needs="save")
    """Number of iterations between checkpoints."""
    save_retain_interval: int | None = flag(None, needs="save")
    """Retain only checkpoints of iterations that are a multiple of this number, and the latest."""
    save_total_limit: int | None = flag(None, needs="save", bounds=">0")
    """Keep the last N checkpoints of this run, those of --save-retain-interval, and the one that the run started from.
    An older one is deleted when a newer one is complete. Unset: all are kept. A flag of this program."""
    no_save_optim: bool | None = flag(None, needs="save")
    """Leave the optimizer out of checkpoints."""
    no_save_rng: bool | None = flag(None, needs="save")
    """Leave random-number states out of checkpoints."""
    async_save: bool = flag(False, needs="save")
    """Write checkpoints in the background."""
    use_persistent_ckpt_worker: bool = False
    """Reuse the background writer between checkpoints."""
    async_strategy: Literal["nvrx", "mcore"] = "nvrx"
    """Implementation of the asynchronous writer."""
    async_ckpt_cpu_priority: int = flag(10, bounds="any")
    """Niceness of the background writer's process."""
    async_ckpt_io_priority: int = flag(3, bounds="any")
    """I/O priority of the background writer."""
    async_ckpt_use_cpu_shm: bool = False
    """Pass tensors to the background writer through shared memory."""
    save_tokenizer_assets: bool = flag(
        True, off=("--no-save-tokenizer-assets", "--disable-save-tokenizer-assets"), needs="save"
    )
    """Copy tokenizer files into checkpoints."""
    verify_integrity: bool = flag(False, needs="save or load or pretrained_checkpoint")
    """Write hashes of checkpoint files, and verify them when they are loaded."""
    save_params_interval: int | None = flag(None, bounds=">0")
    """Iterations between dumps of all parameters, under --save."""
    save_activations_interval: int | None = flag(None, bounds=">0")
    """Iterations between dumps of the inputs and outputs of the layers' modules (of the last microbatch), under
    --save."""
    save_tokens_per_expert_interval: int | None = flag(None, needs="num_experts", bounds=">0")
    """Iterations between dumps of the number of tokens per expert, under --save."""
    save_wgrads_interval: int | None = flag(None, bounds=">0")
    """Iterations between dumps of all weight gradients, reduced and unclipped, under --save."""
    save_dgrads_interval: int | None = flag(None, bounds=">0")
    """Iterations between dumps of the gradients of modules' inputs (of the last microbatch), under --save."""

    # ---- loading
    load: str | None = flag(None, path="read", role="load")
    """Directory that a checkpoint is loaded from."""
    finetune: bool = flag(False, needs=_LOADS, role="load")
    """Load weights only and start at iteration 0."""
    pretrained_checkpoint: str | None = flag(None, path="read", role="load")
    """Directory with the weights to start from if --load has no checkpoint."""
    ckpt_step: int | None = flag(None, needs="load", bounds=">=0", role="load")
    """Iteration to load. Unset: the latest."""
    hf_mapping: str | None = flag(
        None, needs="load or pretrained_checkpoint or stream_weights_to", path="read", role="load"
    )
    """Mapping file of the Hugging Face family of --load or --pretrained-checkpoint, if it is not built in."""
    no_load_optim: bool | None = flag(None, needs=_LOADS, role="load")
    """Do not load the optimizer's state."""
    no_load_rng: bool | None = flag(None, needs=_LOADS, role="load")
    """Do not load random-number states."""
    load_main_params_from_ckpt: bool = flag(False, needs=_LOADS, role="load")
    """Load main parameters from the checkpoint instead of copying them from the model's."""
    use_checkpoint_args: bool = flag(False, needs=_RESUMES, role="load")
    """Take the architecture's flags from the checkpoint."""
    use_mp_args_from_checkpoint_args: bool = flag(False, needs="use_checkpoint_args", role="load")
    """Take the parallel sizes from the checkpoint too."""
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True,
        off=("--no-use-tokenizer-model-from-checkpoint-args", "--disable-use-tokenizer-model-from-checkpoint-args"),
        needs="use_checkpoint_args",
        role="load",
    )
    """Take the tokenizer from the checkpoint (with --use-checkpoint-args)."""
    auto_resume: bool = False
    """Resume from the newest complete checkpoint under --save if there is one, else start as the other flags say.
    SIGTERM, SIGUSR1, --exit-signal and --exit-duration-in-mins then save and exit with code 75: to be restarted."""
    exit_on_missing_checkpoint: bool = flag(False, needs="load", role="load")
    """Stop if --load has no checkpoint, instead of training from the start."""
    override_ckpt_iteration: int | None = flag(None, needs="load or auto_resume", role="load")
    """Continue as if the checkpoint were of this iteration."""

    # ---- checkpoint format
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = flag(
        "torch_dist", needs="save or use_megatron_fsdp"
    )
    """Format of saved checkpoints."""
    auto_detect_ckpt_format: bool = False
    """Detect the format of the checkpoint to load."""
    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = flag("assume_ok_unexpected", needs=_RESUMES, role="load")
    """What to do about keys that are missing in a checkpoint or that nothing reads: accept, log or raise. Not given, it
    acts as raise_unexpected: the default must be named to act."""
    dist_ckpt_optim_fully_reshardable: bool = False
    """Store optimizer states so that any mapping can load them."""
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    """Use less memory for --dist-ckpt-optim-fully-reshardable."""
    dist_ckpt_save_pre_mcore_014: bool = False
    """Write optimizer states in the format before Megatron-Core 0.14."""
    dist_ckpt_workers: int = flag(1, bounds=">0")
    """Number of writer threads per rank."""
    ckpt_fully_parallel_save: bool = flag(True, off=("--no-ckpt-fully-parallel-save",), needs="save")
    """Share the writing among data-parallel ranks."""
    ckpt_fully_parallel_load: bool = flag(False, needs=_RESUMES, role="load")
    """Share the reading among data-parallel ranks."""
    ckpt_fully_parallel_load_exchange_algo: Literal["broadcast", "gather_rounds", "gather_object"] = "broadcast"
    """How ranks exchange what they read with --ckpt-fully-parallel-load."""
    ckpt_fully_parallel_load_per_rank_objects: bool = False
    """Let each rank read its own objects."""
    ckpt_fully_parallel_save_process_group: Literal["dp", "ep_dp"] = "dp"
    """Ranks that share the writing."""
    ckpt_fully_parallel_load_process_group: Literal["dp", "ep_dp"] = "dp"
    """Ranks that share the reading."""
    ckpt_assume_constant_structure: bool = flag(False, needs="save")
    """Plan the first save and reuse the plan, since the structure does not change."""
    ckpt_load_validate_sharding_integrity: bool = flag(
        True, off=("--no-ckpt-load-validate-sharding-integrity", "--disable-ckpt-load-validate-sharding-integrity")
    )
    """Check that shards cover each tensor exactly."""
    ckpt_drop_redundant_extra_state: bool = False
    """Leave TransformerEngine's extra states out."""
    ckpt_pg_tensors_cache_path: str | None = None
    """Directory for a cache of optimizer group tensors."""
    ckpt_pg_tensors_cache_create: bool = False
    """Create the cache of --ckpt-pg-tensors-cache-path."""
    strict_fsdp_dtensor_load: bool = flag(
        True, off=("--no-strict-fsdp-dtensor-load", "--disable-strict-fsdp-dtensor-load")
    )
    """Reject mismatches when loading fsdp_dtensor."""
    use_dist_ckpt_deprecated: bool = flag(False, "--use-dist-ckpt")
    """Deprecated switch for distributed checkpoints."""
    dist_ckpt_format_deprecated: str | None = flag(None, "--dist-ckpt-format")
    """Deprecated spelling of --ckpt-format."""
    ckpt_fully_parallel_save_deprecated: bool = flag(False, "--ckpt-fully-parallel-save")
    """Deprecated switch; shared writing is the default."""
    ckpt_convert_format: Literal["torch", "torch_dist"] | None = None
    """Convert the checkpoint of --load to this format and exit."""
    ckpt_convert_save: str | None = flag(None, needs="ckpt_convert_format", path="write")
    """Directory for the converted checkpoint."""
    ckpt_convert_update_legacy_dist_opt_format: bool = False
    """Update an old distributed-optimizer format while converting."""

    # ---- non-persistent checkpoints
    non_persistent_save_interval: int | None = None
    """Iterations between non-persistent checkpoints."""
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = None
    """Location of non-persistent checkpoints."""
    non_persistent_global_ckpt_dir: str | None = None
    """Shared directory for non-persistent checkpoints."""
    non_persistent_local_ckpt_dir: str | None = None
    """Local directory for non-persistent checkpoints."""
    non_persistent_local_ckpt_algo: Literal["fully_parallel", "atomic"] = "fully_parallel"
    """How local non-persistent checkpoints are written."""
    replication: bool = False
    """Replicate local checkpoints to other nodes."""
    replication_jump: int | None = flag(None, bounds=">=0")
    """Distance between ranks that hold replicas."""
    replication_factor: int = flag(2, bounds=">0")
    """Number of replicas."""

    # ---- log
    log_interval: int = flag(100, bounds=">0")
    """Number of iterations between log lines."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_num_zeros_in_grad: bool = False
    """Log the number of gradient elements that are zero."""
    log_throughput: bool = False
    """Log the throughput in TFLOP/s per device."""
    log_progress: bool = flag(False, needs="save")
    """Append a line to progress.txt in --save for every save."""
    log_memory_interval: int | None = flag(None, bounds=">0")
    """Number of iterations between lines about device memory. Unset: after the first iterations only."""
    log_device_memory_used: bool = flag(False, needs="cuda")
    """Log the memory use that the device itself reports."""
    log_energy: bool = False
    """Log the energy per iteration."""
    log_max_attention_logit: bool = flag(False, demands=SublayerCapability.MAX_LOGITS)
    """Log the largest attention logit of each iteration."""
    logging_level: int | None = flag(None, bounds=">=0")
    """Level of Python's logging: 10 debug, 20 info, 30 warning, 40 error."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Number of timers: 0 the iteration only, 1 a few, 2 many."""
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax", needs="timing_log_level")
    """Timer values to log over ranks: the largest, smallest and largest, or all."""
    barrier_with_L1_time: bool = flag(True, off=("--no-barrier-with-level-1-timing",))
    """Synchronize ranks at level-1 timers."""
    config_logger_dir: str = flag("", path="write")
    """Directory for a record of the configuration; empty: none."""
    log_straggler: bool = False
    """Measure ranks and log the slowest and fastest."""
    straggler_ctrlr_port: int = flag(65535, needs="log_straggler", bounds=">0")
    """Port that turns straggler detection on and off."""
    straggler_minmax_count: int = flag(1, needs="log_straggler", bounds=">0")
    """Number of slowest and fastest ranks to report."""
    disable_straggler_on_startup: bool = flag(False, needs="log_straggler")
    """Start with straggler detection off."""

    # ---- TensorBoard and Weights & Biases
    tensorboard_dir: str | None = flag(None, path="write")
    """Directory for TensorBoard files. Unset: none are written."""
    tensorboard_log_interval: int = flag(1, needs=_TRACKERS, bounds=">0")
    """Number of iterations between points in TensorBoard."""
    tensorboard_queue_size: int = flag(1000, needs="tensorboard_dir", bounds=">0")
    """Number of events that TensorBoard may buffer."""
    log_timers_to_tensorboard: bool = flag(False, needs=_TRACKERS)
    """Write timers to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = flag(
        True, off=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"), needs=_TRACKERS
    )
    """Write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = flag(False, needs=_TRACKERS)
    """Write validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = flag(False, needs=_TRACKERS)
    """Write memory use to TensorBoard."""
    log_world_size_to_tensorboard: bool = flag(False, needs=_TRACKERS)
    """Write the number of ranks to TensorBoard."""
    wandb_project: str | None = None
    """Project on Weights & Biases. Unset or empty: nothing is sent."""
    wandb_exp_name: str | None = flag(None, needs="wandb_project")
    """Name of the run on Weights & Biases."""
    wandb_save_dir: str | None = flag(None, needs="wandb_project", path="write")
    """Local directory of Weights & Biases."""
    wandb_entity: str | None = flag(None, needs="wandb_project")
    """Entity (user or team) on Weights & Biases."""

    # ---- profiling
    profile: bool = False
    """Profile the iterations from --profile-step-start to --profile-step-end."""
    profile_step_start: int = flag(10, needs="profile", bounds=">=0")
    """First iteration that is profiled."""
    profile_step_end: int = flag(12, needs="profile", bounds=">=0")
    """First iteration that is not profiled any more."""
    profile_ranks: list[int] = flag([], needs="profile", bounds=">=0")
    """Ranks to profile. Unset: rank 0."""
    use_pytorch_profiler: bool = flag(False, needs="profile")
    """Use torch's profiler instead of marks for nsys."""
    pytorch_profiler_collect_shapes: bool = flag(False, needs=("profile", "use_pytorch_profiler or !cuda"))
    """Record shapes in torch's profiler."""
    pytorch_profiler_collect_callstack: bool = flag(False, needs=("profile", "use_pytorch_profiler or !cuda"))
    """Record call stacks in torch's profiler."""
    pytorch_profiler_collect_chakra: bool = flag(False, needs=("profile", "use_pytorch_profiler or !cuda"))
    """Write a Chakra trace with torch's profiler."""
    record_memory_history: bool = flag(False, needs="cuda")
    """Record allocations of device memory."""
    memory_snapshot_path: str = flag("snapshot.pickle", needs="record_memory_history", path="write")
    """File for the record of --record-memory-history."""
    record_shapes: bool = flag(False, needs=("profile", "cuda"))
    """Mark every operator with the shapes of its inputs in a profile of nsys."""
    nvtx_ranges: bool = flag(False, needs="cuda")
    """Mark iterations, microbatches, layers and MoE phases for nsys, on CUDA devices."""
