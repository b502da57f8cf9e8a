"""Sparse attention of DeepSeek-V3.2 (DSA): latent attention to keys that an indexer selects."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability, SublayerDeclaration
from arguments.mechanisms.sublayer_kinds.latent_attention import LATENT_ATTENTION
from arguments.mechanisms.support import Rejected

SPARSE_ATTENTION = SublayerDeclaration(
    key="sparse_attention",
    name="sparse attention",
    built_by="mla.MultiLatentAttention",
    letter="D",
    variant="dsa",
    is_attention=True,
    reads_latents=True,
    has_indexer=True,
    selects_keys=True,
    is_megatron_attention=True,
    kernel="sparse-attention",
    has_rules=True,
    capabilities=MappingProxyType(
        {
            **LATENT_ATTENTION.capabilities,
            SublayerCapability.INDEXER_LOSS: True,
            SublayerCapability.SINKS: Rejected("the loss of the indexers has no place for an attention sink"),
            SublayerCapability.WINDOW: Rejected("the indexers select the keys"),
            SublayerCapability.CHUNKS: Rejected("the indexers select the keys"),
            SublayerCapability.QK_CLIP: Rejected("it reads the logits of all keys, not of the selected ones"),
            SublayerCapability.MAX_LOGITS: Rejected("it reads the logits of all keys, not of the selected ones"),
            SublayerCapability.LINEAR_LAYERS: Rejected("every layer has an indexer"),
            SublayerCapability.GRAPHS: Rejected("the loss of the indexers is recorded outside of graphs"),
            SublayerCapability.ADAPTER_DROPOUT: Rejected(
                "it multiplies by the weights of latents directly, where an adapter has no input"
            ),
        }
    ),
)
