"""What other code may ask of a placement of experts: which ranks compute an expert's tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from arguments.mechanisms.support import Mechanism, Support


class PlacementCapability(Enum):
    """What flags may demand of a placement, or a program do with its experts; the value says it in words."""

    LIBRARY_EXPERTS = "TransformerEngine's experts"
    PREPROCESS_GRAPH = "`--cuda-graph-modules moe_preprocess`"
    PADDED_GRAPH = "CUDA graphs of experts that are padded to capacity"
    MLP_CHUNKS = "`--mlp-chunks-for-training`"
    ADAPTERS = "`--lora-dim`"
    OUTPUT_SLICES = "experts that compute a slice of the output"


def zero(_moe: Any) -> int:
    """Return what a placement has that plans nothing: no slots for experts of others, no kernels of a plan."""
    return 0


@dataclass(frozen=True, kw_only=True)
class PlacementDeclaration(Mechanism[PlacementCapability]):
    """Declaration of a placement.

    Attributes:
        key: name of its module in moe_trainer/moe/placement.
        name: name in messages and in the manual.
        dest: destination of the flag that asks for it; None if no flag does.
        capabilities: for each whether it acts, or why not.
        slots: experts of other ranks that a rank can compute besides its own, from the fields of MoEArgs.
        is_planned: every microbatch has its own plan, made from the routing. So the counts of what is dispatched are
            not known before, and the weights of a rank's experts are not the same in all microbatches.
        plan_kernels: kernels that make the plan in a forward pass, from the fields of MoEArgs.
        held_elements: elements of weights and gradients that a rank holds next to its own while a layer is computed,
            from the fields of MoEArgs, the elements of its experts, the size of ep, and the number of experts.
        moved_rate: name in metrics.jsonl of the share of tokens that are computed by another rank than the expert's.
        unmoved_maximum: name in metrics.jsonl of the load of the busiest rank if no token were.
        has_rules: arguments/rules/<key>.py says what else it needs.
        alias: name in the literature, which no flag contains.
    """

    modules: ClassVar[str] = "moe_trainer.moe.placement"

    key: str
    name: str
    capabilities: Mapping[PlacementCapability, Support]
    dest: str | None = None
    slots: Callable[[Any], int] = zero
    is_planned: bool = False
    plan_kernels: Callable[[Any], int] = zero
    held_elements: Callable[[Any, float, int, int], float] = lambda _moe, _local, _ep, _num_experts: 0.0
    moved_rate: str | None = None
    unmoved_maximum: str | None = None
    has_rules: bool = False
    alias: str | None = None

    def __post_init__(self):
        self.check_declares_all(PlacementCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that asks for it, as a template of Settings.violation."""
        return "" if self.dest is None else f"{{{self.dest}:flag}}"
