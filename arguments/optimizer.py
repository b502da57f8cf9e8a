"""OptimizerArgs: optimizer, learning rate, weight decay.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer, learning rate, weight decay."""

    # ---- flags
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-08
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.9
    muon_split_qkv: bool = flag(True, off=("--muon-no-split-qkv",))
    muon_nesterov: bool = False
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = "medium"
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "duplicated"
    muon_use_syrk: bool = False
    muon_extra_scale_factor: float = 1.0
    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    no_weight_decay_cond_type: Literal["apply_wd_to_qk_layernorm"] | None = None
    optimizer: Literal["adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"] = "adam"
    optimizer_cpu_offload: bool = False
    optimizer_cuda_graph: bool = False
    optimizer_offload_fraction: float = 1.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    dump_param_to_param_group_map: str | None = None
    pin_cpu_grads: bool = flag(True, off=("--no-pin-cpu-grads",))
    pin_cpu_params: bool = flag(True, off=("--no-pin-cpu-params",))
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    override_opt_param_scheduler: bool = flag(False, "--override-opt_param-scheduler", "--override-opt-param-scheduler")
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"
    )
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    lr: float | None = None
    warmup: int | None = None
    min_lr: float = 0.0
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    freeze_all_layers: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
