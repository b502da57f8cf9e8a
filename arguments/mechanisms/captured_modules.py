"""Modules of a layer that --cuda-graph-modules can name: one declaration each."""

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from arguments.mechanisms.layer_modules import LayerModule
from arguments.mechanisms.sublayers import MAMBA, SublayerDeclaration
from arguments.mechanisms.support import Rejected, Support

LAYER = "layer"
"""A full layer, which is captured where no module is named."""


class GraphCapability(Enum):
    """What flags may demand of a captured module; the value is the text of the manual."""

    MLP_CHUNKS = "`--mlp-chunks-for-training`"
    EXCHANGE_OVERLAP = "`--overlap-moe-expert-parallel-comm`"
    PACKED_CHUNKS = "`--attention-chunk-size`, with packed sequences"


@dataclass(frozen=True, kw_only=True)
class CapturedModule(LayerModule[GraphCapability]):
    """Declaration of a module that can be captured as a CUDA graph.

    Attributes:
        is_whole: it is in a graph of a full layer by this name. Otherwise it extends the one that it comes after.
        inside: the module that contains it; "" if none does.
        of_sublayers: kinds of sublayers of which one must be in the pattern, if it is named; () if none must.
        layers: name of layers of these kinds in messages.
        draws: destinations of the flags of random numbers that are drawn inside.
        routes: it contains the router.
    """

    dest: str = "cuda_graph_modules"
    declares = GraphCapability
    is_whole: bool = True
    inside: str = ""
    of_sublayers: tuple[SublayerDeclaration, ...] = ()
    layers: str = ""
    draws: tuple[str, ...] = ()
    routes: bool = False


_CHUNKS = Rejected("the pool of a graph holds the tensors of all chunks", "later")
_MIXER: MappingProxyType[GraphCapability, Support] = MappingProxyType(
    {
        GraphCapability.MLP_CHUNKS: True,
        GraphCapability.EXCHANGE_OVERLAP: True,
        GraphCapability.PACKED_CHUNKS: True,
    }
)
_FEED_FORWARD: MappingProxyType[GraphCapability, Support] = MappingProxyType(
    {**_MIXER, GraphCapability.MLP_CHUNKS: _CHUNKS}
)
_OTHER_BATCH = Rejected("another microbatch cannot run inside a graph of a layer", "later")

CAPTURED_MODULES: tuple[CapturedModule, ...] = (
    CapturedModule(
        key="attn",
        capabilities=MappingProxyType(
            {
                **_MIXER,
                GraphCapability.PACKED_CHUNKS: Rejected(
                    "their chunks begin at other tokens in every microbatch", "later"
                ),
            }
        ),
        part="token mixer",
        draws=("attention_dropout", "hidden_dropout"),
    ),
    CapturedModule(key="mlp", capabilities=_FEED_FORWARD, part="dense feed-forward", draws=("hidden_dropout",)),
    CapturedModule(
        key="moe",
        capabilities=MappingProxyType({**_FEED_FORWARD, GraphCapability.EXCHANGE_OVERLAP: _OTHER_BATCH}),
        part="experts",
        draws=("hidden_dropout", "moe_input_jitter_eps"),
        routes=True,
    ),
    CapturedModule(
        key="moe_router",
        capabilities=_FEED_FORWARD,
        part="experts",
        inside="moe",
        draws=("moe_input_jitter_eps",),
        routes=True,
    ),
    CapturedModule(
        key="moe_preprocess",
        capabilities=_FEED_FORWARD,
        part="experts",
        is_whole=False,
        after=("moe_router", "it comes before"),
    ),
    CapturedModule(
        key="mamba",
        capabilities=_MIXER,
        of_sublayers=(MAMBA,),
        layers="Mamba",
        draws=("hidden_dropout",),
    ),
)
OF_FULL_LAYERS = frozenset((LAYER, *tuple(each.key for each in CAPTURED_MODULES if each.is_whole)))
"""What is captured where no module is named."""


def drawing(dest: str) -> frozenset[str]:
    """Return the modules inside which random numbers of a flag are drawn."""
    return frozenset(each.key for each in CAPTURED_MODULES if dest in each.draws)
