"""Matrices and parameters of linear attention (layers/gated_delta_net.py) and short convolutions, from flags alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from arguments.mechanisms.sublayers import variant_of

if TYPE_CHECKING:
    from arguments.model import ModelArgs


class Matrix(NamedTuple):
    """A matrix of a layer; `sharded`: features that tensor-parallel ranks share, "in", "out" or ""."""

    name: str
    in_features: int
    out_features: int
    sharded: str

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Return input and output features on one of `tp` ranks."""
        return (
            self.in_features // (tp if self.sharded == "in" else 1),
            self.out_features // (tp if self.sharded == "out" else 1),
        )


def is_short_conv(model: ModelArgs) -> bool:
    """Whether the layers have short convolutions, not linear attention."""
    return variant_of(model).is_convolution


def num_decays(model: ModelArgs) -> int:
    """Return the decays of a layer: one of a value head, or of each of its channels; 0 without linear attention."""
    if is_short_conv(model):
        return 0
    return model.linear_num_value_heads * (model.linear_key_head_dim if variant_of(model).decays_by_channel else 1)


def conv_channels(model: ModelArgs) -> int:
    """Return the channels of the convolution: queries, keys and values, or the hidden ones."""
    if is_short_conv(model):
        return model.hidden_size
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    return 2 * keys + model.linear_num_value_heads * model.linear_value_head_dim


def gate_rank(model: ModelArgs) -> int | None:
    """Return the width of the latents of decays and output gates; None where one matrix makes each."""
    dest = variant_of(model).gate_rank
    return getattr(model, dest) if dest else None


def linear_matrices(model: ModelArgs) -> list[Matrix]:
    """Return the matrices of a layer."""
    if is_short_conv(model):
        size = model.hidden_size
        return [Matrix("in_proj", size, 3 * size, "out"), Matrix("out_proj", size, size, "in")]
    hidden, rank = model.hidden_size, gate_rank(model)
    values = model.linear_num_value_heads * model.linear_value_head_dim
    rows, gates = conv_channels(model) + model.linear_num_value_heads, {"decay": num_decays(model), "gate": values}
    found = [Matrix("out_proj", values, hidden, "in")]
    if rank is None:
        return [Matrix("in_proj", hidden, rows + sum(gates.values()), "out"), *found]
    found.append(Matrix("in_proj", hidden, rows, "out"))
    for kind, width in gates.items():
        found += [Matrix(f"{kind}_down_proj", hidden, rank, ""), Matrix(f"{kind}_up_proj", rank, width, "out")]
    return found


def linear_attention_params(model: ModelArgs, tp: int = 1, matrices: bool = False) -> int:
    """Return the parameters of a layer on one of `tp` ranks, without its norm, or of its matrices only."""
    sizes = (matrix.on_rank(tp) for matrix in linear_matrices(model))
    count = sum(inputs * outputs for inputs, outputs in sizes)
    rest = conv_channels(model) * model.linear_conv_kernel_dim + num_decays(model)
    rest += 0 if is_short_conv(model) else model.linear_num_value_heads
    return count if matrices else count + rest // tp
