"""The parser of a command's own options, which names the command as the user typed it."""

import argparse
from typing import Any

from arguments.program import as_typed, program_name


def make_command_parser(
    command: str, doc: str, *, allow_abbrev: bool = False, **options: Any
) -> argparse.ArgumentParser:
    """Return a parser whose description is the docstring of the command's module, with its lines kept.

    Args:
        allow_abbrev: not where other words are flags of the trainer.
        options: further ones of ArgumentParser.
    """
    return argparse.ArgumentParser(
        prog=program_name(command),
        description=as_typed(command, doc),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
        **options,
    )
