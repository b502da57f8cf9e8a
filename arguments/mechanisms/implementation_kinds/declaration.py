"""What other code may ask of an implementation of the layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from arguments.mechanisms.support import Mechanism, Support

IMPLEMENTATION = "transformer_impl"


class ImplementationCapability(Enum):
    """What flags may demand of an implementation of the layers; the value is the text of the manual."""

    DELAYED_WGRAD = "`--delay-wgrad-compute`"
    ACTIVATION_OFFLOAD = "`--fine-grained-activation-offloading`"
    OP_FUSER = "`--use-transformer-engine-op-fuser`"


@dataclass(frozen=True, kw_only=True)
class ImplementationDeclaration(Mechanism[ImplementationCapability]):
    """Declaration of an implementation of the layers.

    Attributes:
        key: value of --transformer-impl.
        name: name in messages and in the manual.
        capabilities: for each whether it acts, or why not.
        package: what must be installed; None if nothing must. Its layers compute on CUDA devices what they support, and
            this program's the rest.
        has_attention: it computes core attention, by the kernel of --attention-backend.
        has_quantizers: it computes quantized GEMMs.
        fuses_norms: Megatron-Core's checkpoints of it name norms as parts of the linears that follow.
        switches: environment variables in which it reads flags, by destination.
    """

    key: str
    name: str
    capabilities: Mapping[ImplementationCapability, Support]
    package: str | None = None
    has_attention: bool = False
    has_quantizers: bool = False
    fuses_norms: bool = False
    switches: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.check_declares_all(ImplementationCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that selects it, with its value, as a template of Settings.violation."""
        return f"{{{IMPLEMENTATION}:flag}} {self.key}"

    @property
    def selected_by(self) -> dict[str, str]:
        """The value of the field of PrecisionArgs that selects it."""
        return {IMPLEMENTATION: self.key}
