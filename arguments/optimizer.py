"""OptimizerArgs: optimizer, learning rate, weight decay.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arguments.mechanisms.optimizer_kinds.muon import MuonArgs
from arguments.mechanisms.optimizers import NAMES, needs_rule
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag

if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CommonOptimizerArgs(Section):
    """Flags that no single optimizer declares."""

    # ---- optimizer
    optimizer: Name = flag("adam", restore="to convert", role="update")
    """Optimizer of the weights."""
    adam_beta1: float = flag(
        0.9,
        needs=needs_rule("adam"),
        bounds="[0,1)",
        role="update",
    )
    """Decay factor of Adam's first moment, from 0 to below 1."""
    adam_beta2: float = flag(
        0.999,
        needs=needs_rule("adam"),
        bounds="[0,1)",
        role="update",
    )
    """Decay factor of Adam's second moment, from 0 to below 1."""
    adam_eps: float = flag(
        1e-08,
        needs=needs_rule("adam"),
        bounds=">=0",
        role="update",
    )
    """Constant added to the square root of Adam's second moment."""
    sgd_momentum: float = flag(0.9, needs=needs_rule("sgd"), bounds="[0,1)", role="update")
    """Momentum of SGD, from 0 to below 1."""
    lion_beta1: float = flag(
        0.95,
        needs=needs_rule("lion"),
        bounds="[0,1)",
        role="update",
    )
    """Weight of the momentum in the mean whose sign Lion follows, from 0 to below 1."""
    lion_beta2: float = flag(
        0.98,
        needs=needs_rule("lion"),
        bounds="[0,1)",
        role="update",
    )
    """Decay factor of Lion's momentum, from 0 to below 1."""
    clip_grad: float = flag(1.0, bounds=">=0", role="update")
    """Clip the global gradient norm to this value; 0: do not clip."""
    weight_decay: float = flag(0.01, bounds=">=0", role="update")
    """Decoupled weight decay of all parameters but biases and norms."""
    start_weight_decay: float | None = flag(None, role="schedule")
    """First value of a weight decay that rises over the run."""
    end_weight_decay: float | None = flag(None, role="schedule")
    """Last value of a weight decay that rises over the run."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant", role="schedule")
    """Shape of the rise from --start-weight-decay to --end-weight-decay; constant: --weight-decay."""
    apply_wd_to_qk_layernorm: bool = flag(False, needs="qk_layernorm", role="update")
    """Decay the gains of the query/key norms as well."""
    no_weight_decay_cond_type: Literal["apply_wd_to_qk_layernorm"] | None = None
    """Deprecated way to choose the parameters without weight decay."""
    freeze_all_layers: bool = flag(False, role="update")
    """Run training batches forward only, and update no weights."""
    freeze_backbone: bool = flag(False, needs="num_experts", role="update", demands=SublayerCapability.FROZEN_BACKBONE)
    """Train the embedding, norms, routers and routed experts only, as is done to train upcycled experts
    (its --only-train-list embedding+router+mlp.experts+layernorm). A flag of this program."""

    # ---- learning rate
    lr: float | None = flag(None, bounds=">=0", role="schedule")
    """Largest learning rate, after warm-up."""
    min_lr: float = flag(0.0, needs="!lr_decay_style=constant", bounds=">=0", role="schedule")
    """Smallest learning rate of the schedule."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", role="schedule"
    )
    """Shape of the decay from --lr to --min-lr. WSD: constant, with a final decay."""
    lr_decay_iters: int | None = flag(
        None, needs="!lr_decay_style=constant or lr_warmup_fraction", bounds=">=0", role="schedule"
    )
    """Length of the decay, with its warm-up, in iterations. Unset: --train-iters."""
    lr_decay_samples: int | None = flag(
        None, needs="!lr_decay_style=constant or lr_warmup_fraction", bounds=">=0", role="schedule"
    )
    """Length of the decay, with its warm-up, in samples. Unset: --train-samples."""
    lr_warmup_fraction: float | None = flag(None, bounds="[0,1)", role="schedule")
    """Length of the linear warm-up, as a fraction of the decay's length."""
    lr_warmup_iters: int = flag(0, bounds=">=0", role="schedule")
    """Length of the linear warm-up, in iterations."""
    lr_warmup_samples: int = flag(0, bounds=">=0", role="schedule")
    """Length of the linear warm-up, in samples."""
    lr_warmup_init: float = flag(
        0.0, needs="lr_warmup_iters or lr_warmup_samples or lr_warmup_fraction", bounds=">=0", role="schedule"
    )
    """Learning rate that the warm-up starts from."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", needs="lr_decay_style=WSD", role="schedule"
    )
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = flag(None, needs="lr_decay_style=WSD", bounds=">=0", role="schedule")
    """Length of the final decay of WSD, in iterations."""
    lr_wsd_decay_samples: int | None = flag(None, needs="lr_decay_style=WSD", bounds=">=0", role="schedule")
    """Length of the final decay of WSD, in samples."""
    decoupled_lr: float | None = flag(None, bounds=">=0", role="schedule")
    """Largest learning rate of embedding and output layer. Unset: --lr."""
    decoupled_min_lr: float | None = flag(None, needs="decoupled_lr", bounds=">=0", role="schedule")
    """Smallest learning rate of embedding and output layer, with --decoupled-lr."""
    mup_width_mult: float = flag(1.0, needs="use_mup", bounds=">0", role="size")
    """muP: factor that scales learning rates and Adam's epsilon, per parameter. Always --hidden-size /
    --mup-base-hidden-size."""
    override_opt_param_scheduler: bool = flag(
        False,
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
        needs="load or auto_resume",
        role="schedule",
    )
    """Use the schedules of this command line instead of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "--use-checkpoint-opt_param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        needs="load or auto_resume",
        role="schedule",
    )
    """Use the checkpoint's schedules instead of those of this command line."""
    warmup: int | None = None
    """Old warm-up percentage; use --lr-warmup-fraction."""

    # ---- memory
    use_precision_aware_optimizer: bool = flag(False, role="update")
    """Let the optimizer store its states in the formats of --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and
    --exp-avg-sq-dtype."""
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32", role="precision")
    """Format of the gradients that the optimizer reads."""
    main_params_dtype: Literal["fp32", "fp16"] = flag("fp32", needs="bf16 or fp16", role="precision")
    """Format of the main parameters."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag("fp32", role="update")
    """Format of Adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag("fp32", role="update")
    """Format of Adam's second moment."""
    optimizer_cpu_offload: bool = flag(False, role="method")
    """Store optimizer states and run the optimizer step on the host."""
    optimizer_offload_fraction: float = flag(1.0, needs="optimizer_cpu_offload", bounds="[0,1]", role="method")
    """Fraction of the parameters whose states are on the host, from 0 to 1."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """Use torch's optimizer for the part on the host."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, needs="optimizer_cpu_offload", role="method")
    """Overlap copies to and from the host with the optimizer step."""
    pin_cpu_grads: bool = flag(True, off=("--no-pin-cpu-grads",), needs="optimizer_cpu_offload", role="runtime")
    """Pin host memory of offloaded gradients."""
    pin_cpu_params: bool = flag(
        True,
        off=("--no-pin-cpu-params",),
        needs="optimizer_cpu_offload or chunked_optimizer_state_offload",
        role="runtime",
    )
    """Pin host memory of offloaded parameters."""
    chunked_optimizer_state_offload: bool = flag(
        False, "--chunked-optimizer-state-offload", "--offload-optimizer-states", role="method"
    )
    """Store optimizer states on the host between steps; the device updates them chunk by chunk."""
    optimizer_state_offload_chunk_size_mb: int = flag(
        0, needs="chunked_optimizer_state_offload", bounds=">=0", role="runtime"
    )
    """Device memory for the states of one chunk, in MiB; 0: a fixed number of elements."""
    optimizer_state_offload_fraction: float = flag(
        1.0, needs="chunked_optimizer_state_offload", bounds="[0,1]", role="method"
    )
    """Fraction of the parameters whose states are on the host between steps, from 0 to 1."""
    optimizer_cuda_graph: bool = False
    """Capture the optimizer step in a CUDA graph."""
    dump_param_to_param_group_map: str | None = flag(None, path="write", role="output")
    """Write the parameter group of every parameter to this file."""


@dataclass(frozen=True, repr=False, eq=False)
class OptimizerArgs(
    MuonArgs,
    CommonOptimizerArgs,
):
    """Optimizer, learning rate, weight decay."""
