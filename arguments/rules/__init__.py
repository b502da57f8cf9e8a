"""What follows from flags, and what they must satisfy together.

`resolve` fills in derived values and silent normalisations; `check` runs every rule and returns every violation;
`derived` lists what follows from several flags at once, under Megatron's names. One module per area; each rule is one
small function over the flat `Settings` and the `Facts` of the pass. Deliberate differences from Megatron-LM are on
record in `kinder.py`. Nothing here looks at the machine: see `arguments.machine`.
"""

from arguments.rules import (
    attention,
    checkpoint,
    data,
    dispatcher,
    finermoe,
    graph_limits,
    graphs,
    kernels,
    kinder,
    mup,
    numbers,
    optimizer,
    overlap,
    parallel,
    pipeline,
    precision,
    recompute,
    router,
    sizes,
    sparse_attention,
    training,
)
from arguments.rules.derived import derived
from arguments.rules.facts import gather
from arguments.rules.precedence import command_line_wins
from arguments.settings import Settings, Violation

__all__ = ["AREAS", "check", "derived", "resolve"]

AREAS = (
    numbers, finermoe, sizes, mup, attention, sparse_attention, parallel, pipeline, router, dispatcher, optimizer, precision, recompute, overlap, graphs,
    graph_limits, kernels,
    training, data, checkpoint,
)  # fmt: skip


def resolve(s: Settings, world_size: int | None) -> None:
    """Fill in derived values and normalisations; never fails on bad values, which `check` reports.

    World_size None: what depends on the number of ranks (the default global batch size) is left open.
    """
    if world_size is None:
        s.note("The number of ranks is not known: rules on it are left out (give --world-size N or set WORLD_SIZE).")
    command_line_wins(s)
    facts, known = gather(s, world_size), s.changes
    for step in (*kinder.RESOLVE, *(step for area in AREAS for step in area.RESOLVE), *kinder.RESOLVE_LAST):
        if s.changes != known:  # few steps write anything
            facts, known = gather(s, world_size), s.changes
        step(s, facts)


def check(s: Settings, world_size: int | None) -> list[Violation]:
    """Run every rule on resolved settings and return every violation, each once."""
    facts = gather(s, world_size)
    found = [violation for area in AREAS for rule in area.CHECKS for violation in rule(s, facts)]
    return list(dict.fromkeys(found))
