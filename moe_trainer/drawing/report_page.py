"""A self-contained HTML page: what a command printed, and pictures of the same numbers."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from moe_trainer.drawing.svg import clean
from moe_trainer.io import atomic_path

_STYLE = """
:root{color-scheme:light dark;--paper:#f2f2f4;--ink:#24262a;--card:#fff;--edge:#d9d9de}
@media (prefers-color-scheme:dark){:root{--paper:#121316;--ink:#e3e4e8;--card:#1b1d21;--edge:#363940}}
body{margin:0 auto;max-width:1240px;padding:24px;background:var(--paper);color:var(--ink);
font:15px/1.5 Helvetica,Arial,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}
figure{margin:0;overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:6px}
figure svg{display:block;width:100%;min-width:640px}
figcaption{padding:0 14px 10px;font-size:13px}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:6px;padding:12px;
font:12px/1.45 Menlo,Consolas,monospace}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:6px;margin:8px 0}
table{border-collapse:collapse;font-size:13px}
th,td{text-align:left;padding:4px 12px;border-bottom:1px solid var(--edge);vertical-align:top}
tr:last-child td{border-bottom:0}
th,.number{white-space:nowrap}
.number{font-variant-numeric:tabular-nums}
code{font:12px/1.45 Menlo,Consolas,monospace;overflow-wrap:anywhere}
td:first-child{min-width:14ch}
td code{display:inline-block;width:max-content;max-width:48ch}
li{overflow-wrap:anywhere}
h3{font-size:14px;margin:20px 0 4px}
pre.command{white-space:pre-wrap;overflow-wrap:anywhere}
"""

_GENERATOR = '<meta name="generator" content="moe-trainer report">'
_HEAD_BYTES = 2048  # of a page, which hold its title
_NUMBER = re.compile(r"-?\d[\d,.]*(e[+-]\d+)?( \+- [\d,.]+)?( \*)?$|-$")
"""A cell that is a number, with its interval, or that has none."""


@dataclass(frozen=True)
class Figure:
    """A picture of a report: its heading, its SVG text, and a sentence on how to read it."""

    heading: str
    svg: str
    caption: str = ""


def report_page(title: str, command: str, figures: Sequence[Figure], lines: Sequence[str]) -> str:
    """Return the page.

    Args:
        title: heading of the page.
        command: the command line that made it.
        figures: from top to bottom.
        lines: what the command printed; a Markdown document if the first line is its title.
    """
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8">{_GENERATOR}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{clean(title)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{clean(title)}</h1>",
        f'<pre class="command">{clean(command)}</pre>',
    ]
    for figure in figures:
        caption = f"<figcaption>{clean(figure.caption)}</figcaption>" if figure.caption else ""
        parts += [f"<h2>{clean(figure.heading)}</h2>", f"<figure>{figure.svg}{caption}</figure>"]
    is_document = bool(lines) and lines[0].startswith("# ")
    parts += _document_parts(title, lines) if is_document else ["<h2>Text output</h2>", *_text_parts(lines)]
    return "\n".join([*parts, "</main></body></html>", ""])


def _document_parts(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown document below the page's title: headings, tables, lists and paragraphs."""
    starts = {"#": "heading", "|": "table", "-": "list", "": "blank"}
    kinds = [starts.get(line[:1], "text") for line in lines]
    for kind, group in groupby(zip(kinds, lines), key=lambda each: each[0]):
        found = [line for _, line in group]
        if kind == "heading":
            for line in found:
                level = "h3" if line.startswith("###") else "h2"
                if line != f"# {title}":
                    yield f"<{level}>{_inline(line.lstrip('# '))}</{level}>"
        elif kind == "table":
            yield f"<div class='table'><table>{''.join(_table_rows(found))}</table></div>"
        elif kind == "list":
            yield f"<ul>{''.join(f'<li>{_inline(line[2:])}</li>' for line in found)}</ul>"
        elif kind == "text":
            yield f"<p>{_inline(' '.join(found))}</p>"


def _inline(text: str) -> str:
    """Return a Markdown text as HTML: what is between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", clean(text))


def _text_parts(lines: Sequence[str]) -> Iterator[str]:
    """Yield what was printed: the headings and tables of Markdown as such, all else as it is."""
    is_markdown = any(line.startswith("|---|") for line in lines)
    starts = {"#": "heading", "|": "table"} if is_markdown else {}
    kinds = [starts.get(line[:1], "text") for line in lines]
    for kind, group in groupby(zip(kinds, lines), key=lambda each: each[0]):
        found = [line for _, line in group]
        if kind == "heading":
            yield from (f"<h3>{clean(line.lstrip('# '))}</h3>" for line in found)
        elif kind == "table":
            yield f"<div class='table'><table>{''.join(_table_rows(found))}</table></div>"
        elif text := "\n".join(found).strip("\n"):
            yield f"<pre>{clean(text)}</pre>"


def _table_rows(lines: Sequence[str]) -> Iterator[str]:
    """Yield the rows of a table of drawing/markdown.py."""
    for number, line in enumerate(line for line in lines if not line.startswith("|-")):
        cells = [cell.replace("\\|", "|") for cell in line[2:-2].split(" | ")]
        tag = "td" if number else "th"
        classes = [" class='number'" if number and _NUMBER.match(cell) else "" for cell in cells]
        texts = (f"<{tag}{name}>{_inline(cell)}</{tag}>" for name, cell in zip(classes, cells))
        yield f"<tr>{''.join(texts)}</tr>"


def write_report(path: str | Path, title: str, command: str, figures: Sequence[Figure], lines: Sequence[str]) -> None:
    """Write the page (--report-html). An older one stays if that fails.

    Raises:
        ValueError: if the file cannot be written.
    """
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(report_page(title, command, figures, lines), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"--report-html {path}: the file cannot be written ({error.strerror})") from None


def report_title(path: Path) -> str | None:
    """Return the title of a report; None if the file is another page or cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    found = re.search("<title>(.*?)</title>", head, re.DOTALL) if _GENERATOR in head else None
    return html.unescape(found[1]) if found else None
