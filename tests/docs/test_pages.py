"""Length and order of README and manual: what keeps them readable."""

import re
from pathlib import Path

import yaml
from docs.test_commands import FENCE

ROOT = Path(__file__).resolve().parents[2]


def navigation() -> list:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]


def test_groups_of_the_navigation_are_short():
    groups = {title: entries for group in navigation() for title, entries in group.items() if isinstance(entries, list)}
    pages = {name: [page for page in group if page != "flags/index.md"] for name, group in groups.items()}
    assert {name: len(group) for name, group in pages.items() if len(group) > 8} == {}
    assert len(groups) <= 8


def test_readme_and_start_page_are_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "img/dashboard.png" in start and len(re.findall(r"^\| .*\]\(", start, re.MULTILINE)) == 5


def test_lines_of_code_fit_the_column():
    """At 1,280 pixels the manual shows 92 characters of code; a longer line is cut."""
    wide = {
        f"{page.name}: {line}"
        for page in sorted((ROOT / "docs").glob("*.md"))
        for language, _, text in FENCE.findall(page.read_text(encoding="utf-8"))
        for line in text.splitlines()
        if language in ("bash", "python") and len(line) > 92
    }
    assert not wide, wide
