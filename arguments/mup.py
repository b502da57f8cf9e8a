"""Maximal update parametrization (arXiv 2203.03466): the width multiplier, and the learning rates it scales.

As in Megatron-LM, with m = width / base width: Adam's rate and epsilon of matrices between layers are scaled by 1/m;
SGD's rate of embeddings and vectors by m; any other optimizer's rate of matrices by 1/m. Parameters with one dimension
are vectors; the output layer counts as an embedding. What an optimizer updates as full matrices, or follows
--decoupled-lr, is not scaled.
"""

from collections.abc import Mapping
from typing import Any

from arguments.mechanisms.optimizers import find_optimizer

EMBEDDING_WEIGHTS = ("embeddings.weight", "output_layer.weight")
DECOUPLED_LR_WEIGHTS = ("word_embeddings.weight", "output_layer.weight")


def width_mult(use_mup: bool, hidden_size: int, base_hidden_size: int | None) -> float:
    """Return width / base width; 1 without --use-mup or --mup-base-hidden-size."""
    return hidden_size / (base_hidden_size or hidden_size) if use_mup else 1.0


def recorded_width_mult(record: Mapping[str, Any]) -> float:
    """Return width / base width of flags by destination, as this program and Megatron-LM save them."""
    return width_mult(bool(record.get("use_mup")), record.get("hidden_size", 1), record.get("mup_base_hidden_size"))


def mup_lr_mult(optimizer: str, width: float) -> float:
    """Return the factor of scaled learning rates."""
    return width if find_optimizer(optimizer).scaled_by_mup == "vectors" else 1.0 / width


def is_lr_scaled(name: str, ndim: int, optimizer: str, decoupled: bool) -> bool:
    """Return whether the learning rate of a parameter is scaled; `ndim` is that of one named tensor."""
    if decoupled and name.endswith(DECOUPLED_LR_WEIGHTS):
        return False
    is_vector = ndim <= 1 or name.endswith(EMBEDDING_WEIGHTS)
    declared = find_optimizer(optimizer)
    if declared.scaled_by_mup == "vectors":
        return is_vector
    return not is_vector and not (declared.updates_matrices and ndim == 2)
