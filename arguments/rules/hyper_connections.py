"""Hyper-connections: what several residual streams cannot be combined with."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Limit, Settings

_EXCLUDED = (
    ("mtp_num_layers", "prediction layers read one stream"),
    ("fp32_residual_connection", "the streams are mixed in the activation type"),
    ("apply_residual_connection_post_layernorm", "the residual is the streams, and the norm reads their sum"),
    ("pre_layernorm", "the norm reads the sum of the streams"),
    ("post_self_attn_layernorm", "their weights scale the outputs"),
    ("post_mlp_layernorm", "their weights scale the outputs"),
    ("residual_multiplier", "their weights are learned"),
    ("lora_dim", "memory is not planned for their combination"),
)


def limit_hyper_connections(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for other, why in _EXCLUDED:
        yield Limit(
            s.enable_hyper_connections and s.values[other] != s.default(other),
            f"{{enable_hyper_connections}} cannot be combined with {{:flag}}: {why}.",
            (other,),
        )
    yield Limit(
        s.enable_hyper_connections and s.cuda_graph_impl not in (None, "none"),
        "{enable_hyper_connections} cannot be combined with {cuda_graph_impl}: captured parts have one stream.",
        kind="later",
    )
