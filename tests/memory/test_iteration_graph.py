"""Full-iteration graphs without a device: when an iteration is captured again."""

from types import SimpleNamespace

import torch

from moe_trainer.memory import iteration_graph


def test_dropped_graphs_are_captured_again(monkeypatch):
    """They read the buffers of experts that they were captured with."""
    captured = []
    graph = SimpleNamespace(capture=lambda fn: captured.append(1) or fn(), replay=lambda: None)
    monkeypatch.setattr(iteration_graph, "CapturedGraph", lambda *_: graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    graphs = iteration_graph.IterationGraph(1)

    def run(num_microbatches):
        graphs.run(num_microbatches, torch.ones(1), lambda x: x, lambda: None, lambda _: None)
        return len(captured), graphs.num_graphs

    assert [run(3), run(4), run(3)] == [(1, 1), (2, 2), (2, 2)]
    graphs.drop()
    assert graphs.num_graphs == 0
    assert [run(3), run(3)] == [(3, 1), (3, 1)]
