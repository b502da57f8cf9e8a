"""MkDocs hooks of the manual: pages generated at build time, and links that leave docs/.

The flag reference comes from `arguments/` (flag_reference.py). CONTRIBUTING.md, CHANGELOG.md and the benchmark records
are files of the repository outside of docs/; the manual shows them as pages. In the sources a link names the file as it
is in the repository (`../scripts/bench_results/data.md`), so it works in an editor and on a code host too; here it
becomes a link to the page.
"""

import os
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import flag_reference

RECORDS = {
    f"scripts/bench_results/{path.name}": f"records/{path.name}"
    for path in sorted((ROOT / "scripts" / "bench_results").glob("*.md"))
}
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", **RECORDS}
"""File in the repository -> page of the manual."""
ANSWERS, FLAGS, LAST = 3.0, 0.5, 0.001
"""Factors of search: answers to tasks come first, records of decisions and measurements last."""
RANKS = {
    "how_do_i": ANSWERS,
    **dict.fromkeys(
        "design/ records/ refused_flags combinations recipes test_suite testing_without_gpu".split(),
        LAST,
    ),
}
"""Start of a page's name in docs/ -> its factor; of all others 1."""

_FLAG = re.compile(r"--[a-zA-Z][a-zA-Z0-9-]*")
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the pages that are not in docs/."""
    for name, text in flag_reference.pages().items():
        files.append(File.generated(config, f"flags/{name}.md", content=_ranked(text, FLAGS)))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_ranked((ROOT / source).read_text(encoding="utf-8"), LAST)))
    return files


def _ranked(text: str, boost: float) -> str:
    """A generated page with its factor of search."""
    return f"---\nsearch:\n  boost: {boost}\n---\n{text}"


def on_page_markdown(markdown, page, config, files):
    """Rewrite links between docs/ and the rest of the repository; give the page its factor of search."""
    uri = page.file.src_uri
    boost = next((factor for start, factor in RANKS.items() if uri.startswith(start)), None)
    if boost is not None:
        page.meta.setdefault("search", {"boost": boost})
    source = next((source for source, target in PAGES.items() if target == uri), f"docs/{uri}")

    def rewrite(match: re.Match) -> str:
        target = match[2]
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page_uri = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if path == "README.md":
            page_uri = "index.md"
        if page_uri is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(page_uri, posixpath.dirname(uri) or '.')}{match[3] or ''})"

    return _LINK.sub(rewrite, markdown)


def on_page_content(html, page, config, files):
    """Make tables and flags readable.

    Code hosts need the backslash of a pipe in a table's code, and Markdown here would show it. A flag is not broken at
    its hyphens.
    """
    html = re.sub(r"<td\b.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)
    return re.sub(r"<code>[^<]*</code>", lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
