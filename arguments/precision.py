"""PrecisionArgs: number formats of parameters, gradients and GEMMs; implementations of layers and kernels.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arguments.flag_properties import MAX_FP32
from arguments.mechanisms.formats import list_widths, plain_format
from arguments.mechanisms.implementations import NAMES
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag

if TYPE_CHECKING:
    Implementation = str
else:
    Implementation = Literal[NAMES]


@dataclass(frozen=True, repr=False, eq=False)
class PrecisionArgs(Section):
    """Number formats of parameters, gradients and GEMMs; implementations of layers and kernels."""

    # ---- formats
    bf16: bool = flag(False, restore=("to evaluate", "to convert"), role="precision")
    """Compute in bfloat16, with fp32 main parameters."""
    fp16: bool = flag(False, restore=("to evaluate", "to convert"), role="precision")
    """Compute in float16, with fp32 main parameters and a scaled loss."""
    transformer_impl: Implementation = flag("transformer_engine", role="runtime")
    """Implementation of the layers: local or TransformerEngine."""
    on_missing_backend: Literal["error", "fallback"] | None = flag(None, role="runtime")
    """Action when an optional library is missing. Unset: error if its flag was typed and CUDA is available, else
    fallback."""
    triton_kernels: list[
        Literal[
            "all",
            "none",
            "activation",
            "norm",
            "rope",
            "permute",
            "router",
            "cross-entropy",
            "expert-wgrad",
            "grouped-gemm",
            "quantize",
            "sparse-attention",
            "paged-stash",
            "delta-rule",
        ]
    ] = flag([], needs="cuda", role="runtime")
    """Operations that use this program's Triton kernels on CUDA devices instead of plain torch, with the same results
    up to rounding. expert-wgrad adds the weight gradients of experts in half precision to fp32 sums; torch takes a
    GEMM for each expert, or rounds. Unset: all but grouped-gemm (torch has a fused GEMM), and but those that
    --no-rope-fusion and --no-bias-swiglu-fusion switch off, if the package triton is installed; TransformerEngine's
    norms, --moe-permute-fusion and --moe-router-fusion take precedence over them, and kernels that are named here take
    precedence over those. They have been checked in Triton's interpreter and compiled for sm_90, sm_100 and sm_103, and
    not yet run on a GPU; scripts/benchmarks/bench_kernels.py measures which of them pay. delta-rule, of gated DeltaNet
    layers: the kernels of the package flash-linear-attention if 0.6 or later is installed (packed documents: this
    program's), else this program's. On a CPU: plain torch."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32 (on with --bf16)."""
    grad_reduce_in_bf16: bool = flag(False, needs="bf16", role="precision")
    """Accumulate and reduce gradients in bf16 instead of fp32."""
    attention_softmax_in_fp32: bool = False
    """Compute the attention softmax in fp32."""
    fp16_lm_cross_entropy: bool = False
    """Compute the loss in half precision."""
    logit_dtype: Literal["bf16", "fp32"] | None = flag(None, "--output-logit-dtype", role="precision")
    """Format of the logits that the loss reads. Unset: the format of the model."""
    disable_bf16_reduced_precision_matmul: bool = flag(False, needs=("bf16", "cuda"), role="runtime")
    """Do not let bf16 GEMMs accumulate in bf16 (on CUDA; sets torch's allow_bf16_reduced_precision_reduction)."""

    # ---- fp16 loss scale
    loss_scale: float | None = flag(None, needs="fp16", bounds=">0", most=MAX_FP32, role="runtime")
    """Constant loss scale of --fp16. Unset: a dynamic one."""
    initial_loss_scale: float = flag(
        4294967296.0, needs=("fp16", "!loss_scale"), bounds=">0", most=MAX_FP32, role="runtime"
    )
    """First value of the dynamic loss scale."""
    min_loss_scale: float = flag(1.0, needs=("fp16", "!loss_scale"), bounds=">0", most=MAX_FP32, role="runtime")
    """Smallest value of the dynamic loss scale."""
    loss_scale_window: float = flag(1000.0, needs=("fp16", "!loss_scale"), bounds=">0", role="runtime")
    """Number of iterations without overflow after which the loss scale doubles."""
    hysteresis: int = flag(2, needs=("fp16", "!loss_scale"), bounds=">0", role="runtime")
    """Number of overflows after which the loss scale halves."""

    # ---- quantized GEMMs
    fp8: Literal["e4m3", "hybrid"] | None = flag(
        None, "--fp8-format", role="quantization", demands=SublayerCapability.QUANTIZED
    )
    """Compute linear layers in fp8: e4m3 for all tensors, or hybrid with gradients in e5m2."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = flag(
        "delayed", needs="fp8", role="quantization"
    )
    """Method of computing fp8 scales. custom: --fp8-quantizer-factory chooses."""
    fp8_quantizer_factory: str | None = flag(None, needs="fp8_recipe=custom", role="quantization")
    """Python path (package.module.function) of a function that chooses the format of every tensor with --fp8-recipe
    custom. It gets a role (module_type, tensor_type, name) and returns a recipe other than delayed (of any width) or
    high_precision for the local layers, or a quantizer for TransformerEngine's."""
    fp8_margin: int = flag(0, needs=("fp8", "fp8_recipe=delayed"), bounds=">=0", role="quantization")
    """Powers of two that are left free below the largest fp8 number."""
    fp8_interval: int = flag(1, bounds=">0")
    """Number of iterations between updates of delayed scales."""
    fp8_amax_history_len: int = flag(1, needs=("fp8", "fp8_recipe=delayed"), bounds=">0", role="quantization")
    """Number of iterations whose largest values delayed scaling remembers."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag(
        "most_recent", needs=("fp8", "fp8_recipe=delayed"), role="quantization"
    )
    """Value of the history that delayed scaling uses: the most recent one or the maximum."""
    fp8_wgrad: bool = flag(True, off=("--no-fp8-wgrad", "--disable-fp8-wgrad"), needs="fp8", role="quantization")
    """Compute weight gradients in fp8 as well."""
    fp8_output_proj: bool = flag(False, role="quantization")
    """Compute the output layer in fp8 as well."""
    fp8_param_gather: bool = flag(False, role="quantization")
    """Store and gather the weights of quantized layers in fp8. MXFP8: in the model's format, unless
    --reuse-grad-buf-for-mxfp8-param-ag is given."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = flag(False, role="quantization")
    """With --fp8-param-gather and --fp8-recipe mxfp8: gather weights in the model's format through the memory of the
    gradients, and store them in MXFP8 only, by rows and by columns (2.06 bytes per element), so that no GEMM quantizes
    a weight. TransformerEngine's layers keep theirs in the model's format."""
    first_last_layers_bf16: bool = flag(False, needs=list_widths("or"), role="quantization")
    """Keep the first and last layers in bf16 when others are quantized."""
    num_layers_at_start_in_bf16: int = flag(1, needs="first_last_layers_bf16", bounds=">=0", role="quantization")
    """Number of first layers that stay in bf16 with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = flag(1, needs="first_last_layers_bf16", bounds=">=0", role="quantization")
    """Number of last layers that stay in bf16 with --first-last-layers-bf16."""
    fp4: Literal["e2m1"] | None = flag(None, "--fp4-format", role="quantization", demands=SublayerCapability.QUANTIZED)
    """Compute linear layers in fp4."""
    fp4_recipe: Literal["nvfp4", "custom"] = flag("nvfp4", needs="fp4", role="quantization")
    """Method of computing fp4 scales. custom: --fp4-quantizer-factory chooses."""
    fp4_quantizer_factory: str | None = flag(None, needs="fp4_recipe=custom", role="quantization")
    """As --fp8-quantizer-factory, with --fp4-recipe custom."""
    fp4_param_gather: bool = flag(False, role="quantization")
    """Store and gather the weights of quantized layers in NVFP4: half a byte per element and scales of 16 x 16
    blocks."""
    te_precision_config_file: str | None = flag(None, needs=list_widths("or"), path="read", role="quantization")
    """YAML file that sets the format of each layer for TransformerEngine."""

    @property
    def params_dtype_name(self) -> str:
        """Format of the model's parameters: "fp32", "bf16" or "fp16"."""
        return plain_format(self).name
