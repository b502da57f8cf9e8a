"""Maximal update parametrization on the command line: values derived as in Megatron-LM, and notes."""

import math

from arguments import parse_args
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
    # 1 is no choice, there either
    assert parse(*MUP, str(width // 4), "--mup-output-mult", "1.0").model.mup_output_mult == 0.25


def test_mup_sets_the_softmax_scale():
    plain = parse("--kv-channels", "64")
    assert plain.model.softmax_scale is None and plain.model.width_mult == 1.0
    assert parse("--use-mup", "--kv-channels", "64").model.softmax_scale == 1 / 64
    assert parse("--use-mup", "--kv-channels", "64", "--mup-attn-scale-power", "0.5").model.softmax_scale == 1 / 8
    scaled = parse("--use-mup", "--kv-channels", "64", "--mup-base-head-dim", "32")
    assert scaled.model.softmax_scale == math.sqrt(32) / 64


def test_mup_multipliers_have_no_effect_without_use_mup():
    assert parse("--mup-width-mult", "3", "--mup-embedding-mult", "2").optimizer.mup_width_mult == 1.0


def test_resolving_derived_values_again_changes_nothing():
    width = parse().model.hidden_size
    once = parse(*MUP, str(width // 4))
    given = f"{once.model.mup_base_hidden_size} --mup-width-mult {once.optimizer.mup_width_mult}"
    again = parse(*MUP, *f"{given} --mup-output-mult {once.model.mup_output_mult}".split())
    assert again.as_dict() == once.as_dict()
