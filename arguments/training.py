"""TrainingArgs: batches, duration, recompute, offload, evaluation, exit.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag


@dataclass(frozen=True)
class TrainingArgs:
    """Batches, duration, recompute, offload, evaluation, exit."""

    # ---- flags
    deterministic_mode: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    calculate_per_token_loss: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    distribute_saved_activations: bool = False
    recompute_modules: list[str] | None = None
    enable_cuda_graph: bool = False
    cuda_graph_warmup_steps: int = 3
    external_cuda_graph: bool = False
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    fine_grained_activation_offloading: bool = False
    offload_modules: list[str] = flag([])
    min_offloaded_tensor_size: int = 1048576
    delay_offload_until_cuda_graph: bool = False
    delta_offload_bytes_across_pp_ranks: int = 0
    activation_offload_fraction: float = 1.0
    fine_grained_offloading_max_inflight_offloads: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: list[int] | None = flag(None, nargs=3)
    step_batch_size_schedule: str | None = None
    decrease_batch_size_if_needed: bool = False
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    check_weight_hash_across_dp_replicas_interval: int | None = None
    gpu_sniff_test_interval: int | None = None
    train_sync_interval: int | None = None
    train_iters: int | None = None
    train_samples: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: int | None = None
    exit_signal_handler: bool = False
    exit_signal: Literal[
        "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL",
        "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGSTKFLT", "SIGCHLD", "SIGCONT",
        "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGXCPU", "SIGXFSZ", "SIGVTALRM", "SIGPROF",
        "SIGWINCH", "SIGIO", "SIGPWR", "SIGSYS", "SIGRTMIN", "SIGRTMAX",
    ] = "SIGTERM"
    exit_signal_handler_for_dataloader: bool = False
    exit_signal_handler_for_training: bool = False
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = flag(True, off=("--no-manual-gc-eval", "--disable-manual-gc-eval",))
    iterations_to_skip: list[int] = flag([])
    batch_size: int | None = None
    recompute_activations: bool = False
    check_for_nan_in_loss_and_grad: bool = flag(True, off=("--no-check-for-nan-in-loss-and-grad",))
    check_for_large_grads: bool = False
    result_rejected_tracker_filename: str | None = None
    checkpoint_activations: bool = False
    dataloader_type: Literal["single", "cyclic", "external"] | None = None
    gradient_accumulation_fusion: bool = flag(True, off=("--no-gradient-accumulation-fusion",))
    seed: int = 1234
    te_rng_tracker: bool = False
    data_parallel_random_init: bool = False
    eval_iters: int = 100
    eval_interval: int | None = None
    start_eval_at_iter: int | None = None
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    skip_train: bool = False
    test_mode: bool = False
    full_validation: bool = False
    multiple_validation_sets: bool = False
    validation_set_names: list[str] | None = None
    cuda_graph_scope_deprecated: list[str] | None = flag(None, "--cuda-graph-scope", hidden=True)
    cuda_graph_modules: list[str] = flag([])
    enable_experimental: bool = False
    spec: list[str] | None = flag(None, nargs="*")
    error_injection_rate: int = 0
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    check_for_spiky_loss: bool = False
