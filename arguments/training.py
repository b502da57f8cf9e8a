"""TrainingArgs: batches, duration, recompute, offload, evaluation, exit.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from arguments.flag_properties import MAX_SAMPLES
from arguments.mechanisms.offloaded_modules import offloaded_parts
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag

_COUNT_SUFFIXES = MappingProxyType({"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})
_SCHEDULE_ENTRY = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", re.IGNORECASE)


def parse_batch_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Parse a batch-size schedule such as "0:384 200B:768 400B:1152".

    Entries TOKENS:BATCH_SIZE are separated by blanks or commas; a number of tokens may end in K, M, B or T (thousands
    to trillions). The first number of tokens is 0, and they rise.

    Returns:
        (tokens, global batch size) pairs: the number of tokens from which on a batch size holds.

    Raises:
        ValueError: with the form that is needed and the entry that does not have it.
    """
    need = "TOKENS:BATCH_SIZE entries such as 0:768 250B:1536, first 0 and rising"
    entries = []
    for word in text.replace(",", " ").strip("'\"").split():
        match = _SCHEDULE_ENTRY.fullmatch(word)
        if match is None:
            raise ValueError(f"{need} ({word} is not TOKENS:BATCH_SIZE with an optional K, M, B or T)")
        tokens, batch_size = Decimal(match.group(1)) * _COUNT_SUFFIXES[match.group(2).upper()], int(match.group(3))
        if tokens != int(tokens):
            raise ValueError(f"{need} ({word} has a fraction of a token)")
        if batch_size < 1:
            raise ValueError(f"{need} ({word} has no samples in a batch)")
        entries.append((int(tokens), batch_size))
    if not entries or entries[0][0] != 0:
        raise ValueError(f"{need} (the first entry must begin at 0 tokens)")
    if any(later[0] <= earlier[0] for earlier, later in pairwise(entries)):
        raise ValueError(f"{need} (numbers of tokens must rise from entry to entry)")
    return tuple(entries)


def _checked_batch_schedule(text: str) -> str:
    """Check a schedule and return its text, which checkpoints record as Megatron-LM's do."""
    parse_batch_schedule(text)
    return text


_EVALUATES = "eval_iters or full_validation"
_CHECKS = "check_for_nan_in_loss_and_grad or check_for_spiky_loss or check_for_large_grads"


@dataclass(frozen=True, repr=False, eq=False)
class TrainingArgs(Section):
    """Batches, duration, recompute, offload, evaluation, exit."""

    # ---- batches and duration
    micro_batch_size: int = flag(None, bounds=">0", most=MAX_SAMPLES, restore="to evaluate", role="batch")
    """Number of samples in one forward pass of a data-parallel rank."""
    global_batch_size: int = flag(None, most=MAX_SAMPLES, role="batch")
    """Number of samples per iteration over all ranks. Unset: micro-batch size x data-parallel size."""
    rampup_batch_size: list[int] | None = flag(None, nargs=3, role="batch")
    """START INCREMENT SAMPLES: raise the global batch size from START to --global-batch-size in steps of INCREMENT,
    over this number of samples."""
    step_batch_size_schedule: str | None = flag(None, parse=_checked_batch_schedule, role="batch")
    """Global batch sizes with the tokens at which they begin, such as "0:384 200B:768 400B:1152"."""
    decrease_batch_size_if_needed: bool = flag(False, role="batch")
    """Round the global batch size down when it does not divide among the ranks."""
    calculate_per_token_loss: bool = flag(False, role="update")
    """Average the loss over all tokens of the global batch, instead of over each microbatch first."""
    train_iters: int | None = flag(None, bounds=">=0", most=MAX_SAMPLES, role="schedule")
    """Length of training, in iterations."""
    train_samples: int | None = flag(None, bounds=">=0", most=MAX_SAMPLES, role="schedule")
    """Length of training, in samples."""
    iterations_to_skip: list[int] = flag([], bounds=">=0", role="batch")
    """Iterations whose batch is read but not trained on."""
    exit_interval: int | None = flag(None, bounds=">0", role="exit")
    """Stop at the first iteration that is a multiple of this number."""
    exit_duration_in_mins: int | None = flag(None, bounds=">=0", role="exit")
    """Save and stop after this time, in minutes."""
    exit_signal_handler: bool = flag(False, role="exit")
    """Save and stop when --exit-signal arrives."""
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
    ] = flag("SIGTERM", needs="exit_signal_handler or auto_resume", role="exit")
    """Signal at which --exit-signal-handler and --auto-resume save and stop."""
    save_on_interrupt: bool = flag(False, needs="save", role="exit")
    """Save and stop after the current iteration at Ctrl-C (SIGINT) or SIGTERM, as --exit-signal-handler does at one
    signal. A second Ctrl-C ends the run at once. A flag of this program."""
    exit_signal_handler_for_dataloader: bool = False
    """Install the signal handler in data workers as well."""
    exit_signal_handler_for_training: bool = False
    """Stop without a traceback at SIGINT or SIGTERM."""
    train_sync_interval: int | None = flag(None, bounds=">0")
    """Number of iterations between synchronizations of device and host."""
    batch_size: int | None = flag(None, bounds=">0")
    """Deprecated spelling of --micro-batch-size."""

    # ---- evaluation
    eval_iters: int = flag(100, bounds=">=0", most=MAX_SAMPLES, restore="to evaluate", role="evaluation")
    """Number of iterations of one evaluation; 0: none."""
    eval_interval: int = flag(1000, needs=_EVALUATES, bounds=">0", role="evaluation")
    """Number of iterations between evaluations."""
    start_eval_at_iter: int | None = flag(None, needs=_EVALUATES, bounds=">=0", role="evaluation")
    """First iteration that an evaluation may follow. Unset: 0."""
    eval_global_batch_size: int = flag(None, needs=_EVALUATES, role="evaluation")
    """Global batch size of evaluations, in samples. Unset: training's."""
    eval_micro_batch_size: int = flag(None, needs=_EVALUATES, restore="to evaluate", role="evaluation")
    """Micro-batch size of evaluations, in samples. Unset: training's."""
    skip_train: bool = flag(False, role="evaluation")
    """Evaluate only, without training."""
    test_mode: bool = False
    """Run the additional checks of Megatron-LM's tests during the run."""
    full_validation: bool = flag(False, restore="to evaluate", role="evaluation")
    """Evaluate on the full validation set every time, whatever --eval-iters is."""
    multiple_validation_sets: bool = flag(False, needs=(_EVALUATES, "!mock_data"), restore="data", role="evaluation")
    """Evaluate on each validation set separately."""
    validation_set_names: list[str] | None = flag(
        None, needs=(_EVALUATES, "multiple_validation_sets"), restore="data", role="evaluation"
    )
    """Names of the validation sets in logs, in their order."""
    eval_tasks: list[str] | None = flag(None, role="evaluation")
    """Benchmark tasks of lm-eval to run every --eval-tasks-interval iterations, separated by commas or blanks."""
    eval_tasks_interval: int | None = flag(None, bounds=">0", role="evaluation")
    """Number of iterations between runs of --eval-tasks; they also run after the last iteration."""
    eval_tasks_path: str | None = flag(None, path="read", role="evaluation")
    """Folder with task files (YAML) of your own for --eval-tasks."""
    eval_tasks_limit: int | None = flag(None, bounds=">0", role="evaluation")
    """Number of questions of each task of --eval-tasks. Unset: all."""
    sample_prompts: list[str] | None = flag(None, role="evaluation")
    """Texts that the model continues greedily every --sample-interval iterations, for the log and the dashboard."""
    sample_interval: int | None = flag(None, bounds=">0", role="evaluation")
    """Number of iterations between continuations of --sample-prompts; they also come after the last iteration."""
    sample_max_new_tokens: int = flag(64, needs="sample_prompts", bounds=">0", role="evaluation")
    """Largest number of tokens of a continuation of --sample-prompts."""

    # ---- recompute
    recompute_granularity: Literal["full", "selective"] | None = flag(None, role="method")
    """Recompute activations in the backward pass: those of full layers, or of selected modules."""
    recompute_method: Literal["uniform", "block"] | None = flag(None, needs="recompute_granularity", role="method")
    """Which full layers are recomputed: all, in groups of --recompute-num-layers (uniform), or the first ones of
    each stage (block)."""
    recompute_num_layers: int | None = flag(None, needs="recompute_granularity", bounds=">=0", role="method")
    """Number of layers of a recomputed group (uniform), or of recomputed layers (block)."""
    recompute_modules: list[str] | None = flag(None, needs="recompute_granularity=selective", role="method")
    """Modules of a layer to recompute with --recompute-granularity selective: {modules}."""
    mlp_chunks_for_training: int = flag(1, bounds=">0", role="method")
    """Number of chunks of the sequence in which feed-forward layers and experts run, so that their intermediate tensors
    are those of one chunk; in backward, if they are recomputed."""
    recompute_activations: bool = False
    """Deprecated spelling of --recompute-granularity selective."""
    distribute_saved_activations: bool = flag(False, role="method")
    """Shard saved activations over tensor-parallel ranks."""
    checkpoint_activations: bool = False
    """Deprecated spelling of --recompute-granularity full."""

    # ---- offload of activations
    cpu_offloading_num_layers: int = flag(0, role="method")
    """Number of layers whose activations are offloaded to the host; 0: none."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """Retain the pinned host buffers."""
    fine_grained_activation_offloading: bool = flag(False, role="method", demands=SublayerCapability.OFFLOAD)
    """Offload the saved tensors of the modules in --offload-modules to the host."""
    offload_modules: list[str] = flag([], needs="fine_grained_activation_offloading", role="method")
    """Modules of a layer to offload with --fine-grained-activation-offloading: {modules}."""
    min_offloaded_tensor_size: int = flag(
        1048576, needs="fine_grained_activation_offloading", bounds=">=0", role="method"
    )
    """Size of the smallest tensor that is offloaded, in elements."""
    delay_offload_until_cuda_graph: bool = False
    """Start offloading only when CUDA graphs are replayed."""
    delta_offload_bytes_across_pp_ranks: int = flag(
        0, needs="fine_grained_activation_offloading", bounds=">=0", role="method"
    )
    """Number of bytes that a pipeline rank offloads less than the rank before it."""
    activation_offload_fraction: float = flag(
        1.0, needs="fine_grained_activation_offloading", bounds="[0,1]", role="method"
    )
    """Fraction of the activations of --offload-modules to offload, from 0 to 1."""
    fine_grained_offloading_max_inflight_offloads: int | None = flag(
        None, needs="fine_grained_activation_offloading", bounds=">=0", role="method"
    )
    """Largest number of transfers to the host at a time. Unset: no limit."""

    # ---- CUDA graphs
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = flag(
        "none", role="runtime", demands=SublayerCapability.GRAPHS
    )
    """Capture modules or layers as CUDA graphs, or the full iteration as one."""
    cuda_graph_modules: list[str] = flag([], needs="cuda_graph_impl", role="runtime")
    """Modules of a layer to capture: {modules}. Unset: full layers."""
    cuda_graph_warmup_steps: int = flag(3, needs="cuda_graph_impl", bounds=">=0", role="runtime")
    """Number of iterations that run before capture."""
    enable_cuda_graph: bool = False
    """Deprecated spelling of --cuda-graph-impl local."""
    external_cuda_graph: bool = False
    """Deprecated spelling of --cuda-graph-impl transformer_engine."""
    cuda_graph_scope_deprecated: list[str] | None = flag(None, "--cuda-graph-scope", hidden=True)
    """Deprecated spelling of --cuda-graph-modules."""

    # ---- randomness and reproducibility
    seed: int = flag(1234, bounds=">0", restore="to evaluate", role="update")
    """Seed of initial weights, data order and dropout."""
    data_parallel_random_init: bool = False
    """Let data-parallel ranks start from different weights."""
    te_rng_tracker: bool = False
    """Use TransformerEngine's random-number tracker."""
    deterministic_mode: bool = flag(False, role="runtime")
    """Use deterministic algorithms: a run repeated on the same ranks gives bitwise equal results, and an operation
    without such an algorithm is an error. On CPUs runs are bitwise equal without it."""

    # ---- checks
    check_for_nan_in_loss_and_grad: bool = flag(True, off=("--no-check-for-nan-in-loss-and-grad",), role="runtime")
    """Reject an iteration whose loss or gradients are not finite; see --on-nan."""
    on_nan: Literal["stop", "skip"] = flag("stop", needs="check_for_nan_in_loss_and_grad", role="check")
    """Action when a rerun reproduces a non-finite loss or gradient: stop, and name the layer, expert and microbatch; or
    skip the update, and stop after ten in a row. Skipped iterations and their samples are recorded in checkpoints and
    metrics.jsonl."""
    check_for_large_grads: bool = flag(False, role="check")
    """Reject an iteration whose gradient norm is ten times the largest of the first hundred iterations; see
    --on-loss-spike."""
    check_for_spiky_loss: bool = flag(False, role="check")
    """Reject an iteration whose loss is ten times the largest of the first hundred iterations; see --on-loss-spike."""
    loss_spike_factor: float | None = flag(None, needs="check_for_spiky_loss", role="check")
    """Treat a loss above this factor times the median of the last hundred iterations as a spike (with
    --check-for-spiky-loss)."""
    on_loss_spike: Literal["report", "skip", "stop"] = flag(
        "report", needs="check_for_spiky_loss or check_for_large_grads", role="check"
    )
    """Action when a rerun reproduces a spike of the loss or the gradient norm: report it, skip the update, or stop."""
    check_weight_hash_across_dp_replicas_interval: int | None = flag(None, needs="data_ranks", role="check")
    """Number of iterations between comparisons of weights across data-parallel ranks. Unset: never."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = flag("validate_results", role="check")
    """validate_results: rerun a rejected iteration in place. A different result is a hardware fault: it is reported,
    and the run continues if the rerun is valid, else it exits with code 17. An equal result stops the run with its
    location, exit code 16 where resuming on other machines can tell more, else 17. report_stats: rerun every logged
    iteration and report how far the results differ. disabled: no reruns (exit code 1)."""
    error_injection_rate: int = flag(0, needs=_CHECKS, bounds=">=0", role="check")
    """Corrupt the result of one rank in about one of this many iterations (to test --rerun-mode)."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error", needs="error_injection_rate", role="check"
    )
    """transient_error: wrong once; persistent_error: wrong as long as the machines are the same; correct_result: wrong
    on every rank."""
    result_rejected_tracker_filename: str | None = flag(None, needs=_CHECKS, path="write", role="check")
    """File that gets a line for every rejected result and every rerun."""
    gpu_sniff_test_interval: int | None = flag(None, role="check")
    """Number of iterations between short correctness tests of the device. Unset: never."""

    # ---- housekeeping
    manual_gc: bool = flag(False, role="runtime")
    """Disable Python's automatic garbage collection, and collect every --manual-gc-interval iterations."""
    manual_gc_interval: int = flag(0, needs="manual_gc", bounds=">=0", role="runtime")
    """Number of iterations between manual collections; 0: never."""
    manual_gc_eval: bool = flag(
        True, off=("--no-manual-gc-eval", "--disable-manual-gc-eval"), needs="manual_gc", role="runtime"
    )
    """Collect garbage before and after evaluations as well."""
    empty_unused_memory_level: Literal[0, 1, 2] = flag(0, needs="cuda", role="runtime")
    """Return cached device memory: never (0), after the backward passes of each iteration (1), or after its update as
    well (2)."""
    gradient_accumulation_fusion: bool = flag(True, off=("--no-gradient-accumulation-fusion",), role="runtime")
    """Accumulate weight gradients into the main gradient inside the GEMM: in the local linear layers, router, experts
    computed one by one, and output layer. Grouped GEMMs, TransformerEngine's layers, quantized and deferred gradients
    and full sharding accumulate in a separate pass."""
    dataloader_type: Literal["single", "cyclic", "external"] | None = flag(None, role="data")
    """Order of training samples: once in order (single), cyclically shuffled (cyclic), or from the user's loader
    (external)."""
    enable_experimental: bool = False
    """Allow experimental features of Megatron-Core."""
    spec: list[str] | None = flag(None, nargs="*", role="model")
    """Python function that replaces modules of the model: package.module:function, or module and function as two
    words. It is called with the layer factory and the arguments, and returns the factory to build with
    (docs/python_api.md)."""

    @property
    def step_batch_sizes(self) -> tuple[tuple[int, int], ...] | None:
        """Parsed --step-batch-size-schedule: (tokens, global batch size) pairs, or None."""
        return None if self.step_batch_size_schedule is None else parse_batch_schedule(self.step_batch_size_schedule)

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Parts of a layer that run again in backward.

        "full" for spans of layers, "mtp" for multi-token prediction, else names of --recompute-modules.
        """
        if self.recompute_granularity == "full":
            return frozenset({"full", "mtp"} if self.recompute_method == "uniform" else {"full"})
        modules = frozenset(self.recompute_modules or ()) if self.recompute_granularity == "selective" else frozenset()
        # shared experts are inside moe, but their chunks are not inside those of the routed experts
        in_chunks = self.mlp_chunks_for_training > 1 and "moe" in modules
        return modules | {"shared_experts"} if in_chunks else modules

    @property
    def offloaded_modules(self) -> frozenset[str]:
        """Parts of a layer whose saved tensors are offloaded: "layer" (full layers), or names of --offload-modules."""
        if self.cpu_offloading_num_layers:
            return frozenset({"layer"})
        if not self.fine_grained_activation_offloading:
            return frozenset()
        return offloaded_parts(self.offload_modules)

    @property
    def captured_modules(self) -> frozenset[str]:
        """Parts of a layer that are captured as CUDA graphs.

        Names of --cuda-graph-modules, "layer" for full layers, or "iteration" for one graph of everything.
        """
        if self.cuda_graph_impl == "full_iteration":
            return frozenset({"iteration"})
        if self.cuda_graph_impl == "none":
            return frozenset()
        return frozenset(self.cuda_graph_modules) or frozenset({"layer"})

    def recompute_spans(self, num_layers: int) -> tuple[tuple[int, int, bool], ...]:
        """Return (first, stop, is recomputed) of the spans that the layers of a chunk run in.

        uniform: every --recompute-num-layers layers are one region. block: the first --recompute-num-layers layers are
        one region each.
        """
        step = self.recompute_num_layers or 1
        if self.recompute_granularity != "full":
            return ((0, num_layers, False),)
        if self.recompute_method == "uniform":
            return tuple((first, min(first + step, num_layers), True) for first in range(0, num_layers, step))
        return tuple((index, index + 1, index < step) for index in range(num_layers))


def is_offloaded(index: int, fraction: float) -> bool:
    """Return whether the tensor group `index`, of those that a part saves in one pass, is offloaded.

    memory/offload.py decides the same group by group. fraction: --activation-offload-fraction.
    """
    return math.floor((index + 1) * fraction + 1e-9) > math.floor(index * fraction + 1e-9)
