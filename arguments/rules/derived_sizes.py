"""Sizes derived from the flags, which many rules need.

`DerivedSizes` is computed once per pass. Sizes that are missing or not positive count as 1, so that one wrong size is
reported once, by its rule; unknown sizes are None, and rules skip them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from arguments.flag_properties import MAX_LAYERS
from arguments.layer_pattern import moe_layer_pattern
from arguments.mtp import num_mtp_depths
from arguments.rules.layout_grammar import PipelineLayout, read_layout
from arguments.settings import Settings, Violation


@dataclass(frozen=True)
class DerivedSizes:
    """Sizes that follow from the flags and the number of ranks.

    `world` None: unknown. `dp` and `edp` are None when unknown or when the ranks do not divide. `vpp` is the number of
    virtual chunks per pipeline rank, None without interleaving or when it is unknown. `layers_split` counts what is
    spread over the pipeline (decoder layers, plus embedding and loss where they are to count). `moe_layers[i]` says
    whether decoder layer i has experts; None without experts or with an unreadable pattern. `largest_cp` ranks may
    share a sequence: cp, or dp x cp with dynamic context parallelism, if dp is known. `mtp_depths` are of multi-token
    prediction.
    """

    world: int | None
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int | None
    edp: int | None
    vpp: int | None
    layers: int | None
    layers_split: int | None
    experts: int | None
    moe_layers: tuple[bool, ...] | None
    layout: PipelineLayout | None
    largest_cp: int
    mtp_depths: int


Rule = Callable[[Settings, DerivedSizes], Iterator[Violation]]


def derive_sizes(s: Settings, world: int | None) -> DerivedSizes:
    """Compute the derived sizes of one pass."""
    tp, pp, cp = (
        _size(s.tensor_model_parallel_size),
        _size(s.pipeline_model_parallel_size),
        _size(s.context_parallel_size),
    )
    ep = _size(s.expert_model_parallel_size)
    etp = tp if s.expert_tensor_parallel_size is None else _size(s.expert_tensor_parallel_size)
    layers = s.num_layers if positive(s.num_layers) else None
    split = None
    if layers is not None:
        split = layers + s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split
    layout = _layout(s)
    experts = s.num_experts if positive(s.num_experts) else None
    dp = quotient(world, tp * pp * cp)
    return DerivedSizes(
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=quotient(world, etp * ep * pp),
        vpp=_virtual_stages(s, pp, split, layout),
        layers=layers,
        layers_split=split,
        experts=experts,
        moe_layers=None if experts is None else moe_pattern(s.moe_layer_freq, layers),
        layout=layout,
        largest_cp=cp * (dp or 1) if s.dynamic_context_parallel else cp,
        mtp_depths=num_mtp_depths(s.values),
    )


def positive(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def quotient(total: int | None, parts: int | None) -> int | None:
    """Return total / parts if both are known and it divides, else None."""
    if not positive(total) or not positive(parts) or total % parts:
        return None
    return total // parts


def divides(parts: int | None, total: int | None) -> bool:
    """Return whether `parts` divides `total`; True if either is unknown or not positive (another rule reports it)."""
    return not positive(parts) or not positive(total) or total % parts == 0


def _size(value: object) -> int:
    return value if positive(value) else 1


def _layout(s: Settings) -> PipelineLayout | None:
    if s.pipeline_model_parallel_layout is None:
        return None
    try:
        return read_layout(s.pipeline_model_parallel_layout)
    except ValueError:
        return None


def _virtual_stages(s: Settings, pp: int, layers_split: int | None, layout: PipelineLayout | None) -> int | None:
    """Return the virtual stages per pipeline rank from whichever of three flags is given; None for one stage."""
    count = None
    if layout is not None:
        count = layout.virtual_stages(pp)
    elif s.num_virtual_stages_per_pipeline_rank is not None:
        count = s.num_virtual_stages_per_pipeline_rank
    elif s.num_layers_per_virtual_pipeline_stage is not None:
        count = quotient(quotient(layers_split, pp), s.num_layers_per_virtual_pipeline_stage)
    return count if positive(count) and count > 1 else None


def uneven_ends(s: Settings) -> bool:
    """Return whether the first or the last pipeline stage has a separate number of layers."""
    return s.decoder_first_pipeline_num_layers is not None or s.decoder_last_pipeline_num_layers is not None


def moe_pattern(freq: object, layers: int | None) -> tuple[bool, ...] | None:
    """Return which decoder layers have experts: an integer N means layers 0, N, 2N, ...; a list is per layer."""
    if isinstance(freq, list | tuple):
        return tuple(entry == 1 for entry in freq)
    if layers is None or layers > MAX_LAYERS or not positive(freq):
        return None
    return moe_layer_pattern(layers, 1, freq)


def as_list(value: Any) -> list:
    """Return a value or a list of values as a list; None is the empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def balancing_types(s: Settings) -> list[str]:
    return as_list(s.moe_router_load_balancing_type)
