"""A flag on the command line beats another flag of a preset that answers the same question."""

from arguments import rules
from arguments.container import OPTIONS
from arguments.settings import Settings


def make_settings(recipe: dict, typed: dict) -> Settings:
    s = Settings(OPTIONS)
    for source, values in (("preset", recipe), ("command line", typed)):
        for dest, value in values.items():
            s.set_given(dest, value, source, OPTIONS[dest].spellings[0])
    return s


def test_training_length_on_command_line_overrides_preset():
    s = make_settings(
        {"train_samples": 1000, "lr_decay_samples": 900, "lr_warmup_samples": 10, "global_batch_size": 8},
        {"train_iters": 10},
    )
    rules.resolve(s, 1)
    assert (s.train_samples, s.lr_decay_samples, s.lr_warmup_samples) == (None, None, 0)
    assert (s.train_iters, s.lr_decay_iters) == (10, 10)
    assert sum("is ignored" in note for note in s.notes) == 3
    assert not [v for v in rules.check(s, 1) if "--train-iters" in v.flags]


def test_data_dtype_and_layout_on_command_line_override_preset():
    s = make_settings(
        {"data_path": ["/corpus"], "bf16": True, "pipeline_model_parallel_layout": "Et|tL"},
        {"mock_data": True, "fp16": True, "num_virtual_stages_per_pipeline_rank": 2},
    )
    rules.resolve(s, 1)
    assert (s.data_path, s.bf16, s.pipeline_model_parallel_layout) == (None, False, None)


def test_conflicting_flags_on_the_command_line_are_an_error():
    s = make_settings({}, {"train_samples": 1000, "train_iters": 10})
    rules.resolve(s, 1)
    assert any({"--train-iters", "--train-samples"} <= set(v.flags) for v in rules.check(s, 1))


def test_conflicting_flags_within_a_preset_are_an_error():
    s = make_settings({"train_samples": 1000, "train_iters": 10}, {})
    rules.resolve(s, 1)
    assert any({"--train-iters", "--train-samples"} <= set(v.flags) for v in rules.check(s, 1))
