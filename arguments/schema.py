"""From a dataclass field to a command-line option.

How it works: the eight section files declare `dest: type = default`. `options()` reads the fields and returns one
`Option` for each: its spellings, how many values follow, how a value is read, which values are allowed. The parser,
the help text and the recorded standing of flags all work on these records; a flag is declared in exactly one place.

Spellings: `--` + the field name with dashes, unless the field says otherwise through `flag(...)`. A bool that starts as
False has spellings that switch it on; one that starts as True has only the `off` spellings it declares
(`--disable-bias-linear` for add_bias_linear). There are no abbreviations.

Why own records and not argparse actions: argparse stops at the first mistake; a user who waits in a SLURM queue wants
all of them. The semantics of argparse's tokens (negative numbers, `--flag=value`, `+`, `*`) are kept, and a test
compares both.
"""

import ast
import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from arguments.flag_properties import Bounds, Layers, PathUse, Restore, Role

_ROLE_OF_SECTION: Mapping[str, Role] = types.MappingProxyType(
    {"model": "model", "moe": "model", "parallel": "parallel", "data": "data", "output": "output"}
)
"""The role of most flags of these sections, of which the others say theirs; elsewhere every flag that acts says it."""


def flag(
    default: object,
    *spellings: str,
    off: tuple[str, ...] = (),
    nargs: int | str | None = None,
    parse: Callable[[str], object] | None = None,
    metavar: tuple[str, ...] | None = None,
    hidden: bool = False,
    restore: Restore | tuple[Restore, ...] = (),
    unset: object = None,
    needs: str | tuple[str, ...] = (),
    demands: Enum | tuple[Enum, ...] = (),
    path: PathUse | None = None,
    role: Role | None = None,
    bounds: Bounds | None = None,
    most: float | None = None,
    draws: tuple[object, ...] = (),
    layers: Layers | None = None,
):
    """Declare a flag of which there is more to say than its name, type and default.

    `spellings` replace the natural one; `off` are the spellings that store False; `nargs` is "*" or a count for lists
    (else "+"); `parse` reads one value; `hidden` flags are absent from --help; `needs` are the conditions without which
    the flag has no effect, as arguments/needs.py reads them; `demands` are the capabilities, at most one of every kind
    of mechanism, that values other than the default ask for. What flag_properties.py has words for: `path` of paths;
    `role`, unless it is that of most flags of the section; `restore`, which every flag of the model, of its experts and
    of the data says, and of the others those that a checkpoint restores; `bounds` and `most`, the largest value, of
    numbers. `unset` is what a flag without a value means for the weights: a value, or the name of the flag whose value
    it takes. `layers` is what the flag says of single decoder layers. `draws` are values that random mappings are
    proven with (moe_trainer/verification/random_layouts.py).
    """
    needs = (needs,) if isinstance(needs, str) else needs
    restore = (restore,) if isinstance(restore, str) else restore
    metadata: dict[str, object] = {"on": spellings, "off": off, "nargs": nargs, "parse": parse, "metavar": metavar}
    metadata |= {"hidden": hidden, "restore": restore, "unset": unset, "needs": needs, "path": path, "role": role}
    metadata |= {"bounds": bounds, "most": most, "draws": draws, "layers": layers}
    metadata |= {"demands": (demands,) if isinstance(demands, Enum) else demands}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def int_pair(text: str) -> tuple[int, int]:
    """Read `a,b` or `(a,b)` as two integers."""
    parts = text.strip().strip("()[]").split(",")
    if len(parts) != 2:
        raise ValueError("two integers separated by a comma")
    return read_int(parts[0]), read_int(parts[1])


def layer_pattern(text: str) -> int | list[int]:
    """Read a layer frequency: an integer N, or a list expression of `[ ] ( ) , + *` such as ([0]*3+[1]*58).

    Quotes round the whole expression are dropped: launchers that expand their command line unquoted leave them there.
    """
    bare = text.strip()
    while len(bare) >= 2 and bare[0] in "'\"" and bare[-1] == bare[0]:
        bare = bare[1:-1].strip()
    wanted = "an integer, or a list expression of digits and [ ] ( ) , + * such as ([0]*3+[1]*58)"
    if not bare or set(bare) - set("0123456789[](),+* "):
        raise ValueError(wanted)
    try:
        value = _pattern_value(ast.parse(bare, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(wanted) from error
    if isinstance(value, list) and not all(isinstance(item, int) for item in value):
        raise ValueError(wanted)
    return value


def _pattern_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 2**63:
        return node.value
    if isinstance(node, ast.List):
        return [_pattern_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _pattern_value(node.left), _pattern_value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        sizes = [side if isinstance(side, int) else len(side) for side in (left, right)]
        if sizes[0] * sizes[1] > 100_000:
            raise TypeError("too long")
        return left * right
    raise TypeError("not part of a layer pattern")


class Section:
    """Base of the dataclasses of flags: equality by fields, without a generated method of a hundred fields each."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented


@dataclass(frozen=True)
class Option:
    """One flag as the parser sees it.

    `on` and `off` are the spellings; `takes` is 0 (a switch), 1, a count, "+" or "*"; `read` turns one token into a
    value; `choices` are the allowed values, or None; `default` is Megatron's. The others are as `flag` declares them.
    """

    dest: str
    section: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    takes: int | str
    read: Callable[[str], Any]
    type_name: str
    choices: tuple | None
    default: Any
    metavar: tuple[str, ...] | None
    hidden: bool
    restore: tuple[Restore, ...]
    unset: object
    needs: tuple[str, ...]
    demands: tuple[Enum, ...]
    path: PathUse | None
    role: Role | None
    bounds: Bounds | None
    most: float | None
    draws: tuple[object, ...]
    layers: Layers | None

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.on + self.off

    @property
    def shown_spellings(self) -> tuple[str, ...]:
        """The spellings that texts show: the first of those that differ only by dashes and underscores."""
        return tuple({spelling.replace("_", "-"): spelling for spelling in reversed(self.spellings)}.values())[::-1]

    @property
    def is_list(self) -> bool:
        return self.takes not in (0, 1)

    @property
    def can_be_unset(self) -> bool:
        """Whether the value `none` undoes the flag of a preset: numbers and choices that are not set by default."""
        is_choice = self.choices is not None and "none" not in self.choices
        return self.takes == 1 and self.default is None and (is_choice or self.read in (read_int, read_float))

    def convert(self, text: str) -> object:
        """Turn one token into a value, None to unset it. Raises ValueError that says what is wanted."""
        if self.can_be_unset and text == "none":
            return None
        value = self.read(text)
        if self.choices is not None and value not in self.choices:
            words = (*self.choices, "none") if self.can_be_unset else self.choices
            raise ValueError("one of " + ", ".join(str(word) for word in words))
        return value


def is_text(value: str) -> bool:
    """Return whether a value can be printed and used in a file name.

    The system passes bytes that are not UTF-8 as lone surrogates.
    """
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def read_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("an integer (digits only: 1e6 and 2.0 are not integers here)") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer of 64 bits")
    return value


def read_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if value == 0 and any(digit.isdecimal() and int(digit) for digit in text.lower().partition("e")[0]):
        raise ValueError("a number of 64 bits (this one is so small that it would be 0)")
    return value


_READERS: Mapping[type, Callable[[str], Any]] = types.MappingProxyType({int: read_int, float: read_float, str: str})


def _members(annotation: object) -> tuple[object, ...]:
    """The alternatives of a union, without None; the annotation itself when it is no union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for member in typing.get_args(annotation) if member is not type(None))
    return (annotation,)


def _element(annotation: object) -> tuple[type, tuple | None, bool]:
    """(type of one value, choices, is a list) of a field's annotation."""
    is_list = False
    for member in _members(annotation):
        if typing.get_origin(member) is list:
            is_list, annotation = True, typing.get_args(member)[0]
            break
    else:
        annotation = _members(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices, is_list
    return (annotation if isinstance(annotation, type) else str), None, is_list


def _default(field: dataclasses.Field) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def make_option(field: dataclasses.Field, section: str) -> Option:
    """The option that a section's field declares."""
    extra = field.metadata
    element, choices, is_list = _element(field.type)
    default, parse = _default(field), extra.get("parse")
    on, off = extra.get("on", ()), extra.get("off", ())
    if not on and not (element is bool and default is True):
        on = ("--" + field.name.replace("_", "-"),)
    takes: int | str = 0 if element is bool else (extra.get("nargs") or "+") if is_list and not parse else 1
    return Option(
        dest=field.name,
        section=section,
        on=on,
        off=off,
        takes=takes,
        read=parse or _READERS.get(element, str),
        type_name=element.__name__,
        choices=choices,
        default=default,
        metavar=extra.get("metavar"),
        hidden=bool(extra.get("hidden")),
        restore=extra.get("restore", ()),
        unset=extra.get("unset"),
        needs=extra.get("needs", ()),
        demands=extra.get("demands", ()),
        path=extra.get("path"),
        role=extra.get("role") or _ROLE_OF_SECTION.get(section),
        bounds=extra.get("bounds"),
        most=extra.get("most"),
        draws=extra.get("draws", ()),
        layers=extra.get("layers"),
    )


def options(sections: Iterable[tuple[str, type]]) -> dict[str, Option]:
    """All options of (section name, dataclass) pairs, by destination, in order of declaration."""
    found: dict[str, Option] = {}
    for section, cls in sections:
        for field in dataclasses.fields(cls):
            if field.name in found:
                raise ValueError(f"the flag {field.name} is declared twice, the second time in section {section}")
            found[field.name] = make_option(field, section)
    return found


def by_spelling(all_options: Mapping[str, Option]) -> dict[str, Option]:
    """Every spelling of every option, with its leading dashes."""
    return {spelling: option for option in all_options.values() for spelling in option.spellings}
