"""With --overlap-param-gather the gather of parameters may still run after a step: what reads them waits for it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from moe_trainer.memory import cuda_graph
from moe_trainer.training import evaluate, export


@pytest.fixture
def events() -> list[str]:
    return []


def fake_run(events, **more) -> SimpleNamespace:
    """The parts of a run that are needed, with an optimizer that records when it is waited for."""
    world = SimpleNamespace(rank=0, size=1)
    return SimpleNamespace(
        optimizer=SimpleNamespace(wait_params=lambda: events.append("wait")),
        wait_params=lambda: events.append("wait"),
        chunks=[],
        ps=SimpleNamespace(world=world, dp=world),
        timers=lambda name: contextlib.nullcontext(),
        metrics=None,
        **more,
    )


def test_export_waits_for_the_param_gather(events, monkeypatch, tmp_path):
    monkeypatch.setattr(export, "export_named_weights", lambda chunks, ps: events.append("read") or iter(()))
    export.export_weights(fake_run(events), str(tmp_path / "weights.safetensors"))
    assert events == ["wait", "read"]


def test_validation_waits_for_the_param_gather(events, monkeypatch):
    training = SimpleNamespace(
        eval_micro_batch_size=1, eval_global_batch_size=2, eval_iters=1, manual_gc=False, manual_gc_eval=False
    )
    monkeypatch.setattr(evaluate, "make_packing_planner", lambda *_, **__: None)
    monkeypatch.setattr(evaluate, "make_loader", lambda *_: iter(()))
    monkeypatch.setattr(evaluate, "run_microbatches", lambda *_, **__: events.append("read") or [])
    monkeypatch.setattr(evaluate, "reduce_loss", lambda *_: (0.0, 1.0))
    run = fake_run(events, args=SimpleNamespace(training=training), buffers=SimpleNamespace(agree=lambda *_: False))
    evaluate.evaluate(run, None, "here", "validation", range(4), 0, False)
    assert events == ["wait", "read"]


def test_replayed_graph_waits_for_the_param_gather(events, monkeypatch):
    graph = SimpleNamespace(capture=lambda fn: fn(), replay=lambda: events.append("read"))
    monkeypatch.setattr(cuda_graph, "CapturedGraph", lambda *_: graph)
    graphs = SimpleNamespace(device=torch.device("cpu"), scopes=())
    slot = SimpleNamespace(graphs=graphs, pool=None, static_input=lambda x: x)
    linear, x = torch.nn.Linear(2, 2), torch.ones(2)
    linear.register_forward_pre_hook(lambda *_: events.append("wait"))
    part = cuda_graph._GraphedPart(slot, "mlp", torch.clone, [linear], (x,))
    part.forward([x])  # that of the capture
    events.clear()
    part.forward([x])
    assert events == ["wait", "read"]
