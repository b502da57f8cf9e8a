"""Public recipes of ten families and parallel styles, shrunk and compared with one process."""

import json
from pathlib import Path

import pytest

from moe_trainer.verification.parity import check_parity
from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import shrink

RECORDED = {
    recipe["name"]: recipe for recipe in json.loads((Path(__file__).parents[1] / "data" / "recipes.json").read_text())
}
TEN = {
    "zoo_yaml/DeepSeek-V2-Lite/sbatch/bf16": "MLA, EP alone",
    "zoo_readme/DeepSeek-V3": "MLA, sigmoid and groups, TP PP EP above DP, uneven stages",
    "zoo_yaml/Mixtral-8x22B/sbatch/bf16": "TP PP VPP EP, ETP 1",
    "zoo_yaml/Qwen2-57B-A14B/sbatch/bf16": "biases of q, k and v, TP PP VPP EP",
    "zoo_yaml/Qwen3-30B-A3B/sbatch/bf16": "qk norm, top-8 of 128, EP alone",
    "functional/moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel_dp_last": "TP CP PP EP, the other order of ranks",
    "functional/moe/gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel": "ETP, sinkhorn",
    "functional/mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release": "flex dispatcher, MTP, layout, VPP",
    "functional/moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances": "instances",
    "examples/llama@data": "dense",
}


def assert_equals_one_process(recipe: dict) -> None:
    shrunk = shrink(recipe["argv"], recipe["world_size"])
    with RankPool(max(case.pool_size for case in shrunk.cases), timeout_s=600.0) as pool:
        for case in shrunk.cases:
            result = check_parity(pool, case)
            assert result.is_equal, (str(case.mapping), result.failure[-2000:], *map(str, result.differences[:4]))


@pytest.mark.parametrize("name", ["zoo_yaml/DeepSeek-V3/sbatch/bf16", "examples/mixtral@mock"])
def test_recorded_recipes_equal_one_process(name):
    assert_equals_one_process(RECORDED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_ten_families_equal_one_process(shared, name):
    recipes = {recipe["name"]: recipe for recipe in json.loads((shared / "reference" / "recipes.json").read_text())}
    assert_equals_one_process(recipes[name])
