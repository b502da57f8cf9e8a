"""Modules of a layer that --recompute-modules can name: one declaration each."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from arguments.mechanisms.layer_modules import UNBUILT, LayerModule, Part
from arguments.mechanisms.sublayers import SUBLAYERS, SublayerDeclaration
from arguments.mechanisms.support import Rejected, Support


class RecomputeCapability(Enum):
    """What flags may demand of a recomputed module; the value is the text of the manual."""

    NARROW_INPUTS = "`--fp8-recipe delayed`"
    EXCHANGE_OVERLAP = "`--overlap-moe-expert-parallel-comm`"
    SHARED_EXPERT_OVERLAP = "`--moe-shared-expert-overlap`"
    ADAPTER_DROPOUT = "`--lora-dropout`"
    COMPRESSED_KEYS = "attention to compressed keys"
    ROUTER_GRAPH = "`--cuda-graph-modules moe_router`, `moe_preprocess`"


@dataclass(frozen=True, kw_only=True)
class RecomputedModule(LayerModule[RecomputeCapability]):
    """Declaration of a module that can run again in backward.

    Attributes:
        needs_flag: destination of a flag without which it is rejected, as in Megatron-LM; "" if there is none.
        of_sublayers: kinds of sublayers without which it is rejected; () if all have it.
        runs_in_chunks: --mlp-chunks-for-training recomputes it chunk by chunk.
    """

    dest: str = "recompute_modules"
    declares = RecomputeCapability
    needs_flag: str = ""
    of_sublayers: tuple[SublayerDeclaration, ...] = ()
    runs_in_chunks: bool = False


_ALL: MappingProxyType[RecomputeCapability, Support] = MappingProxyType(
    {
        RecomputeCapability.NARROW_INPUTS: True,
        RecomputeCapability.EXCHANGE_OVERLAP: True,
        RecomputeCapability.SHARED_EXPERT_OVERLAP: True,
        RecomputeCapability.ADAPTER_DROPOUT: True,
        RecomputeCapability.COMPRESSED_KEYS: True,
        RecomputeCapability.ROUTER_GRAPH: True,
    }
)
_SCALES = Rejected("scales of its output follow from earlier iterations, which a second pass would change")
_SCALED_OUTPUT: MappingProxyType[RecomputeCapability, Support] = MappingProxyType(
    {RecomputeCapability.NARROW_INPUTS: _SCALES}
)
_UNBUILT: MappingProxyType[RecomputeCapability, Support] = MappingProxyType(dict.fromkeys(RecomputeCapability, UNBUILT))


def _module(
    key: str,
    part: Part | None = None,
    rejected: Mapping[RecomputeCapability, Support] = MappingProxyType({}),
    needs_flag: str = "",
    of_sublayers: tuple[SublayerDeclaration, ...] = (),
    runs_in_chunks: bool = False,
) -> RecomputedModule:
    return RecomputedModule(
        key=key,
        part=part,
        capabilities=MappingProxyType({**_ALL, **rejected}),
        needs_flag=needs_flag,
        of_sublayers=of_sublayers,
        runs_in_chunks=runs_in_chunks,
    )


RECOMPUTED_MODULES: tuple[RecomputedModule, ...] = (
    _module("core_attn", "attention"),
    _module("moe_act", "experts", _SCALED_OUTPUT, needs_flag="moe_grouped_gemm"),
    _module("layernorm", None, _SCALED_OUTPUT),
    _module(
        "mla_up_proj",
        None,
        MappingProxyType(
            {
                RecomputeCapability.ADAPTER_DROPOUT: Rejected("what is recomputed there draws no random numbers"),
                RecomputeCapability.COMPRESSED_KEYS: Rejected("keys have no up-projection"),
            }
        ),
        needs_flag="multi_latent_attention",
    ),
    _module("mlp", "dense feed-forward", runs_in_chunks=True),
    _module(
        "moe",
        "experts",
        MappingProxyType(
            {
                RecomputeCapability.EXCHANGE_OVERLAP: Rejected("as in Megatron-LM: it contains the exchange"),
                RecomputeCapability.ROUTER_GRAPH: Rejected(
                    "a graph of moe_router cannot run again inside moe", "later"
                ),
            }
        ),
        runs_in_chunks=True,
    ),
    _module(
        "shared_experts",
        "shared experts",
        MappingProxyType(
            {RecomputeCapability.SHARED_EXPERT_OVERLAP: Rejected("as in Megatron-LM: they run during the exchange")}
        ),
        runs_in_chunks=True,
    ),
    _module("gdn_norm_out", of_sublayers=tuple(each for each in SUBLAYERS if each.has_delta_rule)),
    RecomputedModule(key="gdp_in_proj", is_built=False, capabilities=_UNBUILT),
    RecomputedModule(key="gdp_qkv", is_built=False, capabilities=_UNBUILT),
    RecomputedModule(key="mhc", is_built=False, capabilities=_UNBUILT),
)
