"""The layer of a collective, in forward and in backward."""

import threading

import torch
from torch import nn

from moe_trainer.parallel.trace import Trace
from moe_trainer.resilience.layer_trace import register_layer_trace_hooks


class RecordLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trace, seen):
        ctx.trace, ctx.seen = trace, seen
        seen.append((trace.layer, trace.microbatch))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append((ctx.trace.layer, ctx.trace.microbatch))
        return grad * 2, None, None


class Layer(nn.Module):
    def __init__(self, trace, seen):
        super().__init__()
        self.trace, self.seen = trace, seen

    def forward(self, x):
        return RecordLayer.apply(x, self.trace, self.seen)


def test_forward_and_backward_name_layer_and_microbatch():
    trace, seen = Trace(), []
    model = nn.Sequential(Layer(trace, seen), Layer(trace, seen))
    register_layer_trace_hooks(trace, [("decoder.layers.0", model[0]), ("decoder.layers.1", model[1])])
    outputs = []
    for trace.microbatch in (1, 2):  # both forwards before the first backward, as in a pipeline
        outputs.append(model(torch.ones(2, requires_grad=True)).sum())
    outputs[0].backward()
    assert seen == [
        ("decoder.layers.0", 1),
        ("decoder.layers.1", 1),
        ("decoder.layers.0", 2),
        ("decoder.layers.1", 2),
        ("backward of decoder.layers.1", 1),
        ("backward of decoder.layers.0", 1),
    ]


def test_layer_trace_works_without_autograd():
    trace = Trace()
    layer = Layer(trace, [])
    register_layer_trace_hooks(trace, [("decoder.layers.0", layer)])
    with torch.no_grad():
        layer(torch.ones(2))
    assert trace.layer == "decoder.layers.0"


def test_layer_trace_is_separate_for_every_thread():
    trace = Trace()
    trace.layer, trace.microbatch = "decoder.layers.3", 2
    seen = []

    def other():
        before = trace.layer, trace.microbatch
        trace.layer, trace.microbatch = "backward of decoder.layers.1", 1
        seen.extend([before, trace.begin("all_to_all", "ep", (0, 1)).describe()])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == ("", None) and "backward of decoder.layers.1, microbatch 1" in seen[1]
    assert (trace.layer, trace.microbatch) == ("decoder.layers.3", 2)
