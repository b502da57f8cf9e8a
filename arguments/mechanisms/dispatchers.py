"""Token dispatchers: one declaration each, of everything that other code asks of them.

A dispatcher is selected by --moe-token-dispatcher-type and, if that is flex, --moe-flex-dispatcher-backend; with one
expert rank `LOCAL` runs whatever is selected. `get_dispatcher` is the only place that reads the two flags. Its module
is moe_trainer/moe/dispatch/<key>.py, with `make_dispatcher` and a class whose `declaration` it is.

A declaration states for every `Capability` that it acts, that the flags that demand it are rejected and why, or that
they have no effect and why. Its `traffic` is what the estimate sends over which link.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

from arguments.mechanisms.support import Mechanism, NoEffect, Rejected, Support, keys_with
from arguments.mechanisms.traffic import (
    ExchangedTokens,
    Traffic,
    all_gather,
    every_copy,
    nothing,
    once_per_domain,
    two_steps,
)

TYPE, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
FLEX = "flex"
SELECTING_FLAGS = (TYPE, BACKEND, "moe_enable_deepep")
"""Destinations of the flags that select a dispatcher, the deprecated one included."""


class Capability(Enum):
    """What flags may demand of a dispatcher; the value is the text of the manual."""

    CAPACITY_PADDING = "`--moe-pad-expert-input-to-capacity`"
    QUANTIZED_PADDING = "`--moe-router-padding-for-quantization`"
    RANK_CAPACITY = "`--moe-expert-rank-capacity-factor`"
    FUSED_EXPERTS = "`--use-transformer-engine-op-fuser`, with `--moe-expert-rank-capacity-factor`"
    MXFP8_TRANSPORT = "`--moe-dispatch-fwd-dtype mxfp8`, `--moe-combine-bwd-dtype mxfp8`"
    EXCHANGE_OVERLAP = "`--overlap-moe-expert-parallel-comm`"
    SHARED_EXPERT_OVERLAP = "`--moe-shared-expert-overlap`"
    WGRAD_OVERLAP = "`--overlap-dispatch-backward-with-experts-wgrad`"
    PERMUTATION_KERNELS = "`--moe-permute-fusion`, `--triton-kernels permute`"
    NUM_SMS = "`--moe-flex-dispatcher-num-sms`"
    PREPROCESS_GRAPH = "`--cuda-graph-modules moe_preprocess`"
    PADDED_GRAPH = "CUDA graphs of experts that are padded to capacity"
    DROPLESS_GRAPH = "CUDA graphs of dropless experts, with `--moe-expert-rank-capacity-factor`"


@dataclass(frozen=True, kw_only=True)
class Dispatcher(Mechanism[Capability]):
    """Declaration of a dispatcher.

    Attributes:
        name: name in messages and in the manual.
        type: value of --moe-token-dispatcher-type, None if no flag selects it.
        backend: value of --moe-flex-dispatcher-backend, None if the type is not flex.
        capabilities: for each whether it acts, or why not.
        sends_copies: a token is sent, and comes back as wide as an expert makes it, once for each of its experts.
            Otherwise it is sent once to a rank, sorted there, and comes back in full width.
        gathers: every rank receives the tokens of all, and orders those of its experts.
        sorts_tokens: its library orders received tokens by expert, and takes rows of full width back.
        sends_filled_slots: of a receive buffer of a fixed size it sends the tokens, where the all-to-all in its place
            sends all slots.
        traffic: what one exchange sends.
        is_measured: measured times of it, or of one that sends alike, confirm `traffic`; else plans widen their error.
        is_upstream: Megatron-LM has the value that selects it.
        old_names: earlier spellings of the value that selects it.
        package: Python package of the library for CUDA devices that exchanges the tokens; without it alltoall runs.
            None if collectives exchange them.
        compute_capability: oldest generation of GPUs that it works on.
        probs_dtype: format that router probabilities are sent in, if it is always the same.
        default_sms: --moe-flex-dispatcher-num-sms unless given.
        mxfp8_multiple: a token sent in MXFP8 has a multiple of this number of channels.
        needs_flex: its --moe-flex-dispatcher-backend is rejected with another type, as in Megatron-LM, instead of
            having no effect.
        upstream_needs_ranks: in Megatron-LM it stops at the first forward pass with one expert rank.
        classes: what else the doctor looks for in `package`: names in its lines, with the class that each needs.
        slows_with_experts: published runs with many experts take longer than `traffic` says; plans correct it by
            what these runs say (estimate/corrections.py).
        measured_domains: how many NVLink domains the published runs that it exchanged tokens in had; plans of more
            widen their error. None: the number says nothing of the error.
        measured_gpus: the same of the GPUs that NVLink joins.
        groups_by_domain: its groups follow --moe-hierarchical-domain-size; within one domain alltoall runs.
    """

    name: str
    type: str | None
    backend: str | None
    capabilities: Mapping[Capability, Support]
    sends_copies: bool
    gathers: bool
    traffic: Callable[[ExchangedTokens], Traffic]
    is_measured: bool
    is_upstream: bool
    slows_with_experts: bool = False
    measured_domains: int | None = None
    measured_gpus: int | None = None
    old_names: tuple[str, ...] = ()
    package: str | None = None
    compute_capability: int = 0
    probs_dtype: Literal["fp32"] | None = None
    default_sms: int | None = None
    mxfp8_multiple: int = 1
    needs_flex: bool = False
    upstream_needs_ranks: bool = False
    classes: tuple[tuple[str, str], ...] = ()
    groups_by_domain: bool = False
    sorts_tokens: bool = False
    sends_filled_slots: bool = False

    def __post_init__(self):
        self.check_declares_all(Capability)

    @property
    def key(self) -> str:  # type: ignore[override]  # another attribute, read only
        """Name of its module, in estimates and in the doctor's lines."""
        return self.backend or self.type or "local"

    @property
    def dest(self) -> str:
        """Destination of the flag that names it."""
        return TYPE if self.backend is None else BACKEND

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that names it, with its value, as a template of Settings.violation."""
        return f"{{{self.dest}:flag}} {self.key}"

    @property
    def selected_by(self) -> dict[str, Any]:
        """Values of the fields of MoEArgs that select it."""
        return {TYPE: self.type} | ({} if self.backend is None else {BACKEND: self.backend})

    @property
    def words(self) -> tuple[str, ...]:
        """Flags that select it."""
        named = ((dest.replace("_", "-"), value) for dest, value in self.selected_by.items())
        return tuple(word for dest, value in named for word in (f"--{dest}", value))


DEEPEP_WIDE = 2.0
"""Time of DeepEP's exchange over HybridEP's, where NVLink connects more than the 8 ranks that DeepEP was made for.

On 256 GB200, DeepSeek-V3 went from 830 to 944 TFLOP/s when HybridEP replaced DeepEP, 0.6 ms for each of 1,900 exchanges
(Megatron-LM, branch dev, discussion).
"""


def _deepep_traffic(tokens: ExchangedTokens) -> Traffic:
    return once_per_domain(tokens, DEEPEP_WIDE if min(tokens.ep, tokens.domain) > 8 else 1.0)


_NO_RANK_CAPACITY = "as in Megatron-LM, which has receive buffers of a fixed size for two libraries only"
_ANY_SIZE = "its receive buffers have the size of what arrives"
_WITHOUT_KERNELS = "with NCCL's collectives, which have settings of their own"
_LIBRARY_OF, _ORDERS = "the library of --moe-flex-dispatcher-backend", "orders the tokens inside its exchange"
_AS_MANY = "sends a token to as many experts as the router selects"

LOCAL = Dispatcher(
    name="local",
    type=None,
    backend=None,
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: True,
            Capability.FUSED_EXPERTS: True,
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: Rejected("with all experts on one rank there is no exchange to overlap"),
            Capability.SHARED_EXPERT_OVERLAP: NoEffect("with all experts on every rank there is no exchange"),
            Capability.WGRAD_OVERLAP: NoEffect("with --expert-model-parallel-size 1 there is no exchange"),
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect("with one expert rank there is nothing to send"),
            Capability.PREPROCESS_GRAPH: True,
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: True,
        }
    ),
    sends_copies=True,
    gathers=False,
    traffic=nothing,
    is_measured=True,
    is_upstream=True,
)
"""Of one expert rank; no flag selects it."""

ALLGATHER = Dispatcher(
    name="allgather",
    type="allgather",
    backend=None,
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: Rejected("as in Megatron-LM"),
            Capability.RANK_CAPACITY: Rejected(_NO_RANK_CAPACITY),
            Capability.FUSED_EXPERTS: Rejected(_NO_RANK_CAPACITY),
            Capability.MXFP8_TRANSPORT: Rejected("carries bf16"),
            Capability.EXCHANGE_OVERLAP: Rejected("as in Megatron-LM: it gathers in one call"),
            Capability.SHARED_EXPERT_OVERLAP: Rejected("as in Megatron-LM: it gathers in one call"),
            Capability.WGRAD_OVERLAP: NoEffect("the allgather dispatcher gathers in one call"),
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect(_WITHOUT_KERNELS),
            Capability.PREPROCESS_GRAPH: NoEffect(
                "the allgather dispatcher gathers the tokens of all ranks before it orders them"
            ),
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: Rejected(_NO_RANK_CAPACITY),
        }
    ),
    sends_copies=False,
    gathers=True,
    traffic=all_gather,
    is_measured=False,
    is_upstream=True,
)

ALLTOALL = Dispatcher(
    name="alltoall",
    type="alltoall",
    backend=None,
    old_names=("alltoall_seq",),
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: Rejected(_NO_RANK_CAPACITY),
            Capability.FUSED_EXPERTS: Rejected(_NO_RANK_CAPACITY),
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect(_WITHOUT_KERNELS),
            Capability.PREPROCESS_GRAPH: True,
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: Rejected(_NO_RANK_CAPACITY),
        }
    ),
    sends_copies=True,
    gathers=False,
    traffic=every_copy,
    is_measured=True,
    is_upstream=True,
    slows_with_experts=True,
)

DEEPEP = Dispatcher(
    name="DeepEP",
    type=FLEX,
    backend="deepep",
    old_names=("deepepv2",),
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: Rejected("as in Megatron-LM: it sends the tokens that the router selects"),
            Capability.QUANTIZED_PADDING: NoEffect(f"DeepEP {_AS_MANY}"),
            Capability.RANK_CAPACITY: Rejected(_ANY_SIZE),
            Capability.FUSED_EXPERTS: Rejected(_ANY_SIZE),
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: True,
            Capability.PREPROCESS_GRAPH: NoEffect(f"{_LIBRARY_OF} deepep {_ORDERS}"),
            Capability.PADDED_GRAPH: Rejected("experts are not padded to capacity"),
            Capability.DROPLESS_GRAPH: Rejected(_ANY_SIZE),
        }
    ),
    package="deep_ep",
    classes=(("deepep_v2", "ElasticBuffer"),),
    upstream_needs_ranks=True,
    probs_dtype="fp32",
    default_sms=20,
    mxfp8_multiple=128,  # one 4-byte scale for these channels
    sends_copies=False,
    gathers=False,
    traffic=_deepep_traffic,
    is_measured=True,
    is_upstream=True,
    measured_gpus=8,
)

HYBRIDEP = Dispatcher(
    name="HybridEP",
    type=FLEX,
    backend="hybridep",
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: True,
            Capability.FUSED_EXPERTS: True,
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: NoEffect("HybridEP sorts tokens itself"),
            Capability.NUM_SMS: True,
            Capability.PREPROCESS_GRAPH: NoEffect(f"{_LIBRARY_OF} hybridep {_ORDERS}"),
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: True,
        }
    ),
    package="deep_ep",
    sorts_tokens=True,
    sends_filled_slots=True,
    mxfp8_multiple=512,  # DeepEP's scales, which it copies 4 at a time
    sends_copies=False,
    gathers=False,
    traffic=once_per_domain,
    is_measured=True,
    is_upstream=True,
    measured_domains=2,
)

NCCLEP = Dispatcher(
    name="NCCL EP",
    type=FLEX,
    backend="ncclep",
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: Rejected("as in Megatron-LM: it sends the tokens that the router selects"),
            Capability.QUANTIZED_PADDING: NoEffect(f"NCCL EP {_AS_MANY}"),
            Capability.RANK_CAPACITY: True,
            Capability.FUSED_EXPERTS: NoEffect("NCCL EP does not pad the tokens of an expert, so the host does"),
            Capability.MXFP8_TRANSPORT: Rejected("carries bf16 here", "later"),
            Capability.EXCHANGE_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            Capability.SHARED_EXPERT_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            Capability.WGRAD_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            Capability.PERMUTATION_KERNELS: NoEffect("NCCL EP sorts tokens itself"),
            Capability.NUM_SMS: True,
            Capability.PREPROCESS_GRAPH: NoEffect(f"{_LIBRARY_OF} ncclep {_ORDERS}"),
            Capability.PADDED_GRAPH: Rejected("experts are not padded to capacity"),
            Capability.DROPLESS_GRAPH: Rejected(
                "its context is made again, collectively, when the mode changes, which a graph would not do"
            ),
        }
    ),
    package="transformer_engine",
    compute_capability=9,
    sorts_tokens=True,
    needs_flex=True,
    upstream_needs_ranks=True,
    sends_copies=False,
    gathers=False,
    traffic=once_per_domain,
    is_measured=True,
    is_upstream=True,
)

HIERARCHICAL = Dispatcher(
    name="hierarchical",
    type=FLEX,
    backend="hierarchical",
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: Rejected(_ANY_SIZE),
            Capability.FUSED_EXPERTS: Rejected(_ANY_SIZE),
            Capability.MXFP8_TRANSPORT: Rejected("carries bf16 here", "later"),
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect("with the plain collectives of the hierarchical backend"),
            Capability.PREPROCESS_GRAPH: NoEffect("the number of tokens for each node depends on the routing"),
            Capability.PADDED_GRAPH: Rejected("the number of tokens for each node depends on the routing", "later"),
            Capability.DROPLESS_GRAPH: Rejected(_ANY_SIZE),
        }
    ),
    needs_flex=True,
    groups_by_domain=True,
    sends_copies=False,
    gathers=False,
    traffic=two_steps,
    is_measured=True,
    is_upstream=False,
)

DISPATCHERS = (
    LOCAL,
    ALLGATHER,
    ALLTOALL,
    DEEPEP,
    HYBRIDEP,
    NCCLEP,
    HIERARCHICAL,
)
SELECTABLE = tuple(dispatcher for dispatcher in DISPATCHERS if dispatcher.type is not None)
"""Those that flags select."""
TYPES = tuple(dict.fromkeys(str(dispatcher.type) for dispatcher in SELECTABLE))
BACKENDS = MappingProxyType(
    {dispatcher.backend: dispatcher for dispatcher in SELECTABLE if dispatcher.backend is not None}
)
OLD_NAMES = MappingProxyType({(each.dest, old): each.key for each in SELECTABLE for old in each.old_names})
"""(destination, old value) -> its new name."""

_BY_TYPE = MappingProxyType({each.type: each for each in SELECTABLE if each.backend is None})


def find_dispatcher(kind: str, backend: str | None = None) -> Dispatcher:
    """Return the dispatcher of a value of --moe-token-dispatcher-type and, for flex, --moe-flex-dispatcher-backend."""
    return BACKENDS[backend] if kind == FLEX and backend is not None else _BY_TYPE[kind]


def get_dispatcher(moe: Any) -> Dispatcher:
    """Return the dispatcher that the flags select, which runs if there is more than one expert rank.

    Args:
        moe: has the fields of MoEArgs.
    """
    return find_dispatcher(moe.moe_token_dispatcher_type, moe.moe_flex_dispatcher_backend)


def types_with(capability: Capability) -> tuple[str, ...]:
    """Return the values of --moe-token-dispatcher-type with which no flag that demands a capability is rejected."""
    return tuple(dict.fromkeys(str(each.type) for each in SELECTABLE if not each.rejects(capability)))


def backends_with(capability: Capability) -> tuple[str, ...]:
    """Return the values of --moe-flex-dispatcher-backend with which flags that demand a capability act."""
    return keys_with(BACKENDS.values(), capability)
