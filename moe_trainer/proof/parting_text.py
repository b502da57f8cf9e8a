"""The comparison of two records in words: the first quantity that parts, then a table of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_trainer.guard.record import Record
from moe_trainer.proof.mapping import Mapping as Sizes
from moe_trainer.proof.parting import TOLERANCES, Part, arithmetic_of, coarser

_MOST = 12
"""Rows of one kind that are shown of those that part."""
_WIDTH = 84  # of a name
_OF_ALL_TOKENS = frozenset({"loss", "gradient", "gradient norm"})


def run_in_words(head: Mapping[str, Any]) -> str:
    """Mapping, arithmetic and machine of a run."""
    sizes = head["mapping"]
    mapping = Sizes(sizes["tp"], sizes["cp"], sizes["pp"], 1, sizes["dp"], sizes["ep"], sizes["etp"])
    return f"{mapping}, {head['dtype']}{' with ' + head['quantized'] if head['quantized'] else ''}, {head['device_name']}"


def head_lines(one: Record, other: Record, notes: Sequence[str]) -> Iterator[str]:
    """What is compared, and how closely."""
    head, name = one.head, coarser(one.head, other.head)
    allowed = TOLERANCES[name]
    yield f"recorded: iteration {head['iteration']}, {head['samples']} sequences of {head['seq_length']} tokens; {run_in_words(head)} ({one.folder})"
    yield f"here:     {run_in_words(other.head)}"
    for record, what in ((one, "the recorded run"), (other, "this run")):
        if record.head["failure"]:
            yield f"{what} ended so: {record.head['failure']}"
        if record.head["skipped"]:
            yield f"{what} made no update: {record.head['skipped']}"
    also = "" if arithmetic_of(one.head) == arithmetic_of(other.head) else f", the coarser of {arithmetic_of(one.head)} and {arithmetic_of(other.head)}"
    yield (f"allowed ({name}{also}), relative: outputs {allowed.output:.0e}, losses and gradient norm {allowed.loss:.0e}, gradients {allowed.gradient:.0e}, "
           "other experts: none")
    for note in notes:
        yield f"cannot be equal: {note}"


def first_lines(parts: Sequence[Part], again: Mapping[tuple[str, str], float] | None) -> Iterator[str]:
    """The first quantity that parts. again: what the recorded flags, run again here, give by (kind, name); None if they were not run."""
    first = next((part for part in parts if part.parts), None)
    ties = [part for part in parts if part.ties]
    if ties:
        yield (f"near ties of the routing: {sum(part.ties for part in ties)} tokens, first in {ties[0].name}: rounding chose other experts for them; "
               "what follows from that is not judged")
    if first is None:
        worst = max((part.size for part in parts), default=0.0)
        yield f"equal: {len(parts)} quantities within their tolerances" + ("" if worst else ", bit for bit as far as is recorded")
        return
    yield f"the first tensor that parts: {first.kind}{' of ' if first.name else ''}{first.name}"
    yield f"  apart by {first.size:.3g} (allowed {first.allowed:.0e})" + (f"; {first.where}" if first.where else "")
    if again is not None:
        yield f"  the recorded flags again, on this machine: {again.get((first.kind, first.name), 0.0):.3g}"
    if any(parts.index(part) < parts.index(first) for part in ties):
        yield "  near ties come before it, and may be all of the reason" if first.kind in _OF_ALL_TOKENS else "  near ties come before it, of other tokens"
    count = sum(part.parts for part in parts)
    yield f"  it is the first of {count} of {len(parts)} quantities that part; those before it are equal"


def table_lines(parts: Sequence[Part], everything: bool) -> Iterator[str]:
    """A row for every kind, and one for each quantity that parts (or for all). `*`: beyond its tolerance."""
    yield f"{'':2}{'quantity':{_WIDTH}} {'apart by':>10} {'allowed':>9}"
    for kind in dict.fromkeys(part.kind for part in parts):
        those = [part for part in parts if part.kind == kind]
        parted = [part for part in those if part.parts]
        worst = max(those, key=lambda part: part.size)
        what = kind if len(those) == 1 else f"{kind}: {len(those)}, {len(parted)} part; the farthest {worst.name}"
        yield _row(worst, f"{what} {worst.name}" if len(those) == 1 and worst.name else what, worst.where if len(those) == 1 else "")
        if len(those) > 1:
            shown = those if everything else parted[:_MOST]
            yield from (_row(part, f"  {part.name}", part.where) for part in shown)
            if not everything and len(parted) > _MOST:
                yield f"{'':4}... and {len(parted) - _MOST} more"


def _row(part: Part, what: str, where: str) -> str:
    return f"{'*' if part.parts else ' '} {what:{_WIDTH}} {part.size:10.2e} {part.allowed:9.0e}" + (f"  {where}" if where else "")
