"""What a flag needs to have an effect, and the notes where it has none.

These are the conditions of `flag(needs=...)`, and a sublayer that does not ignore what `flag(demands=...)` says.

A condition lists alternatives separated by " or ". An alternative is the destination of a flag, which holds if the flag
is set (a number whose default is 1: above 1); "dest=value", which holds if it has the value, or has it among its
values; or one of FACTS. A "!" before it negates it.
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from arguments.container import OPTIONS
from arguments.flag_status import NOT_IMPLEMENTED
from arguments.layer_pattern import letters_that_select, mixing_sublayers, variants_of
from arguments.mechanisms.sublayer_kinds.declaration import VARIANT, SublayerCapability
from arguments.mechanisms.sublayers import EXPERTS, MLP
from arguments.settings import Settings

CUDA, RANKS, DATA_RANKS, ATTENTION = "cuda", "ranks", "data_ranks", "attention"
FACTS = MappingProxyType(
    {
        CUDA: "a CUDA device",
        RANKS: "more than one rank",
        DATA_RANKS: "more than one data-parallel rank",
        ATTENTION: "a layer with attention",
    }
)
"""Conditions that are no flags, in words."""


def note_unmet_needs(s: Settings, facts: Mapping[str, bool | None], unread: Collection[str]) -> None:
    """Record every given flag that has no effect because of what else is given or not.

    What a preset of the model zoo sets is not reported: the user has not asked for it.

    Args:
        facts: whether each of FACTS holds; None or absent if that is unknown.
        unread: destinations that are given, with a value that is rejected.
    """
    for dest, value in _requested(s):
        if reason := unmet(s, dest, facts, unread):
            s.note_no_effect(s.with_value(dest, value), reason)


def notes_about(s: Settings, facts: Mapping[str, bool | None]) -> Iterator[tuple[str, str]]:
    """Yield the destination and the note of each flag that has no effect because of some of `facts`."""
    for dest, value in _requested(s):
        conditions = [
            need for need in OPTIONS[dest].needs if any(f" {fact} " in f" {need.replace('!', '')} " for fact in facts)
        ]
        if reason := _unmet(s, conditions, facts, ()):
            yield dest, f"{s.with_value(dest, value)} has no effect {reason}."


def _requested(s: Settings) -> Iterator[tuple[str, object]]:
    """Yield the flags that need something, with the values that the user gave, unless these are the defaults."""
    for dest in s.given_dests():
        value, source = s.requests[dest]
        option, default = OPTIONS[dest], s.default(dest)
        if (option.needs or option.demands) and source != "preset" and value not in (default, [default]):
            yield dest, value


def unmet(s: Settings, dest: str, facts: Mapping[str, bool | None], unread: Collection[str] = ()) -> str:
    """Return why a flag has no effect, as "without --profile"; "" if all that it needs holds or is unknown."""
    return _unmet(s, OPTIONS[dest].needs, facts, unread) or _unread_by_sublayers(s, dest)


def _unread_by_sublayers(s: Settings, dest: str) -> str:
    """Return why no sublayer of the model reads a flag."""
    for capability in (each for each in OPTIONS[dest].demands if isinstance(each, SublayerCapability)):
        mixing = sorted(mixing_sublayers(s), key=lambda each: each.name)
        if all(each.ignores(capability) for each in (*mixing, MLP, EXPERTS)):
            names = " and ".join(each.name for each in mixing)
            return f"with {names} alone" if mixing else "without layers that mix positions"
    return ""


def _unmet(s: Settings, needs: Collection[str], facts: Mapping[str, bool | None], unread: Collection[str]) -> str:
    lacking = [need.split(" or ") for need in needs]
    lacking = [need for need in lacking if not any(_holds(s, each, facts, unread) for each in need)]
    return " and ".join(_describe(s, need) for need in lacking)


def _holds(s: Settings, alternative: str, facts: Mapping[str, bool | None], unread: Collection[str]) -> bool:
    """Return whether an alternative holds, or may hold."""
    is_negated, (dest, _, wanted) = alternative.startswith("!"), alternative.removeprefix("!").partition("=")
    if dest in FACTS:
        return facts.get(dest) in (None, not is_negated)
    if dest in unread:
        return True
    value = s.values[dest]
    if dest == VARIANT and s.hybrid_layer_pattern:  # letters may stand for several values
        value = [each.variant for each in variants_of(s)]
    if wanted:
        holds = value == wanted or isinstance(value, list) and wanted in value
    else:
        holds = bool(value) and value != "none" and not (s.default(dest) == value == 1 and value is not True)
    return holds != is_negated


def _describe(s: Settings, need: list[str]) -> str:
    """Return "with A without B or C": what prevents an effect, and what would bring it."""
    wanted, in_the_way = dict[str, list[str]](), dict[str, list[str]]()
    for alternative in need:
        dest, _, value = alternative.removeprefix("!").partition("=")
        (in_the_way if alternative.startswith("!") else wanted).setdefault(dest, []).append(value)
    present = [
        name_of(s, dest, values) for dest, values in in_the_way.items() if dest not in wanted and dest not in FACTS
    ]
    parts = [f"with {' or '.join(present)}"] if present else []
    if wanted:
        parts.append(f"without {' or '.join(name_of(s, dest, values) for dest, values in wanted.items())}")
    return " ".join(parts)


def name_of(s: Settings, dest: str, values: list[str]) -> str:
    """Return a condition in words; `values` has "" for a flag that must be set."""
    if dest in FACTS:
        return FACTS[dest]
    if dest in NOT_IMPLEMENTED and values == [""]:
        values = list(NOT_IMPLEMENTED[dest].values or values)[:1]
    if s.hybrid_layer_pattern and (letters := letters_that_select(dest, [True] if values == [""] else values)):
        return f"{letters} in {s.flag('hybrid_layer_pattern')}"  # which excludes the flag itself
    if values != [""]:
        return f"{s.flag(dest)} {' or '.join(values)}"
    default = s.default(dest)
    if default is True:  # on unless it is switched off
        return f"what {s.flag(dest)} switches off"
    if isinstance(default, int | float) and default is not False:
        return f"{s.flag(dest)} above {1 if default == 1 else 0}"
    return s.flag(dest)
