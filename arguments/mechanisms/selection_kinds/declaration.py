"""What other code may ask of a way to choose experts, which this program calls a selection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

from arguments.mechanisms.support import NoEffect, Rejected, Support

BALANCING = "moe_router_load_balancing_type"
UPSTREAM = Rejected("as in Megatron-LM")
"""What Megatron-LM rejects too; the other rejections are of this program."""


class RoutingCapability(Enum):
    """What flags may demand of a selection; the value is the text of the manual."""

    PRE_SOFTMAX = "`--moe-router-pre-softmax`"
    SCALING_FACTOR = "`--moe-router-topk-scaling-factor`"
    GROUPS = "`--moe-router-num-groups`, `--moe-router-group-topk`"
    HASH_LAYERS = "`--moe-n-hash-layers`"
    FUSED_KERNEL = "`--moe-router-fusion`"
    OTHER_SCORES = "`--moe-router-score-function` other than softmax"
    EXPERT_BIAS = "`--moe-router-enable-expert-bias`"
    REPLAY = "`--moe-enable-routing-replay`"
    FINE_GRAINED = "`--finermoe-intermediate-granularity`, `--finermoe-output-granularity`"
    SPARSEMIXER = "`--moe-router-sparsemixer-jitter`"
    LOSSES = "`--moe-aux-loss-coeff`"
    CAPACITY = "`--moe-expert-capacity-factor`"
    OUR_KERNEL = "`--triton-kernels router`, for the choice or for a loss"
    PADDING = "`--use-varlen-dataset`"
    GRAPH = "`--cuda-graph-modules moe_router`"
    UPCYCLING = "`--moe-use-upcycling`"


DEMANDED_BY: Mapping[str, RoutingCapability] = MappingProxyType(
    {
        "moe_router_pre_softmax": RoutingCapability.PRE_SOFTMAX,
        "moe_router_topk_scaling_factor": RoutingCapability.SCALING_FACTOR,
        "moe_router_group_topk": RoutingCapability.GROUPS,
        "moe_n_hash_layers": RoutingCapability.HASH_LAYERS,
        "moe_router_fusion": RoutingCapability.FUSED_KERNEL,
        "moe_router_enable_expert_bias": RoutingCapability.EXPERT_BIAS,
        "moe_enable_routing_replay": RoutingCapability.REPLAY,
        "finermoe_intermediate_granularity": RoutingCapability.FINE_GRAINED,
        "finermoe_output_granularity": RoutingCapability.FINE_GRAINED,
        "moe_router_sparsemixer_jitter": RoutingCapability.SPARSEMIXER,
        "moe_use_upcycling": RoutingCapability.UPCYCLING,
    }
)
"""Destinations of flags that demand a capability by any value but their default."""


@dataclass(frozen=True, kw_only=True)
class DeclaredSelection:
    """Declaration of a selection.

    Attributes:
        key: name of its module in moe_trainer/moe/selections.
        name: name in messages and in the manual.
        mention: the flag that asks for it, as a template of Settings.violation.
        capabilities: for each whether it acts, or why not.
        asked: whether flags ask for it; reads the fields of MoEArgs.
        balancing: value of --moe-router-load-balancing-type that asks for it; it then balances without a loss.
        num_layers: number of first layers in which it selects; None for all.
        learns_from_one: the weight of a single expert depends on its logit without --moe-router-pre-softmax too, or
            rules of the selection itself say what a token needs.
        biases: names in the router of what a checkpoint stores of it, one number per expert.
        tables: names in the router of what else a checkpoint stores of it.
        counts: whose tokens its choice depends on, besides a token's own logits: those of a rank or of a microbatch.
        counts_because: what to say of two runs that differ in them.
        draws: destinations of its flags, with the values that random tests draw from.
    """

    key: str
    name: str
    mention: str
    capabilities: Mapping[RoutingCapability, Support]
    asked: Callable[[Any], bool]
    balancing: str | None = None
    num_layers: Callable[[Any], int] | None = None
    learns_from_one: bool = False
    biases: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    counts: Literal["rank", "microbatch"] | None = None
    counts_because: str = ""
    draws: tuple[tuple[str, tuple], ...] = ()

    def __post_init__(self):
        if missing := [capability.name for capability in RoutingCapability if capability not in self.capabilities]:
            raise TypeError(f"the declaration of the selection {self.key} leaves out {', '.join(missing)}")

    def supports(self, capability: RoutingCapability) -> bool:
        """Return whether flags that demand a capability act."""
        return self.capabilities[capability] is True

    def rejects(self, capability: RoutingCapability) -> bool:
        return isinstance(self.capabilities[capability], Rejected)

    def ignores(self, capability: RoutingCapability) -> bool:
        """Return whether flags that demand a capability are accepted and have no effect."""
        return isinstance(self.capabilities[capability], NoEffect)

    def reason(self, capability: RoutingCapability) -> str:
        """Return why a capability does not act; "" if it does."""
        support = self.capabilities[capability]
        return "" if support is True else support.reason

    def is_named(self, moe: Any) -> bool:
        """Return whether flags ask for it, be it together with what excludes it."""
        return self.asked(moe) or self.balancing is not None and self.balancing in balancing_kinds(moe)


def balancing_kinds(moe: Any) -> tuple[str, ...]:
    """Return the values of --moe-router-load-balancing-type."""
    kinds = getattr(moe, BALANCING)
    return tuple(kinds) if isinstance(kinds, list | tuple) else () if kinds is None else (kinds,)
