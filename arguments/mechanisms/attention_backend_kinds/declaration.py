"""What other code may ask of a backend of attention: the kernel of scores, mask, softmax and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from arguments.mechanisms.support import Mechanism, Support

ATTENTION_BACKEND = "attention_backend"
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables by which TransformerEngine takes a kind of kernel or not."""


class AttentionBackendCapability(Enum):
    """What flags may demand of a backend of attention; the value is the text of the manual."""

    LIBRARY = "`--transformer-impl transformer_engine`, for core attention"
    FP32 = "parameters in fp32, in the local layers on a CUDA device"


@dataclass(frozen=True, kw_only=True)
class AttentionBackendDeclaration(Mechanism[AttentionBackendCapability]):
    """Declaration of a backend of attention, on CUDA devices.

    Attributes:
        key: value of --attention-backend; that of torch's kernel in moe_trainer/layers/core_attention.py.
        name: name in the manual.
        capabilities: for each whether it acts, or why not.
        stores_scores: the kernels are not fused: scores of all queries and keys are stored, probabilities are saved for
            backward, and keys and values are repeated for their queries.
        switch: of SWITCHES, the one of its kernels; None where all may be taken, or none.
    """

    key: str
    name: str
    capabilities: Mapping[AttentionBackendCapability, Support]
    stores_scores: bool = False
    switch: str | None = None

    def __post_init__(self):
        self.check_declares_all(AttentionBackendCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that selects it, with its value, as a template of Settings.violation."""
        return f"{{{ATTENTION_BACKEND}:flag}} {self.key}"

    @property
    def switches(self) -> dict[str, str]:
        """Environment variables with which TransformerEngine takes its kernels and no others."""
        return {} if self.switch is None else {each: str(int(each == self.switch)) for each in SWITCHES}
