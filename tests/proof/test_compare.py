"""The comparison finds what differs, names it, and puts first what is computed first."""

import math
from dataclasses import replace

import pytest
import torch

from moe_trainer.proof.compare import FP32, closeness, compare, execution_order
from moe_trainer.proof.observe import Outcome, Piece

FC1 = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NAMES = ("embedding.word_embeddings.weight", QKV, "decoder.layers.1.mlp.router.weight", FC1, "decoder.final_layernorm.weight",
         "output_layer.weight")  # fmt: skip


def outcome(**changes) -> Outcome:
    """Two steps of a small model; the qkv weight is cut in two pieces held by ranks 0 and 1, the rest is on both."""
    torch.manual_seed(0)
    grads = {name: torch.randn(4, 6) for name in NAMES}
    weights = {name: torch.randn(4, 6) for name in NAMES}
    pieces = [[Piece(name, *((0, rank, 2, (1,)) if name == QKV else (None, 0, 1, (1,))), ((1.0, 0.5, 0.25), (2.0, 1.0, 0.5))) for name in NAMES]
              for rank in range(2)]  # fmt: skip
    losses = [{"lm loss": 5.0 - step, "z_loss": 9.0} for step in range(2)]
    per_layer = [{"z_loss": [8.0, 10.0]} for _ in range(2)]
    return replace(Outcome(losses, [1.5, 1.25], [0, 3], grads, weights, per_layer, pieces), **changes)


def changed(tensors: dict, name: str, by: float) -> dict:
    """The tensors with one entry of one of them moved."""
    moved = tensors[name].clone()
    moved[3, 2] += by
    return {**tensors, name: moved}


def test_equal_outcomes_have_no_difference():
    assert compare(outcome(), outcome()) == []
    near = outcome(grads=changed(outcome().grads, FC1, 1e-6))
    assert compare(outcome(), near) == []
    assert "2 steps of lm loss, z_loss" in closeness(outcome(), near) and "6 gradients" in closeness(outcome(), near)


def test_a_loss_names_step_and_layer():
    parted = outcome(losses=[{"lm loss": 5.0, "z_loss": 9.0}, {"lm loss": 4.0, "z_loss": 9.1}],
                     per_layer=[{"z_loss": [8.0, 10.0]}, {"z_loss": [8.0, 10.2]}])
    (difference,) = compare(outcome(), parted)
    assert str(difference).startswith("z_loss (step 2) of layer 1: apart by 0.0111") and "one process 9, here 9.1" in str(difference)


def test_a_gradient_names_tensor_piece_and_rank():
    (difference,) = compare(outcome(), outcome(grads=changed(outcome().grads, QKV, 1e-3)))
    assert (difference.quantity, difference.where) == ("gradient (step 1)", QKV)
    assert difference.size > FP32.grad and "most in piece 1 of 2, held by rank 1" in difference.detail


def test_the_first_difference_is_the_first_that_is_computed():
    """Forward, then backward from the last layer to the first, then the norm, then the next step, then the weights."""
    parted = outcome(
        losses=[{"lm loss": 5.0, "z_loss": 9.0}, {"lm loss": 4.5, "z_loss": 9.0}], grad_norms=[1.6, 1.25], dropped=[1, 3],
        grads=changed(changed(outcome().grads, QKV, 0.1), FC1, 0.1), weights=changed(outcome().weights, FC1, 0.1),
    )
    found = [(difference.quantity, difference.where) for difference in compare(outcome(), parted)]
    assert found == [
        ("dropped tokens (step 1)", ""), ("gradient (step 1)", FC1), ("gradient (step 1)", QKV), ("gradient norm (step 1)", ""),
        ("lm loss (step 2)", ""), ("weight (after step 2)", FC1),
    ]


def test_a_weight_may_be_apart_as_far_as_rounding_moves_it():
    """Ten times less than what a disturbance of the reference does to it, and no other weight."""
    shaken = outcome(shaken={FC1: 1e-3})
    assert compare(shaken, outcome(weights=changed(outcome().weights, FC1, 9e-5))) == []
    (difference,) = compare(shaken, outcome(weights=changed(outcome().weights, FC1, 1.1e-4)))
    assert difference.where == FC1 and difference.allowed == pytest.approx(1e-4)
    (difference,) = compare(shaken, outcome(weights=changed(outcome().weights, QKV, 9e-5)))
    assert difference.where == QKV and difference.allowed == FP32.weight


def test_a_copy_that_went_its_own_way_is_found_although_rank_0_is_right():
    pieces = outcome().pieces
    astray = [replace(piece, fingerprints=((1.0, 0.5, 0.25), (2.0, 1.1, 0.5))) if piece.name == FC1 else piece for piece in pieces[1]]
    (difference,) = compare(outcome(), outcome(pieces=[pieces[0], astray]))
    assert difference.quantity == "copies of the weight at the end" and difference.where == FC1
    assert "rank 0 and rank 1" in difference.detail


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_a_difference(value):
    assert compare(outcome(), outcome(grad_norms=[value, 1.25]))
    assert compare(outcome(), outcome(grads=changed(outcome().grads, QKV, value)))
    assert compare(outcome(), outcome(weights=changed(outcome().weights, QKV, value)))


def test_what_is_missing_or_of_another_shape_is_a_difference():
    grads = outcome().grads
    fewer = compare(outcome(), outcome(grads={name: grad for name, grad in grads.items() if name != QKV}))
    assert [difference.detail for difference in fewer] == ["it is missing here"]
    assert "shapes" in compare(outcome(), outcome(grads={**grads, QKV: grads[QKV].t()}))[0].detail
    assert compare(outcome(), outcome(losses=[{"lm loss": 5.0}, {"lm loss": 4.0, "z_loss": 9.0}]))[0].detail.endswith("here absent")


@pytest.mark.parametrize("lacking", ["losses", "grad_norms", "grads", "weights", "pieces"])
def test_nothing_is_not_equal_to_nothing(lacking):
    nothing = outcome(**{lacking: type(getattr(outcome(), lacking))()})
    with pytest.raises(ValueError, match=lacking):
        compare(nothing, nothing)


def test_copies_without_one_of_their_fingerprints_are_not_compared():
    """Else the weight would pass for the gradient."""
    pieces = outcome().pieces
    short = [replace(piece, fingerprints=piece.fingerprints[1:]) for piece in pieces[1]]
    with pytest.raises(ValueError):
        compare(outcome(), outcome(pieces=[pieces[0], short]))


def test_names_sort_as_the_forward_pass_runs():
    names = [
        "embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.10.linear_fc1.weight", "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight",
        "decoder.layers.2.input_layernorm.weight", "decoder.layers.10.input_layernorm.weight", "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight", "mtp.layers.0.mtp_model_layer.mlp.router.weight", "output_layer.weight",
    ]  # fmt: skip
    assert sorted(reversed(names), key=execution_order) == names
