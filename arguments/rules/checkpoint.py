"""Saving and loading, upcycling, flags of long ago."""

from collections.abc import Iterator

from arguments.layer_pattern import STAGE
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import OPTIMIZERS, get_optimizer
from arguments.mechanisms.selections import SELECTIONS, SPLITS, expert_split
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.mechanisms.sublayers import BY_LETTER, VARIANT, relative_of
from arguments.mechanisms.support import keys_with
from arguments.mtp import DEPTH
from arguments.rules.derived_sizes import DerivedSizes, divides, positive, quotient
from arguments.settings import Limit, Settings, Violation

DUMPS = (
    "save_params_interval",
    "save_activations_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
)


STORED_LETTERS = tuple(letter for letter, each in BY_LETTER.items() if each.supports(SublayerCapability.LEGACY_FORMAT))
"""Layers of hybrid models with places in the torch format."""
UNKNOWN_TO_UPCYCLING = (
    ("quick_geglu", "knows the activations gelu, swiglu and squared relu"),
    ("glu_linear_offset", "knows the activations gelu, swiglu and squared relu"),
    ("activation_func_clamp_value", "knows the activations gelu, swiglu and squared relu"),
    ("moe_latent_size", "makes experts that read full-width tokens"),
)


# Derived values.


def resolve_async_save(s: Settings, _f: DerivedSizes) -> None:
    if s.async_save and not s.use_persistent_ckpt_worker:
        s.note(f"{s.flag('async_save')} needs --use-persistent-ckpt-worker; checkpoints are written synchronously.")
        s.set_derived("async_save", False, "no --use-persistent-ckpt-worker")
    if not s.async_save:
        s.set_derived("async_strategy", "mcore", "synchronous saves")


def resolve_upcycling(s: Settings, _f: DerivedSizes) -> None:
    if s.moe_use_upcycling:
        s.set_derived("no_load_optim", True, "upcycling")
        s.set_derived("no_load_rng", True, "upcycling")


# Checks.


def check_save_interval(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.save is not None and s.save_interval is None:
        yield s.violation("{save} needs {save_interval:flag}: the number of iterations between checkpoints.")
    elif s.save_interval is not None and not positive(s.save_interval):
        yield s.violation("{save_interval} must be at least 1.")


def check_auto_resume(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.auto_resume and s.save is None:
        yield s.violation("{auto_resume} needs {save:flag}: the directory whose newest checkpoint it resumes from.")


def check_dump_intervals(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in DUMPS:
        if getattr(s, dest) is not None and s.save is None:
            yield s.violation("{} needs {save:flag}: the directory that dumps are written to.", dest)


def check_save_retain_interval(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.save_retain_interval is None:
        return
    if not positive(s.save_retain_interval):
        yield s.violation("{save_retain_interval} must be at least 1.")
    elif s.save_interval is None:
        yield s.violation("{save_retain_interval} needs {save_interval:flag}.")
    elif not divides(s.save_interval, s.save_retain_interval):
        yield s.violation(
            "{save_retain_interval} must be a multiple of {save_interval}: only saved iterations can be retained."
        )


def check_checkpoint_conversion(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.ckpt_convert_format is None:
        return
    for dest in ("ckpt_convert_save", "load"):
        if getattr(s, dest) is None:
            yield s.violation("{ckpt_convert_format} needs {:flag} DIR.", dest)


def check_override_iteration(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.override_ckpt_iteration is not None and s.override_ckpt_iteration < 0:
        yield s.violation("{override_ckpt_iteration} must be at least 0.")


def limit_legacy_format(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    stored = " and ".join(keys_with(OPTIMIZERS, OptimizerCapability.LEGACY_FORMAT))
    has_places = relative_of(s).supports(SublayerCapability.LEGACY_FORMAT)
    for dest in ("ckpt_format", "ckpt_convert_format"):
        is_legacy = getattr(s, dest) == "torch"
        yield Limit(
            is_legacy and get_optimizer(s).rejects(OptimizerCapability.LEGACY_FORMAT),
            f"{{:flag}} torch has the state of {{optimizer:flag}} {stored} only; use {{:flag}} torch_dist.",
            (dest, dest),
        )
        for layers in (
            VARIANT,
            *(split.projection for split in SPLITS),
            "enable_hyper_connections",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ):
            yield Limit(
                is_legacy and getattr(s, layers) not in (None, False) and not (layers == VARIANT and has_places),
                "{:flag} torch has no known places for the layers of {}; use {:flag} torch_dist.",
                (dest, layers, dest),
            )
        letters = set(s.hybrid_layer_pattern or "")
        yield Limit(
            is_legacy and not letters <= {*STORED_LETTERS, STAGE, DEPTH},
            "{:flag} torch has no known places for other layers of {hybrid_layer_pattern:flag} than "
            f"{' '.join(STORED_LETTERS)}; use {{:flag}} torch_dist.",
            (dest, dest),
        )


def check_torch_format_needs_gloo(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.use_distributed_optimizer and not s.use_gloo_process_groups and s.ckpt_format == "torch":
        yield s.violation(
            "{use_gloo_process_groups} with {use_distributed_optimizer} needs {ckpt_format:flag} torch_dist: the torch "
            "format gathers optimizer shards over gloo."
        )


def check_upcycling(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.moe_use_upcycling:
        return
    if s.save is None:
        yield s.violation("{moe_use_upcycling} needs {save:flag}: where the converted model goes.")
    if s.load is None and s.pretrained_checkpoint is None:
        yield s.violation("{moe_use_upcycling} needs {load:flag}: the dense model.", kind="build")
    if f.experts is None:
        yield s.violation("{moe_use_upcycling} needs {num_experts:flag}.", kind="build")
        return
    dense, expert = s.ffn_hidden_size, s.moe_ffn_hidden_size
    if not divides(expert, dense):
        yield s.violation(
            "{moe_use_upcycling} needs {ffn_hidden_size} to be a multiple of {moe_ffn_hidden_size}: each dense layer "
            "is split into experts.",
            kind="build",
        )
    pieces = quotient(dense, expert)
    if not divides(pieces, f.experts):
        yield s.violation(
            "{num_experts} must be a multiple of the {pieces} experts that a dense layer is split into "
            "({ffn_hidden_size} / {moe_ffn_hidden_size}).",
            kind="build",
            pieces=pieces,
        )
    if s.given("moe_upcycling_granularity") and pieces is not None and s.moe_upcycling_granularity != pieces:
        yield s.violation(
            "{moe_upcycling_granularity} must be {pieces}: {ffn_hidden_size} / {moe_ffn_hidden_size}; or leave one of "
            "them out.",
            pieces=pieces,
        )


def limit_upcycling(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    is_on = s.moe_use_upcycling and s.save is not None and f.experts is not None
    for dest, why in UNKNOWN_TO_UPCYCLING:
        yield Limit(
            is_on and s.values[dest] not in (None, False, 0, 0.0),
            f"{{moe_use_upcycling}} {why}, not {{:flag}}.",
            (dest,),
        )
    shared, split = s.moe_shared_expert_intermediate_size, [each.name for each in SELECTIONS if each.split is not None]
    why = f": only {' and '.join(split)}'s shared expert is the dense network, as wide as {{ffn_hidden_size}}"
    yield Limit(
        is_on and shared is not None and not (expert_split(s) is not None and shared == s.ffn_hidden_size),
        f"{{moe_use_upcycling}} makes no {{moe_shared_expert_intermediate_size}}{why if split else ''}.",
    )


def check_old_flags(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for old, new in (("batch_size", "micro_batch_size"), ("model_parallel_size", "tensor_model_parallel_size")):
        if getattr(s, old) is not None:
            yield s.violation("{} is the old name of {}, and they differ; keep the latter.", old, new)
    if s.warmup is not None:
        yield s.violation(
            "{warmup} has been removed, and its number may mean a share or a count; use {lr_warmup_fraction:flag} or "
            "--lr-warmup-iters."
        )
