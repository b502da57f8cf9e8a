"""Schedules against hand values, and properties that hold for all of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arguments.optimizer import OptimizerArgs
from arguments.training import TrainingArgs
from moe_trainer.optim.scheduler_state import resume_schedules, scheduler_state_dict
from moe_trainer.optim.schedules import (
    BatchSizeSchedule,
    LrSchedule,
    WeightDecaySchedule,
    build_batch_size_schedule,
    build_lr_schedule,
    build_weight_decay_schedule,
)
from moe_trainer.pipeline.batch_sizes import batch_stages

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def _lr(style, wsd_style="linear", **more):
    options = {"max_lr": 1.0, "min_lr": 0.1, "decay_samples": 100, "warmup_samples": 20, "wsd_samples": 40, **more}
    return LrSchedule(style=style, wsd_style=wsd_style, **options)


@pytest.mark.parametrize(
    "schedule, values",
    [
        (_lr("constant"), {0: 0.0, 5: 0.25, 19: 0.95, 20: 1.0, 60: 1.0, 1000: 1.0}),
        (_lr("linear"), {0: 0.0, 19: 0.95, 20: 1.0, 60: 0.55, 100: 0.1, 101: 0.1}),
        (_lr("cosine"), {19: 0.95, 20: 1.0, 40: 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)), 60: 0.55, 100: 0.1}),
        (_lr("inverse-square-root"), {20: 1.0, 80: 0.5, 100: math.sqrt(0.2), 101: 0.1}),
        (_lr("inverse-square-root", warmup_samples=0), {0: 1.0, 1: 1.0, 4: 0.5, 100: 0.1}),
        (_lr("WSD"), {20: 1.0, 60: 1.0, 80: 0.55, 100: 0.1, 101: 0.1}),
        (_lr("WSD", "cosine"), {60: 1.0, 80: 0.55, 100: 0.1}),
        (_lr("WSD", "exponential"), {60: 1.0, 80: 0.1 + 0.9 * (math.sqrt(2) - 1), 100: 0.1}),
        (_lr("WSD", "minus_sqrt"), {60: 1.0, 70: 0.55, 100: 0.1}),
        (_lr("linear", init_lr=0.2), {0: 0.2, 10: 0.6, 20: 1.0}),
        (_lr("linear", warmup_samples=0), {0: 1.0, 50: 0.55}),
    ],
)
def test_learning_rates_match_hand_values(schedule, values):
    for samples, expected in values.items():
        assert schedule.lr(samples) == pytest.approx(expected, rel=1e-12), samples


@given(
    style=st.sampled_from(STYLES),
    wsd_style=st.sampled_from(WSD_STYLES),
    low=st.floats(0, 1e-3),
    span=st.floats(0, 1e-2),
    decay=st.integers(2, 10_000),
    warmup=st.floats(0, 0.99),
    wsd=st.floats(0.01, 1.0),
    samples=st.integers(0, 20_000),
)
def test_learning_rate_stays_in_range_and_falls_after_warmup(style, wsd_style, low, span, decay, warmup, wsd, samples):
    schedule = LrSchedule(
        style, low + span, low, decay, warmup * decay, wsd_style=wsd_style, wsd_samples=max(1, int(wsd * decay))
    )
    here, after = schedule.lr(samples), schedule.lr(samples + 1)
    slack = 1e-12
    assert -slack <= here <= low + span + slack
    if samples >= schedule.warmup_samples:
        assert here >= low - slack and after <= here + slack
    else:
        assert after >= here - slack or samples + 1 > schedule.warmup_samples


def test_decoupled_range_follows_the_same_curve():
    schedule = _lr("cosine", decoupled_max_lr=10.0, decoupled_min_lr=1.0)
    for samples in (0, 7, 20, 55, 99, 100, 200):
        assert schedule.decoupled_lr(samples) == pytest.approx(10 * schedule.lr(samples))
    assert _lr("cosine").decoupled_lr(50) is None
    assert _lr("cosine", decoupled_max_lr=10.0).decoupled_lr(100) == 0.1  # without its own minimum: the common one


@pytest.mark.parametrize(
    "more, words",
    [
        ({"min_lr": 2.0}, "--min-lr 2.0"),
        ({"init_lr": 2.0}, "--lr-warmup-init"),
        ({"decay_samples": 0}, "longer than 0"),
        ({"warmup_samples": 100}, "must be shorter"),
        ({"wsd_samples": None}, "--lr-wsd-decay-iters"),
    ],
)
def test_invalid_learning_rates_are_rejected(more, words):
    with pytest.raises(ValueError, match=words):
        _lr("WSD", **more)


def _training(**options):
    return TrainingArgs(**{"micro_batch_size": 2, "global_batch_size": 8, **options})


def test_lengths_in_iterations_and_in_samples_agree():
    by_iterations = build_lr_schedule(
        OptimizerArgs(lr=1.0, lr_warmup_iters=3, lr_decay_iters=50, lr_wsd_decay_iters=10, lr_decay_style="WSD"),
        _training(train_iters=100),
        8,
    )
    by_samples = build_lr_schedule(
        OptimizerArgs(
            lr=1.0, lr_warmup_samples=24, lr_decay_samples=400, lr_wsd_decay_samples=80, lr_decay_style="WSD"
        ),
        _training(train_samples=800),
        8,
    )
    assert by_iterations == by_samples
    fraction = build_lr_schedule(
        OptimizerArgs(lr=1.0, lr_warmup_fraction=0.06, lr_decay_iters=50), _training(train_iters=100), 8
    )
    assert fraction.warmup_samples == pytest.approx(24)
    full = build_lr_schedule(OptimizerArgs(lr=1.0), _training(train_iters=100), 8)
    assert (full.decay_samples, full.warmup_samples) == (800, 0)
    assert build_lr_schedule(OptimizerArgs(lr=1.0), _training(train_samples=700), 8).decay_samples == 700


def test_missing_schedule_flags_are_named():
    with pytest.raises(ValueError, match="--lr is needed"):
        build_lr_schedule(OptimizerArgs(), _training(train_iters=1), 8)
    with pytest.raises(ValueError, match="--train-iters or --train-samples"):
        build_lr_schedule(OptimizerArgs(lr=1.0), _training(), 8)
    with pytest.raises(ValueError, match="--start-weight-decay"):
        build_weight_decay_schedule(OptimizerArgs(weight_decay_incr_style="linear"), _training(train_iters=1), 8)


def test_weight_decay_schedule():
    linear, cosine = (WeightDecaySchedule(0.1, 0.3, 100, style) for style in ("linear", "cosine"))
    assert [linear.weight_decay(s) for s in (0, 25, 100, 101)] == pytest.approx([0.1, 0.15, 0.3, 0.3])
    assert [cosine.weight_decay(s) for s in (0, 50, 100, 500)] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert cosine.weight_decay(25) == pytest.approx(0.1 + 0.2 * 0.5 * (1 - math.sqrt(0.5)))
    constant = build_weight_decay_schedule(OptimizerArgs(weight_decay=0.2), _training(train_iters=10), 8)
    assert {constant.weight_decay(s) for s in (0, 40, 80, 81)} == {0.2}
    grown = build_weight_decay_schedule(
        OptimizerArgs(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=1.0),
        _training(train_iters=10),
        8,
    )
    assert grown.weight_decay(40) == 0.5


def test_constant_batch_size():
    schedule = build_batch_size_schedule(_training(), dp_size=2, seq_length=64)
    assert (schedule.global_batch_size(0), schedule.num_microbatches(10**9), schedule.iterations_for(83)) == (8, 2, 10)
    unset = build_batch_size_schedule(_training(global_batch_size=None), dp_size=3, seq_length=64)
    assert (unset.global_batch_size(0), unset.num_microbatches(0)) == (6, 1)


def test_rampup_by_hand():
    """From 8 to 32 in three steps of 8, over 300 samples: a step every 100 consumed samples."""
    schedule = build_batch_size_schedule(_training(global_batch_size=32, rampup_batch_size=[8, 8, 300]), 2, 64)
    assert [schedule.global_batch_size(s) for s in (0, 99, 100, 199, 200, 299, 300, 10**6)] == [
        8,
        8,
        16,
        16,
        24,
        24,
        32,
        32,
    ]
    assert schedule.num_microbatches(0) == 2 and schedule.num_microbatches(300) == 8
    assert schedule.final_global_batch_size == 32


def test_rampup_whose_samples_do_not_divide_by_its_steps():
    """As in Megatron-LM a step comes with the first sample at or after its border, 33 1/3 and 66 2/3 here."""
    training = _training(global_batch_size=32, rampup_batch_size=[8, 8, 100])
    assert batch_stages(training, 2, 64) == ((0, 8), (34, 16), (67, 24), (100, 32))


def test_rampup_over_no_samples_is_the_final_size():
    schedule = build_batch_size_schedule(_training(global_batch_size=32, rampup_batch_size=[8, 8, 0]), 2, 64)
    assert schedule.global_batch_size(0) == 32


def _step_stages(text, seq_length):
    return batch_stages(_training(global_batch_size=None, step_batch_size_schedule=text), 2, seq_length)


def test_step_schedule_counts_tokens():
    assert _step_stages("0:384 200B:768 400B:1152", 4096) == ((0, 384), (48828125, 768), (97656250, 1152))
    assert _step_stages("0:16, 0.5K:1000", 10) == ((0, 16), (50, 1000))
    assert _step_stages("0:16 4.1B:32", 1) == ((0, 16), (4_100_000_000, 32))
    schedule = build_batch_size_schedule(
        _training(global_batch_size=None, step_batch_size_schedule="0:4 640:8 2K:12"), 2, 64
    )
    assert [schedule.global_batch_size(s) for s in (0, 9, 10, 30, 31, 99)] == [4, 4, 8, 8, 12, 12]


def test_step_schedule_with_entries_at_one_sample_is_rejected():
    with pytest.raises(ValueError, match="--step-batch-size-schedule"):
        _step_stages("0:16 10:32", 64)


@pytest.mark.parametrize("rampup", [[0, 8, 100], [8, 0, 100], [8, 8, -1], [64, 8, 100], [8, 9, 100]])
def test_invalid_rampups_are_rejected(rampup):
    with pytest.raises(ValueError, match="--rampup-batch-size"):
        build_batch_size_schedule(_training(global_batch_size=32, rampup_batch_size=rampup), 2, 64)


def test_indivisible_batches_are_refused_or_rounded():
    strict = build_batch_size_schedule(_training(global_batch_size=30), dp_size=4, seq_length=64)
    with pytest.raises(ValueError, match=r"30 .*not divisible.* 2 \* 4 = 8"):
        strict.global_batch_size(0)
    rounded = build_batch_size_schedule(_training(global_batch_size=30, decrease_batch_size_if_needed=True), 4, 64)
    assert (rounded.global_batch_size(0), rounded.num_microbatches(0), rounded.final_global_batch_size) == (24, 3, 30)
    with pytest.raises(ValueError, match="--decrease-batch-size-if-needed cannot help"):
        build_batch_size_schedule(_training(global_batch_size=6, decrease_batch_size_if_needed=True), 4, 64)


@given(
    start=st.integers(1, 4),
    steps=st.integers(0, 5),
    increment=st.integers(1, 4),
    ramp=st.integers(0, 500),
    train=st.integers(0, 3000),
)
def test_iterations_for_equals_step_by_step_count(start, steps, increment, ramp, train):
    training = _training(
        micro_batch_size=1, global_batch_size=start + steps * increment, rampup_batch_size=[start, increment, ramp]
    )
    schedule = build_batch_size_schedule(training, 1, 64)
    consumed = iterations = last = 0
    while consumed + schedule.global_batch_size(consumed) <= train:
        assert schedule.global_batch_size(consumed) >= last
        last = schedule.global_batch_size(consumed)
        consumed += last
        iterations += 1
    assert schedule.iterations_for(train) == iterations


def test_past_rampup_stages_need_not_be_divisible():
    """After a restart on more ranks an early, small batch may not be divisible; it is not used again."""
    schedule = BatchSizeSchedule(((0, 4), (100, 16)), micro_batch_size=2, dp_size=8)
    assert schedule.num_microbatches(100) == 1
    assert schedule.iterations_for(164) == 29
    with pytest.raises(ValueError, match="not divisible"):
        schedule.global_batch_size(0)


def _recorded():
    lr, decay = _lr("cosine"), WeightDecaySchedule(0.1, 0.1, 800)
    return lr, decay, scheduler_state_dict(lr, decay, 24)


def test_record_has_megatrons_names():
    assert _recorded()[2] == {
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 20,
        "lr_decay_steps": 100,
        "lr_decay_style": "cosine",
        "num_steps": 24,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 800,
        "wd_incr_style": "constant",
    }


def test_resuming_with_the_same_schedules_changes_nothing():
    lr, decay, saved = _recorded()
    assert resume_schedules(lr, decay, saved, override=False, use_saved=False) == (lr, decay)
    assert resume_schedules(lr, WeightDecaySchedule(0.1, 0.1, 900), saved, override=False, use_saved=False)[0] == lr
    assert resume_schedules(lr, decay, {"num_steps": 3}, override=False, use_saved=False) == (lr, decay)


def test_resuming_with_other_schedules_needs_a_decision():
    _, _, saved = _recorded()
    lr, decay = _lr("linear", max_lr=2.0), WeightDecaySchedule(0.1, 0.2, 900, "linear")
    with pytest.raises(
        ValueError, match=r"--lr is 2.0 in this run and 1.0 .*--lr-decay-style .*the length of the training is 900"
    ):
        resume_schedules(lr, decay, saved, override=False, use_saved=False)
    assert resume_schedules(lr, decay, saved, override=True, use_saved=False) == (lr, decay)
    assert resume_schedules(lr, decay, saved, override=False, use_saved=True) == _recorded()[:2]
