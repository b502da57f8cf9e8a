"""Settings of presets that counts of parameters do not show, as in the published config.json."""

import pytest
import yaml

import model_zoo
from arguments import parse_args
from moe_trainer.checkpoint.hf.config import write_config, write_notes

ROUTED_SCALING = {
    "deepseek_v2": 16.0,
    "deepseek_v2_lite": 1.0,
    "deepseek_v3": 2.5,
    "glm_4_5": 2.5,
    "glm_4_5_air": 1.0,
    "kimi_k2": 2.827,
    "moonlight_16b": 2.446,
}
"""routed_scaling_factor."""


@pytest.mark.parametrize("preset", ROUTED_SCALING)
def test_routed_experts_have_the_published_weight(preset):
    scaling = parse_args(["--preset", preset, "--mock-data"], world_size=1).moe.moe_router_topk_scaling_factor
    assert (scaling or 1.0) == ROUTED_SCALING[preset]


def test_window_of_gpt_oss_holds_128_keys_with_the_query():
    """sliding_window: 128."""
    assert parse_args(["--preset", "gpt_oss_20b", "--mock-data"], world_size=1).model.window_size == (127, 0)


LATENT = [
    name
    for name in model_zoo.names()
    if "--multi-latent-attention" in yaml.safe_load(model_zoo.find(name).read_text())["MODEL_ARGS"]
]


@pytest.mark.parametrize("preset", LATENT)
def test_latents_are_normalized_as_in_transformers(preset):
    """Its norms of latents have an epsilon of their own, whatever rms_norm_eps is."""
    flags = parse_args(["--preset", preset, "--mock-data"], world_size=1).as_dict()
    _, config = write_config(flags, 256)
    assert [note for note in write_notes(flags, config) if "latents" in note] == []
