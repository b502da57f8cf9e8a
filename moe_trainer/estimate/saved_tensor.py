"""Tensors that forward saves for backward, and the layer sizes from which they are listed (activations.py).

Shapes: T tokens of this rank's part of the sequence, `rows` those of them that it holds between blocks (T / tp with
sequence parallelism), `own` those that it routes, R tokens that its experts receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.layer_pattern import model_of_layer

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.training import TrainingArgs

WIDE = 4  # bytes of statistics, which are fp32
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class SavedTensor:
    """A tensor between forward and backward. `part` of the layer saves it, by the names of --offload-modules."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    part: str = ""
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def saves_te_attention(args: Arguments, packed: bool) -> bool:
    """Whether core attention is counted as Transformer Engine saves it: to full sequences, on one context rank."""
    return args.te_attends and not packed and args.parallel.context_parallel_size == 1


def num_mlp_chunks(training: TrainingArgs, length: int) -> int:
    """Return the number of chunks in which experts run, of a rank with `length` positions (memory/activations.py)."""
    if training.mlp_chunks_for_training == 1:
        return 1
    return -(-length // -(-length // training.mlp_chunks_for_training))


class LayerSizes:
    """Sizes and settings of one layer.

    Args:
        number: from 0.
        device: "cpu" or "cuda".
        received: tokens of this rank's experts; None for balanced routing.
        packed: whether sequences are packed documents.
        as_moved: whether to list the bytes that forward moves rather than those that stay reserved: of the experts'
            inputs what they received, and no pages.
    """

    def __init__(
        self,
        args: Arguments,
        number: int,
        *,
        is_moe: bool,
        device: str,
        received: int | None,
        packed: bool,
        as_moved: bool = False,
    ):
        model, parallel, training = model_of_layer(args.model, number + 1), args.parallel, args.training
        self.args, self.model, self.moe, self.is_moe, self.number = args, model, args.moe, is_moe, number
        self.cpu, self.packed = device == "cpu", packed
        self.as_moved, self.has_pages = as_moved, args.moe.moe_paged_stash and not as_moved
        self.parts = training.recomputed_modules
        # whether Transformer Engine's layers compute the quantized GEMMs of (linears, experts)
        self.te_linears, self.te_experts = (False, False) if self.cpu else args.te_quantizes
        self.tp, self.cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.te_attends = not self.cpu and saves_te_attention(args, packed)
        self.size = 4 if args.precision.params_dtype_name == "fp32" else 2
        self.residual = 4 if model.fp32_residual_connection else self.size
        self.hidden = model.hidden_size
        self.streams = model.num_residual_streams if model.enable_hyper_connections else 1
        self.batch, self.length = training.micro_batch_size, args.data.seq_length // self.cp
        self.tokens = self.batch * self.length
        self.own = self.tokens // self.tp
        self.rows = self.own if parallel.sequence_parallel else self.tokens
        etp = parallel.etp_size
        self.etp, self.ep = etp, parallel.expert_model_parallel_size
        self.num_experts = args.moe.expert_count
        self.mlp_chunks = num_mlp_chunks(training, self.own // self.batch)
        self.sent = self.own * args.moe.moe_router_topk
        self.received = self.sent * etp if received is None else received

    def norm(self, part: str, name: str, rows: int, width: int, itemsize: int) -> Iterator[SavedTensor]:
        """Yield the tensors of a norm: its input and one or two numbers per token."""
        yield SavedTensor(f"{name}.x", (rows, width), itemsize, part)
        numbers = 2 if self.model.normalization == "LayerNorm" else 1
        yield SavedTensor(f"{name}.statistics", (rows, numbers), WIDE, part)
