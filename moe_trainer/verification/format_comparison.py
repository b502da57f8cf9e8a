"""Output of the comparison of two records: the first quantity that differs, then a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_trainer.debug.step_record import Record
from moe_trainer.verification.compare_records import TOLERANCES, get_precision, lower_precision
from moe_trainer.verification.comparison import ComparisonRow
from moe_trainer.verification.mapping import ParallelMapping

_MAX_ROWS = 12
"""Rows of one quantity that are printed if they exceed their tolerance."""
_NAME_WIDTH = 84
_OVER_ALL_TOKENS = frozenset({"loss", "gradient", "gradient norm"})


def describe_run(head: Mapping[str, Any]) -> str:
    """Return mapping, precision and device of a run."""
    sizes = head["mapping"]
    mapping = ParallelMapping(sizes["tp"], sizes["cp"], sizes["pp"], 1, sizes["dp"], sizes["ep"], sizes["etp"])
    precision = f"{head['dtype']} with {head['quantized']}" if head["quantized"] else head["dtype"]
    return f"{mapping}, {precision}, {head['device_name']}"


def head_lines(reference: Record, actual: Record, notes: Sequence[str]) -> Iterator[str]:
    """Describe what is compared, and the tolerances."""
    head, precision = reference.head, lower_precision(reference.head, actual.head)
    allowed = TOLERANCES[precision]
    samples = f"{head['samples']} sequences of {head['seq_length']} tokens"
    yield f"recorded: iteration {head['iteration']}, {samples}; {describe_run(head)} ({reference.folder})"
    yield f"replayed: {describe_run(actual.head)}"
    for record, run in ((reference, "the recorded run"), (actual, "the replay")):
        if record.head["failure"]:
            yield f"{run} failed: {record.head['failure']}"
        if record.head["skipped"]:
            yield f"{run} skipped the update: {record.head['skipped']}"
    both = [get_precision(record.head) for record in (reference, actual)]
    suffix = "" if both[0] == both[1] else f", the lower precision of {both[0]} and {both[1]}"
    yield (
        f"allowed relative differences ({precision}{suffix}): outputs {allowed.output:.0e}, losses and gradient norm "
        f"{allowed.loss:.0e}, gradients {allowed.grad:.0e}, chosen experts 0"
    )
    for note in notes:
        yield f"expected difference: {note}"


def first_lines(rows: Sequence[ComparisonRow], repeated: Mapping[tuple[str, str], float] | None) -> Iterator[str]:
    """Describe the first quantity that differs.

    `repeated` has the differences by (quantity, name) of the recorded flags, run again on this machine; None if not
    run.
    """
    first = next((row for row in rows if row.exceeds_tolerance), None)
    near_ties = [row for row in rows if row.num_near_ties]
    if near_ties:
        count = sum(row.num_near_ties for row in near_ties)
        yield (
            f"near ties of the routing: {count} tokens, first in {near_ties[0].name}; rounding chose other experts for "
            "them, and outputs that depend on them are not compared"
        )
    if first is None:
        suffix = "" if any(row.difference for row in rows) else ", bit for bit as far as recorded"
        yield f"equal: {len(rows)} quantities within their tolerances{suffix}"
        return
    yield f"first difference: {first.label}"
    detail = f"; {first.detail}" if first.detail else ""
    yield f"  differs by {first.difference:.3g} (allowed {first.allowed:.0e}){detail}"
    if repeated is not None:
        difference = repeated.get((first.quantity, first.name), 0.0)
        yield f"  with the recorded flags, run again on this machine: {difference:.3g}"
    if any(rows.index(row) < rows.index(first) for row in near_ties):
        includes_all = first.quantity in _OVER_ALL_TOKENS
        yield f"  near ties {'precede it and may be the only cause' if includes_all else 'of other tokens precede it'}"
    count = sum(row.exceeds_tolerance for row in rows)
    yield f"  {count} of {len(rows)} quantities differ; those before this one are equal"


def table_lines(rows: Sequence[ComparisonRow], show_all: bool) -> Iterator[str]:
    """Print a row per quantity, and one per name that exceeds its tolerance (marked `*`) or for all names."""
    yield f"{'':2}{'quantity':{_NAME_WIDTH}} {'difference':>10} {'allowed':>9}"
    for quantity in dict.fromkeys(row.quantity for row in rows):
        of_quantity = [row for row in rows if row.quantity == quantity]
        if len(of_quantity) == 1:
            yield _format_row(of_quantity[0], f"{quantity} {of_quantity[0].name}".rstrip(), of_quantity[0].detail)
            continue
        mismatches = [row for row in of_quantity if row.exceeds_tolerance]
        largest = max(of_quantity, key=lambda row: row.difference)
        summary = f"{quantity}: {len(of_quantity)}, {len(mismatches)} differ; largest difference: {largest.name}"
        yield _format_row(largest, summary, "")
        shown = of_quantity if show_all else mismatches[:_MAX_ROWS]
        yield from (_format_row(row, f"  {row.name}", row.detail) for row in shown)
        if not show_all and len(mismatches) > _MAX_ROWS:
            yield f"{'':4}... and {len(mismatches) - _MAX_ROWS} more"


def _format_row(row: ComparisonRow, label: str, detail: str) -> str:
    mark = "*" if row.exceeds_tolerance else " "
    line = f"{mark} {label:{_NAME_WIDTH}} {row.difference:10.2e} {row.allowed:9.0e}"
    return f"{line}  {detail}" if detail else line
