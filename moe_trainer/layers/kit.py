"""The kit of building blocks a model is made of: a record of constructors, chosen once at build.

Blocks call `kit.column_linear(...)` and the like; nothing else knows which library stands behind them. Local experts
need no grouped linear: they run as one autograd function (ops/expert_mlp.py). TransformerEngine's norm + linear and
grouped linear become two more constructors when that kit is built.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from moe_trainer.layers.core_attention import CoreAttention
from moe_trainer.layers.linear import ColumnParallelLinear, RowParallelLinear
from moe_trainer.layers.norm import Norm

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kit:
    """Constructors of one backend; the signatures are those of the local classes.

    column_linear, row_linear: (in_features, out_features, *, name, group, init, bias)
    norm: (size, model, *, name)
    core_attention: (model, layer_number, *, head_dim, scale)
    """

    name: str
    column_linear: Callable[..., nn.Module]
    row_linear: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    core_attention: Callable[..., nn.Module]


LOCAL = Kit("local", ColumnParallelLinear, RowParallelLinear, Norm, CoreAttention)


def choose(transformer_impl: str) -> Kit:
    """Return the kit for --transformer-impl.

    TransformerEngine layers are not built yet: that choice (Megatron's default) runs the local kit and logs why, once.
    """
    if transformer_impl != "local":
        absent = importlib.util.find_spec("transformer_engine") is None
        reason = "the package is not installed" if absent else "TransformerEngine layers are not built yet"
        logger.info("--transformer-impl %s: %s; using the local layers (plain torch)", transformer_impl, reason)
    return LOCAL
