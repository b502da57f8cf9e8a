"""Persistent communication buffers: which units share them, in turn, and their registration with a communicator."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moe_trainer.parallel.fsdp_buffers import BufferOptions, BufferPool, RegisteredMemory, allocate_plain
from moe_trainer.parallel.state import Group


@dataclass(frozen=True)
class Handle:
    """Stands for a process group."""

    _get_backend: Callable | None


CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.mark.parametrize(
    ("options", "allocated"),
    [
        # two buffers for the two units of size 6; the unit of size 8 allocates a new one, or has two
        (BufferOptions(), [6, 6]),
        (BufferOptions(keeps_others=True), [6, 6, 8, 8]),
        (BufferOptions(takes_largest=True), [8, 8]),
    ],
)
def test_units_take_buffers_in_turn(options, allocated):
    sizes = []

    def allocate(numel, dtype, device):
        sizes.append(numel)
        return allocate_plain(numel, dtype, device)

    pool = BufferPool(options, allocate)
    for numel in (6, 8, 6):
        pool.add_unit(numel)
    for _ in range(3):
        taken = [pool.take(numel, FP32, CPU) for numel in (6, 8, 6, 8)]
        assert [len(buffer) for buffer in taken] == [6, 8, 6, 8]
        for one, other in zip(taken, taken[1:]):
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr(), "the next unit overwrites it"
    assert sorted(sizes) == allocated


@pytest.mark.parametrize("knows_symmetric", [True, False])
def test_memory_is_registered_once_with_every_communicator(monkeypatch, knows_symmetric):
    calls = []

    def backend(name):
        def register(pool, **options):
            if options and not knows_symmetric:
                raise TypeError("symm")
            calls.append((name, pool, options))

        return SimpleNamespace(mem_allocator=f"allocator of {name}", register_mem_pool=register)

    backends = {name: Handle(lambda device, name=name: backend(name)) for name in "ab"}
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of the {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: calls.append(("use", pool, {})) or nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    groups = [Group(name, (0, 1), 0, 2, handle) for name, handle in backends.items()]
    memory = RegisteredMemory([*groups, groups[0]], torch.device("cuda"), BufferOptions(is_symmetric=True))
    memory.register()
    assert not calls, "nothing is allocated yet"
    assert memory.allocate(3, FP32, CPU).shape == (3,)
    memory.register()
    memory.register()
    pool, symmetric = "pool of the allocator of a", {"symm": True} if knows_symmetric else {}
    assert calls == [("use", pool, {}), ("a", pool, symmetric), ("b", pool, symmetric)]


def test_ranks_without_nccl_register_nothing(caplog):
    with caplog.at_level("INFO"):
        memory = RegisteredMemory([Group("dp", (0, 1), 0, 2, Handle(None))], CPU, BufferOptions())
    memory.allocate(3, FP32, CPU)
    memory.register()
    assert "no buffers are registered" in caplog.text
