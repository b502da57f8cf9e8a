"""compare() lists what differs with its name, in execution order."""

import math
from dataclasses import replace

import pytest
import torch

from moe_trainer.verification.compare_runs import FP32, compare, describe_agreement
from moe_trainer.verification.comparison import execution_order
from moe_trainer.verification.training_trace import TracedShard, TrainingTrace

FC1 = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NAMES = ("embedding.word_embeddings.weight", QKV, "decoder.layers.1.mlp.router.weight", FC1, "decoder.final_layernorm.weight",
         "output_layer.weight")  # fmt: skip


def make_trace(**changes) -> TrainingTrace:
    """Two steps of a small model. The qkv weight is sharded over ranks 0 and 1, both hold the other tensors."""
    torch.manual_seed(0)
    grads = {name: torch.randn(4, 6) for name in NAMES}
    weights = {name: torch.randn(4, 6) for name in NAMES}
    shards = [[TracedShard(name, *((0, rank, 2, (1,)) if name == QKV else (None, 0, 1, (1,))), ((1.0, 0.5, 0.25), (2.0, 1.0, 0.5))) for name in NAMES]
              for rank in range(2)]  # fmt: skip
    losses = [{"lm loss": 5.0 - step, "z_loss": 9.0} for step in range(2)]
    per_layer = [{"z_loss": [8.0, 10.0]} for _ in range(2)]
    return replace(TrainingTrace(losses, [1.5, 1.25], [0, 3], grads, weights, per_layer, shards), **changes)


def with_one_entry_moved(tensors: dict, name: str, by: float) -> dict:
    """Return the tensors with one entry of one of them moved."""
    moved = tensors[name].clone()
    moved[3, 2] += by
    return {**tensors, name: moved}


def test_equal_traces_have_no_difference():
    assert compare(make_trace(), make_trace()) == []
    near = make_trace(grads=with_one_entry_moved(make_trace().grads, FC1, 1e-6))
    assert compare(make_trace(), near) == []
    assert "2 steps of lm loss, z_loss" in describe_agreement(
        make_trace(), near
    ) and "6 gradients" in describe_agreement(make_trace(), near)


def test_loss_difference_names_step_and_layer():
    trace = make_trace(
        losses=[{"lm loss": 5.0, "z_loss": 9.0}, {"lm loss": 4.0, "z_loss": 9.1}],
        per_layer=[{"z_loss": [8.0, 10.0]}, {"z_loss": [8.0, 10.2]}],
    )
    (difference,) = compare(make_trace(), trace)
    assert str(difference).startswith(
        "z_loss (step 2) of layer 1: differs by 0.0111"
    ) and "one process 9, ranks 9.1" in str(difference)


def test_gradient_difference_names_tensor_shard_and_rank():
    (difference,) = compare(make_trace(), make_trace(grads=with_one_entry_moved(make_trace().grads, QKV, 1e-3)))
    assert (difference.quantity, difference.name) == ("gradient (step 1)", QKV)
    assert difference.difference > FP32.grad and "largest in shard 1 of 2, held by rank 1" in difference.detail


def test_differences_are_in_execution_order():
    """Forward, then backward from the last layer to the first, then the norm, then the next step, then the weights."""
    trace = make_trace(
        losses=[{"lm loss": 5.0, "z_loss": 9.0}, {"lm loss": 4.5, "z_loss": 9.0}],
        grad_norms=[1.6, 1.25],
        dropped=[1, 3],
        grads=with_one_entry_moved(with_one_entry_moved(make_trace().grads, QKV, 0.1), FC1, 0.1),
        weights=with_one_entry_moved(make_trace().weights, FC1, 0.1),
    )
    found = [(difference.quantity, difference.name) for difference in compare(make_trace(), trace)]
    assert found == [
        ("dropped tokens (step 1)", ""),
        ("gradient (step 1)", FC1),
        ("gradient (step 1)", QKV),
        ("gradient norm (step 1)", ""),
        ("lm loss (step 2)", ""),
        ("weight (after step 2)", FC1),
    ]


def test_weight_tolerance_covers_a_tenth_of_the_perturbed_change():
    """A perturbation of the reference raises the tolerance of the weight that it changes, and of no other."""
    reference = make_trace(perturbed_change={FC1: 1e-3})
    assert compare(reference, make_trace(weights=with_one_entry_moved(make_trace().weights, FC1, 9e-5))) == []
    (difference,) = compare(reference, make_trace(weights=with_one_entry_moved(make_trace().weights, FC1, 1.1e-4)))
    assert difference.name == FC1 and difference.allowed == pytest.approx(1e-4)
    (difference,) = compare(reference, make_trace(weights=with_one_entry_moved(make_trace().weights, QKV, 9e-5)))
    assert difference.name == QKV and difference.allowed == FP32.weight


def test_different_copy_is_found_if_rank_0_is_right():
    shards = make_trace().shards
    different = [
        replace(shard, fingerprints=((1.0, 0.5, 0.25), (2.0, 1.1, 0.5))) if shard.name == FC1 else shard
        for shard in shards[1]
    ]
    (difference,) = compare(make_trace(), make_trace(shards=[shards[0], different]))
    assert difference.quantity == "copies of the weight at the end" and difference.name == FC1
    assert "rank 0 and rank 1" in difference.detail


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_value_is_a_difference(value):
    assert compare(make_trace(), make_trace(grad_norms=[value, 1.25]))
    assert compare(make_trace(), make_trace(grads=with_one_entry_moved(make_trace().grads, QKV, value)))
    assert compare(make_trace(), make_trace(weights=with_one_entry_moved(make_trace().weights, QKV, value)))


def test_missing_tensor_or_other_shape_is_a_difference():
    grads = make_trace().grads
    fewer = compare(make_trace(), make_trace(grads={name: grad for name, grad in grads.items() if name != QKV}))
    assert [difference.detail for difference in fewer] == ["only in one process"]
    assert "shapes" in compare(make_trace(), make_trace(grads={**grads, QKV: grads[QKV].t()}))[0].detail
    assert compare(make_trace(), make_trace(losses=[{"lm loss": 5.0}, {"lm loss": 4.0, "z_loss": 9.0}]))[
        0
    ].detail.endswith("ranks absent")


@pytest.mark.parametrize("missing", ["losses", "grad_norms", "grads", "weights", "shards"])
def test_empty_traces_are_rejected(missing):
    empty = make_trace(**{missing: type(getattr(make_trace(), missing))()})
    with pytest.raises(ValueError, match=missing):
        compare(empty, empty)


def test_missing_fingerprint_is_rejected():
    """Otherwise the weight would be compared with the gradient."""
    shards = make_trace().shards
    short = [replace(shard, fingerprints=shard.fingerprints[1:]) for shard in shards[1]]
    with pytest.raises(ValueError):
        compare(make_trace(), make_trace(shards=[shards[0], short]))


def test_names_sort_in_forward_order():
    names = [
        "embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.10.linear_fc1.weight", "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight",
        "decoder.layers.2.input_layernorm.weight", "decoder.layers.10.input_layernorm.weight", "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight", "mtp.layers.0.mtp_model_layer.mlp.router.weight", "output_layer.weight",
    ]  # fmt: skip
    assert sorted(reversed(names), key=execution_order) == names


def test_outputs_sort_in_forward_order():
    names = [
        "embedding", "decoder.layers.0.self_attention", "decoder.layers.0.mlp", "decoder.layers.1.self_attention",
        "decoder.layers.1.mlp.router.logits", "decoder.layers.1.mlp.router", "decoder.layers.1.mlp.router.probs",
        "decoder.layers.1.mlp", "decoder.layers.10.mlp", "decoder.final_layernorm", "mtp.layers.0.embedding",
        "mtp.layers.0.self_attention", "mtp.layers.0.mlp", "mtp.layers.0", "mtp.layers.1.embedding", "mtp.layers.1.layers.0.mlp",
        "mtp.layers.1.layers.1.mlp.router", "mtp.layers.1.layers.1.mlp", "mtp.layers.1.layers.2.self_attention", "mtp.layers.1", "loss",
    ]  # fmt: skip
    assert sorted(reversed(names), key=execution_order) == names
