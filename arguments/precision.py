"""PrecisionArgs: number formats of parameters, gradients and matrix products.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag


@dataclass(frozen=True)
class PrecisionArgs:
    """Number formats of parameters, gradients and matrix products."""

    # ---- flags
    fp16: bool = False
    bf16: bool = False
    disable_bf16_reduced_precision_matmul: bool = False
    fp8: Literal["e4m3", "hybrid"] | None = flag(None, "--fp8-format")
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = "delayed"
    fp8_quantizer_factory: str | None = None
    fp8_margin: int = 0
    fp8_interval: int = 1
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    fp8_wgrad: bool = flag(True, off=("--no-fp8-wgrad", "--disable-fp8-wgrad",))
    fp8_output_proj: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    fp4: Literal["e2m1"] | None = flag(None, "--fp4-format")
    fp4_recipe: Literal["nvfp4", "custom"] = "nvfp4"
    fp4_quantizer_factory: str | None = None
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] = "transformer_engine"
    grad_reduce_in_bf16: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float = 4294967296.0
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000.0
    hysteresis: int = 2
    attention_softmax_in_fp32: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    fp16_lm_cross_entropy: bool = False
    logit_dtype: Literal["bf16", "fp32"] | None = flag(None, "--output-logit-dtype")
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    fp4_param_gather: bool = False
    fp8_param_gather: bool = False
    te_precision_config_file: str | None = None

    @property
    def params_dtype_name(self) -> str:
        """Format of the model's parameters: "fp32", "bf16" or "fp16"."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"
