"""The embedding and the output layer: their names, and their number of rows, the padded vocabulary size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments.container import Arguments

# what the names of weights with padded rows begin with: a checkpoint may have other padding than the model
VOCABULARY_KEYS = ("embedding.word_embeddings.", "output_layer.")


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int = 1, pad: bool = True) -> int:
    """Round a vocabulary size up to a multiple of divisible_by * tp, so that every rank holds equally many rows.

    pad False (--no-pad-vocab-size) leaves it as it is.

    Raises:
        ValueError: if a size is not positive.
    """
    if vocab_size < 1 or divisible_by < 1 or tp < 1:
        raise ValueError(
            f"vocabulary size {vocab_size}, --make-vocab-size-divisible-by {divisible_by} and tensor-parallel size "
            f"{tp} must all be positive"
        )
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple if pad else vocab_size


def get_padded_vocab_size(args: Arguments, vocab_size: int) -> int:
    """Return --padded-vocab-size if it is set, else a tokenizer's vocabulary size padded as the flags ask for."""
    return args.data.padded_vocab_size or padded_vocab_size(
        vocab_size,
        args.model.make_vocab_size_divisible_by,
        args.parallel.tensor_model_parallel_size,
        args.data.pad_vocab_size,
    )


def padded_vocab_size_from_flags(args: Arguments) -> int | None:
    """Return the padded vocabulary size from flags alone, or None if only a tokenizer determines it."""
    if args.data.padded_vocab_size:
        return args.data.padded_vocab_size
    return get_padded_vocab_size(args, args.data.vocab_size) if args.data.vocab_size else None


def choose_padded_vocab_size(args: Arguments, vocab_size: int, saved_size: Callable[[str], int | None]) -> int:
    """Return the padded vocabulary size to build the model with; `saved_size` returns that of a checkpoint directory.

    The padding depends on the tensor-parallel size and is part of the softmax: the loss of a run resumed with another
    size would jump by the logarithm of the growth. So the checkpoint's size is used if it holds the tokenizer's
    vocabulary and divides among the ranks, unless --padded-vocab-size is on the command line.
    """
    size = get_padded_vocab_size(args, vocab_size)
    if "padded_vocab_size" in args.typed:
        return size
    for folder in (args.output.load, args.output.pretrained_checkpoint):
        saved = None if folder is None else saved_size(folder)
        if saved is not None:
            return size if saved < vocab_size or saved % args.parallel.tensor_model_parallel_size else saved
    return size
