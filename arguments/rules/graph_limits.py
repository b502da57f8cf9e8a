"""What cannot be captured as CUDA graphs, with the reason; graphs.py has Megatron-LM's rules.

A captured module runs its Python once. Modules that draw from a separate random stream, wait for the host, or have
shapes that depend on the routing are not captured. Modules: attn, mamba, mlp, moe_router (with
moe_preprocess), moe, full layers, the full iteration.
"""

from collections.abc import Iterator

from arguments.layer_pattern import hybrid_letters
from arguments.mechanisms.captured_modules import CAPTURED_MODULES, LAYER, OF_FULL_LAYERS, GraphCapability, drawing
from arguments.mechanisms.dispatchers import SELECTABLE, DispatcherCapability, get_dispatcher
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import QUANTIZED, quantized_format
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import PLACEMENTS, get_placement
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import SELECTIONS
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.support import keys_rejecting, keys_with, rejected_flags, rejecting
from arguments.moe import is_padded_to_capacity
from arguments.mtp import num_mtp_depths
from arguments.rules.derived_sizes import DerivedSizes, as_list, moe_pattern
from arguments.rules.packing import is_packed
from arguments.settings import Limit, Settings, Violation
from arguments.stored_weights import stored_weight_format
from arguments.te_support import can_quantize_experts

IMPL, MODULES = "cuda_graph_impl", "cuda_graph_modules"
DROPLESS = tuple(each for each in SELECTABLE if each.supports(DispatcherCapability.DROPLESS_GRAPH))
"""Dispatchers whose receive buffers of a fixed size a graph can hold."""


def dropless_names() -> str:
    return " or ".join(each.name for each in DROPLESS)


def module_names(value: object) -> list[str]:
    """Return names of modules, splitting words with several (`attn,moe_router`)."""
    return [name for word in as_list(value) for name in str(word).replace(",", " ").split()]


def captured_parts(s: Settings) -> set[str]:
    """Return the captured modules: all of them for full layers and iterations, none for a rejected iteration."""
    if s.cuda_graph_impl == "none" or _iteration_varies(s):
        return set()
    return set(module_names(s.cuda_graph_modules) or OF_FULL_LAYERS)


def _graph_flag(s: Settings) -> str:
    """Return the flag that requested graphs."""
    return next((s.flag(old) for old in ("enable_cuda_graph", "external_cuda_graph") if s.given(old)), s.describe(IMPL))


def _not_captured(applies: object, part: str, dest: str, reason: str) -> Limit:
    """Return the limit of a flag, which graphs may hold later, whatever declarations say of it in other words."""
    return Limit(
        applies,
        f"{{cuda_graph_impl}} cannot capture {part} with {{}}: {reason}. Leave one of the two out.",
        (dest,),
        "later",
    )


def has_fixed_receive_buffer(s: Settings) -> bool:
    """Return whether dropless experts receive into a buffer that a graph can hold: its size is fixed."""
    return s.moe_expert_rank_capacity_factor is not None and get_dispatcher(s).supports(
        DispatcherCapability.DROPLESS_GRAPH
    )


def _iteration_varies(s: Settings) -> bool:
    """Return whether the full iteration is to be captured although experts receive varying numbers of tokens."""
    if (
        s.cuda_graph_impl != "full_iteration"
        or not s.num_experts
        or is_padded_to_capacity(s)
        or has_fixed_receive_buffer(s)
    ):
        return False
    pattern = moe_pattern(s.moe_layer_freq, s.num_layers)
    return pattern is None or any(pattern) or num_mtp_depths(s.values) > 0


def note_own_graphs(s: Settings, _f: DerivedSizes) -> None:
    if s.cuda_graph_impl == "transformer_engine":
        s.note(
            f"{_graph_flag(s)}: the same parts are captured as with local, by this program itself (TransformerEngine's "
            "make_graphed_callables stores one graph per microbatch of the batch; here there is one per microbatch in "
            "flight)."
        )


def note_preprocess_not_captured(s: Settings, f: DerivedSizes) -> None:
    """Note why moe_preprocess is not captured: the number of tokens must be known in advance."""
    captured = captured_parts(s)
    if f.experts is None or "moe_preprocess" not in captured or captured & {"moe", "layer"}:
        return
    dispatcher, placement, reason = get_dispatcher(s), get_placement(s, f.ep), None
    if f.ep * f.etp > 1 and not dispatcher.supports(DispatcherCapability.PREPROCESS_GRAPH):
        reason = dispatcher.reason(DispatcherCapability.PREPROCESS_GRAPH)
    elif placement.dest is not None and not placement.supports(PlacementCapability.PREPROCESS_GRAPH):
        reason = f"{s.shown(placement.dest)} {placement.reason(PlacementCapability.PREPROCESS_GRAPH)}"
    elif not dispatcher.supports(DispatcherCapability.PREPROCESS_GRAPH) and (
        s.moe_router_padding_for_quantization
        or s.moe_expert_capacity_factor is not None
        and not is_padded_to_capacity(s)
    ):
        reason = "the number of tokens depends on the routing"
    if reason is not None:
        s.note(f"{_graph_flag(s)} with moe_preprocess: moe_preprocess is not captured ({reason}); moe_router is.")


def limit_full_iteration_shapes(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """Report one reason only: removing another flag would not make such a graph possible."""
    yield Limit(
        _iteration_varies(s),
        "{cuda_graph_impl:flag} full_iteration: the full iteration of a dropless MoE model is captured with "
        f"{dropless_names()}'s fixed receive buffer only: use {' '.join(DROPLESS[0].words)} with "
        "{moe_expert_rank_capacity_factor:flag}, --moe-expert-capacity-factor with "
        "{moe_pad_expert_input_to_capacity:flag}, or {cuda_graph_impl:flag} local --cuda-graph-modules attn "
        "moe_router.",
        kind="later",
    )


def limit_full_layer_shapes(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    has_experts = f.experts is not None and (f.moe_layers is None or any(f.moe_layers) or f.mtp_depths)
    yield Limit(
        "layer" in captured_parts(s)
        and has_experts
        and not is_padded_to_capacity(s)
        and not has_fixed_receive_buffer(s),
        "{cuda_graph_impl} without {cuda_graph_modules:flag} captures full layers, and the number of tokens per expert "
        "varies: use --moe-expert-capacity-factor with {moe_pad_expert_input_to_capacity:flag}, "
        f"--moe-expert-rank-capacity-factor with the {dropless_names()} dispatcher, or --cuda-graph-impl local "
        "--cuda-graph-modules attn moe_router moe_preprocess.",
        kind="later",
    )


def check_preprocess(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """As in Megatron-LM."""
    is_captured = s.num_experts and "moe_preprocess" in captured_parts(s)
    if not is_captured or not get_dispatcher(s).supports(DispatcherCapability.PREPROCESS_GRAPH):
        return
    text = "{cuda_graph_impl} cannot capture moe_preprocess with {}: it orders a fixed number of tokens."
    if s.moe_expert_capacity_factor is not None and not is_padded_to_capacity(s):
        yield s.violation(text, "moe_expert_capacity_factor", kind="later")
    if s.moe_router_padding_for_quantization:
        yield s.violation(text, "moe_router_padding_for_quantization", kind="later")


def limit_dropless_experts(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """Reject what needs token counts on the host, or runs another microbatch between two parts of a graph."""
    is_on = (
        s.num_experts and "moe" in captured_parts(s) and has_fixed_receive_buffer(s) and not is_padded_to_capacity(s)
    )
    fmt, stored = quantized_format(s), stored_weight_format(s, s)
    on_device = " and ".join(keys_with(QUANTIZED, FormatCapability.DROPLESS_GRAPH))
    replaces_weights = stored is not None and stored.library_cannot_hold
    for dest, is_wrong, reason in (
        (
            "moe_permute_fusion_into_hybridep",
            s.moe_permute_fusion_into_hybridep,
            "its fused combine needs counts on the host",
        ),
        (
            "use_transformer_engine_op_fuser",
            s.use_transformer_engine_op_fuser
            and can_quantize_experts(s, s, f.ep, replaces_weights=replaces_weights, fused=True)
            and fmt is not None
            and fmt.rejects(FormatCapability.DROPLESS_GRAPH),
            f"they leave counts on the device only with the {on_device} recipes",
        ),
        ("moe_grouped_gemm", not s.moe_grouped_gemm, "the host reads the counts of experts that run one by one"),
    ):
        yield _not_captured(is_on and is_wrong, "dropless experts", dest, reason)


def limit_padded_experts(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    is_on = s.num_experts and "moe" in captured_parts(s) and is_padded_to_capacity(s)
    for dest, reason in (
        *rejected_flags(PLACEMENTS, PlacementCapability.PADDED_GRAPH),
        ("moe_expert_rank_capacity_factor", "padding to capacity already fixes the number of tokens"),
        ("moe_router_padding_for_quantization", "the number of tokens beyond the capacity varies"),
    ):
        yield _not_captured(is_on and getattr(s, dest), "experts padded to capacity", dest, reason)
    selected = get_dispatcher(s)
    unpadded = [each for each, _ in rejecting(SELECTABLE, DispatcherCapability.CAPACITY_PADDING)]
    for each, rejected in (
        pair for pair in rejecting(SELECTABLE, DispatcherCapability.PADDED_GRAPH) if pair[0] not in unpadded
    ):
        yield Limit(
            is_on and f.ep * f.etp > 1 and each is selected,
            f"{{cuda_graph_impl}} cannot capture moe with {each.mention}: {rejected.reason}. Leave one of the two out.",
            kind=rejected.kind,
        )


def limit_exchange_overlap(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    is_on = s.num_experts and "moe" in captured_parts(s) and (is_padded_to_capacity(s) or has_fixed_receive_buffer(s))
    for module, rejected_overlap in rejecting(CAPTURED_MODULES, GraphCapability.EXCHANGE_OVERLAP):
        yield _not_captured(
            is_on
            and module.key in captured_parts(s)
            and s.overlap_moe_expert_parallel_comm
            and s.cuda_graph_impl != "full_iteration",
            module.key,
            "overlap_moe_expert_parallel_comm",
            rejected_overlap.reason,
        )


def limit_router(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    is_on = s.num_experts and captured_parts(s) & {each.key for each in CAPTURED_MODULES if each.routes}
    for each, rejected in rejecting(SELECTIONS, SelectionCapability.GRAPH):
        yield Limit(
            is_on and each.is_named(s),
            f"{{cuda_graph_impl}} cannot capture moe_router with {each.mention}: {rejected.reason}. Leave one of the "
            "two out.",
            kind=rejected.kind,
        )
    yield _not_captured(
        is_on and s.moe_router_force_biased is not None,
        "moe_router",
        "moe_router_force_biased",
        "forced biases are drawn on the host",
    )


def limit_random_numbers(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """Graphs draw from the device's own generator; streams of tensor-parallel ranks are put in its place by Python.

    Forced routing (--moe-router-force-load-balancing) is drawn outside and read by the graph, whatever is recomputed.
    """
    captured = captured_parts(s)
    for dest, part, has_part, is_parallel in (
        ("attention_dropout", "attn", True, f.tp > 1),
        ("hidden_dropout", "attn, mamba, mlp or moe", True, f.tp > 1 and s.sequence_parallel),
        ("moe_input_jitter_eps", "moe_router", s.num_experts, f.tp > 1),
    ):
        is_on = has_part and captured & drawing(dest) and getattr(s, dest)
        ranks = "{sequence_parallel:flag}" if dest == "hidden_dropout" else "{tensor_model_parallel_size}"
        yield _not_captured(
            is_on and is_parallel,
            part,
            dest,
            f"with {ranks} random numbers come from a separate generator of each tensor-parallel rank",
        )
        yield _not_captured(
            is_on and s.recompute_granularity is not None,
            part,
            dest,
            "with {recompute_granularity} its random numbers are drawn twice, from a state on the host",
        )
    yield _not_captured(
        captured & drawing("attention_dropout") and s.attention_dropout and f.cp > 1,
        "attn",
        "attention_dropout",
        "over the ranks of {context_parallel_size} it draws a seed on the host",
    )


def limit_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    captured = captured_parts(s)
    yield _not_captured(
        (s.mlp_chunks_for_training or 1) > 1
        and not captured.isdisjoint((LAYER, *keys_rejecting(CAPTURED_MODULES, GraphCapability.MLP_CHUNKS))),
        "what runs in chunks",
        "mlp_chunks_for_training",
        "the pool of a graph holds the tensors of all chunks; --cuda-graph-modules attn captures the rest",
    )
    recomputed = as_list(s.recompute_modules) if s.recompute_granularity == "selective" else []
    for module, rejected in rejecting(RECOMPUTED_MODULES, RecomputeCapability.ROUTER_GRAPH):
        yield Limit(
            module.key in recomputed and captured & {"moe_router", "moe_preprocess"} and LAYER not in captured,
            f"{{cuda_graph_impl}} cannot capture moe_router with {module.mention}: {rejected.reason}. Leave one of the "
            "two out.",
            kind=rejected.kind,
        )


def limit_param_sharding(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for dest, reason in rejected_flags(SHARDINGS, ShardingCapability.MODULE_GRAPHS):
        yield _not_captured(
            captured_parts(s) and getattr(s, dest) and s.cuda_graph_impl != "full_iteration",
            "modules",
            dest,
            f"{reason}; a graph of the full iteration contains the gathers",
        )


def limit_packed_chunks(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield _not_captured(
        s.attention_chunk_size is not None
        and is_packed(s)
        and not captured_parts(s).isdisjoint((LAYER, *keys_rejecting(CAPTURED_MODULES, GraphCapability.PACKED_CHUNKS))),
        "attention to packed sequences",
        "attention_chunk_size",
        "their chunks begin at other tokens in every microbatch",
    )


def limit_absent_sublayers(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    letters = hybrid_letters(s.hybrid_layer_pattern or "")
    for module in (each for each in CAPTURED_MODULES if each.of_sublayers):
        yield Limit(
            s.cuda_graph_modules
            and module.key in captured_parts(s)
            and not any(each.letter in letters for each in module.of_sublayers),
            f"{{cuda_graph_impl}} with {module.mention}: there are no {module.layers} layers; leave {module.key} out.",
            kind="later",
        )


def limit_full_iteration_gather(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """Reject a gather that starts before the graph: a graph waits for what it has launched itself."""
    yield _not_captured(
        s.cuda_graph_impl == "full_iteration"
        and not _iteration_varies(s)
        and s.overlap_param_gather_with_optimizer_step,
        "the full iteration",
        "overlap_param_gather_with_optimizer_step",
        "the graph gathers the parameters at its start, after the optimizer's step",
    )
