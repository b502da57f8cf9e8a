"""What cannot be captured as CUDA graphs, with the reason; graphs.py has Megatron-LM's rules.

A captured module runs its Python once. Modules that draw from a separate random stream, wait for the host, or have
shapes that depend on the routing are not captured. Modules: attn, mlp, moe_router (with
moe_preprocess), moe, full layers, the full iteration.
"""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes, as_list, balancing_types, moe_pattern
from arguments.settings import Settings, Violation

IMPL, MODULES = "cuda_graph_impl", "cuda_graph_modules"


def _captured(s: Settings) -> set[str]:
    """Return the captured modules: all of them for full layers and iterations, none for a rejected iteration."""
    if s.cuda_graph_impl == "none" or _iteration_varies(s):
        return set()
    names = {name for word in as_list(s.cuda_graph_modules) for name in str(word).replace(",", " ").split()}
    return names or {"attn", "mlp", "moe", "moe_router", "layer"}


def _graph_flag(s: Settings) -> str:
    """Return the flag that requested graphs."""
    return next((s.flag(old) for old in ("enable_cuda_graph", "external_cuda_graph") if s.given(old)), s.describe(IMPL))


def _not_capturable(s: Settings, reason: str, dest: str) -> Violation:
    with_what = "" if dest == MODULES else f" with {s.describe(dest)}"
    return s.violation(
        "{asks}{with_what} is not possible: {reason} Leave one of the two out.",
        dest,
        IMPL,
        kind="later",
        asks=_graph_flag(s),
        with_what=with_what,
        reason=reason,
    )


def _is_padded(s: Settings) -> bool:
    return s.moe_expert_capacity_factor is not None and s.moe_pad_expert_input_to_capacity


def has_fixed_receive_buffer(s: Settings) -> bool:
    """Return whether dropless experts receive into a buffer that a graph can hold: its size is fixed.

    NCCL EP's is fixed too, but Python makes its context again, collectively, when its mode changes; a graph would not.
    """
    return (
        s.moe_expert_rank_capacity_factor is not None
        and s.moe_token_dispatcher_type == "flex"
        and s.moe_flex_dispatcher_backend == "hybridep"
    )


def _iteration_varies(s: Settings) -> bool:
    """Return whether the full iteration is to be captured although experts receive varying numbers of tokens."""
    if s.cuda_graph_impl != "full_iteration" or not s.num_experts or _is_padded(s) or has_fixed_receive_buffer(s):
        return False
    pattern = moe_pattern(s.moe_layer_freq, s.num_layers)
    return pattern is None or any(pattern) or bool(s.mtp_num_layers)


def note_options_without_graphs(s: Settings, _f: DerivedSizes) -> None:
    for dest in (MODULES, "cuda_graph_warmup_steps"):
        if s.cuda_graph_impl == "none" and s.given(dest):
            s.note_no_effect(s.shown(dest), f"without {s.flag(IMPL)}")
    if s.cuda_graph_impl == "transformer_engine":
        s.note(
            f"{_graph_flag(s)}: the same parts are captured as with local, by this program itself (TransformerEngine's "
            "make_graphed_callables stores one graph per microbatch of the batch; here there is one per microbatch in "
            "flight)."
        )


def note_preprocess_not_captured(s: Settings, f: DerivedSizes) -> None:
    """Note why moe_preprocess is not captured: the number of tokens must be known in advance."""
    captured = _captured(s)
    if f.experts is None or "moe_preprocess" not in captured or captured & {"moe", "layer"}:
        return
    kind, reason = s.moe_token_dispatcher_type, None
    if kind == "flex" and f.ep * f.etp > 1:
        backend = s.moe_flex_dispatcher_backend
        reason = (
            "the number of tokens for each node depends on the routing"
            if backend == "hierarchical"
            else f"the library of --moe-flex-dispatcher-backend {backend} orders the tokens inside its exchange"
        )
    elif kind == "allgather" and f.ep * f.etp > 1:
        reason = "the allgather dispatcher gathers the tokens of all ranks before it orders them"
    elif s.moe_clone_hot_experts and f.ep > 1:
        reason = f"{s.shown('moe_clone_hot_experts')} gathers the counts of all ranks first, to plan the clones"
    elif kind != "alltoall" and (
        s.moe_router_padding_for_quantization or s.moe_expert_capacity_factor is not None and not _is_padded(s)
    ):
        reason = "the number of tokens depends on the routing"
    if reason is not None:
        s.note(f"{_graph_flag(s)} with moe_preprocess: moe_preprocess is not captured ({reason}); moe_router is.")


def check_full_iteration_shapes(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Report one reason only: removing another flag would not make such a graph possible."""
    if _iteration_varies(s):
        yield s.violation(
            "{asks}: the full iteration of a dropless MoE model is captured with HybridEP's fixed receive buffer "
            "only: use --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep with "
            "{moe_expert_rank_capacity_factor:flag}, --moe-expert-capacity-factor with "
            "{moe_pad_expert_input_to_capacity:flag}, or {cuda_graph_impl:flag} local --cuda-graph-modules attn "
            "moe_router.",
            kind="later",
            asks=_graph_flag(s),
        )


def check_full_layer_shapes(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    moe = f.experts is not None and (f.moe_layers is None or any(f.moe_layers) or s.mtp_num_layers)
    if "layer" in _captured(s) and moe and not _is_padded(s) and not has_fixed_receive_buffer(s):
        what = f"without {s.flag(MODULES)} captures full layers"
        yield s.violation(
            "{asks} {what}, and the number of tokens per expert varies: use --moe-expert-capacity-factor with "
            "--moe-pad-expert-input-to-capacity, --moe-expert-rank-capacity-factor with the HybridEP dispatcher, or "
            "--cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess.",
            IMPL,
            "moe_pad_expert_input_to_capacity",
            kind="later",
            asks=_graph_flag(s),
            what=what,
        )


def check_experts_capturable(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    captured = _captured(s)
    if (
        s.num_experts and "moe_preprocess" in captured and s.moe_token_dispatcher_type == "alltoall"
    ):  # as in Megatron-LM
        if s.moe_expert_capacity_factor is not None and not _is_padded(s):
            yield _not_capturable(
                s, "moe_preprocess orders a fixed number of tokens, and some are dropped.", "moe_expert_capacity_factor"
            )
        if s.moe_router_padding_for_quantization:
            yield _not_capturable(
                s,
                "moe_preprocess orders a fixed number of tokens, and padding adds to them.",
                "moe_router_padding_for_quantization",
            )
    if not s.num_experts or "moe" not in captured:
        return
    if has_fixed_receive_buffer(s) and not _is_padded(s):
        yield from _check_dropless_experts(s)
    elif _is_padded(s):
        yield from _check_padded_experts(s, f)


def _check_dropless_experts(s: Settings) -> Iterator[Violation]:
    """Report what needs token counts on the host, or runs another microbatch between two parts of a graph."""
    for dest, is_on, reason in (
        (
            "moe_permute_fusion_into_hybridep",
            s.moe_permute_fusion_into_hybridep,
            "its fused combine needs counts on the host.",
        ),
        ("moe_grouped_gemm", not s.moe_grouped_gemm, "the host reads the counts of experts that run one by one."),
        (
            "overlap_moe_expert_parallel_comm",
            s.overlap_moe_expert_parallel_comm and s.cuda_graph_impl != "full_iteration",
            "another microbatch cannot run inside a graph of a layer.",
        ),
    ):
        if is_on:
            yield _not_capturable(s, reason, dest)


def _check_padded_experts(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    for dest, reason in (
        ("moe_clone_hot_experts", "experts that are padded to capacity have equally many tokens, so none is hot."),
        ("moe_expert_rank_capacity_factor", "padding to capacity already fixes the number of tokens."),
        ("moe_router_padding_for_quantization", "the number of tokens beyond the capacity varies."),
    ):
        if getattr(s, dest):
            yield _not_capturable(s, reason, dest)
    if s.overlap_moe_expert_parallel_comm and s.cuda_graph_impl != "full_iteration":
        yield _not_capturable(
            s, "another microbatch cannot run inside a graph of a layer.", "overlap_moe_expert_parallel_comm"
        )
    if s.moe_token_dispatcher_type == "flex" and s.moe_flex_dispatcher_backend == "hierarchical" and f.ep * f.etp > 1:
        yield _not_capturable(
            s, "the number of tokens for each node depends on the routing.", "moe_flex_dispatcher_backend"
        )


def check_router_capturable(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.num_experts or not _captured(s) & {"moe_router", "moe"}:
        return
    if "sinkhorn" in balancing_types(s):
        yield _not_capturable(s, "sinkhorn checks for convergence on the host.", "moe_router_load_balancing_type")
    if s.moe_router_force_biased is not None:
        yield _not_capturable(s, "forced biases are drawn on the host.", "moe_router_force_biased")


def check_rng_capturable(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    """Graphs draw from the device's own generator; streams of tensor-parallel ranks are put in its place by Python.

    Forced routing (--moe-router-force-load-balancing) is drawn outside and read by the graph, whatever is recomputed.
    """
    captured = _captured(s)
    noise = [
        dest
        for dest, inside in (
            ("attention_dropout", "attn" in captured),
            ("hidden_dropout", bool(captured & {"attn", "mlp", "moe", "layer"})),
            ("moe_input_jitter_eps", bool(captured & {"moe_router", "moe"})),
        )
        if inside and getattr(s, dest) and (s.num_experts or not dest.startswith("moe"))
    ]
    for dest in noise:
        if f.tp > 1 and (dest != "hidden_dropout" or s.sequence_parallel):
            yield _not_capturable(s, "random numbers come from a stream of each tensor-parallel rank.", dest)
        if s.recompute_granularity is not None:
            yield _not_capturable(
                s,
                f"with {s.describe('recompute_granularity')} its random numbers are drawn twice, from a state on the "
                "host.",
                dest,
            )
    if f.cp > 1 and "attention_dropout" in noise:
        yield _not_capturable(
            s, "attention dropout over context-parallel ranks draws a seed on the host.", "attention_dropout"
        )


def check_recompute_capturable(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    captured = _captured(s)
    if not captured:
        return
    if (
        s.recompute_granularity == "selective"
        and "moe" in as_list(s.recompute_modules)
        and captured & {"moe_router", "moe_preprocess"}
        and "layer" not in captured
    ):
        yield _not_capturable(s, "a graph of moe_router cannot run again inside moe.", "recompute_modules")


def check_param_sharding(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if _captured(s) and getattr(s, dest) and s.cuda_graph_impl != "full_iteration":
            yield _not_capturable(
                s,
                "sharded parameters are gathered at a different address every time; a graph of the full iteration "
                "contains the gathers.",
                dest,
            )
    if "mamba" in _captured(s):
        yield s.violation(
            "{asks}: there are no Mamba layers; leave mamba out of {cuda_graph_modules:flag}.",
            IMPL,
            kind="later",
            asks=_graph_flag(s),
        )


def check_full_iteration_communication(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Report a gather that starts before the graph: a graph waits for what it has launched itself."""
    if s.cuda_graph_impl != "full_iteration" or _iteration_varies(s):
        return
    if s.overlap_param_gather_with_optimizer_step:
        yield _not_capturable(
            s,
            "the graph gathers the parameters at its start, after the optimizer's step.",
            "overlap_param_gather_with_optimizer_step",
        )
