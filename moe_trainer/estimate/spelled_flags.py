"""Command lines that name a preset or a checkpoint, with their values as flags, so that each of them can be changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from arguments.parse import flags_from_checkpoint
from arguments.recipe import load
from arguments.spelling import to_command_line
from arguments.tokens import drop_flags, parse_tokens

_ASKS = frozenset(
    "use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args".split()
)


def spell_preset(argv: Sequence[str], dests: frozenset[str]) -> list[str]:
    """Return the command line with its preset as flags if the preset sets one of these destinations.

    Some flags have no value that undoes a preset's.
    """
    name = parse_tokens(argv).last("preset")
    if name is None:
        return list(argv)
    given = {flag.dest: flag.value for flag in load(name, os.environ).parsed.given}
    if not dests.intersection(given):
        return list(argv)
    return [*to_command_line(given), *drop_flags(argv, frozenset(("preset",)))]


def spell_recorded(argv: Sequence[str], recorded: Mapping[str, object] | None) -> list[str]:
    """Return the command line with what --use-checkpoint-args takes of these recorded flags; None: without them.

    Raises:
        ValueError: if the command line contradicts them.
    """
    if recorded is None:
        return [*argv]
    taken = flags_from_checkpoint([*argv], recorded)
    dests = frozenset(taken) | _ASKS
    return [*drop_flags(spell_preset(argv, dests), dests), *to_command_line(taken)]
