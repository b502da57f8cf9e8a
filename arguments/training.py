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

    # ---- batches and duration
    micro_batch_size: int | None = None
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = None
    """Samples per iteration over all ranks. Unset: micro-batch size x data-parallel size."""
    rampup_batch_size: list[int] | None = flag(None, nargs=3)
    """START INCREMENT SAMPLES: grow the global batch size from START in steps over that many samples."""
    step_batch_size_schedule: str | None = None
    """Global batch sizes with the tokens at which they begin, such as "0:384 200B:768 400B:1152"."""
    decrease_batch_size_if_needed: bool = False
    """Round the global batch size down when it does not divide among the ranks."""
    calculate_per_token_loss: bool = False
    """Divide the loss by all tokens of the global batch, not per sample."""
    train_iters: int | None = None
    """Iterations to train."""
    train_samples: int | None = None
    """Samples to train."""
    iterations_to_skip: list[int] = flag([])
    """Iterations whose batch is read but not trained on."""
    exit_interval: int | None = None
    """Stop when the iteration is a multiple of this."""
    exit_duration_in_mins: int | None = None
    """Stop (and save) after this many minutes."""
    exit_signal_handler: bool = False
    """Save and stop when the signal below arrives."""
    exit_signal: Literal[
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGILL",
        "SIGTRAP",
        "SIGABRT",
        "SIGBUS",
        "SIGFPE",
        "SIGKILL",
        "SIGUSR1",
        "SIGSEGV",
        "SIGUSR2",
        "SIGPIPE",
        "SIGALRM",
        "SIGTERM",
        "SIGSTKFLT",
        "SIGCHLD",
        "SIGCONT",
        "SIGSTOP",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGURG",
        "SIGXCPU",
        "SIGXFSZ",
        "SIGVTALRM",
        "SIGPROF",
        "SIGWINCH",
        "SIGIO",
        "SIGPWR",
        "SIGSYS",
        "SIGRTMIN",
        "SIGRTMAX",
    ] = "SIGTERM"
    """The signal to stop at."""
    exit_signal_handler_for_dataloader: bool = False
    """Install the handler in data workers too."""
    exit_signal_handler_for_training: bool = False
    """Stop without a traceback at SIGINT or SIGTERM."""
    train_sync_interval: int | None = None
    """Synchronise device and host every so many iterations."""
    batch_size: int | None = None
    """Old spelling of --micro-batch-size."""

    # ---- evaluation
    eval_iters: int = 100
    """Iterations of one evaluation."""
    eval_interval: int | None = None
    """Iterations between evaluations."""
    start_eval_at_iter: int | None = None
    """First iteration with an evaluation."""
    eval_global_batch_size: int | None = None
    """Global batch size of evaluation. Unset: training's."""
    eval_micro_batch_size: int | None = None
    """Micro-batch size of evaluation. Unset: training's."""
    skip_train: bool = False
    """Evaluate only."""
    test_mode: bool = False
    """Run the extra checks of Megatron-LM's own tests beside the run."""
    full_validation: bool = False
    """Evaluate on the whole validation set each time."""
    multiple_validation_sets: bool = False
    """Evaluate on each validation set separately."""
    validation_set_names: list[str] | None = None
    """Names of these sets."""

    # ---- recompute
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers, or selected parts of them."""
    recompute_method: Literal["uniform", "block"] | None = None
    """How whole layers are grouped for recompute."""
    recompute_num_layers: int | None = None
    """Layers in a group, or layers to recompute."""
    recompute_modules: list[str] | None = None
    """Parts of a layer to recompute."""
    recompute_activations: bool = False
    """Old spelling of --recompute-granularity selective."""
    distribute_saved_activations: bool = False
    """Spread saved activations over tensor-parallel ranks."""
    checkpoint_activations: bool = False
    """Old spelling of full recompute."""

    # ---- offload of activations
    cpu_offloading_num_layers: int = 0
    """Layers whose activations go to the host."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """Keep the pinned host buffers."""
    fine_grained_activation_offloading: bool = False
    """Send the inputs of chosen parts to the host."""
    offload_modules: list[str] = flag([])
    """The parts."""
    min_offloaded_tensor_size: int = 1048576
    """Smallest tensor worth sending, elements."""
    delay_offload_until_cuda_graph: bool = False
    """Wait with sending until a CUDA graph runs."""
    delta_offload_bytes_across_pp_ranks: int = 0
    """Difference of sent bytes between pipeline ranks."""
    activation_offload_fraction: float = 1.0
    """Share of the activations to send."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """Transfers under way at once."""

    # ---- CUDA graphs
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """Who captures CUDA graphs."""
    cuda_graph_modules: list[str] = flag([])
    """Parts of a layer to capture."""
    cuda_graph_warmup_steps: int = 3
    """Iterations before capture."""
    enable_cuda_graph: bool = False
    """Old spelling of --cuda-graph-impl local."""
    external_cuda_graph: bool = False
    """Old spelling of --cuda-graph-impl transformer_engine."""
    cuda_graph_scope_deprecated: list[str] | None = flag(None, "--cuda-graph-scope", hidden=True)
    """Old spelling of --cuda-graph-modules."""

    # ---- randomness and reproducibility
    seed: int = 1234
    """Seed of weights, data order, dropout."""
    data_parallel_random_init: bool = False
    """Let data-parallel ranks start from different weights."""
    te_rng_tracker: bool = False
    """Use TransformerEngine's random-number tracker."""
    deterministic_mode: bool = False
    """Choose deterministic algorithms: the same run on the same ranks gives the same bits, and an operation that has none ends it by name. On
    CPUs runs are the same to the bit without it."""

    # ---- checks
    check_for_nan_in_loss_and_grad: bool = flag(True, off=("--no-check-for-nan-in-loss-and-grad",))
    """Reject an iteration whose loss or gradients are not finite; --on-nan says what then."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What an iteration that is not finite leads to, when repeating it gives the same: stop, and name the layer, expert and microbatch; or
    skip its update, and end the run after ten in a row. Skipped iterations and their samples stand in checkpoints and metrics.jsonl."""
    check_for_large_grads: bool = False
    """Reject an iteration whose gradient norm is ten times the largest of the first hundred iterations; see --on-loss-spike."""
    check_for_spiky_loss: bool = False
    """Reject an iteration whose loss is ten times the largest of the first hundred iterations; see --on-loss-spike."""
    loss_spike_factor: float | None = None
    """Call it a spike when the loss is more than X times the median of the last hundred iterations (with --check-for-spiky-loss)."""
    on_loss_spike: Literal["report", "skip", "stop"] = "report"
    """What a spike of the loss or the gradient norm leads to, when repeating the iteration gives the same: a warning, no update, or the end."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Iterations between comparisons of weights across data-parallel ranks."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """validate_results: repeat a rejected iteration in place. A result that differs is a machine's fault: it is named, and the run goes on if the
    repeated one is good, else exit code 17. One that comes again stops the run with the place, exit code 16 where resuming elsewhere can tell
    more, else 17. report_stats: repeat every logged iteration and report how far the results lie apart. disabled: repeat nothing (exit code 1)."""
    error_injection_rate: int = 0
    """Make the result of one rank wrong in about one of so many iterations (to test the above)."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    """transient_error: wrong once; persistent_error: wrong as long as the machines are the same; correct_result: wrong everywhere."""
    result_rejected_tracker_filename: str | None = None
    """Add a line to this file for every rejected result and every repetition."""
    gpu_sniff_test_interval: int | None = None
    """Iterations between quick tests of the device."""

    # ---- housekeeping
    manual_gc: bool = False
    """Switch Python's garbage collector off and collect at fixed iterations."""
    manual_gc_interval: int = 0
    """Iterations between manual collections; 0 is never."""
    manual_gc_eval: bool = flag(
        True,
        off=(
            "--no-manual-gc-eval",
            "--disable-manual-gc-eval",
        ),
    )
    """Collect round evaluations too."""
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Return cached device memory: never, after each iteration, or more often."""
    gradient_accumulation_fusion: bool = flag(True, off=("--no-gradient-accumulation-fusion",))
    """Add weight gradients into the main gradient inside the matmul: of this program's linear layers, router, experts that are computed one
    by one, and output head. Grouped GEMMs, TransformerEngine's layers, quantized and deferred gradients and full sharding add in a pass of their own."""
    dataloader_type: Literal["single", "cyclic", "external"] | None = None
    """How training samples are drawn: once in order, cyclically shuffled, or by the user's own loader."""
    enable_experimental: bool = False
    """Allow experimental features of Megatron-Core."""
    spec: list[str] | None = flag(None, nargs="*")
    """Python path of a custom layer specification."""
