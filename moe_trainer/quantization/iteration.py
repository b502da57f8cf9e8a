"""State of quantized layers across an iteration: stored weights, delayed scaling, weight casts of TransformerEngine.

Delayed scaling: at the end of an iteration the amax of every layer is reduced over the microbatches and over all ranks
of the stage that share a model replica or its data (ps.tp_dp_cp, Megatron-Core's amax reduction group), in one
all-reduce. All experts of a layer share their scales. So the state is equal on all these ranks and for every layout,
and a checkpoint stores it under the layer's name.

Flags store the weights of quantized layers in their format (arguments/stored_weights.py) from the moment the
optimizer takes them over (optim/quantized_params.py), where `Arguments.has_quantized_params` allows it: one set of
bytes must serve both output and input gradient. MXFP8 blocks lie along the contracted dimension of each
GEMM, so MXFP8 weights are gathered in the model's format, and stored in it or twice in MXFP8 (optim/mx_params.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from arguments.mechanisms.format_kinds.eight_bit import SCALING_PREFIX
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState
from moe_trainer.participant import Participant, StepMetrics
from moe_trainer.quantization.gemms import QuantizedGemms


class WeightCastCache:
    """TransformerEngine's is_first_microbatch: whether a module must cast its weights again.

    first: None casts in every call. True casts in the next call only and reuses that cast until the flag is reset.
    """

    first: bool | None = None

    def is_first(self) -> bool | None:
        """Return the value for this call, and consume a True."""
        first = self.first
        if first:
            self.first = False
        return first


class QuantizedChunk(Protocol):
    """A model chunk, as far as quantization reads it.

    Attributes:
        quantized: what `find_quantized_gemms` has found in it.
        casts: what `find_weight_casts` has found in it, if casts may be reused between calls.
        caches_experts: casts of experts whose counts are on the device may be reused too.
    """

    quantized: tuple[QuantizedGemms, ...]
    casts: tuple[WeightCastCache, ...]
    caches_experts: bool


def find_quantized_gemms(chunk: nn.Module) -> tuple[QuantizedGemms, ...]:
    """Return the quantized GEMMs of a chunk in model order."""
    return tuple(module for module in chunk.modules() if isinstance(module, QuantizedGemms))


def iter_quantized_gemms(chunks: Iterable[QuantizedChunk]) -> Iterator[QuantizedGemms]:
    """Yield the quantized GEMMs of built chunks in model order."""
    return (gemms for chunk in chunks for gemms in chunk.quantized)


def begin_iteration(chunks: Iterable[QuantizedChunk], iteration: int) -> None:
    """Start the stochastic-rounding streams of an iteration, before its first microbatch."""
    for gemms in iter_quantized_gemms(chunks):
        if gemms.rounding is not None:
            gemms.rounding.begin(iteration)


def find_weight_casts(chunk: nn.Module) -> tuple[WeightCastCache, ...]:
    """Return the cast flags of all modules of a chunk."""
    found = (getattr(module, "casts", None) for module in chunk.modules())
    return tuple(casts for casts in found if isinstance(casts, WeightCastCache))


@contextmanager
def cached_weight_casts(chunks: Iterable[QuantizedChunk], num_microbatches: int = 1) -> Iterator[None]:
    """Cast each weight once in this scope, where weights do not change.

    So do layers of the library, and experts of ours whose counts are on the device if there are several microbatches.
    """
    chunks = list(chunks)
    library_casts = [casts for chunk in chunks for casts in chunk.casts]
    caching = [chunk for chunk in chunks if chunk.caches_experts and num_microbatches > 1]
    try:
        for casts in library_casts:
            casts.first = True
        for gemms in iter_quantized_gemms(caching):
            gemms.cached_weights = {}
        yield
    finally:
        for casts in library_casts:
            casts.first = None
        for gemms in iter_quantized_gemms(caching):
            gemms.cached_weights = None


def reset_amax(chunks: Iterable[QuantizedChunk]) -> None:
    """Drop the maxima of the current iteration, which is repeated or skipped."""
    for gemms in iter_quantized_gemms(chunks):
        if gemms.recipe.delayed is not None:
            gemms.amax.zero_()


@torch.no_grad()
def update_scales(chunks: Iterable[QuantizedChunk], ps: ParallelState) -> None:
    """End an iteration of delayed scaling: compute new scales from the maxima of all ranks.

    Communication: a max all-reduce of three fp32 numbers per linear over ps.tp_dp_cp.
    """
    found = [
        (gemms, gemms.recipe.delayed) for gemms in iter_quantized_gemms(chunks) if gemms.recipe.delayed is not None
    ]
    if not found:
        return
    together = all_reduce(torch.stack([gemms.amax for gemms, _ in found]), ps.tp_dp_cp, op="max")
    for (gemms, delayed), amax_3 in zip(found, together):
        gemms.advance(delayed, amax_3)


def scaling_state(chunk: QuantizedChunk) -> Iterator[tuple[str, Tensor]]:
    """Yield the state of delayed scaling for checkpoints, under mapping-independent names."""
    for gemms in iter_quantized_gemms([chunk]):
        if gemms.recipe.delayed is not None:
            yield f"{SCALING_PREFIX}{gemms.name}.scaling", gemms.scaling


class QuantizedLayers(Participant):
    """Scales, rounding streams and weight casts of the quantized layers of a model."""

    def __init__(self, chunks: Sequence[QuantizedChunk], ps: ParallelState):
        self._chunks, self._ps = chunks, ps

    def begin_step(self, iteration: int) -> None:
        begin_iteration(self._chunks, iteration)

    def passes(self, num_microbatches: int) -> AbstractContextManager[None]:
        return cached_weight_casts(self._chunks, num_microbatches)

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        update_scales(self._chunks, self._ps)
        return StepMetrics()

    def discard(self) -> None:
        reset_amax(self._chunks)
