"""What a built model becomes before it trains: parameters that stay as they are, weights in 8 or 4 bits."""

from collections.abc import Sequence

from torch import nn

from arguments import Arguments
from moe_trainer.layers.sparse_attention import freeze_all_but_indexers
from moe_trainer.model.lora import freeze_all_but_adapters
from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel.params import freeze_all_but

_TRAINED_WITHOUT_BACKBONE = ("embedding", "router", "mlp.experts", "layernorm", "final_norm")
"""Parts of the names of parameters that --freeze-backbone trains."""


def freeze_parameters(chunks: Sequence[Transformer], args: Arguments) -> None:
    """Freeze the parameters that the flags do not train, but for those of --freeze-all-layers."""
    if args.model.dsa_indexer_warmup:
        freeze_all_but_indexers(chunks)
    elif args.model.lora_dim is not None:
        freeze_all_but_adapters(chunks, args.model)
    elif args.optimizer.freeze_backbone:
        freeze_backbone(chunks)


def freeze_backbone(chunks: Sequence[nn.Module]) -> None:
    """Freeze all but embedding, norms, routers and routed experts, so that none has a gradient or optimizer state."""
    freeze_all_but(chunks, lambda name: any(part in name for part in _TRAINED_WITHOUT_BACKBONE))


def store_quantized_weights(chunks: Sequence[nn.Module]) -> int:
    """Mark the weights of all quantized layers for storage in 8 or 4 bits, and return their number of elements.

    The parameter buffers allocate the bytes, except those of weights that are stored twice.
    """
    count = 0
    for chunk in chunks:
        for module in chunk.modules():
            for weight, gemms in getattr(module, "quantized_weights", tuple)():
                kind = gemms.recipe.weight_class
                assert kind is not None
                if weight.shape[-1] % kind.elements_per_byte:
                    continue  # a row would end within a byte
                stored = kind.for_param(weight, gemms.recipe.weight, gemms.quantizer, gemms.weight_scale)
                gemms.stored_weight = weight.stored_weight = stored
                count += weight.numel()
    return count
