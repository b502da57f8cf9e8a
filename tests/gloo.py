"""One gloo device per process instead of one per group.

Every device has a thread that wakes 100 times per second. A test that trains under one mapping after the other has
hundreds of groups, whose threads would take most of the processor time.
"""

import functools
import os

from torch.distributed import ProcessGroupGloo


@functools.cache
def get_device(pid: int) -> ProcessGroupGloo.Device:
    """Return the device of this process; that of the parent has no thread in a forked child."""
    return ProcessGroupGloo.create_default_device()


def share_device() -> None:
    """Let all groups of a process, and of those forked from it, use one device."""
    init = ProcessGroupGloo.__init__

    def init_with_shared_device(self, store, rank, size, timeout, **more):
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [get_device(os.getpid())], 2, timeout
        for name, value in more.items():  # torch 2.14 gives enable_reconfigure too
            setattr(options, name, value)
        init(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_with_shared_device
