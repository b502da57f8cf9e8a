"""Constants that estimate/ repeats because neither side may import the other: they are equal."""

import pytest
import torch

from arguments.training import is_offloaded
from moe_trainer.memory.offload import ActivationOffload


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 1 / 3, 0.5, 0.7, 0.9, 1.0])
def test_offloaded_groups_are_equal(fraction):
    offload = ActivationOffload(frozenset({"mlp"}), torch.device("cpu"), fraction=fraction)
    sent = [offload.open("mlp") is not None for _ in range(60)]
    assert sent == [is_offloaded(number, fraction) for number in range(60)]
    assert sum(sent) == round(60 * fraction)
