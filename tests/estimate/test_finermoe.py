"""The estimate of FineRMoE's models: parameters, FLOPs, time of the exchange."""

import pytest
from estimate.test_flops import CORE, MOE, parse
from estimate.test_parameters import check_counts, preset
from estimate.test_parameters_match_model import check_parameters
from estimate.test_rank_parameters import check_ranks

from arguments import parse_args
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.interconnect import Interconnect, dispatch_combine_seconds, exchange_seconds
from moe_trainer.estimate.parameters import count_parameters

PUBLISHED = {
    "finermoe_qwen2_5_0_5b": (1_678_896_000, 0, 649_284_480, 513_149_824, 340_480),
    "finermoe_qwen2_5_1_5b": (5_636_152_832, 0, 1_842_847_232, 1_609_473_536, 1_075_200),
    "finermoe_qwen2_5_7b": (26_639_244_800, 0, 7_925_603_840, 7_380_606_464, 5_304_320),
}
EXPERTS = "--G-I 2 --G-O 2 --R-I 1 --R-O 2 --num-experts 8 --expert-model-parallel-size 2"


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_counts(name):
    check_counts(name, PUBLISHED[name])


@pytest.mark.parametrize(("name", "total", "active"), [("0_5b", 1.68, 0.65), ("1_5b", 5.64, 1.85), ("7b", 26.65, 7.94)])
def test_finermoe_has_the_published_parameter_counts(name, total, active):
    """The last digit of the larger ones is one lower here (arXiv 2603.13364 names no vocabulary)."""
    counts = count_parameters(preset(f"finermoe_qwen2_5_{name}"))
    assert counts.total / 1e9 == pytest.approx(total, abs=0.015) and counts.active / 1e9 == pytest.approx(
        active, abs=0.015
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--G-I 4 --G-O 3 --R-I 2 --R-O 2 --disable-bias-linear --swiglu --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate",
        "--G-I 4 --G-O 3 --R-I 1 --R-O 1",
        "--G-I 4 --G-O 3 --R-I 1 --R-O 1 --moe-concat-proj --mtp-num-layers 1 --position-embedding-type rope",
    ],
)
def test_estimated_parameters_equal_the_model(flags):
    check_parameters(flags)


def test_estimated_bytes_of_ranks_equal_the_built_run():
    check_ranks(2, [("plain", EXPERTS), ("biases, tied head", f"{EXPERTS} --moe-ffn-hidden-size 64")])


@pytest.mark.parametrize(("gate", "matrices"), [("--swiglu", 2), ("", 1)])
def test_flops_of_finermoe_experts(gate, matrices):
    args = parse(*f"{MOE} {gate} --G-I 4 --G-O 2 --R-I 1 --R-O 2 --moe-router-topk 4".split())
    assert training_flops(args, 1, 4, 16) == 6 * 4 * (
        CORE + 4 * 3 * (8 * matrices + 4) + 7 * 8 * (matrices + 1) + 8 * 16
    )


def test_flops_of_the_matrix_behind_slices():
    words = f"{MOE} --G-I 4 --G-O 2 --R-I 1 --R-O 2".split()
    plain, projected = (training_flops(parse(*words, *more), 1, 4, 16) for more in ([], ["--moe-concat-proj"]))
    assert projected - plain == 6 * 4 * 8 * 8


def test_flops_of_a_frozen_backbone():
    """Frozen weights have two of three GEMMs; attention itself (4 of 32 tokens x 8) and the routed experts have all."""
    words = f"{MOE} --G-I 4 --G-O 2 --R-I 1 --R-O 2 --moe-concat-proj".split()
    full, frozen = (training_flops(parse(*words, *more), 1, 4, 16) for more in ([], ["--freeze-backbone"]))
    assert full - frozen == pytest.approx(2 * 4 * (8 * 24 + 8 * 8 + 7 * 8 * 2 + 8 * 8 + 8 * 16))


def test_dispatch_and_combine_times_follow_the_widths_of_experts():
    """FineRMoE combines half-width rows; an all-gather sends full rows both ways."""
    links, flags = (
        Interconnect(find_hardware("h100")),
        "--preset finermoe_qwen2_5_7b --mock-data --expert-model-parallel-size 8",
    )
    fine, gathered = (
        parse_args([*flags.split(), *more.split()], 8)
        for more in ("", "--moe-token-dispatcher-type allgather --moe-shared-expert-overlap=false")
    )
    there = exchange_seconds(fine, links, 8192, 2)
    assert dispatch_combine_seconds(fine, links, 8192, 2) == pytest.approx(
        there + exchange_seconds(fine, links, 8192, 2, width=3584 // 2)
    )
    assert dispatch_combine_seconds(fine, links, 8192, 2) == pytest.approx(1.5 * there, rel=0.05)
    assert dispatch_combine_seconds(gathered, links, 8192, 2) == pytest.approx(
        2 * exchange_seconds(gathered, links, 8192, 2)
    )
