"""FineRMoE's sizes follow from its four numbers, in either spelling; errors name the flags."""

import pytest

from arguments import parse_args
from arguments.moe import ExpertGrid
from tests.arguments.invalid_command_lines import FINE, FREE
from tests.arguments.rule_lines import changed, findings


def test_sizes_are_derived():
    moe = parse_args(changed(f"{FINE} --ffn-hidden-size 1024", FREE), 8).moe
    assert (moe.num_experts, moe.moe_router_topk, moe.moe_ffn_hidden_size) == (16, 2, 256)
    assert moe.finermoe == ExpertGrid(slices=2, candidates=2, group_size=4)
    assert moe.expert_widths(512) == (512, 256)


def test_expansion_defaults_to_the_granularity():
    moe = parse_args(changed("--G-I 4 --G-O 2 --ffn-hidden-size 1024", FREE), 8).moe
    assert (moe.finermoe_intermediate_expansion, moe.finermoe_output_expansion, moe.num_experts) == (4, 2, 64)


def test_long_and_short_flag_names_are_equivalent():
    long = (
        "--finermoe-intermediate-granularity 4 --finermoe-output-granularity 2 --finermoe-intermediate-expansion 1 "
        "--finermoe-output-expansion 2"
    )
    assert parse_args(changed(long, FREE), 8).moe == parse_args(changed(FINE, FREE), 8).moe


def test_expansion_alone_has_no_effect_and_is_noted():
    settings, violations = findings(changed("--R-O 3"), 8)
    assert not violations
    assert settings.num_experts == 8
    assert any("--R-O" in line for line in settings.lines())


@pytest.mark.parametrize(("flags", "needs"), [
    ("--num-experts 24", "must be 16: --G-O 2 x --R-O 2 x --G-I 4 x --R-I 1"),
    ("--moe-router-topk 3", "multiple of --G-O 2"),
    ("--moe-permute-fusion", "--triton-kernels permute does slices"),
    ("--moe-latent-size 64", "--G-I cannot be combined with --moe-latent-size"),
])  # fmt: skip
def test_errors_state_the_requirement(flags, needs):
    _, violations = findings(changed(f"{FINE} {flags}", FREE), 8)
    assert any(needs in violation.message for violation in violations), violations


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-enable-expert-bias",
        "--moe-expert-capacity-factor 1.0",
        "--moe-token-dispatcher-type flex",
        "--triton-kernels norm permute",
    ],
)
def test_flags_that_slices_need_not_exclude(flags):
    _, violations = findings(changed(f"{FINE} {flags}", FREE), 8)
    assert not violations


def test_topk_of_a_checkpoint_is_kept():
    recorded = parse_args(changed(f"{FINE} --moe-router-topk 4", FREE), 8).as_dict()
    args = parse_args(changed("--load . --use-checkpoint-args", FREE), 8, checkpoint=recorded)
    assert (args.moe.moe_router_topk, args.moe.num_experts) == (4, 16)
