"""Help texts and messages name what the user typed."""

import pytest

from arguments.program import as_typed
from moe_trainer.commands import doctor, evaluate


@pytest.mark.parametrize("command, text, count", [("doctor", doctor.__doc__, 3), ("evaluate", evaluate.__doc__, 1)])
def test_columns_of_an_installed_command_stay_aligned(monkeypatch, command, text, count):
    monkeypatch.setattr("sys.argv", [f"moe-trainer {command}"])
    typed = as_typed(command, text)
    assert f"torchrun --nproc-per-node 8 -m moe_trainer {command}" in typed and "scripts/" not in typed
    pairs = [*zip(text.splitlines(), typed.splitlines(), strict=True)]
    columns = [[line.rfind("   ") for line in pair] for pair in pairs if "   " in pair[0].strip()]
    assert len(columns) >= count and all(old == new for old, new in columns), typed
