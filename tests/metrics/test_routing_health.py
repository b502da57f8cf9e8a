"""Routing health against its definitions."""

import math

import pytest
import torch

from arguments.mechanisms.placements import MOVED_RATES, UNMOVED_MAXIMA
from moe_trainer.metrics.routing_health import COLD, HOT, MEAN, PER_LAYER, heat_map, routing_health


def make_loads(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_routing_health_of_a_layer_calculated_by_hand():
    """Four experts on two ranks: loads 6, 0, 1, 1 of 8, two of them dropped, the second rank computes one for the first; the first layer is dense."""
    found = routing_health(make_loads([0] * 10, [6, 0, 1, 1, 2, 1, 0.25, 1, 5, 3]), expert_ranks=2, layer_share=0.1)
    assert found["layers"] == [1] and found["tokens_per_expert"] == [[6, 0, 1, 1]]
    assert (
        found["load_max_over_mean"] == [3.0]
        and found["dead_experts"] == [1]
        and found["drop_rate"] == [0.25]
        and all(found[name] == [0.125] for name in MOVED_RATES)
    )
    assert found["bias_drift"] == [0.25] and found["rank_max_over_mean"] == [1.25]
    assert all(found[name] == [1.5] for name in UNMOVED_MAXIMA)
    assert found["load_entropy"] == pytest.approx([-(0.75 * math.log(0.75) + 0.25 * math.log(0.125)) / math.log(4)])
    assert found["straggler_cost"] == pytest.approx(0.025)
    assert all(len(found[name]) == 1 for name in PER_LAYER)


def test_tokens_between_ranks_are_integers_by_row():
    between_ranks = make_loads([3, 1], [0, 4])
    found = routing_health(make_loads([0] * 16), 4, layer_share=0.0, between_ranks=between_ranks)["between_ranks"]
    assert found == {"ranks_per_row": 2, "tokens": [[3, 1], [0, 4]]}
    assert all(isinstance(value, int) for row in found["tokens"] for value in row)
    assert "between_ranks" not in routing_health(make_loads([0] * 10), 2, layer_share=0.0)


def test_balanced_routing_has_no_straggler_cost():
    found = routing_health(make_loads(*[[5, 5, 5, 5, 0, 0, 0, 1, 5, 5, 5, 5]] * 3), expert_ranks=4, layer_share=0.2)
    assert found["load_max_over_mean"] == found["rank_max_over_mean"] == [1.0] * 3
    assert found["load_entropy"] == pytest.approx([1.0] * 3) and found["straggler_cost"] == 0.0


def test_routing_to_one_expert_is_the_worst_case():
    found = routing_health(make_loads([8, 0, 0, 0, 0, 0, 0, 1, 8, 0, 0, 0]), expert_ranks=4, layer_share=0.5)
    assert found["load_max_over_mean"] == found["rank_max_over_mean"] == [4.0] and found[
        "load_entropy"
    ] == pytest.approx([0.0])
    assert found["straggler_cost"] == pytest.approx(1.5)


def test_stage_of_dense_layers_has_no_routing_health():
    found = routing_health(make_loads([0] * 9), expert_ranks=1, layer_share=0.0)
    assert found["layers"] == [] and found["straggler_cost"] == 0.0 and found["tokens_per_expert"] == []


def test_heat_map_colors_of_expert_loads():
    """Loads with mean 4: four times the mean, a quarter of it, the mean, and zero."""
    picture = heat_map([[16, 4, 1, 0, 0, 3], [4, 4, 4, 4, 4, 4]], cell=2)
    assert picture.dtype == torch.uint8 and picture.shape == (3, 4, 12)
    colours = [tuple(picture[:, 1, 2 * expert + 1].tolist()) for expert in range(6)]
    assert colours[:5] == [HOT, MEAN, COLD, (0, 0, 0), (0, 0, 0)] and COLD < colours[5] < MEAN
    assert tuple(picture[:, 3, 0].tolist()) == MEAN
