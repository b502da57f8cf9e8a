"""CopyStream between host and device: in the order that each needs, and none from the host inside a graph.

What a full training run hides behind its own waits.
"""

from typing import NamedTuple

import pytest
import torch
from emulated_cuda.run import check_races, on_device
from emulated_cuda.test_emulation import refused

from moe_trainer.memory.graph_capture import CapturedGraph
from moe_trainer.memory.host_read import AsyncHostReader
from moe_trainer.memory.offload import ActivationOffload
from moe_trainer.ops.grouped_gemm import grouped_forward, token_offsets
from moe_trainer.optim.host_offload import HostUpdatePipeline


def read_of_what_is_freed() -> list[int]:
    check_races()
    counts = torch.arange(4, device="cuda")
    values = AsyncHostReader().start(torch.flatten, counts)
    del counts
    torch.ones(4, device="cuda")  # may be given its memory
    return values()


def test_counts_may_be_freed_while_they_are_read():
    assert on_device(read_of_what_is_freed) == [0, 1, 2, 3]


def waits_of_offload(max_in_flight: int | None) -> tuple[int, list[bool]]:
    """Waits of the host while three tensors leave, and which have left when the computation has gone through."""
    import emulation

    offload = ActivationOffload(frozenset({"part"}), torch.device("cuda"), max_in_flight=max_in_flight)
    tensors = [torch.full((4,), number + 1.0, device="cuda") for number in range(3)]
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        backs = [offload.store(x, offload.open("part")) for x in tensors]
    torch.cuda.current_stream().synchronize()
    return sum(ledger.waits.values()), [
        torch.equal(back.args[0]._host, x.cpu()) for back, x in zip(backs, tensors, strict=True)
    ]


@pytest.mark.parametrize(("max_in_flight", "gone"), [(None, 0), (2, 1), (1, 2), (0, 3)])
def test_the_computation_waits_for_copies_beyond_the_limit(max_in_flight, gone):
    """And the host for none."""
    waits, left = on_device(waits_of_offload, max_in_flight)
    assert (waits, left) == (0, [True] * gone + [False] * (3 - gone))


class Range(NamedTuple):
    """What a HostUpdatePipeline needs of a range."""

    start: int
    stop: int
    grad: torch.Tensor


def updated_on_the_host(overlap: bool) -> list[float]:
    """Twice the gradients, which the device has just computed and the host has not waited for, as parameters that the device reads at once."""
    check_races()
    pipeline = HostUpdatePipeline(torch.device("cuda"), pinned_grads=True, pinned_params=True, overlap=overlap)
    grads, model = torch.arange(8.0, device="cuda") + 1, torch.zeros(8, device="cuda")
    for part, grad in pipeline.gradients(
        [Range(start, start + 2, grads[start : start + 2]) for start in range(0, 8, 2)]
    ):
        pipeline.send(model[part.start : part.stop], 2 * grad)
    pipeline.finish()
    return (model + 0).tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_update_on_the_host_waits_for_the_gradients_and_the_device_for_the_update(overlap):
    assert on_device(updated_on_the_host, overlap) == [2.0 * number for number in range(1, 9)]


def products_in_a_graph(*counts: int) -> list[bool]:
    """Are replays for other rows those without a graph?"""
    weight = torch.randn(len(counts), 16, 8, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    x = torch.zeros(sum(counts), 8, dtype=torch.bfloat16, device="cuda")
    graph = CapturedGraph(torch.cuda.graph_pool_handle())
    y = graph.capture(lambda: grouped_forward(x, weight, token_offsets(counts, x.device)))
    found = []
    for seed in range(2):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        found.append(torch.equal(y, grouped_forward(x, weight, token_offsets(counts, x.device))))
    return found


def test_a_graph_makes_the_offsets_of_experts_with_equal_rows():
    """On the device: where they come from a list of the host there is no graph."""
    assert on_device(products_in_a_graph, 16, 16, 16) == [True, True]
    assert "not permitted when stream is capturing" in refused(products_in_a_graph, 16, 32, 0)
