"""What keeps sparse attention from gathering the chosen keys (--dsa-attention-form): read by the rules and by the model alike."""

from arguments.model import ModelArgs
from arguments.settings import Settings


def cannot_gather(model: ModelArgs | Settings, quantized: bool) -> tuple[str, str] | None:
    """The destination of the flag that stands in the way, and why; None: nothing does.

    quantized: linears multiply in 8 or 4 bits. Not asked: whether the model has sparse attention at all.
    """
    if quantized:
        return "fp8", "with latents the up-projection is no product of its own that could be quantised"
    if model.attention_dropout:
        return "attention_dropout", "it draws by blocks of consecutive keys"
    if model.dsa_indexer_loss_coeff and not model.dsa_indexer_use_sparse_loss:
        return "dsa_indexer_use_sparse_loss", "without it the indexers' loss multiplies every query with all keys of every head"
    return None
