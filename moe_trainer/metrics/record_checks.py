"""What the dashboard's page can draw of a record.

Any program may have written a metrics file, so values of other types are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moe_trainer.metrics.run_state import STATES

_MAX_DRAWN = 1e300  # largest number that the page can draw
_MAX_DEPTH = 8  # of what describes a run
_HEAD_TYPES = MappingProxyType(
    {
        "model": Mapping,
        "mapping": Mapping,
        "hardware": Mapping,
        "versions": Mapping,
        "settings": Mapping,
        "all_settings": Mapping,
        "started": int | float,
        "total_parameters": int | float,
        "active_parameters": int | float,
        "num_experts": int | float,
        "train_iters": int,
        "seq_length": int,
        "topk": int,
        "hostnames": list,
        "warnings": list,
    }
)
_NESTED = ("routing", "rejected", "own_time_ms", "run", "packing", "validation", "task", "saved", "sample", "ended")


def checked_record(record: Any) -> dict[str, Any] | None:
    """Return the fields of a record that the page can draw; None if it is not a record."""
    if not isinstance(record, Mapping) or not isinstance(record.get("iteration"), int):
        return None
    if not is_number(record["iteration"]):
        return None
    checked = {name: value for name, value in record.items() if is_number(value) and name not in _NESTED}
    for kind, texts in (("validation", ()), ("task", ("metric",)), ("sample", ("text",)), ("ended", ("reason",))):
        if kind in record:
            found = {name: record.get(name) for name in (kind, *texts)}
            is_known = kind != "ended" or found[kind] in STATES
            if not is_known or not all(isinstance(value, str) for value in found.values()):
                return None
            head = record.get("run")
            return checked | found | ({"run": _checked_head(head)} if isinstance(head, Mapping) else {})
    times = record.get("own_time_ms")
    if isinstance(times, Mapping) and (found := _checked_times(times)):
        checked["own_time_ms"] = found
    rejected = record.get("rejected")
    if isinstance(rejected, list):
        types = {"iteration": int, "because": str}
        checked["rejected"] = [
            entry
            for entry in rejected
            if isinstance(entry, Mapping) and all(isinstance(entry.get(name), kind) for name, kind in types.items())
        ]
    saved = record.get("saved")
    if isinstance(saved, list):
        checked["saved"] = [each for each in saved if isinstance(each, int)]
    packing = record.get("packing")
    if isinstance(packing, Mapping):
        checked["packing"] = {str(name): value for name, value in packing.items() if is_number(value)}
    if isinstance(record.get("run"), Mapping):
        checked["run"] = _checked_head(record["run"])
    routing = record.get("routing")
    if isinstance(routing, Mapping):
        plain = {name: value for name, value in routing.items() if name != "between_ranks"}
        if _is_routing(plain):
            checked["routing"] = plain
            between = routing.get("between_ranks")
            if isinstance(between, Mapping) and _is_between_ranks(between):
                plain["between_ranks"] = {name: between[name] for name in ("ranks_per_row", "tokens")}
    return checked


def _checked_head(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe a run and have the expected types."""
    head = _of_expected_types(_drawable(run, _MAX_DEPTH))
    return head | {name: _of_expected_types(head[name]) for name in ("model", "hardware") if name in head}


def _of_expected_types(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if isinstance(value, _HEAD_TYPES.get(name, object))}


def _drawable(value: Any, depth: int) -> Any:
    """Return a value with None for numbers that cannot be drawn and for what is nested deeper."""
    if isinstance(value, Mapping):
        return {str(name): _drawable(each, depth - 1) for name, each in value.items()} if depth else None
    if isinstance(value, list):
        return [_drawable(each, depth - 1) for each in value] if depth else None
    return value if isinstance(value, str | bool) or is_number(value) else None


def _checked_times(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of `own_time_ms` that have the expected types."""
    found: dict[str, Any] = {}
    if isinstance(times.get("stragglers"), list):
        found["stragglers"] = [rank for rank in times["stragglers"] if isinstance(rank, int)]
    if isinstance(times.get("parts"), Mapping):
        found["parts"] = {str(name): value for name, value in times["parts"].items() if is_number(value)}
    ranks, memory = times.get("ranks"), times.get("memory_mb")
    if isinstance(ranks, list) and ranks and _are_numbers(ranks, len(ranks)) and None not in ranks:
        found["ranks"] = ranks
        if _are_numbers(memory, len(ranks)):
            found["memory_mb"] = memory
    return found


def _is_routing(routing: Mapping[str, Any]) -> bool:
    """Return whether it has numbers for every layer, and equally many experts in each."""
    if not isinstance(layers := routing.get("layers"), list) or not layers:
        return False
    loads = routing.get("tokens_per_expert")
    lists = [value for name, value in routing.items() if name not in ("tokens_per_expert", "straggler_cost")]
    required = ("load_max_over_mean", "load_entropy", "dead_experts", "rank_max_over_mean")
    return (
        is_number(routing.get("straggler_cost"))
        and all(name in routing for name in required)
        and all(_are_numbers(values, len(layers)) for values in lists)
        and isinstance(loads, list)
        and len(loads) == len(layers)
        and all(isinstance(row, list) and row and _are_numbers(row, len(loads[0])) for row in loads)
    )


def _is_between_ranks(between: Mapping[str, Any]) -> bool:
    """Return whether it has a square of numbers."""
    tokens = between.get("tokens")
    return (
        isinstance(between.get("ranks_per_row"), int)
        and isinstance(tokens, list)
        and bool(tokens)
        and all(_are_numbers(row, len(tokens)) and None not in row for row in tokens)
    )


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(is_number, values))


def is_number(value: Any) -> bool:
    """Return whether the page can draw a value; None stands for a number that JSON cannot represent."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_DRAWN)
