"""Constants that estimate/ repeats because neither side may import the other: they are equal."""

import pytest
import torch

from arguments.training import is_offloaded
from moe_trainer.estimate import saved_attention
from moe_trainer.memory.offload import ActivationOffload
from moe_trainer.ops import attention


def test_attention_block_sizes_are_equal():
    assert saved_attention.BLOCKED_MAX_LENGTH == attention.BLOCKED_MAX_LENGTH
    assert saved_attention.QUERY_BLOCK == attention.QUERY_BLOCK


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 1 / 3, 0.5, 0.7, 0.9, 1.0])
def test_offloaded_groups_are_equal(fraction):
    offload = ActivationOffload(frozenset({"mlp"}), torch.device("cpu"), fraction=fraction)
    sent = [offload.open("mlp") is not None for _ in range(60)]
    assert sent == [is_offloaded(number, fraction) for number in range(60)]
    assert sum(sent) == round(60 * fraction)
