"""Maximal update parametrization (arXiv 2203.03466): whose learning rate is scaled with the width, as in Megatron-LM.

m is width / base width. With Adam, matrices between layers get 1/m of the rate and of epsilon. With SGD, embeddings and vectors get m of the rate.
With any other rule matrices get 1/m. Biases, gains and whatever else has one dimension are vectors; the output layer counts with the embeddings.
What Muon itself updates, and what follows --decoupled-lr, is left alone.
"""

from collections.abc import Mapping
from typing import Any

from arguments.mup import width_mult

EMBEDDINGS = ("embeddings.weight", "output_layer.weight")
DECOUPLED = ("word_embeddings.weight", "output_layer.weight")


def recorded_width_mult(record: Mapping[str, Any]) -> float:
    """Width / base width. record: the flags by destination, as either program saves them."""
    return width_mult(bool(record.get("use_mup")), record.get("hidden_size"), record.get("mup_base_hidden_size"))


def rate_mult(optimizer: str, width: float) -> float:
    """What scaled learning rates are multiplied by."""
    return width if optimizer == "sgd" else 1.0 / width


def is_scaled(name: str, ndim: int, optimizer: str, decoupled: bool) -> bool:
    """Whether a parameter's learning rate is scaled. ndim: of one named tensor. decoupled: whether --decoupled-lr is given."""
    if decoupled and name.endswith(DECOUPLED):
        return False
    vector = ndim <= 1 or name.endswith(EMBEDDINGS)
    if optimizer == "sgd":
        return vector
    return not vector and not (optimizer == "muon" and ndim == 2)
