"""NCCL's process groups, as gloo's on the same bytes."""

import functools

import torch.distributed as dist
from torch.distributed import distributed_c10d

BACKENDS = {None: "gloo", "nccl": "gloo", "cuda:nccl": "gloo", "cpu:gloo,cuda:nccl": "gloo"}


def use_gloo() -> None:
    """Replace the backend wherever a group is made."""
    init, new_group = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(backend=None, *args, device_id=None, pg_options=None, **kwargs):
        return init(BACKENDS.get(backend, backend), *args, **kwargs)

    @functools.wraps(new_group)
    def new_gloo_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, device_id=None, **kwargs):
        return new_group(ranks, timeout, BACKENDS.get(backend, backend), None, *args, **kwargs)

    for module in (dist, distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_gloo_group
