"""Memory retained after a forward pass: storages created in it that are still alive."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moe_trainer.memory.offload import HostCopies


class _StorageTracker(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int, tuple[int, ...], torch.dtype]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper takes longer than the operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in _tensors((*args, *kwargs.values()))}
        for x in _tensors((outputs,)):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), tuple(x.shape), x.dtype
        return outputs


def _tensors(values: Iterable) -> Iterator[Tensor]:
    """Yield the tensors of an operation; torch's tree_leaves takes longer than most operations of small models."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class CountedCopies(HostCopies):
    """Host copies, counted separately from what stays on the device."""

    def __init__(self):
        self.hosts: list[StorageWeakRef] = []

    def start_out(self, x):
        host, out = super().start_out(x)
        self.hosts.append(StorageWeakRef(host.untyped_storage()))
        return host, out


@dataclass(frozen=True)
class Retained:
    """Bytes on the device and on the host; shapes of what is on the device, largest first."""

    device: int
    host: int
    tensors: list[tuple[int, tuple[int, ...], torch.dtype]]


def others_idle() -> bool:
    """Return whether all other threads of this process are idle, after a moment in which they could have started."""
    time.sleep(0.01)
    others = [
        task / "stat" for task in Path("/proc/self/task").iterdir() if int(task.name) != threading.get_native_id()
    ]
    return not any(path.read_text().rpartition(")")[2].split()[0] == "R" for path in others)


def measure_retained(forward: Callable[[], Tensor], copies: CountedCopies | None = None) -> tuple[Retained, Tensor]:
    """Run forward; return what it retained, without its result, and the result."""
    births = _StorageTracker()
    with births:
        result = forward()
    if dist.is_initialized():
        time.sleep(0.2)  # gloo's threads free what they have sent and received a moment later:
        while not all(others_idle() for _ in range(3)):  # on a busy machine, when they get a processor
            time.sleep(0.05)
    own = result.untyped_storage()._cdata
    hosts = {reference.cdata for reference in (copies.hosts if copies is not None else ()) if not reference.expired()}
    alive = {address: entry for address, entry in births.found.items() if not entry[0].expired() and address != own}
    tensors = sorted(
        ((size, shape, dtype) for address, (_, size, shape, dtype) in alive.items() if address not in hosts),
        key=lambda entry: entry[:2],
        reverse=True,
    )
    return Retained(sum(entry[0] for entry in tensors), sum(alive[address][1] for address in hosts), tensors), result
