"""HybridEP's stand-in (tests/moe/fake_deep_ep.py) on an emulated device: every call is one kernel, which a graph captures.

A call with `non_blocking` waits for nothing: its sizes are fixed, and counts and overflow flag are on the device. Another dispatch makes
the host wait for the counts, which a capture does not permit. What a handle holds is computed again by every replay.
"""

import sys
from types import SimpleNamespace

import torch
from moe.fake_deep_ep import HYBRID_EP
from moe.test_flex import make_fake_deep_ep


def on_device(host_class):
    """The class for tensors of a device, in a process that has one."""
    import emulation

    class HybridEPBuffer:
        def __init__(self, **options):
            self.host = host_class(**options)

        def dispatch_with_permute(self, *, hidden, probs=None, handle=None, routing_map=None, **options):
            if handle is None and not options.get("non_blocking"):
                return self._blocking(hidden, probs, routing_map, options)
            new = handle is None
            if new:
                route = SimpleNamespace(num_tokens=len(hidden), num_columns=probs.shape[1])
                handle = route, torch.empty(1, dtype=torch.int32, device=hidden.device)
            route, flag = handle
            given = {"hidden": hidden, "probs": probs, "routing_map": routing_map}
            given = {name: tensor for name, tensor in given.items() if tensor is not None}
            rows = options["num_permuted_tokens"]
            x, weights = hidden.new_empty(rows, hidden.shape[1]), None if probs is None else probs.new_empty(rows)
            counts = torch.empty(options["num_of_experts_per_rank"], dtype=torch.int64, device=hidden.device)
            outputs = [tensor for tensor in (x, weights) if tensor is not None]

            def run(*tensors):
                sent, (to_counts, to_flag, *to) = dict(zip(given, tensors)), tensors[len(given) :]
                known = {} if new else {"handle": route.handle}
                *made, found, made_handle = self.host.dispatch_with_permute(**sent, **known, **options)
                for target, result in zip(to, made):
                    target.copy_(result)
                if new:
                    route.handle = made_handle
                    to_counts.copy_(found)
                    to_flag.copy_(made_handle[-1])

            emulation.DEVICE().kernel("HybridEP dispatch", [*given.values(), counts, flag, *outputs], run)
            return x, weights, None, counts, handle

        def _blocking(self, hidden, probs, routing_map, options):
            stream = torch.cuda.current_stream()
            emulation.DEVICE().wait("HybridEP counts", stream.device.index, stream.cuda_stream)
            tensors = (torch.ops.emulated_cuda.host_alias(x) for x in (hidden, probs, routing_map))
            x, weights, _, counts, handle = self.host.dispatch_with_permute(
                **dict(zip(("hidden", "probs", "routing_map"), tensors)), **options
            )
            flag = torch.zeros(1, dtype=torch.int32, device=hidden.device)
            route = SimpleNamespace(num_tokens=len(hidden), num_columns=probs.shape[1], handle=handle)
            return x.cuda(), weights.cuda(), None, counts, (route, flag)

        def combine_with_unpermute(self, *, hidden, probs=None, handle, **options):
            route = handle[0]
            x = hidden.new_empty(route.num_tokens, hidden.shape[1])
            tables = [] if probs is None else [probs, probs.new_empty(route.num_tokens, route.num_columns)]

            def run(hidden, to, *tables):
                sent = {"probs": tables[0]} if tables else {}
                made = self.host.combine_with_unpermute(hidden=hidden, handle=route.handle, **sent, **options)
                to.copy_(made[0])
                if tables:
                    tables[1].copy_(made[1])

            emulation.DEVICE().kernel("HybridEP combine", [hidden, x, *tables], run)
            return x, tables[1] if tables else None

    return HybridEPBuffer


def use_stand_in() -> None:
    """Let this process use it for --moe-flex-dispatcher-backend hybridep."""
    module, _ = make_fake_deep_ep({"github hybrid-ep": HYBRID_EP}, "HybridEP")
    module.HybridEPBuffer = on_device(module.HybridEPBuffer)
    sys.modules["deep_ep"] = module
