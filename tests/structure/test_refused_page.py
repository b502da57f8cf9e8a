"""The manual's page of refused flags is generated from the tables of the parser."""

from pathlib import Path

from arguments import refused

PAGE = Path(__file__).parents[2] / "docs" / "refused_flags.md"


def test_page_of_refused_flags_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == refused.page(), (
        "make it again: python -m arguments.refused > docs/refused_flags.md"
    )
