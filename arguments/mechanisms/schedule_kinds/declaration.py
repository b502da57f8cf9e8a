"""What other code may ask of a pipeline schedule: the order of a rank's forward and backward passes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from arguments.mechanisms.support import Mechanism, Support

PIPELINE_SCHEDULE = "pipeline_schedule"


class ScheduleCapability(Enum):
    """What flags may demand of a schedule; the value is the text of the manual."""

    VIRTUAL_STAGES = "virtual stages (`--num-virtual-stages-per-pipeline-rank` above 1)"
    EXCHANGE_OVERLAP = "`--overlap-moe-expert-parallel-comm` (more than one stage: with virtual stages)"
    WGRAD_OVERLAP = "`--overlap-dispatch-backward-with-experts-wgrad`"
    HEAD_WGRAD = "`--defer-embedding-wgrad-compute`"
    SHARDED_GRADS = "`--use-megatron-fsdp` with a strategy that shards gradients"
    MLP_CHUNKS = "`--mlp-chunks-for-training` above 1"


@dataclass(frozen=True, kw_only=True)
class ScheduleDeclaration(Mechanism[ScheduleCapability]):
    """Declaration of a pipeline schedule.

    Attributes:
        key: value of --pipeline-schedule, and key of its order in moe_trainer/pipeline/orders.py.
        name: name in the manual.
        capabilities: for each whether it acts, or why not.
        needs_virtual_stages: it alternates between the virtual stages of a rank, so that it needs several.
        splits_backward: weight gradients of all layers are computed apart from the backward that sends the gradient of
            a stage's input. Until then their activations are kept. The local linears can, TransformerEngine's cannot.
        is_drawn: random mappings ask for it, which they would else not have.
        is_measured: measured times confirm estimates; else plans widen their error.
    """

    key: str
    name: str
    capabilities: Mapping[ScheduleCapability, Support]
    needs_virtual_stages: bool = False
    splits_backward: bool = False
    is_drawn: bool = False
    is_measured: bool = True

    def __post_init__(self):
        self.check_declares_all(ScheduleCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that selects it, with its value, as a template of Settings.violation."""
        return f"{{{PIPELINE_SCHEDULE}:flag}} {self.key}"

    def runs(self, num_chunks: int) -> bool:
        """Return whether it can run so many chunks (virtual stages) on a rank."""
        return self.supports(ScheduleCapability.VIRTUAL_STAGES) if num_chunks > 1 else not self.needs_virtual_stages
