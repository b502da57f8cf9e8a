"""Logits and gradients of the reference implementation, from its weights and batches."""

import json

import numpy as np
import pytest
import torch
from model.test_mtp import collect_losses
from safetensors.torch import load_file

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.model.weights import export_named_weights, load_named_weights
from moe_trainer.parallel.state import ParallelState

CASES = ("d_dense_gpt2", "a_mixtral", "a2_mixtral", "a_capacity_zloss", "b_deepseek_mtp", "c_qwen3moe")


@pytest.fixture(scope="module", params=CASES)
def case(request, shared):
    """Return the model with the reference's initial weights, the batches by microbatch, and the folder."""
    folder = shared / "golden" / request.param
    args = arguments.parse_args(json.loads((folder / "meta.json").read_text())["argv"], world_size=1)
    (model,) = build_chunks(args, ParallelState.single(), 512)
    load_named_weights([model], load_file(folder / "init.safetensors"), ParallelState.single())
    data = np.load(folder / "data.npz")

    def batch(i):
        ids = [torch.from_numpy(data[f"batch/{name}"][i]).long() for name in ("tokens", "position_ids", "labels")]
        return *ids, torch.from_numpy(data["batch/loss_mask"][i])

    return model, batch, folder


def test_logits_equal_megatron(case):
    model, batch, folder = case
    tokens, positions, _, _ = batch(0)
    with torch.no_grad():
        logits = model.eval()(tokens, positions)
    expected = torch.from_numpy(np.load(folder / "data.npz")["logits_first_microbatch"])
    assert (logits - expected).abs().max() < 1e-5


def test_first_step_gradients_equal_megatron(case):
    model, batch, folder = case
    model.train()
    model.zero_grad()
    losses = []
    for i in range(2):
        tokens, positions, labels, mask = batch(i)
        loss_BS = model(tokens, positions, labels, mask, grad_scale=0.5)
        loss = (loss_BS * mask).sum() / mask.sum()
        (loss / 2).backward()
        losses.append(loss.item())
    step = json.loads((folder / "meta.json").read_text())["steps"][0]
    assert sum(losses) / 2 == pytest.approx(step["lm loss"], rel=2e-6)
    expected = load_file(folder / "grads_step1.safetensors")
    for param in model.parameters():
        for name, grad in zip(param.info.names, param.grad.unbind() if param.info.stacked else (param.grad,)):
            want = expected.pop(name)
            assert (grad - want).norm() < 1e-5 * want.norm(), name
    assert not expected


def test_mtp_loss_is_accumulated_and_reset(case):
    model, batch, folder = case
    collect_losses(model)
    with torch.no_grad():
        model.train()(*batch(0), grad_scale=0.5)
        model(*batch(1), grad_scale=0.5)
    metrics = collect_losses(model)
    step = json.loads((folder / "meta.json").read_text())["steps"][0]
    assert len(metrics) == len(step.get("mtp_losses", []))
    if metrics:
        assert metrics == {"mtp_1 loss": pytest.approx(step["mtp_losses"][0], rel=2e-6)}
        assert collect_losses(model) == {"mtp_1 loss": 0.0}


def test_exported_weights_equal_the_loaded_ones(case):
    model, _, folder = case
    weights = load_file(folder / "init.safetensors")
    exported = dict(export_named_weights([model], ParallelState.single()))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
