"""Where flags defer weight gradients, a chunk defers those GEMMs and nothing else."""

import pytest
import torch

import arguments
from arguments.parallel import ParallelArgs
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState
from tests.training.layouts import make_argv

TOKENS = torch.arange(32).view(2, 16)


def build(kind):
    (chunk,) = build_chunks(arguments.parse_args(make_argv(kind), world_size=1), ParallelState.single(), 64)
    return chunk


def backward(chunk):
    loss_BS = chunk(TOKENS, torch.arange(16).expand(2, 16), TOKENS + 1)
    if chunk.weight_grads is not None:
        chunk.weight_grads.active = True
    loss_BS.sum().backward()


@pytest.mark.parametrize("kind", ["plain", "deepseek", "biases, tied head"])
def test_deferred_weight_gradients_equal_autograd(kind, monkeypatch):
    plain = build(kind)
    monkeypatch.setattr(ParallelArgs, "has_deferred_wgrad", True)  # as flags do with more stages
    chunk = build(kind)
    assert plain.weight_grads is None
    backward(plain)
    backward(chunk)
    waiting = {name for name, param in chunk.named_parameters() if param.grad is None}
    at_once = {name for name, _ in chunk.named_parameters()} - waiting
    assert waiting and all("linear" in name or "eh_proj" in name or "output_layer" in name for name in waiting), waiting
    gemms = {name for name, param in chunk.named_parameters() if param.dim() > 1 and not name.endswith("bias")}
    assert gemms & at_once <= {name for name in gemms if "embedding" in name or "router" in name}, at_once
    chunk.weight_grads.run()
    for (name, param), other in zip(chunk.named_parameters(), plain.parameters()):
        torch.testing.assert_close(
            param.grad, other.grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
