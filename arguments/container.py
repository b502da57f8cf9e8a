"""The frozen result of parsing: eight sections, and how they came about."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from arguments import schema
from arguments.data import DataArgs
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.optimizer import OptimizerArgs
from arguments.output import OutputArgs
from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from arguments.settings import Settings, Violation, evaluates_only
from arguments.training import TrainingArgs

SECTIONS = (
    ("model", ModelArgs),
    ("moe", MoEArgs),
    ("parallel", ParallelArgs),
    ("training", TrainingArgs),
    ("optimizer", OptimizerArgs),
    ("precision", PrecisionArgs),
    ("data", DataArgs),
    ("output", OutputArgs),
)

OPTIONS = MappingProxyType(schema.options(SECTIONS))
"""Every flag's option by destination, in order of declaration."""


@dataclass(frozen=True)
class Arguments:
    """All flags, resolved. Field `x_y` of a section is the flag whose Megatron destination is `x_y`.

    `source[dest]` says where a value came from, `typed` which destinations stood on the command line,
    `spelling[dest]` how a given flag was written, `notes` are one-line notices for the log, `recipe_env` are the
    environment variables a recipe asks for, `world_size` is the number of ranks the rules were checked against (None:
    unknown), `unbuildable` is what a run refuses although the flags are read (see `parse.parse_args`).
    """

    model: ModelArgs
    moe: MoEArgs
    parallel: ParallelArgs
    training: TrainingArgs
    optimizer: OptimizerArgs
    precision: PrecisionArgs
    data: DataArgs
    output: OutputArgs
    source: Mapping[str, str] = field(default_factory=dict, repr=False)
    typed: frozenset[str] = frozenset()
    spelling: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    recipe_env: Mapping[str, str] = field(default_factory=dict)
    world_size: int | None = None
    unbuildable: tuple[Violation, ...] = ()

    @property
    def evaluates_only(self) -> bool:
        """Does the run evaluate a model and nothing else?"""
        return evaluates_only(self.training.skip_train, self.moe.moe_use_upcycling, self.output.ckpt_convert_format)

    @property
    def keeps_weights(self) -> bool:
        """Do the weights stay as they are, so that there are no gradients and no optimizer?"""
        return self.evaluates_only or self.optimizer.freeze_all_layers

    def as_dict(self) -> dict[str, object]:
        """Every flag by destination, flat, in order of declaration (for logs and for the checkpoint's record)."""
        return {f.name: getattr(getattr(self, name), f.name) for name, cls in SECTIONS for f in dataclasses.fields(cls)}


def freeze(settings: Settings, world_size: int | None, unbuildable: Iterable[Violation] = ()) -> Arguments:
    """Freeze resolved settings into sections."""
    sections = {
        name: cls(**{f.name: settings.values[f.name] for f in dataclasses.fields(cls)}) for name, cls in SECTIONS
    }
    return Arguments(
        **sections,
        source=MappingProxyType(dict(settings.source)),
        typed=frozenset(settings.typed),
        spelling=MappingProxyType(dict(settings.spelling)),
        notes=tuple(settings.lines()),
        recipe_env=MappingProxyType(dict(settings.recipe_env)),
        world_size=world_size,
        unbuildable=tuple(unbuildable),
    )


def from_values(values: Mapping[str, object], world_size: int) -> Arguments:
    """Make arguments of resolved values by destination, as a run records them; what is not named is at its default.

    Raises: ValueError for a value of a type that no flag has.
    """
    settings = Settings(OPTIONS)
    for name, value in values.items():
        if name not in OPTIONS:
            continue
        if OPTIONS[name].read is schema.int_pair and isinstance(value, list):
            value = tuple(value)  # JSON has no tuples
        if isinstance(value, dict):
            raise ValueError(f"{name}: {value!r} is no value of a flag")
        settings.values[name] = value
    return freeze(settings, world_size)
