"""Norms after attention and feed-forward layers, and layers without norms before them."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Limit, Settings, Violation

_NEED_PRE_NORMS = (
    ("apply_residual_connection_post_layernorm", "the residual is the output of that norm"),
    ("fp32_residual_connection", "that norm converts the residual stream to the type of the weights"),
    ("lora_dim", "memory is not planned for their combination"),
)


def check_norms_of_layers(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.pre_layernorm and not (s.post_self_attn_layernorm and s.post_mlp_layernorm):
        yield s.violation(
            "{pre_layernorm:flag} needs {post_self_attn_layernorm:flag} and {post_mlp_layernorm:flag}: otherwise a "
            "layer has no norm."
        )


def limit_layers_without_pre_norms(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for dest, why in _NEED_PRE_NORMS:
        yield Limit(
            not s.pre_layernorm and s.values[dest] != s.default(dest),
            f"{{pre_layernorm:flag}} cannot be combined with {{:flag}}: {why}.",
            (dest,),
        )
