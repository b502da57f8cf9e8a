"""Rules 40-44, 48-49: batch sizes, the length of training, warmup and decay, evaluation."""

from collections.abc import Iterator

from arguments.rules.batch_schedule import read_batch_schedule
from arguments.rules.facts import Facts, as_list, broken, divides, positive, say
from arguments.settings import Settings, Violation

GBS, MBS = "global_batch_size", "micro_batch_size"
ITERATIONS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def _per_microstep(s: Settings, f: Facts, micro: object) -> int | None:
    """Samples that all data ranks take in one forward pass."""
    return None if f.dp is None or not positive(micro) else micro * f.dp


# Derived and normalised values.


def batch_size(s: Settings, f: Facts) -> None:
    samples = _per_microstep(s, f, s.micro_batch_size)
    if s.global_batch_size is None and samples is not None:
        s.set_derived(GBS, samples, f"micro batch size * {f.dp} data ranks")


def eval_batch_sizes(s: Settings, f: Facts) -> None:
    if s.eval_micro_batch_size is None and s.micro_batch_size is not None:
        s.set_derived("eval_micro_batch_size", s.micro_batch_size, "as --micro-batch-size")
    if s.eval_global_batch_size is None and s.global_batch_size is not None:
        size, step = s.global_batch_size, _per_microstep(s, f, s.eval_micro_batch_size)
        if s.decrease_batch_size_if_needed and step is not None and size > step:
            size -= size % step
        s.set_derived("eval_global_batch_size", size, "as --global-batch-size")


OF_TRAINING = (
    "save", "async_save", "exit_interval", "exit_duration_in_mins", "exit_signal_handler", "iterations_to_skip", "record_step", "dump_step",
    "error_injection_rate", "rampup_batch_size", "profile", "auto_resume",
)  # fmt: skip
"""Flags of which an evaluation does nothing, besides those that say how long a training is."""


def evaluation_says_what_it_leaves_out(s: Settings, _f: Facts) -> None:
    if not s.evaluates_only:
        return
    skip, idle = s.flag("skip_train"), [s.flag(dest) for dest in OF_TRAINING if s.given(dest) and getattr(s, dest)]
    if idle:
        s.note(f"{', '.join(idle)} with {skip}: no effect, nothing is trained or saved.")
    if s.eval_iters == 0 and not s.full_validation:
        s.note(f"{s.flag('eval_iters')} 0 with {skip}: nothing is evaluated; give --eval-iters N or --full-validation.")
    if s.load is None and s.pretrained_checkpoint is None and s.init_from is None:
        s.note(f"{skip} without --load: the weights that are evaluated are initial ones.")


def evaluation_batch_fits_the_ranks(s: Settings, f: Facts) -> None:
    """A batch of evaluation that nobody typed is rounded down to what these ranks can divide among them; there is no other batch then."""
    dest, step = "eval_global_batch_size", _per_microstep(s, f, s.eval_micro_batch_size)
    if not s.evaluates_only or s.given(dest) or s.given(GBS) or step is None or not positive(s.eval_global_batch_size):
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
        s.note(f"an evaluation batch of {size} samples does not divide among {f.dp} data ranks with micro-batches of {s.eval_micro_batch_size}: "
               f"{s.eval_global_batch_size} are taken, so the evaluation reads {s.eval_iters} x {s.eval_global_batch_size} samples.")
    s.set_derived(GBS, s.eval_global_batch_size, "as the batch of evaluation")


def evaluation_loads_no_optimizer(s: Settings, _f: Facts) -> None:
    if s.evaluates_only:
        s.set_derived("no_load_optim", True, "--skip-train")


def iterations_of_samples(s: Settings, _f: Facts) -> None:
    if (
        s.train_iters is None
        and positive(s.train_samples)
        and positive(s.global_batch_size)
        and not s.rampup_batch_size
    ):
        s.set_derived("train_iters", s.train_samples // s.global_batch_size, "training samples / global batch size")


def decay_length(s: Settings, _f: Facts) -> None:
    """Decay over the whole training unless told otherwise; the source of `train_iters` tells which unit counts."""
    if s.train_samples is not None and s.source["train_iters"] in ("default", "derived"):
        if s.lr_decay_samples is None:
            s.set_derived("lr_decay_samples", s.train_samples, "as --train-samples")
    elif s.train_iters is not None and s.lr_decay_iters is None:
        s.set_derived("lr_decay_iters", s.train_iters, "as --train-iters")


# Checks.


def batch_divides(s: Settings, f: Facts) -> Iterator[Violation]:
    step = _per_microstep(s, f, s.micro_batch_size)
    if s.global_batch_size is not None and not positive(s.global_batch_size):
        yield broken(s, f"{say(s, GBS)} must be above 0.", GBS)
    elif s.decrease_batch_size_if_needed and step is not None and positive(s.global_batch_size):
        if s.global_batch_size < step:
            yield _batch_violation(s, f, GBS, MBS, s.global_batch_size, "at least")
    elif not divides(step, s.global_batch_size):
        yield _batch_violation(s, f, GBS, MBS, s.global_batch_size, "a multiple of")


def _batch_violation(s: Settings, f: Facts, batch: str, micro: str, size: int, need: str) -> Violation:
    step = getattr(s, micro) * f.dp
    shown = say(s, batch) if getattr(s, batch) == size else f"{say(s, batch)}: a batch of {size}"
    nearest = sorted({max(size // step, 1) * step, -(-size // step) * step})
    text = (
        f"{shown} must be {need} {step} ({say(s, micro)} on each of {f.dp} data ranks), for example "
        f"{' or '.join(map(str, nearest))}."
    )
    return broken(s, text, batch, micro)


def eval_batch_divides(s: Settings, f: Facts) -> Iterator[Violation]:
    batch, micro = "eval_global_batch_size", "eval_micro_batch_size"
    for dest in (batch, micro):
        if s.given(dest) and not positive(getattr(s, dest)):
            yield broken(s, f"{say(s, dest)} must be above 0.", dest)
    step = _per_microstep(s, f, s.eval_micro_batch_size)
    if (s.given(batch) or s.given(micro)) and not divides(step, s.eval_global_batch_size):
        yield _batch_violation(s, f, batch, micro, s.eval_global_batch_size, "a multiple of")


def step_schedule_stands_alone(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest = "step_batch_size_schedule"
    if s.step_batch_size_schedule is None:
        return
    for other in (GBS, "decrease_batch_size_if_needed", "rampup_batch_size"):
        if s.given(other):
            yield broken(
                s,
                f"{say(s, dest)} cannot be combined with {say(s, other)}: the schedule sets the batch size.",
                dest,
                other,
            )


def step_schedule_is_sound(s: Settings, f: Facts) -> Iterator[Violation]:
    dest = "step_batch_size_schedule"
    if s.step_batch_size_schedule is None:
        return
    try:
        entries = read_batch_schedule(s.step_batch_size_schedule)
    except ValueError as error:
        yield broken(s, f"{say(s, dest)}: {error}.", dest)
        return
    step = _per_microstep(s, f, s.micro_batch_size)
    for _, batch in entries:
        if not divides(step, batch):
            yield _batch_violation(s, f, dest, MBS, batch, "a multiple of")


def rampup_is_sound(s: Settings, f: Facts) -> Iterator[Violation]:
    ramp, dest = as_list(s.rampup_batch_size), "rampup_batch_size"
    if not ramp or not positive(s.global_batch_size) or len(ramp) != 3:
        return
    start, increment, samples = ramp
    step = _per_microstep(s, f, s.micro_batch_size)
    if not positive(start) or not positive(increment) or samples < 0:
        yield broken(
            s, f"{say(s, dest)}: start and increment must be above 0, the number of samples not negative.", dest
        )
    elif start > s.global_batch_size or (s.global_batch_size - start) % increment:
        yield broken(
            s,
            f"{say(s, dest)} must reach {say(s, GBS)} from {start} in whole increments of {increment}.",
            dest,
            GBS,
        )
    else:
        for size in (start, increment):
            if not divides(step, size):
                yield _batch_violation(s, f, dest, MBS, size, "a multiple of")


def one_training_length(s: Settings, _f: Facts) -> Iterator[Violation]:
    iters_given = s.given("train_iters")
    if iters_given and s.train_samples is not None:
        yield broken(
            s,
            f"Use only one of {say(s, 'train_iters')} and {say(s, 'train_samples')}: training is counted in one unit.",
            "train_iters",
            "train_samples",
        )
    elif not iters_given and s.train_samples is None and (not s.skip_train or s.moe_use_upcycling):
        yield broken(
            s,
            "The length of training is missing: give --train-iters or --train-samples.",
            "train_iters",
            "train_samples",
        )


def schedule_uses_the_training_unit(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.evaluates_only or s.given("train_iters") == (s.train_samples is not None):
        return
    length, strangers = ("train_iters", SAMPLES) if s.given("train_iters") else ("train_samples", ITERATIONS)
    for dest in strangers:
        if s.given(dest) and getattr(s, dest):
            unit = "iterations" if length == "train_iters" else "samples"
            yield broken(
                s, f"{say(s, dest)} does not fit {say(s, length)}: this training is counted in {unit}.", dest, length
            )


def one_warmup(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.lr_warmup_fraction is None:
        return
    for dest in ("lr_warmup_iters", "lr_warmup_samples"):
        if getattr(s, dest):
            yield broken(
                s,
                f"Use only one of {say(s, 'lr_warmup_fraction')} and {say(s, dest)}.",
                "lr_warmup_fraction",
                dest,
            )


def warmup_ends_before_decay(s: Settings, _f: Facts) -> Iterator[Violation]:
    for warmup, decay in (("lr_warmup_iters", "lr_decay_iters"), ("lr_warmup_samples", "lr_decay_samples")):
        steps, length = getattr(s, warmup), getattr(s, decay)
        if steps and positive(length) and steps >= length:
            yield broken(
                s,
                f"{say(s, warmup)} must be below {say(s, decay)}: warmup is the beginning of the decay length.",
                warmup,
                decay,
            )


def wsd_has_a_decay(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.lr_decay_style == "WSD" and s.lr_wsd_decay_iters is None and s.lr_wsd_decay_samples is None:
        yield broken(
            s,
            f"{say(s, 'lr_decay_style')} needs --lr-wsd-decay-iters (or -samples): how long the final decay lasts.",
            "lr_decay_style",
            "lr_wsd_decay_iters",
        )


def evaluation_is_scheduled(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.eval_interval is None and not s.skip_train and not s.full_validation and s.eval_iters != 0:
        yield broken(
            s,
            f"{s.flag('eval_interval')} is missing: give the number of iterations between validations (or "
            "--eval-iters 0 for none).",
            "eval_interval",
        )


def memory_log_follows_log(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not divides(s.log_interval, s.log_memory_interval):
        yield broken(
            s,
            f"{say(s, 'log_memory_interval')} must be a multiple of {say(s, 'log_interval')}.",
            "log_memory_interval",
            "log_interval",
        )


def checks_have_intervals(s: Settings, _f: Facts) -> Iterator[Violation]:
    for dest in ("check_weight_hash_across_dp_replicas_interval", "gpu_sniff_test_interval"):
        if getattr(s, dest) is not None and getattr(s, dest) <= 0:
            yield broken(s, f"{say(s, dest)} must be above 0.", dest)


def a_spike_is_above_the_rest(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.loss_spike_factor is not None and s.loss_spike_factor <= 1:
        yield broken(s, f"{say(s, 'loss_spike_factor')} must be above 1: half of all losses are above their median.", "loss_spike_factor")


def sharded_weights_are_held_once(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest, sharding = "check_weight_hash_across_dp_replicas_interval", "data_parallel_sharding_strategy"
    if s.use_megatron_fsdp and getattr(s, dest) is not None and s.data_parallel_sharding_strategy == "optim_grads_params":
        yield broken(s, f"{say(s, dest)} with {say(s, sharding)}: no weight is held by two ranks, there is nothing to compare.", dest, sharding)


def switch_has_a_port(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.straggler_ctrlr_port > 65535:
        yield broken(s, f"{say(s, 'straggler_ctrlr_port')}: the number of a port is at most 65535.", "straggler_ctrlr_port")


RESOLVE = (batch_size, eval_batch_sizes, evaluation_batch_fits_the_ranks, evaluation_loads_no_optimizer, evaluation_says_what_it_leaves_out, iterations_of_samples, decay_length)
CHECKS = (
    batch_divides,
    eval_batch_divides,
    step_schedule_stands_alone,
    step_schedule_is_sound,
    rampup_is_sound,
    one_training_length,
    schedule_uses_the_training_unit,
    one_warmup,
    warmup_ends_before_decay,
    wsd_has_a_decay,
    evaluation_is_scheduled,
    memory_log_follows_log,
    checks_have_intervals,
    a_spike_is_above_the_rest,
    sharded_weights_are_held_once,
    switch_has_a_port,
)
