"""NVFP4: numbers of 4 bits, a scale for 16 of them, and one for the tensor."""

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

FP4 = FormatFlags(name="fp4", values=("e2m1",), bits=4, is_measured=False)

NVFP4 = FormatDeclaration(
    key="nvfp4",
    name="NVFP4",
    flags=FP4,
    searched_with="e2m1",
    stored=StoredForm(
        name="nvfp4",
        flag=FP4.param_gather,
        num_bytes=0.5 + BLOCK_SCALE_BYTES / (16 * 16),
        gathered_bytes=0.5,
        library_cannot_hold=True,
    ),
    copy_bytes=1 / 2 + 1 / 16,
    tokens_per_scale=16,
    has_global_scale=True,
    scales_whole_tensor=True,
    keeps_expert_casts=False,
    needs_blackwell=True,
    library=("NVFP4BlockScaling", "is_nvfp4_available"),
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: True,
            FormatCapability.DEVICE_COUNTS: True,
            FormatCapability.DROPLESS_GRAPH: True,
            FormatCapability.OUTPUT_LAYER: Rejected("as in Megatron-LM"),
            FormatCapability.PRECISION_FILE: True,
            FormatCapability.RECOMPUTED_INPUTS: True,
            FormatCapability.HOST_OPTIMIZER: True,
            FormatCapability.PROOF: Rejected("gradients are rounded stochastically, differently on every rank"),
        }
    ),
)

FP4_CUSTOM = FormatDeclaration(
    key=CUSTOM,
    name="fp4 formats of a function",
    flags=FP4,
    copy_bytes=1 / 2 + 1 / 16,
    tokens_per_scale=16,
    has_global_scale=True,
    scales_whole_tensor=True,
    names_layers=False,
    keeps_expert_casts=False,
    needs_blackwell=True,
    library=("CustomRecipe", "is_fp8_available"),
    capabilities=MappingProxyType(
        {
            FormatCapability.LIBRARY_GEMMS: True,
            FormatCapability.DEVICE_COUNTS: NoEffect(f"TransformerEngine reads them on the host with {CUSTOM} scaling"),
            FormatCapability.DROPLESS_GRAPH: COUNTS_ON_HOST,
            FormatCapability.OUTPUT_LAYER: Rejected("as in Megatron-LM"),
            FormatCapability.PRECISION_FILE: Rejected("both choose the formats"),
            FormatCapability.RECOMPUTED_INPUTS: True,
            FormatCapability.HOST_OPTIMIZER: True,
            FormatCapability.PROOF: Rejected("gradients are rounded stochastically, differently on every rank"),
        }
    ),
)
"""Estimated like NVFP4."""
