"""What other code may ask of a token dispatcher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

from arguments.mechanisms.support import Mechanism, Support
from arguments.mechanisms.traffic import ExchangedTokens, Traffic

TYPE, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
FLEX = "flex"
NO_RANK_CAPACITY = "as in Megatron-LM, which has receive buffers of a fixed size for two libraries only"
ANY_SIZE = "its receive buffers have the size of what arrives"
WITHOUT_KERNELS = "with NCCL's collectives, which have settings of their own"
AS_MANY = "sends a token to as many experts as the router selects"


def orders_inside(backend: str) -> str:
    """Return why the work before an exchange is not captured with a library."""
    return f"the library of --moe-flex-dispatcher-backend {backend} orders the tokens inside its exchange"


class DispatcherCapability(Enum):
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
class DispatcherDeclaration(Mechanism[DispatcherCapability]):
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

    modules: ClassVar[str] = "moe_trainer.moe.dispatch"

    name: str
    type: str | None
    backend: str | None
    capabilities: Mapping[DispatcherCapability, Support]
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
        self.check_declares_all(DispatcherCapability)

    @property
    def key(self) -> str:  # type: ignore[override]  # another attribute, read only
        """Name of its module, in estimates and in the doctor's lines."""
        return self.backend or self.type or "local"

    @property
    def dest(self) -> str:  # type: ignore[override]  # another attribute, read only
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
