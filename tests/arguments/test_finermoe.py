"""FineRMoE's sizes follow from its four numbers, in either spelling."""

from arguments import parse_args
from arguments.mechanisms.selection_kinds.finermoe import ExpertGrid, expert_grid
from tests.arguments.rule_lines import changed

FINE, FREE = "--G-I 4 --G-O 2 --R-I 1 --R-O 2", "--num-experts --moe-router-topk"


def test_sizes_are_derived():
    moe = parse_args(changed(f"{FINE} --ffn-hidden-size 1024", FREE), 8).moe
    assert (moe.num_experts, moe.moe_router_topk, moe.moe_ffn_hidden_size) == (16, 2, 256)
    assert expert_grid(moe) == ExpertGrid(slices=2, candidates=2, group_size=4)
    assert moe.expert_widths(512) == (512, 256)


def test_expansion_defaults_to_the_granularity():
    moe = parse_args(changed("--G-I 4 --G-O 2 --ffn-hidden-size 1024", FREE), 8).moe
    assert (moe.finermoe_intermediate_expansion, moe.finermoe_output_expansion, moe.num_experts) == (4, 2, 64)
    assert parse_args(changed("--R-O 3"), 8).moe.num_experts == 8, "an expansion alone has no effect"


def test_long_and_short_flag_names_are_equivalent():
    long = (
        "--finermoe-intermediate-granularity 4 --finermoe-output-granularity 2 --finermoe-intermediate-expansion 1 "
        "--finermoe-output-expansion 2"
    )
    assert parse_args(changed(long, FREE), 8).moe == parse_args(changed(FINE, FREE), 8).moe


def test_topk_of_a_checkpoint_is_kept():
    recorded = parse_args(changed(f"{FINE} --moe-router-topk 4", FREE), 8).as_dict()
    args = parse_args(changed("--load . --use-checkpoint-args", FREE), 8, checkpoint=recorded)
    assert (args.moe.moe_router_topk, args.moe.num_experts) == (4, 16)
