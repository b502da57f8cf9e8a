"""What a built model becomes before it trains: parameters that stay as they are, weights in 8 or 4 bits."""

from collections.abc import Sequence

from arguments import Arguments
from moe_trainer.layers.sparse_attention import freeze_all_but_indexers
from moe_trainer.model.lora import freeze_all_but_adapters
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.finermoe import freeze_backbone
from moe_trainer.quantization import iteration


def freeze_parameters(chunks: Sequence[Transformer], args: Arguments) -> None:
    """Freeze the parameters that the flags do not train, but for those of --freeze-all-layers."""
    if args.model.dsa_indexer_warmup:
        freeze_all_but_indexers(chunks)
    elif args.model.lora_dim is not None:
        freeze_all_but_adapters(chunks, args.model)
    elif args.optimizer.freeze_backbone:
        freeze_backbone(chunks)


def store_quantized_weights(chunks: Sequence[Transformer]) -> int:
    """Mark the weights of all quantized layers for storage in 8 or 4 bits, and return their number of elements."""
    return iteration.store_quantized_weights(chunks)
