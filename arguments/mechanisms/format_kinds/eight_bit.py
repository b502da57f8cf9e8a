"""Formats of 8 bits: one scale for a tensor, from this iteration or from earlier ones, and scales for blocks."""

from types import MappingProxyType

from arguments.mechanisms.format_kinds.declaration import (
    BLOCK_SCALE_BYTES,
    COUNTS_ON_HOST,
    CUSTOM,
    FormatCapability,
    FormatDeclaration,
    FormatFlags,
    StoredForm,
)
from arguments.mechanisms.support import NoEffect, Rejected

GRAD_BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
"""Destination of the flag that gathers weights through the memory of the gradients."""
OUTPUT_LAYER = "fp8_output_proj"
"""Destination of the flag that quantizes the output layer."""
SCALING_PREFIX = "fp8."
"""Beginning of the names of delayed scaling's state in checkpoints."""
FP8 = FormatFlags(
    name="fp8",
    values=("e4m3", "hybrid"),
    bits=8,
    wgrad="fp8_wgrad",
    displaced=(GRAD_BUFFER,),
)
_STORED = StoredForm(name="fp8", flag=FP8.param_gather, num_bytes=1.0, gathered_bytes=1.0, library_takes=True)
_MXFP8_BYTES = 1 + 1 / 32
_NOT_THE_OUTPUT_LAYER = Rejected("as in Megatron-LM")
_NOT_ON_THE_HOST = Rejected("as in Megatron-LM")


def _reads_counts_on_host(key: str) -> NoEffect:
    return NoEffect(f"TransformerEngine reads them on the host with {key} scaling")


DELAYED = FormatDeclaration(
    key="delayed",
    name="fp8 delayed",
    flags=FP8,
    stored=_STORED,
    scales_whole_tensor=True,
    keeps_scales=True,
    names_layers=False,
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: NoEffect(
                "it updates delayed scales with every microbatch and does not save them; here they are updated once "
                "per iteration, equal for every mapping and with recompute, and saved in checkpoints"
            ),
            FormatCapability.DEVICE_COUNTS: _reads_counts_on_host("delayed"),
            FormatCapability.DROPLESS_GRAPH: NoEffect("experts are this program's, which read counts on the device"),
            FormatCapability.OUTPUT_LAYER: _NOT_THE_OUTPUT_LAYER,
            FormatCapability.PRECISION_FILE: True,
            FormatCapability.RECOMPUTED_INPUTS: Rejected("delayed scaling would see the values twice"),
            FormatCapability.HOST_OPTIMIZER: True,
            FormatCapability.PROOF: True,
        }
    ),
)

TENSORWISE = FormatDeclaration(
    key="tensorwise",
    name="fp8 tensorwise",
    flags=FP8,
    searched_with="hybrid",
    stored=_STORED,
    scales_whole_tensor=True,
    library=("Float8CurrentScaling", "is_fp8_available"),
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: True,
            FormatCapability.DEVICE_COUNTS: _reads_counts_on_host("tensorwise"),
            FormatCapability.DROPLESS_GRAPH: COUNTS_ON_HOST,
            FormatCapability.OUTPUT_LAYER: _NOT_THE_OUTPUT_LAYER,
            FormatCapability.PRECISION_FILE: True,
            FormatCapability.RECOMPUTED_INPUTS: True,
            FormatCapability.HOST_OPTIMIZER: _NOT_ON_THE_HOST,
            FormatCapability.PROOF: True,
        }
    ),
)

BLOCKWISE = FormatDeclaration(
    key="blockwise",
    name="fp8 blockwise",
    flags=FP8,
    searched_with="e4m3",
    stored=StoredForm(
        name="fp8",
        flag=FP8.param_gather,
        num_bytes=1.0 + BLOCK_SCALE_BYTES / (128 * 128),
        gathered_bytes=1.0,
        library_takes=True,
    ),
    tokens_per_scale=128,
    superseded_on_blackwell=True,
    library=("Float8BlockScaling", "is_fp8_block_scaling_available"),
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: True,
            FormatCapability.DEVICE_COUNTS: _reads_counts_on_host("blockwise"),
            FormatCapability.DROPLESS_GRAPH: COUNTS_ON_HOST,
            FormatCapability.OUTPUT_LAYER: _NOT_THE_OUTPUT_LAYER,
            FormatCapability.PRECISION_FILE: True,
            FormatCapability.RECOMPUTED_INPUTS: True,
            FormatCapability.HOST_OPTIMIZER: _NOT_ON_THE_HOST,
            FormatCapability.PROOF: True,
        }
    ),
)

MXFP8 = FormatDeclaration(
    key="mxfp8",
    name="MXFP8",
    flags=FP8,
    searched_with="e4m3",
    stored=StoredForm(name="mxfp8", flag=GRAD_BUFFER, num_bytes=2 * _MXFP8_BYTES, gathered_bytes=None),
    copy_bytes=_MXFP8_BYTES,
    tokens_per_scale=32,
    needs_blackwell=True,
    library=("MXFP8BlockScaling", "is_mxfp8_available"),
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: True,
            FormatCapability.DEVICE_COUNTS: True,
            FormatCapability.DROPLESS_GRAPH: True,
            FormatCapability.OUTPUT_LAYER: True,
            FormatCapability.PRECISION_FILE: True,
            FormatCapability.RECOMPUTED_INPUTS: True,
            FormatCapability.HOST_OPTIMIZER: _NOT_ON_THE_HOST,
            FormatCapability.PROOF: True,
        }
    ),
)

FP8_CUSTOM = FormatDeclaration(
    key=CUSTOM,
    name="fp8 formats of a function",
    flags=FP8,
    names_layers=False,
    library=("CustomRecipe", "is_fp8_available"),
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: True,
            FormatCapability.DEVICE_COUNTS: _reads_counts_on_host(CUSTOM),
            FormatCapability.DROPLESS_GRAPH: COUNTS_ON_HOST,
            FormatCapability.OUTPUT_LAYER: _NOT_THE_OUTPUT_LAYER,
            FormatCapability.PRECISION_FILE: Rejected("both choose the formats"),
            FormatCapability.RECOMPUTED_INPUTS: True,
            FormatCapability.HOST_OPTIMIZER: _NOT_ON_THE_HOST,
            FormatCapability.PROOF: Rejected("its function may choose formats that depend on layers"),
        }
    ),
)
