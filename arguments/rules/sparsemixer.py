"""SparseMixer: how many experts it chooses."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Settings, Violation


def check_sparsemixer(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_router_sparsemixer_jitter is not None and s.moe_router_topk != 2:
        yield s.violation(
            "{moe_router_sparsemixer_jitter:flag} needs {moe_router_topk:flag} 2: SparseMixer has two choices."
        )
