"""How many tokens' logits exist at once in the loss (cross_entropy.py). Without torch: plans count the same."""

CHUNK_BYTES = (
    1 << 26
)  # of logits that exist at once on a CPU, where they do not exist full; four times that on a device
MIN_CHUNK_TOKENS = 256  # fewer rows would starve the GEMMs


def logit_chunk_size(rows: int, columns: int, width: int, *, weight_bytes: int, logit_bytes: int, on_cpu: bool) -> int:
    """Return the number of tokens whose logits exist at once; all if chunks would not save memory.

    In chunks, the weight gradient is accumulated in fp32 from forward on.

    Args:
        rows: tokens.
        columns: of the vocabulary on this rank.
        width: hidden size.
        weight_bytes: of an element of the weight.
        logit_bytes: of a logit.
        on_cpu: whether there is no accelerator.
    """
    step = max(MIN_CHUNK_TOKENS, (CHUNK_BYTES if on_cpu else 4 * CHUNK_BYTES) // (columns * logit_bytes))
    whole, chunked = (
        (rows * logit_bytes + width * weight_bytes) * columns,
        (step * logit_bytes + width * (4 if weight_bytes == 4 else 4 + weight_bytes)) * columns,
    )
    # adding up a narrower format in fp32 is a separate pass, which has to pay
    saves = whole > (1 if weight_bytes >= 4 else 2) * chunked
    return step if saves and step < rows else rows
