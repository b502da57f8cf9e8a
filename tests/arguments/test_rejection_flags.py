"""Flags for rejecting results: notes about missing companion flags, and invalid values."""

import pytest

from arguments import ArgumentError, parse_args

ARGV = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8 --eval-iters 0"
).split()


@pytest.mark.parametrize(
    "argv, needed",
    [
        (["--on-loss-spike", "skip"], "--check-for-spiky-loss or --check-for-large-grads"),
        (["--loss-spike-factor", "3"], "--check-for-spiky-loss"),
        (["--error-injection-type", "persistent_error"], "--error-injection-rate"),
        (
            ["--no-check-for-nan-in-loss-and-grad", "--on-nan", "skip"],
            "without what --no-check-for-nan-in-loss-and-grad switches off",
        ),
        (
            ["--no-check-for-nan-in-loss-and-grad", "--error-injection-rate", "5"],
            "without what --no-check-for-nan-in-loss-and-grad switches off or --check-for-spiky",
        ),
    ],
)
def test_flag_without_its_required_check_is_noted(argv, needed):
    notes = [note for note in parse_args([*ARGV, *argv], 1).notes if argv[-2] in note]
    assert len(notes) == 1 and needed in notes[0]


def test_flags_with_their_required_checks_give_no_note():
    args = parse_args(
        [
            *ARGV,
            "--check-for-spiky-loss",
            "--on-loss-spike",
            "skip",
            "--loss-spike-factor",
            "3",
            "--on-nan",
            "skip",
            "--rerun-mode",
            "report_stats",
            "--error-injection-rate",
            "5",
            "--error-injection-type",
            "correct_result",
        ],
        1,
    )
    assert not [note for note in args.notes if "no effect" in note or "--rerun-mode" in note]
    assert (args.training.on_loss_spike, args.training.loss_spike_factor, args.training.on_nan) == ("skip", 3.0, "skip")


@pytest.mark.parametrize(
    "argv, flag",
    [
        (["--on-nan", "report"], "--on-nan"),
        (["--on-loss-spike", "ignore"], "--on-loss-spike"),
        (["--loss-spike-factor", "1"], "--loss-spike-factor 1"),
        (["--loss-spike-factor", "nan"], "--loss-spike-factor"),
        (["--error-injection-rate", "-1"], "--error-injection-rate"),
        (["--rerun-mode", "sometimes"], "--rerun-mode"),
    ],
)
def test_invalid_rejection_flags_are_refused_by_name(argv, flag):
    with pytest.raises(ArgumentError, match=flag):
        parse_args([*ARGV, *argv], 1)
