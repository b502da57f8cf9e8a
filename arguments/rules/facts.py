"""What the rules ask again and again: the sizes behind the flags, and how a finding is worded.

`Facts` is computed once per pass. Sizes that are missing or not positive count as 1 here, so that one wrong size is
reported once (by its own rule) and does not drag others along; what cannot be known is None, and rules leave it alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from arguments.rules.layout_grammar import Layout, read_layout
from arguments.settings import Settings, Violation


@dataclass(frozen=True)
class Facts:
    """Sizes that follow from the flags and the number of ranks.

    `world` None: unknown. `dp` and `edp` are None when unknown or when the ranks do not divide. `vpp` is the number of
    virtual chunks per pipeline rank, None without interleaving or when it cannot be told. `layers_split` counts what is
    spread over the pipeline (decoder layers, plus embedding and loss where they are to count). `moe_layers[i]` says
    whether decoder layer i has experts; None without experts or with an unreadable pattern.
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
    layout: Layout | None


MOST_LAYERS = 100_000
"""Beyond this a number of layers is a slip of the keyboard, and no list is made for it."""

Rule = Callable[[Settings, Facts], Iterator[Violation]]


def gather(s: Settings, world: int | None) -> Facts:
    """Compute the facts of one pass."""
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
    return Facts(
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=quotient(world, tp * pp * cp),
        edp=quotient(world, etp * ep * pp),
        vpp=_virtual_stages(s, pp, split, layout),
        layers=layers,
        layers_split=split,
        experts=experts,
        moe_layers=None if experts is None else moe_pattern(s.moe_layer_freq, layers),
        layout=layout,
    )


def positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def quotient(total: int | None, parts: int | None) -> int | None:
    """total / parts where both are known and it divides; else None."""
    if not positive(total) or not positive(parts) or total % parts:
        return None
    return total // parts


def divides(parts: int | None, total: int | None) -> bool:
    """Does `parts` divide `total`? True where either is unknown or not positive: then another rule speaks."""
    return not positive(parts) or not positive(total) or total % parts == 0


def _size(value: object) -> int:
    return value if positive(value) else 1


def _layout(s: Settings) -> Layout | None:
    if s.pipeline_model_parallel_layout is None:
        return None
    try:
        return read_layout(s.pipeline_model_parallel_layout)
    except ValueError:
        return None


def _virtual_stages(s: Settings, pp: int, layers_split: int | None, layout: Layout | None) -> int | None:
    """Virtual chunks per pipeline rank from whichever of the three flags is given; 1 counts as none."""
    count = None
    if layout is not None:
        count = layout.virtual_stages(pp)
    elif s.num_virtual_stages_per_pipeline_rank is not None:
        count = s.num_virtual_stages_per_pipeline_rank
    elif s.num_layers_per_virtual_pipeline_stage is not None:
        count = quotient(quotient(layers_split, pp), s.num_layers_per_virtual_pipeline_stage)
    return count if positive(count) and count > 1 else None


def uneven_ends(s: Settings) -> bool:
    """Does the first or the last pipeline stage have its own number of layers?"""
    return s.decoder_first_pipeline_num_layers is not None or s.decoder_last_pipeline_num_layers is not None


def moe_pattern(freq: object, layers: int | None) -> tuple[bool, ...] | None:
    """Which decoder layers have experts: an integer N means layers 0, N, 2N, ...; a list says it for each layer."""
    if isinstance(freq, list | tuple):
        return tuple(entry == 1 for entry in freq)
    if layers is None or layers > MOST_LAYERS or not positive(freq):
        return None
    return tuple(index % freq == 0 for index in range(layers))


def as_list(value: object) -> list:
    """A flag that takes one or several values, as a list; None is the empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def balancing_types(s: Settings) -> list[str]:
    return as_list(s.moe_router_load_balancing_type)


def say(s: Settings, dest: str) -> str:
    """`--flag value` for a message, with a word on values that the user did not give."""
    text = s.shown(dest)
    if s.values[dest] is None:
        return f"{s.flag(dest)} (not given)"
    if s.source[dest] == "default":
        return f"{text} (default)"
    return f"{text} (derived)" if s.source[dest] == "derived" else text


def broken(s: Settings, message: str, *dests: str, kind: str = "rule") -> Violation:
    """A violation of a rule that concerns these flags, the most important first."""
    return Violation(tuple(s.flag(dest) for dest in dests), message, kind)
