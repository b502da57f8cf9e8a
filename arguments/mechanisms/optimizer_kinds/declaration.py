"""What other code may ask of an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

from arguments.mechanisms.support import Mechanism, Support
from arguments.settings import Settings

OPTIMIZER = "optimizer"


class OptimizerCapability(Enum):
    """What flags may demand of an optimizer; the value is the text of the manual."""

    FSDP = "`--use-megatron-fsdp`, `--use-torch-fsdp2`"
    EARLY_GATHER = "`--overlap-param-gather-with-optimizer-step`"
    STATE_FORMATS = "`--use-precision-aware-optimizer`, with the formats of its state"
    HOST_UPDATE = "`--optimizer-cpu-offload`, without `--use-precision-aware-optimizer`"
    HOST_UPDATE_8_BITS = "`--optimizer-cpu-offload`, with `--fp8-param-gather` and an `--fp8-recipe` other than delayed"
    LEGACY_FORMAT = "`--ckpt-format torch`, `--ckpt-convert-format torch`"
    OTHER_FORMATS = "`--use-distributed-optimizer`, with a `--ckpt-format` other than torch and torch_dist"


@dataclass(frozen=True, kw_only=True)
class OptimizerDeclaration(Mechanism[OptimizerCapability]):
    """Declaration of an optimizer.

    Attributes:
        key: value of --optimizer, and name of the module of its update rule in moe_trainer/optim/update_rules.
        name: name in messages and in the manual.
        capabilities: for each whether it acts, or why not.
        states: its moments of a parameter, under their names in checkpoints.
        old_names: earlier values of --optimizer that it is taken for.
        relatives: values of --optimizer that Megatron-LM has and this program rejects in favor of this one.
        updates_matrices: it updates full matrices, except embeddings and the output layer. Its module has
            `make_matrix_rule`; other parameters follow the rule that the flag `others_follow` names.
        others_follow: destination of that flag; "" if all parameters follow its rule.
        others: values of that flag.
        is_layer_wise: with --use-distributed-optimizer Megatron-LM assigns full layers to ranks.
        scaled_by_mup: parameters whose learning rate muP scales: matrices by the base width over the width, or
            embeddings and vectors by its inverse.
        epsilon: destination of what its update divides by; muP scales it with the learning rate.
        counts_steps: Megatron-LM's keeps the number of steps in a checkpoint.
        record_group: the settings of a parameter group that Megatron-LM's checkpoints have of it alone, from flags by
            destination and the value of its epsilon.
        has_rules: arguments/rules/<key>.py says what else it needs.
        comparable: options with which small runs of different mappings agree, and notes that say why, from flags and
            whether there are tensor-parallel ranks.
        set_again: destinations of those options, if they always have them.
    """

    modules: ClassVar[str] = "moe_trainer.optim.update_rules"

    key: str
    name: str
    capabilities: Mapping[OptimizerCapability, Support]
    states: tuple[str, ...]
    old_names: tuple[str, ...] = ()
    relatives: tuple[str, ...] = ()
    updates_matrices: bool = False
    others_follow: str = ""
    others: tuple[str, ...] = ()
    is_layer_wise: bool = False
    scaled_by_mup: Literal["matrices", "vectors"] = "matrices"
    epsilon: str = ""
    counts_steps: bool = True
    record_group: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    has_rules: bool = False
    comparable: Callable[[Settings, bool], tuple[dict[str, object], list[str]]] | None = None
    set_again: tuple[str, ...] = ()

    def __post_init__(self):
        self.check_declares_all(OptimizerCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that selects it, with its value, as a template of Settings.violation."""
        return f"{{{OPTIMIZER}:flag}} {self.key}"
