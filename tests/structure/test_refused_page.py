"""The manual's page on what is refused is made of the tables that refuse."""

from pathlib import Path

from arguments import refused

PAGE = Path(__file__).parents[2] / "docs" / "refused_flags.md"


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text(encoding="utf-8") == refused.page(), (
        "make it again: python -m arguments.refused > docs/refused_flags.md"
    )
