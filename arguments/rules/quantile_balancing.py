"""Quantile balancing: the sizes that its estimate needs."""

from collections.abc import Iterator

from arguments.mechanisms.selection_kinds.quantile_balancing import KIND, QUANTILE_BALANCING
from arguments.rules.derived_sizes import DerivedSizes, divides, positive
from arguments.settings import Settings, Violation


def check_quantile_balancing(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None or not QUANTILE_BALANCING.is_named(s):
        return
    if positive(s.moe_router_topk) and s.moe_router_topk >= f.experts:
        yield s.violation(
            f"{{moe_router_load_balancing_type:flag}} {KIND} needs {{moe_router_topk}} to be below {{num_experts}}: a "
            "token's threshold is the best expert that it does not choose."
        )
    elif (
        positive(s.micro_batch_size)
        and positive(s.seq_length)
        and not divides(f.experts, s.micro_batch_size * s.seq_length * s.moe_router_topk)
    ):
        yield s.violation(
            f"{{moe_router_load_balancing_type:flag}} {KIND} needs an even share per expert: {{micro_batch_size}} "
            "times {seq_length} times {moe_router_topk} must be a multiple of {num_experts}."
        )
