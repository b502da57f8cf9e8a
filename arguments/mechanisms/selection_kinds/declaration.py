"""What other code may ask of a way to choose experts, which this program calls a selection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any, ClassVar, Literal

from arguments.mechanisms.support import Mechanism, NoEffect, Rejected, Support

BALANCING = "moe_router_load_balancing_type"
UPSTREAM = Rejected("as in Megatron-LM")
"""What Megatron-LM rejects too; the other rejections are of this program."""


class SelectionCapability(Enum):
    """What flags may demand of a selection; the value is the text of the manual."""

    PRE_SOFTMAX = "`--moe-router-pre-softmax`"
    SCALING_FACTOR = "`--moe-router-topk-scaling-factor`"
    GROUPS = "`--moe-router-num-groups`, `--moe-router-group-topk`"
    HASH_LAYERS = "`--moe-n-hash-layers`"
    FUSED_KERNEL = "`--moe-router-fusion`"
    OTHER_SCORES = "`--moe-router-score-function` other than softmax"
    EXPERT_BIAS = "`--moe-router-enable-expert-bias`"
    REPLAY = "`--moe-enable-routing-replay`"
    LARGEST_LOGITS = "experts of the largest logits alone"
    LOSSES = "`--moe-aux-loss-coeff`"
    CAPACITY = "`--moe-expert-capacity-factor`"
    OUR_KERNEL = "`--triton-kernels router`, for the choice or for a loss"
    PADDING = "`--use-varlen-dataset`"
    GRAPH = "`--cuda-graph-modules moe_router`"
    UPCYCLING = "`--moe-use-upcycling`"


@dataclass(frozen=True, kw_only=True)
class UpcycledExperts:
    """How the experts of a selection are made of a dense network (moe_trainer/checkpoint/upcycling.py).

    Attributes:
        repeats: consecutive experts with the same row of the router.
        slices: number of slices of the output, each of as many consecutive experts that compute nothing else.
        fc1: factor of the weight, as fc2.
        bias: factor of fc2's bias.
        std: of what is drawn: the router, the gate of the shared expert, the projection of the output. None for
            xavier_uniform.
    """

    repeats: int
    slices: int = 1
    fc1: float
    fc2: float
    bias: float
    std: float | None


@dataclass(frozen=True, kw_only=True)
class ExpertSplit:
    """How experts divide what a dense layer computes, where each makes but a slice of the output.

    Attributes:
        width_shares: destination of the number of experts that share the width of a dense layer.
        slices: destination of the number of slices.
        projection: destination of the flag that adds a square matrix to the layer, which multiplies its output; also
            the matrix is named so, without the prefix of the flag.
        saves: indices that its permutation saves for backward, by name, given rows, tokens, chunks and slices; the
            selection's module has `make_permutation`.
        upcycle: flags by destination and the number of pieces of a dense network -> its experts; the dense network
            is the shared expert then.
        draw: flags that random tests draw, given a source of random numbers, the expert-parallel size and the flags
            drawn before.
        shrink: its flags for a small model, given those of the large one, the expert-parallel size and the width of a
            dense layer.
    """

    width_shares: str
    slices: str
    projection: str
    saves: Callable[[int, int, int, int], Mapping[str, int]]
    upcycle: Callable[[Mapping[str, Any], int], UpcycledExperts]
    draw: Callable[[Random, int, Mapping[str, object]], dict[str, object]]
    shrink: Callable[[Any, int, int], dict[str, object]]

    @property
    def projection_name(self) -> str:
        return self.projection.removeprefix("moe_")


@dataclass(frozen=True, kw_only=True)
class SelectionDeclaration(Mechanism[SelectionCapability]):
    """Declaration of a selection.

    Attributes:
        key: name of its module in moe_trainer/moe/selections.
        name: name in messages and in the manual.
        mention: the flag that asks for it, as a template of Settings.violation.
        capabilities: for each whether it acts, or why not.
        asked_by: the capability of others that flags demand when they ask for it.
        asked_because: why they demand it, which is the reason of a selection that rejects it FOR_WHO_ASKS.
        asked: whether flags ask for it; reads the fields of MoEArgs.
        balancing: value of --moe-router-load-balancing-type that asks for it; it then balances without a loss.
        num_layers: number of first layers in which it selects; None for all.
        learns_from_one: the weight of a single expert depends on its logit without --moe-router-pre-softmax too, or
            rules of the selection itself say what a token needs.
        biases: names in the router of what a checkpoint stores of it, one number per expert.
        tables: names in the router of what else a checkpoint stores of it.
        counts: whose tokens its choice depends on, besides a token's own logits: those of a rank or of a microbatch.
        counts_because: what to say of two runs that differ in them.
        has_rules: arguments/rules/<key>.py says what else it needs.
        lists_limits: rules of its topic list what it rejects, in words that say more.
        draws: destinations of its flags, with the values that random tests draw from.
        saves: what its choice and weights save for backward, given tokens, experts and top-k: name, shape, and bytes of
            an element, None of a score. None: what top-k saves.
        split: how its experts divide what a dense layer computes; None if each makes the full output.
    """

    modules: ClassVar[str] = "moe_trainer.moe.selections"

    key: str
    name: str
    mention: str
    capabilities: Mapping[SelectionCapability, Support]
    asked: Callable[[Any], bool]
    asked_by: SelectionCapability | None = None
    asked_because: str = ""
    balancing: str | None = None
    num_layers: Callable[[Any], int] | None = None
    learns_from_one: bool = False
    biases: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    counts: Literal["rank", "microbatch"] | None = None
    counts_because: str = ""
    has_rules: bool = False
    lists_limits: bool = False
    draws: tuple[tuple[str, tuple], ...] = ()
    saves: Callable[[int, int, int], tuple[tuple[str, tuple[int, ...], int | None], ...]] | None = None
    split: ExpertSplit | None = None

    def __post_init__(self):
        self.check_declares_all(SelectionCapability)
        losses = self.capabilities[SelectionCapability.LOSSES]
        if isinstance(losses, NoEffect) or losses is True and self.balancing is not None:
            raise TypeError(
                f"the declaration of {self.name} must say why LOSSES are rejected: they have an effect with every "
                "selection, unless it balances by itself"
            )

    def because(self, capability: SelectionCapability) -> str:
        """Return why a capability does not act, to follow `mention`: reasons of balancing begin with a verb."""
        if self.capabilities[capability] == UPSTREAM:
            return f", {UPSTREAM.reason}"
        return f"{': ' if self.balancing is None else ', which '}{self.reason(capability)}"

    def is_named(self, moe: Any) -> bool:
        """Return whether flags ask for it, be it together with what excludes it."""
        return self.asked(moe) or self.balancing is not None and self.balancing in balancing_kinds(moe)


def balancing_kinds(moe: Any) -> tuple[str, ...]:
    """Return the values of --moe-router-load-balancing-type."""
    kinds = getattr(moe, BALANCING)
    return tuple(kinds) if isinstance(kinds, list | tuple) else () if kinds is None else (kinds,)
