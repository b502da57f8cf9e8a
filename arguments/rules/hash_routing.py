"""Hash routing: the layers that it may have, and what a token needs to learn."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes, positive
from arguments.settings import Settings, Violation


def note_layers_without_experts(s: Settings, f: DerivedSizes) -> None:
    count = s.moe_n_hash_layers
    if f.moe_layers is not None and positive(count) and not any(f.moe_layers[:count]):
        s.note_no_effect(s.shown("moe_n_hash_layers"), "none of the first layers that it counts has experts")


def check_hash_layers(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None or not positive(s.moe_n_hash_layers):
        return
    if f.layers is not None and s.moe_n_hash_layers > f.layers:
        yield s.violation("{moe_n_hash_layers} is more than {num_layers}.")
    if s.moe_router_topk == 1 and s.moe_router_score_function != "softmax":
        yield s.violation(
            "{moe_n_hash_layers} needs {moe_router_topk:flag} of at least 2 with {moe_router_score_function}: the "
            "normalized weight of a single expert is always 1, and the router would not learn."
        )
