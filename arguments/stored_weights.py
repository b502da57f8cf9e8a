"""The format in which the weights of quantized layers are stored."""

from typing import Any, Literal

StoredWeightFormat = Literal["fp8", "mxfp8", "nvfp4"]


def stored_weight_format(precision: Any, parallel: Any) -> StoredWeightFormat | None:
    """Return the format in which the weights of quantized layers are stored (--fp8-param-gather, --fp4-param-gather).

    None for the model's format: with full sharding, on any number of ranks (then one process computes with the same
    weights), and with a factory, which may give every layer another format. MXFP8 weights cannot be stored once for
    both GEMMs (quantization/stored_weight.py: can_store_once): they are stored twice, and gathered in the model's
    format through the gradient buffer, or in the model's format.

    Args:
        precision: has the fields of PrecisionArgs.
        parallel: has the fields of ParallelArgs.
    """
    is_fully_sharded = parallel.use_torch_fsdp2 or (
        parallel.use_megatron_fsdp and parallel.data_parallel_sharding_strategy != "optim"
    )
    if not parallel.use_distributed_optimizer or is_fully_sharded:
        return None
    if precision.fp4 and precision.fp4_param_gather and precision.fp4_recipe == "nvfp4":
        return "nvfp4"
    if not (precision.fp8 and precision.fp8_param_gather) or precision.fp8_recipe == "custom":
        return None
    if precision.fp8_recipe != "mxfp8":
        return "fp8"
    reuses = precision.reuse_grad_buf_for_mxfp8_param_ag and not parallel.use_megatron_fsdp
    return "mxfp8" if reuses else None
