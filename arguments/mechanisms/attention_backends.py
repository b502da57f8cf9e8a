"""Backends of attention: the kernel of scores, mask, softmax and values; one declaration each.

A backend is selected by --attention-backend; `get_attention_backend` is the only place that reads it. A declaration,
in attention_backend_kinds/, states for every `AttentionBackendCapability` that it acts, that the flags that demand it
are rejected and why, or that they have no effect and why. moe_trainer/layers/core_attention.py has torch's kernel of
each.
"""

from typing import Any

from arguments.mechanisms.attention_backend_kinds.declaration import AttentionBackendDeclaration
from arguments.mechanisms.attention_backend_kinds.fused import AUTO, FLASH, FUSED
from arguments.mechanisms.attention_backend_kinds.unfused import LOCAL_UNFUSED, UNFUSED

ATTENTION_BACKENDS: tuple[AttentionBackendDeclaration, ...] = (
    FLASH,
    FUSED,
    UNFUSED,
    LOCAL_UNFUSED,
    AUTO,
)
NAMES = tuple(each.key for each in ATTENTION_BACKENDS)
"""Values of --attention-backend."""


def get_attention_backend(model: Any) -> AttentionBackendDeclaration:
    """Return the backend that the flags select.

    Args:
        model: has the fields of ModelArgs.
    """
    return next(each for each in ATTENTION_BACKENDS if each.key == model.attention_backend)
