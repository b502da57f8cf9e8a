"""Rules 47, 111, 113-114 and 116: saving and loading, upcycling, flags of long ago."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes, divides, positive, quotient
from arguments.settings import Settings, Violation

SAVE, INTERVAL, RETAIN = "save", "save_interval", "save_retain_interval"
DUMPS = (
    "save_params_interval",
    "save_activations_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
)


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
        yield s.violation(
            f"{s.describe(SAVE)} needs --save-interval: the number of iterations between checkpoints.", SAVE, INTERVAL
        )
    elif s.save_interval is not None and not positive(s.save_interval):
        yield s.violation(f"{s.describe(INTERVAL)} must be at least 1.", INTERVAL)


def check_auto_resume(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.auto_resume and s.save is None:
        yield s.violation(
            f"{s.flag('auto_resume')} needs --save: the directory whose newest checkpoint it resumes from.",
            "auto_resume",
            SAVE,
        )


def check_dump_intervals(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in DUMPS:
        if getattr(s, dest) is not None and s.save is None:
            yield s.violation(f"{s.describe(dest)} needs --save: the directory that dumps are written to.", dest, SAVE)


def check_save_retain_interval(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.save_retain_interval is None:
        return
    if not positive(s.save_retain_interval):
        yield s.violation(f"{s.describe(RETAIN)} must be at least 1.", RETAIN)
    elif s.save_interval is None:
        yield s.violation(f"{s.describe(RETAIN)} needs --save-interval.", RETAIN, INTERVAL)
    elif not divides(s.save_interval, s.save_retain_interval):
        yield s.violation(
            f"{s.describe(RETAIN)} must be a multiple of {s.describe(INTERVAL)}: only saved iterations can be "
            "retained.",
            RETAIN,
            INTERVAL,
        )


def check_checkpoint_conversion(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.ckpt_convert_format is None:
        return
    for dest in ("ckpt_convert_save", "load"):
        if getattr(s, dest) is None:
            yield s.violation(
                f"{s.describe('ckpt_convert_format')} needs {s.flag(dest)} DIR.", "ckpt_convert_format", dest
            )


def check_override_iteration(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.override_ckpt_iteration is not None and s.override_ckpt_iteration < 0:
        yield s.violation(f"{s.describe('override_ckpt_iteration')} must be at least 0.", "override_ckpt_iteration")


def check_legacy_format_optimizer(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("ckpt_format", "ckpt_convert_format"):
        if getattr(s, dest) == "torch" and s.optimizer not in ("adam", "sgd"):
            yield s.violation(
                f"{s.flag(dest)} torch has the state of --optimizer adam and sgd only, not of {s.optimizer}; use "
                f"{s.flag(dest)} torch_dist.",
                dest,
                "optimizer",
            )


def check_legacy_format_layers(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("ckpt_format", "ckpt_convert_format"):
        for layers in ("experimental_attention_variant", "moe_latent_size"):
            if getattr(s, dest) == "torch" and getattr(s, layers) not in (None, "dsa"):
                yield s.violation(
                    f"{s.flag(dest)} torch has no known places for the layers of {s.describe(layers)}; use "
                    f"{s.flag(dest)} torch_dist.",
                    dest,
                    layers,
                )


def check_torch_format_needs_gloo(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.use_distributed_optimizer and not s.use_gloo_process_groups and s.ckpt_format == "torch":
        yield s.violation(
            f"{s.flag('use_gloo_process_groups')} with {s.flag('use_distributed_optimizer')} needs --ckpt-format "
            "torch_dist: the torch format gathers optimizer shards over gloo.",
            "use_gloo_process_groups",
            "ckpt_format",
            "use_distributed_optimizer",
        )


def check_upcycling(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.moe_use_upcycling:
        return
    if s.save is None:
        yield s.violation(
            f"{s.flag('moe_use_upcycling')} needs --save: where the converted model goes.", "moe_use_upcycling", SAVE
        )
    if s.load is None and s.pretrained_checkpoint is None:
        yield s.violation(
            f"{s.flag('moe_use_upcycling')} needs --load: the dense model.",
            "moe_use_upcycling",
            "load",
            kind="build",
        )
    if f.experts is None:
        yield s.violation(
            f"{s.flag('moe_use_upcycling')} needs --num-experts.", "moe_use_upcycling", "num_experts", kind="build"
        )
        return
    dense, expert = s.ffn_hidden_size, s.moe_ffn_hidden_size
    if not divides(expert, dense):
        yield s.violation(
            f"{s.flag('moe_use_upcycling')} needs {s.describe('ffn_hidden_size')} to be a multiple of "
            f"{s.describe('moe_ffn_hidden_size')}: each dense layer is split into experts.",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
            "moe_use_upcycling",
            kind="build",
        )
    pieces = quotient(dense, expert)
    if not divides(pieces, f.experts):
        yield s.violation(
            f"{s.describe('num_experts')} must be a multiple of the {pieces} experts that a dense layer is split into "
            f"({s.describe('ffn_hidden_size')} / {s.describe('moe_ffn_hidden_size')}).",
            "num_experts",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
            kind="build",
        )
    fine = s.finermoe_intermediate_granularity is not None
    if s.given("moe_upcycling_granularity") and pieces is not None and s.moe_upcycling_granularity != pieces:
        yield s.violation(
            f"{s.describe('moe_upcycling_granularity')} must be {pieces}: {s.describe('ffn_hidden_size')} / "
            f"{s.describe('moe_ffn_hidden_size')}; or leave one of them out.",
            "moe_upcycling_granularity",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
        )
    for dest, why in UNKNOWN_TO_UPCYCLING:
        if s.values[dest] not in (None, False, 0, 0.0):
            yield s.violation(f"{s.flag('moe_use_upcycling')} {why}, not {s.flag(dest)}.", "moe_use_upcycling", dest)
    shared = s.moe_shared_expert_intermediate_size
    if shared is not None and not (fine and shared == dense):
        yield s.violation(
            f"{s.flag('moe_use_upcycling')} makes no {s.describe('moe_shared_expert_intermediate_size')}: only "
            f"FineRMoE's shared expert is the dense network, as wide as it ({dense}).",
            "moe_use_upcycling",
            "moe_shared_expert_intermediate_size",
        )
    if fine and s.add_bias_linear:
        yield s.violation(
            f"{s.flag('moe_use_upcycling')} to FineRMoE's experts needs --disable-bias-linear: they have no biases.",
            "moe_use_upcycling",
            "add_bias_linear",
        )


def check_old_flags(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for old, new in (("batch_size", "micro_batch_size"), ("model_parallel_size", "tensor_model_parallel_size")):
        if getattr(s, old) is not None:
            yield s.violation(
                f"{s.describe(old)} is the old name of {s.describe(new)}, and they differ; keep the latter.", old, new
            )
    if s.warmup is not None:
        yield s.violation(
            f"{s.describe('warmup')} has been removed, and its number may mean a share or a count; use "
            "--lr-warmup-fraction or --lr-warmup-iters.",
            "warmup",
            "lr_warmup_fraction",
        )


RESOLVE = (resolve_async_save, resolve_upcycling)
CHECKS = (
    check_save_interval,
    check_auto_resume,
    check_dump_intervals,
    check_save_retain_interval,
    check_checkpoint_conversion,
    check_override_iteration,
    check_legacy_format_optimizer,
    check_legacy_format_layers,
    check_torch_format_needs_gloo,
    check_upcycling,
    check_old_flags,
)
