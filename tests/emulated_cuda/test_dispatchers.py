"""Hierarchical dispatch on emulated devices: host waits, races, results."""

import sys

import pytest
import torch
from emulated_cuda.run import check_races, on_device
from emulated_cuda.test_deep_ep import run
from emulated_cuda.test_waits import FEW_LAYERS, MICROBATCHES, count, expected
from training.layouts import make_argv

EXPERTS = "--bf16 --moe-token-dispatcher-type flex --expert-model-parallel-size"
NODES = f"{EXPERTS} 4 --moe-flex-dispatcher-backend hierarchical --moe-hierarchical-domain-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def count_waits(rank: int, n: int, flags: str) -> dict[str, int]:
    """Waits of a training iteration."""
    return {key: times for key, times in count(rank, n, flags).items() if key.startswith("train")}


@pytest.mark.parametrize("flags", [NODES, f"{NODES} {RECOMPUTE}"])
def test_host_waits_of_a_layer(flags):
    check_waits(count_waits, flags, 4, ["memory/host_read.py"])


def check_waits(waits, flags, ranks, files):
    """Once in each of the files."""
    expects = {key: times for key, times in expected("", 0, 0).items() if key.startswith("train")}
    expects |= {f"train {file}": FEW_LAYERS * MICROBATCHES // ranks for file in files}
    for found in on_device(waits, flags, ranks=ranks, devices=ranks):
        assert found == expects


def compare_with_alltoall(rank: int, n: int, topk: int, kind: str) -> list:
    """Results of the all-to-all and of hierarchical dispatch over two nodes, with race checks."""
    from moe.test_flex import random_routing

    from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
    from moe_trainer.moe.dispatch.hierarchical import HierarchicalDispatcher
    from moe_trainer.ops.permute import Permutation
    from moe_trainer.parallel.state import ParallelState

    check_races()
    ps = ParallelState.create(n, rank, ep=n, ranks_per_node=2)
    probs, routing = (table.cuda() for table in random_routing(rank, 5 + rank, topk, kind))
    x, weight = torch.randn(2, 5 + rank, 16, generator=torch.Generator().manual_seed(rank)).cuda()
    return [
        run(kind_of(ps, Permutation()), x, probs, routing, weight)
        for kind_of in (AllToAllDispatcher, HierarchicalDispatcher)
    ]


@pytest.mark.parametrize(("topk", "kind"), [(4, "plain"), (2, "drops"), (2, "no tokens")])
def test_hierarchical_dispatch_equals_all_to_all_without_races(topk, kind):
    for plain, hierarchical in on_device(compare_with_alltoall, topk, kind, ranks=4, devices=4):
        assert plain[:3] == hierarchical[:3], "counts, rows and probabilities of the experts"
        for ours, theirs in zip(plain[3:], hierarchical[3:], strict=True):
            torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), atol=2e-6, rtol=2e-6)


def stream_priorities(rank: int, n: int) -> list[int]:
    """Priorities of the streams on which HybridEP exchanges, with the flag and without it."""
    import types

    from arguments import parse_args
    from moe_trainer.backends import BackendPolicy
    from moe_trainer.model import build
    from moe_trainer.parallel.state import ParallelState

    sys.modules["deep_ep"] = types.SimpleNamespace(HybridEPBuffer=lambda **_: None)
    stream, found = torch.cuda.Stream, []
    torch.cuda.Stream = lambda device, priority: found.append(priority) or stream(device, priority)
    ps, device = ParallelState.create(n, rank, ep=n), torch.device("cuda", torch.cuda.current_device())
    flex = "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
    for flag in ("--high-priority-a2a-comm-stream", ""):
        args = parse_args([*make_argv("plain"), "--bf16", *flex.split(), *flag.split()], n)
        rows = build._dispatch_buffer_spec(args, ps, torch.bfloat16, device)
        dispatcher = build.build_dispatcher(args.moe, ps, rows, BackendPolicy("error", cuda=True))
        assert dispatcher._stream.run(lambda: 7, device)[0] == 7
    return found


def test_hybridep_exchanges_on_a_stream_of_the_priority_of_the_flag():
    assert on_device(stream_priorities, devices=2, ranks=2) == [[-1, 0]] * 2
