"""The flag surface: Megatron's flags, read, resolved and judged. Imports neither torch nor moe_trainer."""

from arguments.container import Arguments
from arguments.machine import check_machine
from arguments.parse import find_checkpoint_args_source, parse_args, violations_without_checkpoint
from arguments.settings import ArgumentError, Violation

__all__ = [
    "ArgumentError",
    "Arguments",
    "Violation",
    "check_machine",
    "find_checkpoint_args_source",
    "parse_args",
    "violations_without_checkpoint",
]
