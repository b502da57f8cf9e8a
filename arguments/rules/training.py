"""Batch sizes, the length of training, warmup and decay, evaluation."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import get_sharding
from arguments.optimizer import OptimizerArgs
from arguments.rules.derived_sizes import DerivedSizes, as_list, divides, positive
from arguments.settings import Limit, Settings, Violation
from arguments.training import parse_batch_schedule

GBS, MBS = "global_batch_size", "micro_batch_size"
ITERATIONS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def _samples_per_microstep(s: Settings, f: DerivedSizes, micro: object) -> int | None:
    """Return the samples of one forward pass on all data ranks."""
    return None if f.dp is None or not positive(micro) else micro * f.dp


# Derived values.


def resolve_global_batch_size(s: Settings, f: DerivedSizes) -> None:
    samples = _samples_per_microstep(s, f, s.micro_batch_size)
    if s.global_batch_size is None and samples is not None:
        s.set_derived(GBS, samples, f"micro batch size * {f.dp} data ranks")


def resolve_eval_batch_sizes(s: Settings, f: DerivedSizes) -> None:
    if s.eval_micro_batch_size is None and s.micro_batch_size is not None:
        s.set_derived("eval_micro_batch_size", s.micro_batch_size, "as --micro-batch-size")
    if s.eval_global_batch_size is None and s.global_batch_size is not None:
        size, step = s.global_batch_size, _samples_per_microstep(s, f, s.eval_micro_batch_size)
        if s.decrease_batch_size_if_needed and step is not None and size > step:
            size -= size % step
        s.set_derived("eval_global_batch_size", size, "as --global-batch-size")


TRAINING_ONLY = (
    "save",
    "async_save",
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_handler",
    "save_on_interrupt",
    "iterations_to_skip",
    "record_step",
    "eval_tasks",
    "sample_prompts",
    "stream_weights_to",
    "dump_step",
    "error_injection_rate",
    "rampup_batch_size",
    "profile",
    "auto_resume",
)
"""Flags without effect in an evaluation, besides those that set the length of training."""


def resolve_eval_batch_of_ranks(s: Settings, f: DerivedSizes) -> None:
    """Round a derived evaluation batch down to what these ranks can divide; an evaluation has no other batch."""
    dest, step = "eval_global_batch_size", _samples_per_microstep(s, f, s.eval_micro_batch_size)
    if not s.is_eval_only or s.given(dest) or s.given(GBS) or not positive(s.eval_global_batch_size):
        return
    if step is None or f.dp is None:
        return
    size = s.eval_global_batch_size
    if size % step and size % f.dp == 0 and not s.given("eval_micro_batch_size") and not s.given("micro_batch_size"):
        # a smaller microbatch evaluates the same samples
        per_rank = size // f.dp
        smaller = max(each for each in range(1, s.eval_micro_batch_size + 1) if per_rank % each == 0)
        for micro in ("eval_micro_batch_size", MBS):
            s.set_derived(micro, smaller, f"a batch of {size} samples over {f.dp} data ranks")
        step = smaller * f.dp
    if size % step:
        s.set_derived(dest, max(size // step, 1) * step, f"a multiple of {step} near {size}")
        s.note(
            f"an evaluation batch of {size} samples does not divide among {f.dp} data ranks with micro-batches of "
            f"{s.eval_micro_batch_size}: {s.eval_global_batch_size} are used, so the evaluation reads {s.eval_iters} x "
            f"{s.eval_global_batch_size} samples."
        )
    s.set_derived(GBS, s.eval_global_batch_size, "as the batch of evaluation")


def note_batch_that_fits(s: Settings, f: DerivedSizes) -> None:
    step = _samples_per_microstep(s, f, s.micro_batch_size)
    if s.decrease_batch_size_if_needed and step is not None and divides(step, s.global_batch_size):
        s.note_no_effect(s.flag("decrease_batch_size_if_needed"), f"{s.shown(GBS)} divides among the ranks")


def resolve_eval_load_optim(s: Settings, _f: DerivedSizes) -> None:
    if s.is_eval_only:
        s.set_derived("no_load_optim", True, "--skip-train")


def note_flags_without_effect_in_eval(s: Settings, _f: DerivedSizes) -> None:
    if not s.is_eval_only:
        return
    skip = s.flag("skip_train")
    unused = [s.flag(dest) for dest in TRAINING_ONLY if s.given(dest) and getattr(s, dest)]
    if unused:
        s.note(f"{', '.join(unused)} with {skip}: no effect, because nothing is trained or saved.")
    of_updates = [s.flag(field.name) for field in fields(OptimizerArgs) if field.name in s.typed]
    if of_updates:
        s.note(f"{', '.join(of_updates)} with {skip}: no effect, because no weights are updated.")
    if s.eval_iters == 0 and not s.full_validation:
        s.note(f"{s.flag('eval_iters')} 0 with {skip}: nothing is evaluated; give --eval-iters N or --full-validation.")
    if s.load is None and s.pretrained_checkpoint is None and s.init_from is None:
        s.note(f"{skip} without --load: the initial weights are evaluated.")


def resolve_train_iters(s: Settings, _f: DerivedSizes) -> None:
    if (
        s.train_iters is None
        and positive(s.train_samples)
        and positive(s.global_batch_size)
        and not s.rampup_batch_size
    ):
        s.set_derived("train_iters", s.train_samples // s.global_batch_size, "training samples / global batch size")


def resolve_decay_length(s: Settings, _f: DerivedSizes) -> None:
    """Decay over the full training by default; the source of `train_iters` determines the unit."""
    if s.train_samples is not None and s.source["train_iters"] in ("default", "derived"):
        if s.lr_decay_samples is None:
            s.set_derived("lr_decay_samples", s.train_samples, "as --train-samples")
    elif s.train_iters is not None and s.lr_decay_iters is None:
        s.set_derived("lr_decay_iters", s.train_iters, "as --train-iters")


# Checks.


def check_spec(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    """--spec names a module and a function of it."""
    if not s.spec:
        return
    names = ":".join(s.spec).split(":")
    if len(names) != 2 or not all(part.isidentifier() for name in names for part in name.split(".")) or "." in names[1]:
        yield s.violation("{spec} must be package.module:function, or a module and a function as two words.")
    else:
        s.note(f"{s.flag('spec')}: plans count the modules that the flags select, not those of the function.")


def check_global_batch_size(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    step = _samples_per_microstep(s, f, s.micro_batch_size)
    if s.global_batch_size is not None and not positive(s.global_batch_size):
        yield s.violation("{global_batch_size} must be above 0.")
    elif s.decrease_batch_size_if_needed and step is not None and positive(s.global_batch_size):
        if s.global_batch_size < step:
            yield _batch_violation(s, f, GBS, MBS, s.global_batch_size, "at least")
    elif not divides(step, s.global_batch_size):
        yield _batch_violation(s, f, GBS, MBS, s.global_batch_size, "a multiple of")


def _batch_violation(s: Settings, f: DerivedSizes, batch: str, micro: str, size: Any, need: str) -> Violation:
    step = getattr(s, micro) * f.dp
    shown = s.describe(batch) if getattr(s, batch) == size else f"{s.describe(batch)}: a batch of {size}"
    nearest = sorted({max(size // step, 1) * step, -(-size // step) * step})
    text = (
        f"{shown} must be {need} {step} ({s.describe(micro)} on each of {f.dp} data ranks), for example "
        f"{' or '.join(map(str, nearest))}."
    )
    return s.violation(text, batch, micro)


def check_eval_batch_sizes(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    batch, micro = "eval_global_batch_size", "eval_micro_batch_size"
    for dest in (batch, micro):
        if s.given(dest) and not positive(getattr(s, dest)):
            yield s.violation("{} must be above 0.", dest)
    step = _samples_per_microstep(s, f, s.eval_micro_batch_size)
    if (s.given(batch) or s.given(micro)) and not divides(step, s.eval_global_batch_size):
        yield _batch_violation(s, f, batch, micro, s.eval_global_batch_size, "a multiple of")


def check_step_schedule_conflicts(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.step_batch_size_schedule is None:
        return
    for other in (GBS, "decrease_batch_size_if_needed", "rampup_batch_size"):
        if s.given(other):
            yield s.violation(
                "{step_batch_size_schedule} cannot be combined with {}: the schedule sets the batch size.", other
            )


def check_step_schedule(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    dest = "step_batch_size_schedule"
    if s.step_batch_size_schedule is None:
        return
    step = _samples_per_microstep(s, f, s.micro_batch_size)
    for _, batch in parse_batch_schedule(s.step_batch_size_schedule):
        if not divides(step, batch):
            yield _batch_violation(s, f, dest, MBS, batch, "a multiple of")


def check_rampup(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    ramp, dest = as_list(s.rampup_batch_size), "rampup_batch_size"
    if not ramp or not positive(s.global_batch_size) or len(ramp) != 3:
        return
    start, increment, samples = ramp
    step = _samples_per_microstep(s, f, s.micro_batch_size)
    if not positive(start) or not positive(increment) or samples < 0:
        yield s.violation(
            "{rampup_batch_size}: start and increment must be above 0, the number of samples not negative."
        )
    elif start > s.global_batch_size or (s.global_batch_size - start) % increment:
        yield s.violation(
            "{rampup_batch_size} must reach {global_batch_size} from {start} in increments of {increment}.",
            start=start,
            increment=increment,
        )
    else:
        for size in (start, increment):
            if not divides(step, size):
                yield _batch_violation(s, f, dest, MBS, size, "a multiple of")


def check_training_length(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    iters_given = s.given("train_iters")
    if iters_given and s.train_samples is not None:
        yield s.violation("Use only one of {train_iters} and {train_samples}: training is counted in one unit.")
    elif not iters_given and s.train_samples is None and (not s.skip_train or s.moe_use_upcycling):
        yield s.violation("The length of training is missing: give {train_iters:flag} or {train_samples:flag}.")


def check_schedule_unit(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.is_eval_only or s.given("train_iters") == (s.train_samples is not None):
        return
    length, strangers = ("train_iters", SAMPLES) if s.given("train_iters") else ("train_samples", ITERATIONS)
    for dest in strangers:
        if s.given(dest) and getattr(s, dest):
            unit = "iterations" if length == "train_iters" else "samples"
            yield s.violation("{} does not fit {}: this training is counted in {unit}.", dest, length, unit=unit)


def check_one_warmup(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.lr_warmup_fraction is None:
        return
    for dest in ("lr_warmup_iters", "lr_warmup_samples"):
        if getattr(s, dest):
            yield s.violation("Use only one of {lr_warmup_fraction} and {}.", dest)


def check_warmup_length(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for warmup, decay in (("lr_warmup_iters", "lr_decay_iters"), ("lr_warmup_samples", "lr_decay_samples")):
        steps, length = getattr(s, warmup), getattr(s, decay)
        if steps and positive(length) and steps >= length:
            yield s.violation("{} must be below {}: warmup is the beginning of the decay length.", warmup, decay)


def check_wsd_decay(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.lr_decay_style == "WSD" and s.lr_wsd_decay_iters is None and s.lr_wsd_decay_samples is None:
        yield s.violation(
            "{lr_decay_style} needs {lr_wsd_decay_iters:flag} (or -samples): how long the final decay lasts."
        )


def check_eval_tasks(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if bool(s.eval_tasks) != (s.eval_tasks_interval is not None):
        yield s.violation(
            "{eval_tasks:flag} and {eval_tasks_interval:flag} belong together: which tasks, and every how many "
            "iterations."
        )
    for dest in ("eval_tasks_path", "eval_tasks_limit"):
        if getattr(s, dest) is not None and not s.eval_tasks:
            yield s.violation("{} needs {eval_tasks:flag}.", dest)


def check_sample_prompts(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if bool(s.sample_prompts) != (s.sample_interval is not None):
        yield s.violation(
            "{sample_prompts:flag} and {sample_interval:flag} belong together: which texts, and every how many "
            "iterations."
        )


def check_stream_weights(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if (s.stream_weights_to is None) != (s.stream_weights_interval is None):
        yield s.violation(
            "{stream_weights_to:flag} and {stream_weights_interval:flag} belong together: where weights are written, "
            "and every how many iterations."
        )
    target = s.stream_weights_to or ""
    name = PurePosixPath(target.removeprefix("shm:"))
    if s.stream_weights_to == "" or (
        target.startswith("shm:") and (not name.parts or name.is_absolute() or ".." in name.parts)
    ):
        yield s.violation(
            "{stream_weights_to} needs a directory, or shm:NAME for a folder in shared memory (without .. or a "
            "leading slash)."
        )


def limit_eval_tasks(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """List what texts of many lengths cannot be combined with."""
    for dest, script in (("eval_tasks", "evaluate"), ("sample_prompts", "generate")):
        flag = f"{{{dest}:flag}}"
        yield Limit(
            getattr(s, dest) and s.context_parallel_size > 1,
            f"{flag} cannot be combined with {{context_parallel_size}}: texts are short, and computed without context "
            f"parallelism; run scripts/{script}.py on the checkpoints instead.",
        )
        yield Limit(
            getattr(s, dest) and s.cuda_graph_impl != "none",
            f"{flag} cannot be combined with {{cuda_graph_impl}}: texts have many lengths, and a graph is captured for "
            f"one; run scripts/{script}.py on the checkpoints instead.",
        )
        yield Limit(
            getattr(s, dest) and s.tokenizer_type == "NullTokenizer",
            f"{flag} cannot be combined with {{tokenizer_type}}, which has no text.",
        )


def check_log_memory_interval(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not divides(s.log_interval, s.log_memory_interval):
        yield s.violation("{log_memory_interval} must be a multiple of {log_interval}.")


def check_check_intervals(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("check_weight_hash_across_dp_replicas_interval", "gpu_sniff_test_interval"):
        if getattr(s, dest) is not None and getattr(s, dest) <= 0:
            yield s.violation("{} must be above 0.", dest)


def check_loss_spike_factor(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.loss_spike_factor is not None and s.loss_spike_factor <= 1:
        yield s.violation("{loss_spike_factor} must be above 1: half of all losses are above their median.")


def check_weight_hash_needs_replicas(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dest = "check_weight_hash_across_dp_replicas_interval"
    if getattr(s, dest) is not None and get_sharding(s).rejects(ShardingCapability.REPLICA_HASH):
        yield s.violation(
            "{check_weight_hash_across_dp_replicas_interval} with {data_parallel_sharding_strategy}: no two ranks hold "
            "the same weight, so there is nothing to compare."
        )


def check_straggler_port(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.straggler_ctrlr_port > 65535:
        yield s.violation("{straggler_ctrlr_port}: a port is at most 65535.")


def check_profiled_iterations(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.profile and s.profile_step_end <= s.profile_step_start:
        yield s.violation("{profile_step_end} must be above {profile_step_start}: otherwise nothing is recorded.")


def note_profiled_ranks(s: Settings, f: DerivedSizes) -> None:
    if s.profile and f.world is not None and s.profile_ranks and min(s.profile_ranks) >= f.world:
        s.note(f"{s.shown('profile_ranks')}: nothing is recorded, since there are {f.world} ranks.")


def note_profile_beyond_the_end(s: Settings, _f: DerivedSizes) -> None:
    if s.profile and s.train_iters is not None and s.profile_step_end > s.train_iters:
        s.note(
            f"{s.flag('profile')}: no profile is written, since training ends after iteration {s.train_iters}, before "
            f"--profile-step-end {s.profile_step_end}."
        )
