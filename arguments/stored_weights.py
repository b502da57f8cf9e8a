"""The form in which the weights of quantized layers are stored."""

from typing import Any

from arguments.mechanisms.format_kinds.declaration import StoredForm
from arguments.mechanisms.formats import quantized_format
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import get_sharding


def stored_weight_format(precision: Any, parallel: Any) -> StoredForm | None:
    """Return the form in which the weights of quantized layers are stored, if it is not the model's format.

    It is the model's with full sharding, on any number of ranks (then one process computes with the same
    weights), and with a factory, which may give every layer another format. Weights that cannot be stored once for both
    GEMMs, since the scales of the transposed weight are others, are stored twice, and gathered in the model's format
    through the gradient buffer, or in the model's format.

    Args:
        precision: has the fields of PrecisionArgs.
        parallel: has the fields of ParallelArgs.
    """
    fmt, sharding = quantized_format(precision), get_sharding(parallel)
    if fmt is None or fmt.stored is None or not sharding.supports(ShardingCapability.QUANTIZED_GATHER):
        return None
    if not getattr(precision, fmt.flags.param_gather) or not getattr(precision, fmt.stored.flag):
        return None
    is_accepted = not fmt.stored.is_gathered_wide or sharding.supports(ShardingCapability.GRAD_BUFFER_REUSE)
    return fmt.stored if is_accepted else None
