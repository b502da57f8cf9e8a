"""Maximal update parametrization on the command line: values derived as in Megatron-LM, and notes."""

import math

import pytest

from arguments import parse_args
from arguments.parse import resolve_command_line
from tests.arguments.rule_lines import base_line

MUP = ("--use-mup", "--mup-base-hidden-size")


def parse(*more: str):
    return parse_args([*base_line(), *more], 8)


def test_width_and_output_multipliers_are_derived_from_widths():
    width = parse().model.hidden_size
    args = parse(*MUP, str(width // 4))
    assert (args.optimizer.mup_width_mult, args.model.width_mult, args.model.mup_output_mult) == (4.0, 4.0, 0.25)
    assert parse("--use-mup").model.mup_base_hidden_size == width and parse("--use-mup").model.mup_output_mult == 1.0
    assert parse(*MUP, str(2 * width)).optimizer.mup_width_mult == 0.5
    assert parse(*MUP, str(width // 4), "--mup-output-mult", "0.7").model.mup_output_mult == 0.7
    assert (
        parse(*MUP, str(width // 4), "--mup-output-mult", "1.0").model.mup_output_mult == 0.25
    )  # 1 is no choice, there either


def test_mup_sets_the_softmax_scale():
    plain = parse("--kv-channels", "64")
    assert plain.model.softmax_scale is None and plain.model.width_mult == 1.0
    assert parse("--use-mup", "--kv-channels", "64").model.softmax_scale == 1 / 64
    assert parse("--use-mup", "--kv-channels", "64", "--mup-attn-scale-power", "0.5").model.softmax_scale == 1 / 8
    assert (
        parse("--use-mup", "--kv-channels", "64", "--mup-base-head-dim", "32").model.softmax_scale == math.sqrt(32) / 64
    )


def test_mup_multipliers_have_no_effect_without_use_mup():
    args = parse("--mup-width-mult", "3", "--mup-embedding-mult", "2")
    assert args.optimizer.mup_width_mult == 1.0
    settings, violations = resolve_command_line([*base_line(), "--mup-embedding-mult", "2"], 8)
    assert not violations and any("--mup-embedding-mult" in line and "--use-mup" in line for line in settings.lines())


@pytest.mark.parametrize(
    ("more", "note_text"),
    [
        ("--mup-width-mult 3", "--mup-width-mult 3.0: 4"),
        ("--decoupled-lr 1e-4", "--decoupled-lr"),
        ("--optimizer muon", "unit_rms_norm"),
        ("--init-method-xavier-uniform", "scales none"),
        ("--multi-latent-attention", "latent attention"),
    ],
)
def test_settings_that_mup_does_not_scale_are_noted(more, note_text):
    width = parse().model.hidden_size
    settings, _ = resolve_command_line([*base_line(), *MUP, str(width // 4), *more.split()], 8)
    assert any(note_text in note for note in settings.notes), settings.notes


@pytest.mark.parametrize(
    "flag", ["--mup-base-hidden-size", "--mup-embedding-mult", "--mup-output-mult", "--mup-base-head-dim"]
)
def test_mup_multipliers_must_be_positive(flag):
    (violation,) = resolve_command_line([*base_line(), "--use-mup", flag, "0"], 8)[1]
    assert violation.flags == (flag,) and "above 0" in violation.message


def test_resolving_derived_values_again_changes_nothing():
    width = parse().model.hidden_size
    once = parse(*MUP, str(width // 4))
    again = parse_args(
        [
            *base_line(),
            *MUP,
            str(once.model.mup_base_hidden_size),
            "--mup-width-mult",
            str(once.optimizer.mup_width_mult),
            "--mup-output-mult",
            str(once.model.mup_output_mult),
        ],
        8,
    )
    assert again.as_dict() == once.as_dict()
