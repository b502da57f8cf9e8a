"""The padded vocabulary: how many rows the embedding and the output head really have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments import Arguments


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int = 1) -> int:
    """Round a vocabulary size up to a multiple of divisible_by * tp; every rank then holds equally many rows."""
    if vocab_size < 1 or divisible_by < 1 or tp < 1:
        raise ValueError(
            f"vocabulary size {vocab_size}, --make-vocab-size-divisible-by {divisible_by} and tensor parallel size "
            f"{tp} must all be positive"
        )
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def vocab_rows_from_flags(args: Arguments) -> int | None:
    """Return the padded vocabulary as far as flags alone tell it, or None when only a tokenizer could say.

    --padded-vocab-size is taken as it is; --vocab-size is padded by --make-vocab-size-divisible-by.
    """
    if args.data.padded_vocab_size:
        return args.data.padded_vocab_size
    if not args.data.vocab_size:
        return None
    return padded_vocab_size(
        args.data.vocab_size, args.model.make_vocab_size_divisible_by, args.parallel.tensor_model_parallel_size
    )
