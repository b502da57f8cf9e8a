"""What the standings mean for one command line: what is refused, and a line for each flag renamed or without effect."""

from collections.abc import Iterator

from arguments import retired, standing
from arguments.settings import Settings, Violation


def check(s: Settings) -> list[Violation]:
    """Violations by standing: what comes later, what will not come. Call it on resolved settings."""
    return [*_later(s), *_other(s)]


def _later(s: Settings) -> Iterator[Violation]:
    for dest, entry in standing.LATER.items():
        value = s.values[dest]
        if not entry.refuses(value, s.default(dest)):
            continue
        given = [name for name in (dest, *entry.also) if s.given(name)]
        if not given and s.source[dest] == "default":
            continue
        shown = [s.shown(name) for name in given] or [s.shown(dest)]
        text = f"{' and '.join(shown)}: this version does not have {entry.what} yet (feature: {entry.feature})"
        yield Violation(tuple(s.flag(name) for name in given) or (s.flag(dest),), text, "later")


def _other(s: Settings) -> Iterator[Violation]:
    for dest, text in standing.OTHER.items():
        refused = standing.OTHER_VALUES.get(dest)
        value = s.values[dest]
        if value in refused if refused else value != s.default(dest):
            yield Violation((s.flag(dest),), f"{s.shown(dest)}: {text}", "product")


def merge_architectures(s: Settings, violations: list[Violation]) -> list[Violation]:
    """Replace what is refused of one missing architecture, flag by flag, by one violation that names it.

    What is captured of its layers as CUDA graphs is not judged then: those reasons are left out.
    """
    for what, architecture in retired.ARCHITECTURES.items():
        parts = [violation for violation in violations if violation.kind in ("later", "product") and set(violation.flags) & set(architecture.flags)]
        named = [flag for violation in parts for flag in violation.flags if flag in architecture.flags]
        if len(set(named) & set(architecture.named_by)) < 2:
            continue
        text = f"{', '.join(dict.fromkeys(named))}: this version does not have {what} yet (feature: {standing.MODELS})"
        first, graphs = violations.index(parts[0]), s.flag("cuda_graph_impl")
        rest = [violation for violation in violations if violation not in parts and not (violation.kind == "later" and graphs in violation.flags)]
        violations = [*rest[:first], Violation(tuple(dict.fromkeys(named)), text, "later"), *rest[first:]]
    return violations


def announce(s: Settings) -> None:
    """Write one line for every given flag that was renamed or has no effect here into `s.renamed` and `s.idle`."""
    refused = {dest for dest, entry in standing.LATER.items() if entry.refuses(s.values[dest], s.default(dest))}
    for dest in s.given_dests():
        if dest in standing.OLD:
            s.say_renamed(s.flag(dest), standing.OLD[dest])
        elif dest in standing.IDLE and dest not in refused:
            s.say_idle(s.shown(dest), standing.IDLE[dest])
        elif dest in standing.PARENT and standing.PARENT[dest] not in refused:
            s.say_idle(s.shown(dest), f"no effect without {_parent_text(s, standing.PARENT[dest])}")
    for parents, dests in standing.NEEDS:
        if any(_is_on(s, parent) for parent in parents):
            continue
        _say_without(s, dests, " or ".join(_parent_text(s, parent) for parent in parents))
    for parent, value, dests in standing.NEEDS_VALUE:
        if s.values[parent] != value:
            _say_without(s, dests, f"{s.flag(parent)} {value}")


def _say_without(s: Settings, dests: str, wanted: str) -> None:
    for dest in dests.split():
        if s.given(dest) and s.values[dest] != s.default(dest):
            s.say_idle(s.shown(dest), f"no effect without {wanted}")


def _is_on(s: Settings, parent: str) -> bool:
    """Is a flag that others need in force? The size of a dimension is from 2 on."""
    dest, _, wanted = parent.partition("=")
    value, default = s.values[dest], s.default(dest)
    if wanted:
        return value == wanted
    return bool(value) and not (type(value) is int and value == default == 1)


def _parent_text(s: Settings, parent: str) -> str:
    if "=" in parent:
        dest, _, value = parent.partition("=")
        return f"{s.flag(dest)} {value}"
    if parent in ("moe_flex_dispatcher_backend", "fp8_recipe", "fp4_recipe"):
        return f"{s.flag(parent)} {standing.LATER[parent].values[0]}"
    value = s.default(parent)
    if value is True:  # on unless it is switched off
        return f"what {s.flag(parent)} switches off"
    return f"{s.flag(parent)} above 1" if isinstance(value, int) and not isinstance(value, bool) else s.flag(parent)


def countable(s: Settings, violations: list[Violation]) -> bool:
    """Is the model well defined, so that its parameters can be counted although the line is refused?"""
    if any(violation.kind not in ("later", "product", "machine", "note") for violation in violations):
        return False
    return not any(standing.LATER[dest].refuses(s.values[dest], s.default(dest)) for dest in standing.ARCHITECTURE)
