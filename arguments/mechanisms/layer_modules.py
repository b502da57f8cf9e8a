"""What declarations of modules of a layer have in common, whether they are recomputed, offloaded or captured.

recomputed_modules.py, offloaded_modules.py and captured_modules.py have one declaration for each name that their flag
takes. A declaration states for every capability of its kind that it acts, or why not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from arguments.mechanisms.support import C, Mechanism, NoEffect, Support
from arguments.settings import Settings, Violation

UNBUILT = NoEffect("layers that have it are not built: its name is rejected")
Part = Literal["attention", "token mixer", "feed-forward", "dense feed-forward", "experts", "shared experts"]
"""Of a layer; a token mixer is attention, a recurrence or a convolution."""


@dataclass(frozen=True, kw_only=True)
class LayerModule(Mechanism[C]):
    """Declaration of a module of a layer.

    Attributes:
        dest: destination of the flag that takes its name.
        key: its name.
        capabilities: for each whether it acts, or why not.
        part: what a layer must have for it; None if every layer can have it.
        is_built: layers that have it exist here.
        after: the module that must be named with it, and why; None if none must.
    """

    dest: str
    declares: ClassVar[type[Any]]
    key: str
    capabilities: Mapping[C, Support]
    part: Part | None = None
    is_built: bool = True
    after: tuple[str, str] | None = None

    def __post_init__(self):
        self.check_declares_all(self.declares)

    @property
    def name(self) -> str:  # type: ignore[override]  # another attribute, read only
        """Name in the manual."""
        return f"`{self.key}`"

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that takes its name, with the name, as a template of Settings.violation."""
        return f"{{{self.dest}:flag}} {self.key}"


L = TypeVar("L", bound=LayerModule[Any])


def unbuilt(modules: Iterable[LayerModule[Any]]) -> tuple[str, ...]:
    """Return the names of modules of layers that do not exist here."""
    return tuple(each.key for each in modules if not each.is_built)


def names_of(modules: Iterable[LayerModule[Any]]) -> str:
    """Return the names of modules that layers have here, for messages and help."""
    return ", ".join(each.key for each in modules if each.is_built)


def unknown_names(
    s: Settings, dest: str, names: Iterable[str], modules: Sequence[LayerModule[Any]], others: Sequence[str] = ()
) -> Iterator[Violation]:
    """Report values of a flag that are no names of modules; `others` are values that it takes too."""
    known = (*(each.key for each in modules), *others)
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    from difflib import get_close_matches  # imported only for an error message

    close = [match for name in unknown for match in get_close_matches(name, known, n=1)]
    yield s.violation(
        "{:flag} {unknown}: the values must be among {known}{hint}.",
        dest,
        unknown=" ".join(unknown),
        known=", ".join((names_of(modules), *others)),
        hint=f" (did you mean {' '.join(close)}?)" if len(close) == len(unknown) else "",
    )


def named(modules: Sequence[L], names: Iterable[str]) -> tuple[L, ...]:
    """Return the modules that are named, in the order of their declarations; unknown names are left out."""
    wanted = set(names)
    return tuple(each for each in modules if each.key in wanted)


def unaccompanied(s: Settings, modules: Sequence[LayerModule[Any]]) -> Iterator[Violation]:
    """Report modules that are named without the one that they come after."""
    names = [module.key for module in modules]
    for module in modules:
        if module.after is not None and module.after[0] not in names:
            yield s.violation(f"{module.mention} needs {module.after[0]} too: {module.after[1]}.")
