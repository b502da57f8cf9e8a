"""Markdown tables of reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table. Bars and line breaks inside of cells do not end them."""
    return [_row(columns), f"|{'---|' * len(columns)}", *map(_row, rows)]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
