"""The worth of the pieces (pieces.py) as text and as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from moe_trainer.estimate.pieces import Row, Worth

if TYPE_CHECKING:
    from moe_trainer.estimate.plan import Plan

WIDTH = 42


def pieces_lines(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the commands print; the roofline's columns if it was asked."""
    is_asked = any(row.roofline is not None for row in rows)
    models = ("planner", "roofline") if is_asked else ("planner",)
    yield f"--- what each piece is worth on {plan.world_size} x {plan.hardware.name} ---"
    yield "seconds of an iteration without and with a piece, and how much faster it is with it"
    yield " " * (WIDTH + 2) + "   ".join(f"{model:^26s}" for model in models).rstrip()
    for title, is_tried in (("in these flags", False), ("not in these flags, tried", True)):
        chosen = [row for row in rows if row.is_tried == is_tried and row.planner is not None]
        if chosen:
            yield f"{title}:"
        for row in chosen:
            yield f"  {row.piece.name:{WIDTH}s}" + "   ".join(_worth(worth) for worth in _worths(row)).rstrip()
            yield from (f"      {remark}" for remark in remarks(row))
    without = [row for row in rows if row.planner is None]
    if without:
        yield "not counted:"
        yield from (f"  {row.piece.name:{WIDTH}s}{row.reason}" for row in without)


def _worths(row: Row) -> list[Worth]:
    return [worth for worth in (row.planner, row.roofline) if worth is not None]


def _worth(worth: Worth) -> str:
    return f"{worth.without:8.3f} {worth.used:8.3f} {100 * worth.gain:+6.1f} %"


def remarks(row: Row) -> Iterator[str]:
    """Yield what there is to say about a row besides its numbers."""
    for pair in row.piece.published:
        yield f"published: {100 * pair.gain:+.1f} %: {pair.text}"
    if row.piece.note:
        yield row.piece.note
    if not row.agrees:
        why = f": {row.difference}" if row.difference else ""
        yield f"the models differ by more than {100 * row.bar:.0f} %{why}"


def markdown_lines(title: str, command: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield a section with a table of the gains of one command line."""
    yield f"## {title}"
    yield ""
    yield f"`{command}`"
    yield ""
    yield "| piece | | planner | roofline | published | |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        use = "tried" if row.is_tried else "used"
        gains = [f"{100 * worth.gain:+.1f} %" for worth in _worths(row)] or [""]
        published = "; ".join(f"{100 * pair.gain:+.1f} % ({pair.text})" for pair in row.piece.published)
        said = row.reason or ("" if row.agrees else row.difference or f"differ by more than {100 * row.bar:.0f} %")
        cells = (row.piece.name, use, gains[0], gains[1] if len(gains) > 1 else "", published, said.replace("|", "\\|"))
        yield f"| {' | '.join(cells)} |"
    yield ""
