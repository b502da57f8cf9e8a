"""Rules: values derived from flags, and what flags must satisfy together.

`resolve` fills in derived values; `check` runs every rule and returns every violation; `derived` lists values that
follow from several flags, under Megatron's names. One module per topic. A rule is a function of the flat `Settings` and
the `DerivedSizes` of the pass. Its name begins with `resolve_` (derives values), `note_` (only explains), `check_`
(yields violations: what is wrong in Megatron-LM too, or in any program) or `limit_` (yields limits of this program,
which the manual lists). Rules run in order of definition; those of a mechanism, such as an optimizer, are found by
its declaration. tests/data/check_sources.json names the rules of Megatron-LM (commit d98e8a64, validate_args and
TransformerConfig) that the checks follow, megatron_differences.py records the deliberate differences, and machine.py
has the rules about the machine.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from arguments import megatron_differences
from arguments.mechanisms.optimizers import OPTIMIZERS
from arguments.mechanisms.placements import PLACEMENTS
from arguments.mechanisms.selections import SELECTIONS
from arguments.mechanisms.sublayers import SUBLAYERS
from arguments.rules import (
    attention,
    checkpoint,
    data,
    dispatcher,
    dynamic_context,
    graph_limits,
    graphs,
    hybrid,
    hyper_connections,
    kernels,
    lora,
    mup,
    norms,
    numbers,
    optimizer,
    overlap,
    packing,
    parallel,
    paths,
    pipeline,
    precision,
    recompute,
    router,
    sft,
    sizes,
    sublayers,
    training,
)
from arguments.rules.derived import derived
from arguments.rules.derived_sizes import DerivedSizes, derive_sizes
from arguments.rules.precedence import command_line_wins
from arguments.settings import Limit, Settings, Violation

__all__ = ["AREAS", "CHECKS", "LIMITS", "RESOLVERS", "check", "derived", "limits", "resolve"]


def _rules_of(mechanisms: Iterable[Any]) -> Iterator[ModuleType]:
    """Return the modules of the mechanisms that have rules."""
    return (import_module(f"{__name__}.{each.key}") for each in mechanisms if each.has_rules)


AREAS = (
    hybrid,
    numbers,
    *tuple(_rules_of(SELECTIONS)),
    sizes,
    mup,
    norms,
    attention,
    sublayers,
    *tuple(_rules_of(SUBLAYERS)),
    lora,
    hyper_connections,
    parallel,
    pipeline,
    router,
    dispatcher,
    *tuple(_rules_of(OPTIMIZERS)),
    *tuple(_rules_of(PLACEMENTS)),
    optimizer,
    precision,
    recompute,
    overlap,
    graphs,
    graph_limits,
    kernels,
    training,
    data,
    dynamic_context,
    packing,
    sft,
    checkpoint,
    paths,
)


def _rules(area: ModuleType, prefixes: tuple[str, ...]) -> tuple[Callable, ...]:
    """Return the functions of a module whose names begin with one of the prefixes, in order of definition."""
    return tuple(
        rule for name, rule in vars(area).items() if name.startswith(prefixes) and rule.__module__ == area.__name__
    )


RESOLVERS = tuple(
    rule
    for area, prefixes in (
        (megatron_differences, ("resolve_",)),
        *((area, ("resolve_", "note_")) for area in AREAS),
        (megatron_differences, ("note_",)),
    )
    for rule in _rules(area, prefixes)
)
CHECKS = tuple(rule for area in AREAS for rule in _rules(area, ("check_",)))
LIMITS = tuple(rule for area in AREAS for rule in _rules(area, ("limit_",)))


def resolve(s: Settings, world_size: int | None) -> None:
    """Fill in derived values and normalisations; never fails on bad values, which `check` reports.

    World_size None: what depends on the number of ranks (the default global batch size) is left open.
    """
    if world_size is None:
        s.note("The number of ranks is not known: rules on it are left out (give --world-size N or set WORLD_SIZE).")
    command_line_wins(s)
    facts, known = derive_sizes(s, world_size), s.changes
    for step in RESOLVERS:
        if s.changes != known:  # few steps write anything
            facts, known = derive_sizes(s, world_size), s.changes
        step(s, facts)


def check(s: Settings, world_size: int | None) -> list[Violation]:
    """Run every rule on resolved settings and return every violation, each once."""
    facts = derive_sizes(s, world_size)
    found = [violation for rule in CHECKS for violation in rule(s, facts)]
    for _, limit in limits(s, facts):
        if limit.applies:
            found.append(s.violation(limit.message, *limit.dests, kind=limit.kind))
    return list(dict.fromkeys(found))


def limits(s: Settings, sizes: DerivedSizes) -> Iterator[tuple[str, Limit]]:
    """Yield every limit of this program with its topic, whether it applies to these settings or not."""
    for rule in LIMITS:
        for limit in rule(s, sizes):
            yield rule.__module__.rpartition(".")[2], limit
