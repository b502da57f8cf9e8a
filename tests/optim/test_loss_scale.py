"""The sequence of the dynamic loss scale by hand, and its selection by the flags."""

from hypothesis import given
from hypothesis import strategies as st

from arguments.precision import PrecisionArgs
from moe_trainer.optim.loss_scale import DynamicLossScale, LossScale, build_loss_scale


def test_loss_scale_sequence_matches_hand_computation():
    """hysteresis 2: the first overflow is forgiven, every further one halves; three clean iterations double and forgive."""
    scale = DynamicLossScale(16.0, minimum=2.0, window=3, hysteresis=2)
    story = [
        (True, 16),
        (True, 8),
        (False, 8),
        (True, 4),
        (True, 2),
        (True, 2),
        (False, 2),
        (False, 2),
        (False, 4),
        (True, 4),
        (True, 2),
        (False, 2),
        (False, 2),
        (False, 4),
        (False, 4),
        (False, 4),
        (False, 8),
    ]
    for overflow, expected in story:
        scale.update(overflow)
        assert scale.scale == expected


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60))
def test_state_resumes_the_sequence(story, cut):
    straight = DynamicLossScale(2.0**16, window=4, hysteresis=3)
    resumed = DynamicLossScale(2.0**16, window=4, hysteresis=3)
    for index, overflow in enumerate(story):
        if index == cut:
            state, resumed = resumed.state_dict(), DynamicLossScale(1.0, window=4, hysteresis=3)
            resumed.load_state_dict(state)
        straight.update(overflow)
        resumed.update(overflow)
        assert resumed.scale == straight.scale >= 1.0


def test_loss_scale_follows_the_flags():
    assert build_loss_scale(PrecisionArgs()) == LossScale(1.0)
    assert build_loss_scale(PrecisionArgs(loss_scale=8.0)) == LossScale(1.0)  # fp32 has no scale, as in Megatron-LM
    assert build_loss_scale(PrecisionArgs(bf16=True)) == LossScale(1.0)
    assert build_loss_scale(PrecisionArgs(bf16=True, loss_scale=8.0)) == LossScale(8.0)
    assert build_loss_scale(PrecisionArgs(fp16=True, loss_scale=8.0)) == LossScale(8.0)
    dynamic = build_loss_scale(PrecisionArgs(fp16=True))
    assert (dynamic.scale, dynamic.minimum, dynamic.window, dynamic.hysteresis) == (2.0**32, 1.0, 1000, 2)


def test_consecutive_overflows_at_the_minimum_are_counted():
    scale = DynamicLossScale(4.0, minimum=2.0, window=3, hysteresis=1)
    counts = []
    for overflow in (True, True, True, False, True):
        scale.update(overflow)
        counts.append(scale.overflows_at_minimum)
    assert counts == [0, 1, 2, 0, 1]
