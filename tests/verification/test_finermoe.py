"""Small and random models with FineRMoE's experts."""

from verification.test_shrink import MODEL

import arguments
from arguments.mechanisms.selection_kinds.finermoe import expert_grid, is_asked
from moe_trainer.verification.low_precision import comparable_fp8_options
from moe_trainer.verification.mapping import ParallelMapping
from moe_trainer.verification.random_layouts import draw_cases
from moe_trainer.verification.shrink import shrink


def test_random_models_have_slices():
    drawn = [arguments.parse_args(list(case.argv), case.world_size).moe for case in draw_cases(60, 4, seed=0)]
    assert any(is_asked(moe) and expert_grid(moe).slices > 1 for moe in drawn)


def test_the_grid_is_kept_by_a_small_model():
    argv = [
        word
        for word in MODEL
        if word not in ("--num-experts", "256", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "2048")
    ]
    at = argv.index("--moe-shared-expert-intermediate-size")
    argv.insert(at + 1, "18432")
    shrunk = shrink(
        [*argv, *"--G-I 32 --G-O 4 --R-I 1 --R-O 2 --moe-router-topk 8 --expert-model-parallel-size 64".split()], 64
    )
    (case,) = shrunk.cases
    args = arguments.parse_args(list(case.argv), case.world_size)
    moe, grid = args.moe, expert_grid(args.moe)
    assert (
        grid.slices == grid.candidates == 2
        and moe.finermoe_intermediate_granularity > 1
        and moe.moe_router_topk == 2 * grid.slices
    )
    assert moe.moe_shared_expert_intermediate_size == args.model.ffn_hidden_size > moe.moe_ffn_hidden_size
    assert moe.num_experts // args.parallel.expert_model_parallel_size > 1


def test_experts_whose_number_follows_are_experts():
    flags = {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "finermoe_output_granularity": 2,
    }
    found, _ = comparable_fp8_options(flags, ParallelMapping(dp=2, ep=2), 4)
    assert found["fp8_recipe"] == "delayed" and found["moe_router_dtype"] == "fp64"
