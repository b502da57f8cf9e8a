"""Number formats: one declaration each, of everything that other code asks of them.

The model is computed and stored in a plain format. The operands of GEMMs may be narrower: `quantized_format` is the
only place that reads the flags which select that, and format_kinds/ declares what they select. The module of such a
format is moe_trainer/quantization/formats/<key>.py. A declaration states for every `FormatCapability` that it acts,
that the flags that demand it are rejected and why, or that they have no effect and why.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from arguments.mechanisms.format_kinds.declaration import FormatCapability, FormatDeclaration, FormatFlags
from arguments.mechanisms.format_kinds.eight_bit import BLOCKWISE, DELAYED, FP8, FP8_CUSTOM, MXFP8, TENSORWISE
from arguments.mechanisms.format_kinds.nvfp4 import FP4_CUSTOM, NVFP4


@dataclass(frozen=True)
class PlainFormat:
    """A format that parameters, gradients and activations may have.

    Attributes:
        name: destination of the flag that asks for it, if there is one.
        num_bytes: of an element.
    """

    name: str
    num_bytes: float


FP32 = PlainFormat("fp32", 4.0)
BF16 = PlainFormat("bf16", 2.0)
FP16 = PlainFormat("fp16", 2.0)
STATE_BYTES = MappingProxyType({each.name: each.num_bytes for each in (FP32, BF16, FP16, PlainFormat(FP8.name, 1.0))})
"""Bytes of an element of the optimizer's state, by the values of the flags of its formats."""
QUANTIZED: tuple[FormatDeclaration, ...] = (
    DELAYED,
    TENSORWISE,
    BLOCKWISE,
    MXFP8,
    FP8_CUSTOM,
    NVFP4,
    FP4_CUSTOM,
)
FLAGS: tuple[FormatFlags, ...] = tuple({each.flags.name: each.flags for each in QUANTIZED}.values())
"""The flags of each width."""
UNPROVABLE = tuple(
    flags for flags in FLAGS if all(each.rejects(FormatCapability.PROOF) for each in QUANTIZED if each.flags is flags)
)
"""Those of the widths in which one process cannot compute what several compute."""
BY_KEY: Mapping[str, FormatDeclaration] = MappingProxyType({each.key: each for each in reversed(QUANTIZED)})
"""Formats by the name of their module, whatever the width that a function chooses from."""
SELECTING_FLAGS = tuple(dest for flags in FLAGS for dest in (flags.name, flags.recipe))
"""Destinations of the flags that select a format of GEMMs."""
NAMED_BY_LAYER = tuple(each for each in QUANTIZED if each.names_layers)
"""Those that files and functions can choose for single layers or tensors."""
SEARCHED_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        key: (f"--{BF16.name}", *words)
        for key, words in (
            (BF16.name, ()),
            *((each.key, each.words) for each in QUANTIZED if each.searched_with is not None),
        )
    }
)
"""Formats of GEMMs that a search can compare, as flags."""
STORING_FLAGS = tuple(dict.fromkeys(each.stored.flag for each in QUANTIZED if each.stored is not None))
"""Destinations of the flags that store weights in a form of their own."""
TRANSPORT = MXFP8
"""The format in which tokens and their gradients may be sent."""
TOKEN_MULTIPLE = 32
"""Multiple of the numbers of tokens that GEMMs take in all formats."""


def plain_format(precision: Any) -> PlainFormat:
    """Return the format of the model's parameters; arguments as of `quantized_format`."""
    return next((each for each in (BF16, FP16) if getattr(precision, each.name)), FP32)


def quantized_format(precision: Any) -> FormatDeclaration | None:
    """Return the format of quantized GEMMs; None if no flag asks for one.

    Args:
        precision: has the fields of PrecisionArgs.
    """
    flags = next((each for each in FLAGS if getattr(precision, each.name)), None)
    return None if flags is None else selected(precision, flags)


def selected(precision: Any, flags: FormatFlags) -> FormatDeclaration:
    """Return the format that the flags of a width select, whether they ask for the width or not."""
    return next(each for each in of_width(flags) if each.key == getattr(precision, flags.recipe))


def quantizes_weight_gradients(precision: Any) -> bool:
    """Return whether the GEMMs of weight gradients are quantized, in whatever format."""
    fmt = quantized_format(precision)
    return fmt is not None and (fmt.flags.wgrad is None or getattr(precision, fmt.flags.wgrad))


def of_width(flags: FormatFlags) -> tuple[FormatDeclaration, ...]:
    """Return the formats of a width."""
    return tuple(each for each in QUANTIZED if each.flags is flags)


def naming_flag(fmt: FormatDeclaration, holds: Callable[[FormatDeclaration], bool]) -> str:
    """Return the destination of the flag that is the reason if something holds for a format: of its width, or of it."""
    return fmt.flags.name if all(map(holds, of_width(fmt.flags))) else fmt.flags.recipe


def list_widths(conjunction: str) -> str:
    """Return the names of all widths, joined by a word."""
    return f" {conjunction} ".join(each.name for each in FLAGS)
