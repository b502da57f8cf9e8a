"""Compressed attention of DeepSeek-V4: a window, and compressed keys among which an indexer selects."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability, SublayerDeclaration
from arguments.mechanisms.sublayer_kinds.latent_attention import LATENT_ATTENTION
from arguments.mechanisms.support import Rejected

COMPRESSED_ATTENTION = SublayerDeclaration(
    key="compressed_attention",
    name="compressed attention",
    built_by="compressed_attention.CompressedAttention",
    variant="dsv4_hybrid",
    is_attention=True,
    reads_latents=True,
    has_indexer=True,
    compresses_keys=True,
    is_megatron_attention=True,
    is_upstream=False,
    has_rules=True,
    capabilities=MappingProxyType(
        {
            **LATENT_ATTENTION.capabilities,
            **dict.fromkeys(
                (SublayerCapability.WINDOW, SublayerCapability.CHUNKS),
                Rejected("--csa-window-size has the window of all layers"),
            ),
            **dict.fromkeys(
                (SublayerCapability.DOCUMENTS, SublayerCapability.PACKED_SAMPLES),
                Rejected("compressed keys would join documents or samples"),
            ),
            SublayerCapability.CONTEXT_PARALLEL: Rejected("compressed keys join tokens of several ranks"),
            SublayerCapability.INDEXER_LOSS: Rejected("its indexers do not learn yet"),
            SublayerCapability.SINKS: Rejected("every head has a learned sink already"),
            SublayerCapability.TEMPERATURE: Rejected("its queries are normalized"),
            SublayerCapability.QK_CLIP: Rejected("it rescales weights of keys that have no values of their own here"),
            SublayerCapability.MAX_LOGITS: Rejected("the logits of compressed keys are not tracked"),
            SublayerCapability.LAYERS_WITHOUT_ROPE: Rejected("compressed keys need positions"),
            SublayerCapability.LAYER_ROTARY_BASES: Rejected(
                "--csa-compress-rotary-base is that of layers with compressed keys"
            ),
            SublayerCapability.ROTARY_PERCENT: Rejected("--qk-pos-emb-head-dim channels are rotated"),
            SublayerCapability.FUSED_DOWN_PROJ: Rejected("its down-projections are separate"),
            SublayerCapability.HEAD_GATES: Rejected("its outputs have no gates"),
            SublayerCapability.LINEAR_LAYERS: Rejected("every layer has this attention"),
            SublayerCapability.MTP: Rejected("prediction layers have one rotary embedding, that of the model"),
            SublayerCapability.ADAPTERS: Rejected("adapters are not planned for its projections"),
            SublayerCapability.FROZEN_BACKBONE: Rejected("its compressors are neither norms nor projections"),
            SublayerCapability.MUP: Rejected("nothing scales its compressors"),
            SublayerCapability.GRAPHS: Rejected("its blocks are not captured"),
            SublayerCapability.QUANTIZED: Rejected("its compressors are computed in high precision only"),
            SublayerCapability.OFFLOAD: Rejected("single parts are not offloaded"),
            SublayerCapability.UPCYCLING: Rejected("there is no dense model of such layers"),
            SublayerCapability.LEGACY_FORMAT: Rejected("the format has no known places for its parameters"),
        }
    ),
)
