"""What this program does not capture as CUDA graphs, with the reason; rules 105 and 106, Megatron-LM's own, stand in graphs.py.

A captured part runs its Python once. So what draws from a random stream of its own, waits for the host, or whose shapes depend on the
routing or on the documents of a batch, stays outside. Parts: attn, mlp, moe_router (with moe_preprocess), moe, whole layers, everything.
"""

from collections.abc import Iterator

from arguments.rules.facts import Facts, as_list, balancing_types, broken, moe_pattern, say
from arguments.settings import Settings, Violation
from arguments.standing import MEMORY

IMPL, MODULES = "cuda_graph_impl", "cuda_graph_modules"
OF_ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")


def _captured(s: Settings) -> set[str]:
    """Names of what is captured; whole layers and whole iterations hold every part. Nothing of an iteration that is refused as a whole."""
    if s.cuda_graph_impl == "none" or _iteration_varies(s):
        return set()
    names = {name for word in as_list(s.cuda_graph_modules) for name in str(word).replace(",", " ").split()}
    return names or {"attn", "mlp", "moe", "moe_router", "layer"}


def _asked(s: Settings) -> str:
    """How graphs were asked for."""
    return next((s.flag(old) for old in ("enable_cuda_graph", "external_cuda_graph") if s.given(old)), say(s, IMPL))


def _later(s: Settings, reason: str, dest: str) -> Violation:
    with_what = "" if dest == MODULES else f" with {say(s, dest)}"
    return broken(s, f"{_asked(s)}{with_what} is not possible: {reason} Leave one of the two out.", dest, IMPL, kind="later")


def _pads(s: Settings) -> bool:
    return s.moe_expert_capacity_factor is not None and s.moe_pad_expert_input_to_capacity


def _iteration_varies(s: Settings) -> bool:
    """Is the whole iteration to be captured, of a model whose experts receive varying numbers of tokens?"""
    if s.cuda_graph_impl != "full_iteration" or not s.num_experts or _pads(s):
        return False
    pattern = moe_pattern(s.moe_layer_freq, s.num_layers)
    return pattern is None or any(pattern) or bool(s.mtp_num_layers)


def tuning_without_graphs(s: Settings, _f: Facts) -> None:
    for dest in (MODULES, "cuda_graph_warmup_steps"):
        if s.cuda_graph_impl == "none" and s.given(dest):
            s.say_idle(s.shown(dest), f"no effect without {s.flag(IMPL)}")
    if s.cuda_graph_impl == "transformer_engine":
        s.note(f"{_asked(s)}: the same parts are captured as with local, by this program itself (TransformerEngine's make_graphed_callables "
               "keeps a graph for every microbatch of the batch; here there is one for every microbatch in flight).")


def preprocess_stays_outside(s: Settings, f: Facts) -> None:
    """Say why moe_preprocess is not captured where it is asked for: what it does is captured where the number of rows is known beforehand."""
    captured = _captured(s)
    if f.experts is None or "moe_preprocess" not in captured or captured & {"moe", "layer"}:
        return
    kind, reason = s.moe_token_dispatcher_type, None
    if kind == "flex" and f.ep * f.etp > 1:
        reason = f"the library of --moe-flex-dispatcher-backend {s.moe_flex_dispatcher_backend} lays the rows out inside its own exchange"
    elif kind == "allgather" and f.ep * f.etp > 1:
        reason = "the allgather dispatcher gathers the tokens of all ranks before it orders them"
    elif s.moe_clone_hot_experts and f.ep > 1:
        reason = f"{s.shown('moe_clone_hot_experts')} plans on the host which experts are cloned, before the rows are ordered"
    elif kind != "alltoall" and (s.moe_router_padding_for_quantization or s.moe_expert_capacity_factor is not None and not _pads(s)):
        reason = "how many rows there are depends on the routing"
    if reason is not None:
        s.note(f"{_asked(s)} with moe_preprocess: moe_preprocess is not captured ({reason}); moe_router is.")


def whole_iteration_has_fixed_rows(s: Settings, _f: Facts) -> Iterator[Violation]:
    """One reason for all: what else stands in the way of such a graph is not said, since no flag beside it would help."""
    if _iteration_varies(s):
        stash = f" ({s.flag('moe_paged_stash')} keeps activations in pages, but its counts are read on the host)" if s.moe_paged_stash else ""
        yield broken(
            s, f"{_asked(s)}: this version does not capture the whole iteration of a dropless MoE model yet{stash} (feature: {MEMORY}). Use "
            "--cuda-graph-impl local --cuda-graph-modules attn moe_router, or --moe-expert-capacity-factor with --moe-pad-expert-input-to-capacity.",
            IMPL, "moe_pad_expert_input_to_capacity", kind="later")


def whole_layers_have_fixed_rows(s: Settings, f: Facts) -> Iterator[Violation]:
    moe = f.experts is not None and (f.moe_layers is None or any(f.moe_layers) or s.mtp_num_layers)
    if "layer" in _captured(s) and moe and not _pads(s):
        what = f"without {s.flag(MODULES)} captures whole layers"
        yield broken(
            s, f"{_asked(s)} {what}, and how many rows experts receive varies: use --moe-expert-capacity-factor with "
            "--moe-pad-expert-input-to-capacity, or --cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess. (A budget, "
            "--moe-expert-rank-capacity-factor, fixes the experts' buffers, but their rows are not captured yet.)",
            IMPL, "moe_pad_expert_input_to_capacity", kind="later")


def experts_inside_wait_for_nothing(s: Settings, f: Facts) -> Iterator[Violation]:
    captured = _captured(s)
    if s.num_experts and "moe_preprocess" in captured and s.moe_token_dispatcher_type == "alltoall":  # as in Megatron-LM
        if s.moe_expert_capacity_factor is not None and not _pads(s):
            yield _later(s, "moe_preprocess orders a fixed number of rows, and tokens are dropped.", "moe_expert_capacity_factor")
        if s.moe_router_padding_for_quantization:
            yield _later(s, "moe_preprocess orders a fixed number of rows, and padding adds to them.", "moe_router_padding_for_quantization")
    if not s.num_experts or "moe" not in captured or not _pads(s):
        return
    for dest, reason in (
        ("moe_clone_hot_experts", "which experts are cloned is planned on the host."),
        ("moe_paged_stash", "pages are dealt out by the host."),
        ("moe_expert_rank_capacity_factor", "padding to capacity fixes the rows already."),
        ("overlap_moe_expert_parallel_comm", "another microbatch cannot run inside a graph."),
        ("moe_router_padding_for_quantization", "rows beyond the capacity vary."),
    ):
        if getattr(s, dest):
            yield _later(s, reason, dest)
    if s.moe_token_dispatcher_type != "alltoall" and (f.ep > 1 or f.etp > 1):
        yield _later(s, "experts are captured with --moe-token-dispatcher-type alltoall, whose sizes can be known beforehand.",
                     "moe_token_dispatcher_type")


def routing_is_made_of_operators(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.num_experts or not _captured(s) & {"moe_router", "moe"}:
        return
    if "sinkhorn" in balancing_types(s):
        yield _later(s, "sinkhorn asks on the host whether it has converged.", "moe_router_load_balancing_type")
    if s.moe_router_force_biased is not None:
        yield _later(s, "forced biases are drawn on the host.", "moe_router_force_biased")


def random_numbers_have_one_stream(s: Settings, f: Facts) -> Iterator[Violation]:
    """Graphs draw from the device's own generator; streams of tensor-parallel ranks are put in its place by Python.

    Forced routing (--moe-router-force-load-balancing) is drawn outside and read by the graph, whatever is recomputed.
    """
    captured = _captured(s)
    noise = [dest for dest, inside in (
        ("attention_dropout", "attn" in captured), ("hidden_dropout", bool(captured & {"attn", "mlp", "moe", "layer"})),
        ("moe_input_jitter_eps", bool(captured & {"moe_router", "moe"})),
    ) if inside and getattr(s, dest) and (s.num_experts or not dest.startswith("moe"))]
    for dest in noise:
        if f.tp > 1 and (dest != "hidden_dropout" or s.sequence_parallel):
            yield _later(s, "random numbers come from a stream of each tensor-parallel rank.", dest)
        if s.recompute_granularity is not None:
            yield _later(s, f"with {say(s, 'recompute_granularity')} its random numbers are drawn twice, from a state that the host keeps.", dest)
    if f.cp > 1 and "attention_dropout" in noise:
        yield _later(s, "attention dropout over context-parallel ranks draws a seed on the host.", "attention_dropout")
    if captured and s.fp4:
        yield _later(s, "stochastic rounding has a generator for every tensor.", "fp4")


def attention_sees_no_documents(s: Settings, _f: Facts) -> Iterator[Violation]:
    if "attn" not in _captured(s):
        return
    for dest in ("reset_attention_mask", "dataloader_inter_document_masking"):
        if getattr(s, dest) and (dest != "reset_attention_mask" or s.create_attention_mask_in_dataloader):
            yield _later(s, "which tiles attention computes depends on a batch's documents.", dest)


def activations_stay_inside(s: Settings, _f: Facts) -> Iterator[Violation]:
    captured = _captured(s)
    if not captured:
        return
    if s.recompute_granularity == "selective" and "moe" in as_list(s.recompute_modules) and captured & {"moe_router", "moe_preprocess"} \
            and "layer" not in captured:
        yield _later(s, "a graph of moe_router cannot run again inside moe.", "recompute_modules")
    if s.cpu_offloading_num_layers:
        yield _later(s, "layers whose activations go to the host are not captured.", "cpu_offloading_num_layers")
    if not s.fine_grained_activation_offloading:
        return
    inside = [part for part in as_list(s.offload_modules) if (
        "attn" in captured if part in OF_ATTENTION else bool(captured & {"mlp", "moe_router", "moe"}) if part == "mlp_norm" else "moe" in captured)]
    if inside:
        yield _later(s, f"{' '.join(inside)} would be sent to the host out of a graph, whose memory is fixed.", "offload_modules")


def parameters_stay_in_place(s: Settings, _f: Facts) -> Iterator[Violation]:
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if _captured(s) and getattr(s, dest):
            yield _later(s, "sharded parameters are gathered at other addresses every time.", dest)
    if "mamba" in _captured(s):
        yield broken(s, f"{_asked(s)}: there are no Mamba layers; leave mamba out of {s.flag(MODULES)}.", MODULES, IMPL, kind="later")


def whole_iteration_runs_on_one_stage(s: Settings, f: Facts) -> Iterator[Violation]:
    if s.cuda_graph_impl != "full_iteration" or _iteration_varies(s):
        return
    for dest, is_on, reason in (
        ("pipeline_model_parallel_size", f.pp > 1, "messages between pipeline stages are waited for by the host."),
        ("overlap_grad_reduce", s.overlap_grad_reduce, "which bucket of gradients is complete is counted by the host."),
        ("overlap_param_gather", s.overlap_param_gather, "gathered parameters are waited for by the host."),
        ("context_parallel_size", f.cp > 1, "context-parallel ranks exchange keys and values by the host's doing."),
    ):
        if is_on:
            yield _later(s, reason, dest)


RESOLVE = (tuning_without_graphs, preprocess_stays_outside)
CHECKS = (
    whole_iteration_has_fixed_rows, whole_layers_have_fixed_rows, experts_inside_wait_for_nothing, routing_is_made_of_operators, random_numbers_have_one_stream,
    attention_sees_no_documents, activations_stay_inside, parameters_stay_in_place, whole_iteration_runs_on_one_stage,
)
