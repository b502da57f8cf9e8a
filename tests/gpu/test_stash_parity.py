"""On one CUDA device: the paged stash, on the device and in pinned memory, does not change the gradients of layers."""

import pytest
import torch
from moe.test_paged_stash import KINDS, PAGE, build_layers, free_pages, gradients

from moe_trainer.memory.paged_stash import PagedStash

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("on_device", "on_host"), [(1.2, 0.0), (0.3, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_paged_stash_equals_unpaged_layers_on_a_device(kind, on_device, on_host):
    """Within tolerances, because atomics add in any order; in the first iteration, which measures, and in the next."""
    device = torch.device("cuda")
    stash = PagedStash(device, PAGE, on_device, on_host)
    plain, layers = (
        build_layers(4, stash=which, dtype=torch.float32, device=device, **KINDS[kind]) for which in (None, stash)
    )
    for _ in range(2):
        for mine, theirs in zip(gradients(layers), gradients(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    assert stash.generation and all(free == total for free, total in free_pages(stash))
