"""The padded vocabulary: how many rows the embedding and the output head really have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from arguments.vocabulary import padded_vocab_size

if TYPE_CHECKING:
    from arguments import Arguments


def vocab_rows_from_flags(args: Arguments) -> int | None:
    """Return the padded vocabulary as far as flags alone tell it, or None when only a tokenizer could say.

    --padded-vocab-size is taken as it is; --vocab-size is padded by --make-vocab-size-divisible-by unless --no-pad-vocab-size.
    """
    if args.data.padded_vocab_size:
        return args.data.padded_vocab_size
    if not args.data.vocab_size:
        return None
    return vocab_rows(args, args.data.vocab_size)


def rows_to_build(args: Arguments, vocab_size: int, saved_rows: Callable[[str], int | None]) -> int:
    """Return the rows to build: those of the checkpoint to load where they hold the tokenizer's vocabulary and divide, else what the flags say.

    The padding depends on the tensor-parallel size and takes part in the softmax: a run resumed under another mapping would jump by the
    logarithm of its growth. --padded-vocab-size decides where it is typed. saved_rows: the rows of a checkpoint folder, None where it
    has none.
    """
    rows = vocab_rows(args, vocab_size)
    if "padded_vocab_size" in args.typed:
        return rows
    for folder in (args.output.load, args.output.pretrained_checkpoint):
        saved = None if folder is None else saved_rows(folder)
        if saved is not None:
            return rows if saved < vocab_size or saved % args.parallel.tensor_model_parallel_size else saved
    return rows


def vocab_rows(args: Arguments, vocab_size: int) -> int:
    """Return the padded form of a tokenizer's vocabulary size under these flags; --padded-vocab-size wins."""
    return args.data.padded_vocab_size or padded_vocab_size(
        vocab_size,
        args.model.make_vocab_size_divisible_by,
        args.parallel.tensor_model_parallel_size,
        args.data.pad_vocab_size,
    )
