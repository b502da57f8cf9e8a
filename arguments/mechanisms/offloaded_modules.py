"""Modules of a layer that --offload-modules can name: one declaration each."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from arguments.mechanisms.layer_modules import UNBUILT, LayerModule, named
from arguments.mechanisms.support import Rejected, Support


class OffloadCapability(Enum):
    """What flags may demand of an offloaded module; the value is the text of the manual."""

    PAGED_STASH = "`--moe-paged-stash`"
    MLP_CHUNKS = "`--mlp-chunks-for-training`"
    EXPERTS_RECOMPUTED = "`--recompute-modules moe`"


@dataclass(frozen=True, kw_only=True)
class OffloadedModule(LayerModule[OffloadCapability]):
    """Declaration of a module whose saved tensors can be on the host until backward.

    Attributes:
        stands_for: modules that are offloaded if it is named; () if it alone is.
        saves_received: what it saves is of received tokens, inside the experts.
    """

    dest: str = "offload_modules"
    declares = OffloadCapability
    stands_for: tuple[str, ...] = ()
    saves_received: bool = False


_ALL: MappingProxyType[OffloadCapability, Support] = MappingProxyType(
    {
        OffloadCapability.PAGED_STASH: True,
        OffloadCapability.MLP_CHUNKS: True,
        OffloadCapability.EXPERTS_RECOMPUTED: True,
    }
)
_OF_EXPERTS: MappingProxyType[OffloadCapability, Support] = MappingProxyType(
    {
        OffloadCapability.PAGED_STASH: Rejected("the same tensors cannot be in pages and on the host"),
        OffloadCapability.MLP_CHUNKS: Rejected("the tensors of a chunk are recomputed, not offloaded"),
        OffloadCapability.EXPERTS_RECOMPUTED: Rejected("moe contains it"),
    }
)

OFFLOADED_MODULES: tuple[OffloadedModule, ...] = (
    OffloadedModule(key="core_attn", capabilities=_ALL, part="token mixer"),
    OffloadedModule(
        key="attn_proj", capabilities=_ALL, part="token mixer", after=("core_attn", "its input is what core_attn saves")
    ),
    OffloadedModule(key="expert_fc1", capabilities=_OF_EXPERTS, part="experts", saves_received=True),
    OffloadedModule(
        key="fused_group_mlp", capabilities=_OF_EXPERTS, part="experts", stands_for=("expert_fc1", "moe_act")
    ),
    OffloadedModule(key="moe_act", capabilities=_OF_EXPERTS, part="experts", saves_received=True),
    OffloadedModule(key="attn_norm", capabilities=_ALL, part="token mixer"),
    OffloadedModule(key="mlp_norm", capabilities=_ALL, part="feed-forward"),
    OffloadedModule(key="qkv_linear", capabilities=_ALL, part="token mixer"),
    OffloadedModule(
        key="gdp_qkv",
        is_built=False,
        capabilities=MappingProxyType(dict.fromkeys(OffloadCapability, UNBUILT)),
    ),
)


def offloaded_parts(names: Iterable[str]) -> frozenset[str]:
    """Return the parts of a layer whose saved tensors are offloaded if modules are named."""
    names = tuple(names)
    return frozenset(names).union(*(each.stands_for for each in named(OFFLOADED_MODULES, names)))
