"""CopyStream between host and device: in the order that each needs, and none from the host inside a graph.

What a full training run hides behind its own waits.
"""

from typing import NamedTuple

import pytest
import torch
from emulated_cuda.run import check_races, on_device
from emulated_cuda.test_emulation import device_error

from moe_trainer.memory.graph_capture import CapturedGraph
from moe_trainer.memory.host_read import AsyncHostReader
from moe_trainer.memory.offload import ActivationOffload
from moe_trainer.ops.grouped_gemm import grouped_forward, token_offsets
from moe_trainer.optim.host_offload import HostUpdatePipeline


def read_freed_counts() -> list[int]:
    check_races()
    counts = torch.arange(4, device="cuda")
    values = AsyncHostReader().start(torch.flatten, counts)
    del counts
    torch.ones(4, device="cuda")  # may be given its memory
    return values()


def test_counts_may_be_freed_during_an_async_read():
    assert on_device(read_freed_counts) == [0, 1, 2, 3]


def count_offload_waits(max_in_flight: int | None) -> tuple[int, list[bool]]:
    """Return the host waits while three tensors are offloaded, and which are on the host when the computation ends."""
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
def test_offload_waits_for_copies_beyond_the_limit(max_in_flight, gone):
    """The host waits for none."""
    waits, left = on_device(count_offload_waits, max_in_flight)
    assert (waits, left) == (0, [True] * gone + [False] * (3 - gone))


class Range(NamedTuple):
    """What a HostUpdatePipeline needs of a range."""

    start: int
    stop: int
    grad: torch.Tensor


def update_on_host(overlap: bool) -> list[float]:
    """Return parameters set to twice the gradients, without an explicit wait between device and host."""
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
def test_host_update_is_synchronized_with_the_device(overlap):
    assert on_device(update_on_host, overlap) == [2.0 * number for number in range(1, 9)]


def run_gemms_in_graph(*counts: int) -> list[bool]:
    """Return whether replays for other rows equal the results without a graph."""
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


def test_graph_computes_expert_offsets_for_equal_counts():
    """On the device: offsets from a host list cannot be captured."""
    assert on_device(run_gemms_in_graph, 16, 16, 16) == [True, True]
    assert "not permitted when stream is capturing" in device_error(run_gemms_in_graph, 16, 32, 0)
