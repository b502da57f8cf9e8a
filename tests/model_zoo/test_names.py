"""Preset names and files."""

import pytest
import yaml

import model_zoo

NAMES = """
    deepseek_moe_16b
    deepseek_v2
    deepseek_v2_lite
    deepseek_v3
    deepseek_v3_2
    deepseek_v3_2_tiny
    deepseek_v3_proxy
    deepseek_v3_tiny
    deepseek_v4_tiny
    dots_llm1
    ernie_4_5_21b_a3b
    finermoe_qwen2_5_0_5b
    finermoe_qwen2_5_1_5b
    finermoe_qwen2_5_7b
    finermoe_tiny
    flex_olmo_7x7b
    glm_4_5
    glm_4_5_air
    glm_4_7_flash
    glm_5
    gpt_oss_120b
    gpt_oss_20b
    gpt_oss_tiny
    granite_3_1_3b_a800m
    hunyuan_a13b
    kimi_k2
    kimi_linear_48b_a3b
    latentmoe_tiny
    ling_3_0_flash
    llama_4_maverick
    llama_4_scout
    mimo_v2_flash
    minimax_m2
    mistral_small_4
    mixtral_8x22b
    mixtral_8x2b
    mixtral_8x7b
    mixtral_tiny
    moonlight_16b
    nemotron_3_nano_30b_a3b
    nemotron_3_tiny
    olmoe_1b_7b
    phi_3_5_moe
    qwen2_57b_a14b
    qwen3_235b_a22b
    qwen3_30b_a3b
    qwen3_5_35b_a3b
    qwen3_next_80b_a3b
    qwen3_next_tiny
    qwen3_tiny
    solar_open_100b
    trinity_mini
""".split()
PARALLEL_FLAGS = ("-parallel", "--sequence-parallel", "-pipeline-")


def test_all_documented_presets_exist():
    assert set(NAMES) <= set(model_zoo.names())


@pytest.mark.parametrize("typed", ["mixtral_8x7b", "Mixtral-8x7B", "MIXTRAL.8x7b", " mixtral-8x7b"])
def test_preset_lookup_ignores_spelling_variants(typed):
    assert model_zoo.find(typed).name == "mixtral_8x7b.yaml"


def test_unknown_name_offers_close_ones():
    with pytest.raises(LookupError, match="deepseek_v3"):
        model_zoo.find("deepsek-v3")
    with pytest.raises(LookupError, match="there are .*mixtral_tiny"):
        model_zoo.find("zzzzzz")


@pytest.mark.parametrize("name", NAMES)
def test_file_is_a_recipe_with_source_vocabulary_and_no_parallel_mapping(name):
    text = model_zoo.find(name).read_text(encoding="ascii")
    assert "# Source: " in text
    recipe = yaml.safe_load(text)
    assert {section for section in recipe if not section.startswith("launch_")} == {"ENV_VARS", "launch", "MODEL_ARGS"}
    flags = recipe["MODEL_ARGS"]
    assert all(flag.startswith("--") for flag in flags)
    assert flags["--vocab-size"] % flags["--make-vocab-size-divisible-by"] == 0
    assert not [flag for flag in flags if any(part in flag for part in PARALLEL_FLAGS)]
