"""The combinations that the manual calls refused are (tests/structure/test_refused_page.py compares the rest)."""

import pytest

from arguments import refused
from arguments.parse import resolve_command_line
from tests.arguments.rule_lines import changed


@pytest.mark.parametrize("flags", [flags for flags, _ in refused.COMBINATIONS])
def test_combinations_listed_as_refused_are_rejected(flags):
    """Each by a violation that names two of its flags; graphs without further flags stand alone."""
    spelled = {word for word in flags.split() if word.startswith("--")}
    alone = spelled <= {"--cuda-graph-impl", "--no-check-for-nan-in-loss-and-grad"}
    assert any(
        len(spelled & set(violation.flags)) >= 2 - alone for violation in resolve_command_line(changed(flags), 8)[1]
    ), flags
