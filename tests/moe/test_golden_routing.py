"""Routing decisions and auxiliary losses of the reference implementation's first step."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.model.weights import load_named_weights
from moe_trainer.moe.balancing import LOSS_NAMES, collect_moe_metrics, start_iteration, update_expert_bias
from moe_trainer.parallel.state import ParallelState

CASES = ("a_mixtral", "a2_mixtral", "a_capacity_zloss", "b_deepseek_mtp", "c_qwen3moe")


@pytest.fixture(scope="module", params=CASES)
def first_step(request, shared):
    """The model after the two microbatches of step 1 (forward only), the recorded routing, and the reference's record."""
    folder = shared / "golden" / request.param
    meta = json.loads((folder / "meta.json").read_text())
    args = arguments.parse_args(meta["argv"], world_size=1)
    (model,) = build_chunks(args, ParallelState.single(), 512)
    load_named_weights([model], load_file(folder / "init.safetensors"), ParallelState.single())
    data = np.load(folder / "data.npz")
    for layer in model.moe_layers():
        layer.router.recorder = []
    start_iteration([model])
    for i in range(2):
        ids = [torch.from_numpy(data[f"batch/{name}"][i]).long() for name in ("tokens", "position_ids", "labels")]
        model(*ids, torch.from_numpy(data["batch/loss_mask"][i]), grad_scale=0.5)
    return model, data, meta["steps"][0]


def key(layer, model) -> str:
    """The dump's name of a layer."""
    depth = layer.layer_number - len(model.decoder.layers)
    return f"layer{layer.layer_number}" if depth < 1 else f"mtp{depth}"


def test_router_logits_probabilities_and_map_equal_megatron(first_step):
    model, data, _ = first_step
    compared = 0
    for layer in model.moe_layers():
        for microbatch, seen in enumerate(layer.router.recorder):
            path = f"routing/{key(layer, model)}/mb{microbatch}"
            num_experts = seen["map"].shape[1]
            expected_map = np.unpackbits(data[f"{path}/map"], axis=1)[:, :num_experts].astype(bool)
            assert np.array_equal(seen["map"].numpy(), expected_map), path
            assert np.abs(seen["logits"].numpy() - data[f"{path}/logits"]).max() < 1e-6
            assert np.abs(seen["probs"].numpy() - data[f"{path}/probs"]).max() < 1e-6
            compared += 3
    assert compared == sum(name.startswith("routing/") for name in data)


def test_aux_losses_drops_and_bias_equal_megatron(first_step):
    model, data, step = first_step
    moe, last = model.moe_layers()[0].router.moe, model.moe_layers()[-1].layer_number
    metrics = collect_moe_metrics([model], ParallelState.single(), 2, moe, last)
    for name in LOSS_NAMES:
        recorded = step.get(f"{name}/per_layer")
        if recorded is None:
            assert metrics.losses.get(name, 0.0) == 0.0
            continue
        assert metrics.per_layer[name] == pytest.approx(recorded, rel=2e-6), name
        assert metrics.losses[name] == pytest.approx(sum(recorded) / len(model.moe_layers()), rel=2e-6)
    maps = [data[name] for name in data if name.endswith("/map")]
    topk = model.moe_layers()[0].router.topk
    taken = sum(int(np.unpackbits(packed).sum()) for packed in maps)
    assert metrics.dropped_tokens == sum(topk * len(packed) for packed in maps) - taken
    update_expert_bias([model], ParallelState.single())
    for name, recorded in step.get("expert_bias", {}).items():
        bias = dict(model.named_state_buffers())[name]
        assert bias.tolist() == pytest.approx(recorded, rel=1e-6)
