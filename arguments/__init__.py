"""The flag surface: Megatron's flags, read, resolved and judged. Imports neither torch nor moe_trainer."""

from arguments.container import Arguments
from arguments.parse import parse_args
from arguments.settings import ArgumentError, Violation

__all__ = ["ArgumentError", "Arguments", "Violation", "parse_args"]
