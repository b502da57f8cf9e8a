"""CUDA graphs."""

from collections.abc import Iterator

from arguments.layer_pattern import mixing_sublayers
from arguments.mechanisms.captured_modules import CAPTURED_MODULES
from arguments.mechanisms.layer_modules import named, unaccompanied, unknown_names
from arguments.mechanisms.sublayers import MAMBA
from arguments.moe import is_padded_to_capacity
from arguments.rules.derived_sizes import DerivedSizes
from arguments.rules.graph_limits import dropless_names, has_fixed_receive_buffer, module_names
from arguments.rules.recompute import absent_parts
from arguments.settings import Settings, Violation

IMPL, MODULES, OLD_SCOPE = "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope_deprecated"
OLD_WHOLE = ("full", "full_iteration", "full_iteration_inference")


# Derived values.


def resolve_old_switches(s: Settings, _f: DerivedSizes) -> None:
    for dest, impl in (("external_cuda_graph", "transformer_engine"), ("enable_cuda_graph", "local")):
        if getattr(s, dest) and s.cuda_graph_impl == "none":
            s.set_derived(IMPL, impl, f"from {s.flag(dest)}")


def resolve_old_scope(s: Settings, _f: DerivedSizes) -> None:
    scope = module_names(s.cuda_graph_scope_deprecated)
    if not scope or module_names(s.cuda_graph_modules):
        return
    if "full_iteration" in scope and s.cuda_graph_impl == "local":
        s.set_derived(IMPL, "full_iteration", f"from {s.flag(OLD_SCOPE)}")
    s.set_derived(MODULES, [name for name in scope if name not in OLD_WHOLE], f"from {s.flag(OLD_SCOPE)}")


def resolve_router_before_preprocess(s: Settings, _f: DerivedSizes) -> None:
    modules = module_names(s.cuda_graph_modules)
    for module in named(CAPTURED_MODULES, modules) if s.cuda_graph_impl == "local" else ():
        if module.after is not None and module.after[0] not in modules:
            first, reason = module.after
            s.note(f"{s.flag(MODULES)} {module.key}: {first} is captured too, {reason}.")
            s.set_derived(MODULES, [*modules, first], f"{module.key} comes with {first}")


def resolve_rng_tracker(s: Settings, _f: DerivedSizes) -> None:
    if s.cuda_graph_impl != "none" and not s.te_rng_tracker:
        s.set_derived("te_rng_tracker", True, "CUDA graphs")


def note_absent_modules(s: Settings, f: DerivedSizes) -> None:
    if s.cuda_graph_impl == "none":
        return
    absent = absent_parts(s, f)
    if mixing_sublayers(s) == {MAMBA}:
        absent["token mixer"] = "attention"
    for module in named(CAPTURED_MODULES, module_names(s.cuda_graph_modules)):
        if module.part in absent:
            what = absent[module.part]
            s.note(f"{s.flag(MODULES)} {module.key}: no layer of this model has {what}, so nothing is captured.")


# Checks.


def check_old_and_new_flags(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    old = [dest for dest in ("external_cuda_graph", "enable_cuda_graph") if getattr(s, dest)]
    if len(old) == 2:
        yield s.violation("Use only one of {:flag} and {:flag}.", *old)
    elif old and s.given(IMPL) and s.source[IMPL] != "derived":
        yield s.violation("{:flag} is the old form of {cuda_graph_impl}; keep the latter.", old[0])
    if s.cuda_graph_scope_deprecated is not None and s.given(MODULES):
        yield s.violation(
            "{cuda_graph_scope_deprecated:flag} is the old form of {cuda_graph_modules:flag}; keep the latter."
        )


def check_known_modules(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    yield from unknown_names(s, MODULES, module_names(s.cuda_graph_modules), CAPTURED_MODULES)
    yield from unknown_names(s, OLD_SCOPE, module_names(s.cuda_graph_scope_deprecated), CAPTURED_MODULES, OLD_WHOLE)


def check_expert_modules(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    modules = module_names(s.cuda_graph_modules)
    if s.cuda_graph_impl == "none":
        return
    if "moe" in modules and not is_padded_to_capacity(s) and not has_fixed_receive_buffer(s):
        yield s.violation(
            "{cuda_graph_modules:flag} moe needs {moe_expert_capacity_factor:flag} and "
            "{moe_pad_expert_input_to_capacity:flag}, or {moe_expert_rank_capacity_factor:flag} with "
            f"{dropless_names()}: a graph cannot hold a varying number of tokens."
        )
    captured = named(CAPTURED_MODULES, modules)
    for module in captured:
        if module.inside in modules:
            yield s.violation(
                f"{{cuda_graph_modules:flag}}: {module.inside} already contains {module.key}; name one of them."
            )
    yield from unaccompanied(s, captured)
    has_dense = f.moe_layers is None or not all(f.moe_layers)
    for module in (each for each in captured if each.part == "dense feed-forward" and not has_dense):
        yield s.violation(f"{module.mention} needs dense layers, but every layer has experts ({{moe_layer_freq}}).")


def check_full_iteration_graph(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.cuda_graph_impl != "full_iteration":
        return
    if module_names(s.cuda_graph_modules):
        yield s.violation("{cuda_graph_impl} captures everything; drop {cuda_graph_modules}.")
    if s.check_for_nan_in_loss_and_grad and not s.skip_train:
        yield s.violation(
            "{cuda_graph_impl} needs {check_for_nan_in_loss_and_grad:flag}: a graph cannot stop in the middle."
        )


def check_full_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity == "full" and s.cuda_graph_impl not in ("none", "full_iteration"):
        yield s.violation(
            "{cuda_graph_impl} cannot be combined with {recompute_granularity}; use --cuda-graph-impl full_iteration "
            "or recompute selected modules."
        )
