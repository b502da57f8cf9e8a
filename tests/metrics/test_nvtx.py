"""Ranges for nsys: names, nesting, and the backward of modules."""

from types import SimpleNamespace

import pytest
import torch
from emulated_cuda.run import on_device
from training.layouts import make_argv

from arguments.output import OutputArgs
from moe_trainer.metrics import profiler
from moe_trainer.metrics.nvtx import NvtxRanges, make_ranges


class Recorder:
    """A replacement of torch.cuda.nvtx: what is open, and every (name, names of the pushed ranges around it)."""

    def __init__(self):
        self.pushed, self.seen, self.started, self.number = [], [], {}, 0

    def range_push(self, name):
        self.seen.append((name, tuple(self.pushed)))
        self.pushed.append(name)

    def range_pop(self):
        self.pushed.pop()

    def range_start(self, name):
        self.number += 1
        self.started[self.number] = name
        self.seen.append((name, ()))
        return self.number

    def range_end(self, number):
        del self.started[number]


def record_step(flags: str) -> tuple[list, list, dict]:
    """Ranges of a training step, and what is still open."""
    from training import layouts

    from arguments import parse_args
    from moe_trainer.metrics import nvtx
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.verification import training_trace

    torch.cuda.nvtx, recorder = Recorder(), None
    recorder = torch.cuda.nvtx
    argv = [*layouts.shallow(make_argv("deepseek")), "--nvtx-ranges", *flags.split()]
    training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), 1, device="cuda")
    assert nvtx.torch is torch
    return recorder.seen, recorder.pushed, recorder.started


@pytest.mark.parametrize("flags", ["", "--recompute-granularity selective --recompute-modules moe"])
def test_ranges_of_a_step_on_a_device(flags):
    seen, pushed, started = on_device(record_step, flags)
    assert not pushed and not started
    around = {}
    for name, outer in seen:
        around.setdefault(name, []).append(outer)
    microbatches = 4
    assert len([1 for name in around if name.startswith("forward microbatch ")]) == microbatches
    (attention,) = {outer for outer in around["decoder.layers.1.self_attention"] if outer[0] == "forward-backward"} & {
        ("forward-backward", "forward-compute", "forward microbatch 2 chunk 0", "decoder.layers.1")
    }
    assert attention
    moe = ("decoder.layers.1", "decoder.layers.1.mlp")
    for part in ("decoder.layers.1.mlp.router", "decoder.layers.1.mlp.experts", "dispatch", "combine"):
        passes = [outer for outer in around[part] if outer[-2:] == moe]
        assert len(passes) >= microbatches, part
        assert f"backward of {part}" in around or flags, part
    assert "optimizer" in around and "backward of decoder.layers.0" in around
    # a dense layer has no phases
    assert "decoder.layers.0.mlp" in around and "decoder.layers.0.mlp.router" not in around


def test_ranges_are_popped_and_ended_when_something_fails():
    recorder = Recorder()
    ranges, module = NvtxRanges(recorder), torch.nn.Linear(2, 2)
    ranges.mark_module("linear", module)
    with pytest.raises(RuntimeError), ranges("outer"):
        module(torch.zeros(3))
    assert not recorder.pushed and [name for name, _ in recorder.seen] == ["outer", "linear"]
    x = torch.zeros(2, requires_grad=True)
    module(x).sum().backward()
    assert recorder.seen[-1] == ("backward of linear", ()) and not recorder.started


def test_a_backward_that_never_ended_ends_with_the_next():
    """A gradient may reach the output of a module and not its input."""
    recorder = Recorder()
    ranges, module = NvtxRanges(recorder), torch.nn.Identity()
    module.forward = lambda x: x.detach() * torch.ones(2, requires_grad=True)
    ranges.mark_module("cut", module)
    for _ in range(3):
        module(torch.zeros(2, requires_grad=True)).sum().backward()
    assert len(recorder.started) == 1


def test_a_cpu_has_no_ranges():
    module = torch.nn.Linear(2, 2)
    for ranges in (make_ranges(True, torch.device("cpu")), make_ranges(False, torch.device("cuda"))):
        ranges.mark_module("linear", module)
        with ranges("name"):
            assert not module._forward_hooks


def test_nsys_profile_starts_and_stops_around_its_iterations(monkeypatch):
    calls = []

    class Operators:
        def __init__(self, record_shapes):
            calls.append(f"shapes {record_shapes}")

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *exception):
            calls.append("exit")

    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start"), cudaProfilerStop=lambda: calls.append("stop")
    )
    monkeypatch.setattr(profiler.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiler.torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(profiler.torch.autograd.profiler, "emit_nvtx", Operators)
    for shapes in (False, True):
        output = OutputArgs(
            profile=True, profile_step_start=2, profile_step_end=4, profile_ranks=[0], record_shapes=shapes
        )
        profile = profiler.Profiler(output, 0)
        for iteration in range(1, 7):
            profile.before(iteration)
            calls.append(iteration)
            profile.after(iteration)
    within = ["shapes True", "enter", 3, 4, "exit"]
    assert calls == [1, 2, "start", 3, 4, "stop", 5, 6, 1, 2, "start", *within, "stop", 5, 6]
