"""OutputArgs: checkpoints, logging, profiling, and our own files.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag


@dataclass(frozen=True)
class OutputArgs:
    """Checkpoints, logging, profiling, and our own files."""

    # ---- flags
    config_logger_dir: str = ""
    profile: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    use_pytorch_profiler: bool = False
    pytorch_profiler_collect_shapes: bool = False
    pytorch_profiler_collect_callstack: bool = False
    pytorch_profiler_collect_chakra: bool = False
    profile_ranks: list[int] = flag([])
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"
    record_shapes: bool = False
    nvtx_ranges: bool = False
    save: str | None = None
    save_interval: int | None = flag(None, "--save-interval", "--persistent-save-interval")
    save_params_interval: int | None = None
    save_activations_interval: int | None = None
    save_tokens_per_expert_interval: int | None = None
    save_wgrads_interval: int | None = None
    save_dgrads_interval: int | None = None
    save_retain_interval: int | None = None
    load: str | None = None
    load_main_params_from_ckpt: bool = False
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_local_ckpt_dir: str | None = None
    non_persistent_local_ckpt_algo: Literal["fully_parallel", "atomic"] = "fully_parallel"
    finetune: bool = False
    pretrained_checkpoint: str | None = None
    ckpt_step: int | None = None
    use_checkpoint_args: bool = False
    use_mp_args_from_checkpoint_args: bool = False
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True, off=("--no-use-tokenizer-model-from-checkpoint-args", "--disable-use-tokenizer-model-from-checkpoint-args",)
    )
    exit_on_missing_checkpoint: bool = False
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "torch_dist"
    auto_detect_ckpt_format: bool = False
    ckpt_convert_format: Literal["torch", "torch_dist"] | None = None
    ckpt_convert_save: str | None = None
    ckpt_convert_update_legacy_dist_opt_format: bool = False
    ckpt_fully_parallel_save: bool = flag(True, off=("--no-ckpt-fully-parallel-save",))
    async_save: bool = False
    async_strategy: Literal["nvrx", "mcore"] = "nvrx"
    use_persistent_ckpt_worker: bool = False
    async_ckpt_cpu_priority: int = 10
    async_ckpt_io_priority: int = 3
    async_ckpt_use_cpu_shm: bool = False
    ckpt_fully_parallel_load: bool = False
    ckpt_fully_parallel_load_exchange_algo: Literal["broadcast", "gather_rounds", "gather_object"] = "broadcast"
    ckpt_fully_parallel_load_per_rank_objects: bool = False
    ckpt_fully_parallel_save_process_group: Literal["dp", "ep_dp"] = "dp"
    ckpt_fully_parallel_load_process_group: Literal["dp", "ep_dp"] = "dp"
    ckpt_assume_constant_structure: bool = False
    ckpt_pg_tensors_cache_path: str | None = None
    ckpt_pg_tensors_cache_create: bool = False
    ckpt_load_validate_sharding_integrity: bool = flag(
        True, off=("--no-ckpt-load-validate-sharding-integrity", "--disable-ckpt-load-validate-sharding-integrity",)
    )
    strict_fsdp_dtensor_load: bool = flag(
        True, off=("--no-strict-fsdp-dtensor-load", "--disable-strict-fsdp-dtensor-load",)
    )
    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
        "return_unexpected", "return_all", "ignore_all",
    ] = "assume_ok_unexpected"
    dist_ckpt_save_pre_mcore_014: bool = False
    dist_ckpt_optim_fully_reshardable: bool = False
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    save_tokenizer_assets: bool = flag(True, off=("--no-save-tokenizer-assets", "--disable-save-tokenizer-assets",))
    replication: bool = False
    replication_jump: int | None = None
    replication_factor: int = 2
    verify_integrity: bool = False
    no_save_optim: bool | None = None
    no_save_rng: bool | None = None
    no_load_optim: bool | None = None
    no_load_rng: bool | None = None
    override_ckpt_iteration: int | None = None
    use_dist_ckpt_deprecated: bool = flag(False, "--use-dist-ckpt")
    dist_ckpt_format_deprecated: str | None = flag(None, "--dist-ckpt-format")
    dist_ckpt_workers: int = 1
    ckpt_fully_parallel_save_deprecated: bool = flag(False, "--ckpt-fully-parallel-save")
    ckpt_drop_redundant_extra_state: bool = False
    log_interval: int = 100
    log_params_norm: bool = False
    log_throughput: bool = False
    log_progress: bool = False
    timing_log_level: Literal[0, 1, 2] = 0
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = flag(
        True, off=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard",)
    )
    log_validation_ppl_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_memory_interval: int | None = None
    log_device_memory_used: bool = False
    log_num_zeros_in_grad: bool = False
    log_max_attention_logit: bool = False
    barrier_with_L1_time: bool = flag(True, off=("--no-barrier-with-level-1-timing",))
    log_world_size_to_tensorboard: bool = False
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None
    logging_level: int | None = None
    log_energy: bool = False
    log_straggler: bool = False
    straggler_ctrlr_port: int = 65535
    straggler_minmax_count: int = 1
    disable_straggler_on_startup: bool = False

    # ---- this program's own flags
    preset: str | None = None
    validate_only: bool = False
    report: str | None = None
    metrics_file: str | None = None
    init_from: str | None = None
    export_weights: str | None = None
    dump_step: list[str] | None = flag(None, nargs=2, metavar=("N", "DIR"))
