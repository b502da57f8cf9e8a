"""Markdown tables: a row each, whatever is in the cells."""

from moe_trainer.drawing.markdown import markdown_table


def test_bars_and_line_breaks_stay_in_their_cell():
    lines = markdown_table(("name", "value"), [("a|b", 1), ("two\nlines", None)])
    assert lines == ["| name | value |", "|---|---|", "| a\\|b | 1 |", "| two lines | None |"]
    assert markdown_table(["a"], []) == ["| a |", "|---|"]
