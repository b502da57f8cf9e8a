"""What other code may ask of a format of GEMMs' operands that is narrower than the model's."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from arguments.mechanisms.support import Mechanism, Rejected, Support

CUSTOM = "custom"
"""Value of the flag of recipes with which a user's function chooses the formats."""
BLOCK_SCALE_BYTES = 12
"""Scale of a block of a stored weight, its inverse, and the largest magnitude that both are computed from."""

COUNTS_ON_HOST = Rejected("TransformerEngine reads token counts on the host", "later")


class FormatCapability(Enum):
    """What flags may demand of a format; the value is the text of the manual."""

    LIBRARY_GEMMS = "`--transformer-impl transformer_engine`, for GEMMs"
    DEVICE_COUNTS = "`--use-transformer-engine-op-fuser`, without token counts on the host"
    DROPLESS_GRAPH = "`--use-transformer-engine-op-fuser`, in CUDA graphs of dropless experts"
    OUTPUT_LAYER = "`--fp8-output-proj`"
    PRECISION_FILE = "`--te-precision-config-file`"
    RECOMPUTED_INPUTS = "`--recompute-modules moe_act`, `layernorm`"
    HOST_OPTIMIZER = "`--optimizer-cpu-offload`, with weights that are gathered in the format"
    PROOF = "comparison of a mapping with one process"


@dataclass(frozen=True, kw_only=True)
class FormatFlags:
    """The flags of all formats of one width.

    Attributes:
        name: destination of the flag that asks for them, and the beginning of the others'; the width in estimates.
        values: values of that flag.
        bits: of a number.
        wgrad: destination of the flag that leaves gradients of weights in high precision; None if none does.
        displaced: destinations that a flag of another width on the command line resets where a preset sets them.
        is_measured: measured times of GEMMs of this width confirm estimates; else plans widen their error.
    """

    name: str
    values: tuple[str, ...]
    bits: int
    wgrad: str | None = None
    displaced: tuple[str, ...] = ()
    is_measured: bool = True

    @property
    def recipe(self) -> str:
        """Destination of the flag that selects a format."""
        return f"{self.name}_recipe"

    @property
    def factory(self) -> str:
        """Destination of the flag that names the function of `CUSTOM`."""
        return f"{self.name}_quantizer_factory"

    @property
    def param_gather(self) -> str:
        """Destination of the flag that stores and gathers weights in the format."""
        return f"{self.name}_param_gather"

    @property
    def in_precision_file(self) -> str:
        """Key of the format in --te-precision-config-file."""
        return f"{self.name}_quantization_recipe"


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """How the weights of quantized layers are stored where it is not in the model's format.

    Attributes:
        name: in logs.
        flag: destination of the flag that asks for it.
        num_bytes: of an element, with its share of scales but without those of a tensor.
        gathered_bytes: of an element in the all-gather of parameters; None if that is in the model's format, into
            copies by rows and by columns.
        library_takes: TransformerEngine's layers compute with what is stored. Otherwise they hold the model's format.
        library_cannot_hold: nor could they: these layers are this program's.
    """

    name: str
    flag: str
    num_bytes: float
    gathered_bytes: float | None
    library_takes: bool = False
    library_cannot_hold: bool = False

    @property
    def is_gathered_wide(self) -> bool:
        """Whether weights are gathered in the model's format and stored twice."""
        return self.gathered_bytes is None


@dataclass(frozen=True, kw_only=True)
class FormatDeclaration(Mechanism[FormatCapability]):
    """Declaration of a format of quantized GEMMs.

    Attributes:
        key: value of the flag that selects it; name of its module in moe_trainer/quantization/formats.
        name: name in messages and in the manual.
        flags: those of its width.
        capabilities: for each whether it acts, or why not.
        searched_with: value of the flag of its width in searches; None if they leave it out.
        stored: how weights are stored where flags ask for it; None if they are not.
        copy_bytes: of an element of a cast weight, with its share of a scale where few elements share one.
        tokens_per_scale: tokens that share a scale of what is saved for backward; None if all do.
        has_global_scale: blocks have scales, and so has the tensor.
        scales_whole_tensor: scales depend on all tokens of a pass.
        keeps_scales: scales follow from earlier iterations and are saved in checkpoints.
        names_layers: files and functions can choose it for single layers or tensors.
        keeps_expert_casts: this program's experts may keep casts of their weights between microbatches.
        needs_blackwell: hardware has it from compute capability 10 on.
        superseded_on_blackwell: searches prefer another format there.
        library: class of its recipe in TransformerEngine, and the function that says whether the device can do it.
    """

    modules: ClassVar[str] = "moe_trainer.quantization.formats"

    key: str
    name: str
    flags: FormatFlags
    capabilities: Mapping[FormatCapability, Support]
    searched_with: str | None = None
    stored: StoredForm | None = None
    copy_bytes: float = 1.0
    tokens_per_scale: int | None = None
    has_global_scale: bool = False
    scales_whole_tensor: bool = False
    keeps_scales: bool = False
    names_layers: bool = True
    keeps_expert_casts: bool = True
    needs_blackwell: bool = False
    superseded_on_blackwell: bool = False
    library: tuple[str, str] | None = None

    def __post_init__(self):
        self.check_declares_all(FormatCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that selects it, with its value, as a template of Settings.violation."""
        return f"{{{self.flags.recipe}:flag}} {self.key}"

    @property
    def is_custom(self) -> bool:
        """Whether a user's function chooses the format of every tensor."""
        return self.key == CUSTOM

    @property
    def words(self) -> tuple[str, ...]:
        """Flags that select it in searches."""
        width = self.flags.name
        return (f"--{width}-format", str(self.searched_with), f"--{width}-recipe", self.key)
