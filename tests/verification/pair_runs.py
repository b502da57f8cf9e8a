"""Trainings of pairs of features on emulated devices, for tests/verification/prove_combinations.py."""

import sys
from typing import NamedTuple

import torch
from memory import hybrid_ep_on_device
from moe import fake_te_ep
from moe.fake_deep_ep import Event
from moe.test_flex import make_fake_deep_ep
from torch.utils._pytree import tree_map
from training.layouts import create_groups

from arguments import parse_args
from moe_trainer.memory.graph_capture import CapturedGraph
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace

STEPS = 3  # one without graphs, one that captures, one that only replays


def use_stand_ins(recorded: dict) -> None:
    """Let this process use the stand-ins of the libraries; `recorded` holds the signatures of DeepEP."""
    hybrid_ep_on_device.use_stand_in()
    module, _ = make_fake_deep_ep(recorded, "DeepEP of the hybrid branch")
    sys.modules["deep_ep"].Buffer = _on_device(module.Buffer)
    fake_te_ep.install()


def _on_device(host_class: type) -> type:
    """Return DeepEP's class for tensors of a device; every call waits for the device, as the library does."""

    def through_host(name: str):
        method = getattr(host_class, name)

        def run(self, *args, **kwargs):
            args, kwargs = tree_map(_contiguous, (args, kwargs))
            torch.cuda.synchronize()
            args, kwargs = tree_map(_to_host, (args, kwargs))
            *results, event = method(self, *args, **kwargs)
            if event.work is not None:
                event.current_stream_wait()
            return *tree_map(_to_device, results), Event(lambda: None)

        return run

    return type(
        "Buffer", (host_class,), {name: through_host(name) for name in ("get_dispatch_layout", "dispatch", "combine")}
    )


def _contiguous(x):
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _to_host(x):
    return torch.ops.emulated_cuda.host_alias(x) if isinstance(x, torch.Tensor) and x.is_cuda else x


def _to_device(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


class Run(NamedTuple):
    """What a training has given, how many graphs it captured, and the keys of its dispatchers."""

    outcome: training_trace.TrainingTrace
    captured: int
    dispatchers: set[str]


def train_alone(argvs: list[list[str]], recorded: dict) -> list[Run]:
    return _train(argvs, recorded, 0, 1)


def train(rank: int, n: int, argvs: list[list[str]], recorded: dict) -> list[Run]:
    return _train(argvs, recorded, rank, n)


def _train(argvs: list[list[str]], recorded: dict, rank: int, n: int) -> list[Run]:
    use_stand_ins(recorded)
    runs, captured, capture = [], 0, CapturedGraph.capture
    dispatchers: set[str] = set()

    def counted(graph, run):
        nonlocal captured
        captured += 1
        return capture(graph, run)

    def look(run) -> None:
        dispatchers.update(layer.dispatcher.declaration.key for chunk in run.chunks for layer in chunk.moe_layers())

    CapturedGraph.capture = counted
    for argv in argvs:
        torch.manual_seed(7)
        captured, dispatchers = 0, set()
        ps = create_groups(argv, rank, n) if n > 1 else ParallelState.single()
        outcome = training_trace.train(parse_args(argv, n), rank, ps, STEPS, prepare=look, device="cuda")
        runs.append(Run(outcome, captured, dispatchers))
    CapturedGraph.capture = capture
    return runs


def difference(plain: training_trace.TrainingTrace, ours: training_trace.TrainingTrace) -> float:
    """Return the largest relative difference of a loss or gradient norm."""
    pairs = [*zip(ours.grad_norms, plain.grad_norms)]
    pairs += [(one[name], other[name]) for one, other in zip(ours.losses, plain.losses) for name in one]
    return max(abs(one - other) / max(abs(other), 1e-30) for one, other in pairs)
