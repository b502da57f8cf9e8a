"""The padded vocabulary: pure arithmetic that the rules, the parameter counts and the model share."""


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int = 1, pad: bool = True) -> int:
    """Round a vocabulary size up to a multiple of divisible_by * tp; every rank then holds equally many rows.

    pad False (--no-pad-vocab-size) leaves it as it is.
    Raises: ValueError when a size is not positive.
    """
    if vocab_size < 1 or divisible_by < 1 or tp < 1:
        raise ValueError(
            f"vocabulary size {vocab_size}, --make-vocab-size-divisible-by {divisible_by} and tensor parallel size "
            f"{tp} must all be positive"
        )
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple if pad else vocab_size
