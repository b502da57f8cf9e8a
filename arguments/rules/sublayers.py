"""What kinds of sublayers reject: flags that demand a capability which a model's sublayers do not have."""

from collections.abc import Iterator

from arguments.demands import demands
from arguments.layer_pattern import all_letters, variants_of
from arguments.mechanisms.sublayer_kinds.declaration import PATTERN, SublayerCapability, SublayerDeclaration
from arguments.mechanisms.sublayers import LATENT_ATTENTION, SUBLAYERS
from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Limit, Settings


def limit_sublayers(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for sublayer in (each for each in SUBLAYERS if each.mention):
        rejected = (
            (dest, capability)
            for dest, capability in demands(SublayerCapability).items()
            if sublayer.rejects(capability) and not _is_of_latents(sublayer, capability)
        )
        for dest, capability in rejected:
            yield Limit(
                _is_asked_for(s, sublayer) and s.values[dest] != s.default(dest),
                f"{sublayer.mention} cannot be combined with {{}}: {sublayer.reason(capability)}.",
                (dest,),
            )


def _is_asked_for(s: Settings, sublayer: SublayerDeclaration) -> bool:
    if sublayer.variant is not None:
        return sublayer in variants_of(s)
    if sublayer.switch == PATTERN:
        return sublayer.letter in all_letters(s.hybrid_layer_pattern or "")
    return bool(s.values[sublayer.switch])


def _is_of_latents(sublayer: SublayerDeclaration, capability: SublayerCapability) -> bool:
    """Return whether latent attention, whose flag the sublayer needs, rejects a capability for the same reason."""
    is_same = sublayer.capabilities[capability] == LATENT_ATTENTION.capabilities[capability]
    return is_same and sublayer.reads_latents and sublayer is not LATENT_ATTENTION
