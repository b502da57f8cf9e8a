"""Upcycling a dense checkpoint to FineRMoE's experts."""

import pytest
import torch
from training import test_upcycling
from training.test_upcycling import GATED, LAYER, TIED, check_layout, upcycle

dense, upcycled = test_upcycling.dense, test_upcycling.upcycled

FINE = (
    "--finermoe-intermediate-granularity 3 --finermoe-output-granularity 2 --finermoe-intermediate-expansion 2 "
    "--finermoe-output-expansion 2 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-grouped-gemm"
)
SHARED = "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate"


@pytest.mark.parametrize(("shared", "factor"), [(SHARED, 1.0), ("", 3.0)])
def test_finermoe_experts_follow_the_published_layout(shared, factor, dense, tmp_path):
    source, old, _ = dense(TIED)  # its head is copied from the embedding
    _, new = upcycle(source, f"{GATED} {FINE} {shared}", tmp_path)
    fc1, fc2 = old[f"{LAYER}mlp.linear_fc1.weight"], old[f"{LAYER}mlp.linear_fc2.weight"]
    for expert in range(2 * 2 * 3 * 2):
        piece, slot = (expert % 6) % 3, expert // 12
        rows = slice(16 * piece, 16 * piece + 16)
        own = f"{LAYER}mlp.experts.local_experts.{expert}."
        assert torch.equal(new[f"{own}linear_fc1.weight"], torch.cat([fc1[:48][rows], fc1[48:][rows]]))
        torch.testing.assert_close(new[f"{own}linear_fc2.weight"], factor * fc2[16 * slot : 16 * slot + 16, rows])
    if shared:
        assert torch.equal(new[f"{LAYER}mlp.shared_experts.linear_fc1.weight"], fc1)
        assert torch.equal(new[f"{LAYER}mlp.shared_experts.linear_fc2.weight"], fc2)
        assert 0.01 < new[f"{LAYER}mlp.shared_experts.gate_weight"].std() < 0.03
    assert 0.015 < new[f"{LAYER}mlp.router.weight"].std() < 0.025
    assert torch.equal(new["output_layer.weight"], old["embedding.word_embeddings.weight"])
    assert torch.equal(new[f"{LAYER}self_attention.linear_qkv.weight"], old[f"{LAYER}self_attention.linear_qkv.weight"])


def test_random_experts_next_to_the_dense_network(dense, tmp_path):
    """All-normal initialization, and the matrix behind the slices."""
    source, old, _ = dense(GATED)
    flags = f"{GATED} {FINE} {SHARED} --moe-concat-proj --moe-upcycling-expert-init normal"
    _, new = upcycle(source, flags, tmp_path)
    assert torch.equal(new[f"{LAYER}mlp.shared_experts.linear_fc2.weight"], old[f"{LAYER}mlp.linear_fc2.weight"])
    drawn = [name for name in new if ".experts.local_experts." in name or ".concat_proj." in name]
    assert len(drawn) == 2 * (2 * 24 + 1)  # layers
    for name in drawn:
        assert 0.015 < new[name].std() < 0.025 and abs(new[name].mean()) < 0.007, name
    assert len({value.sum().item() for name, value in new.items() if name in drawn}) == len(drawn)


def test_upcycling_under_another_layout_saves_the_same_model(dense, upcycled, tmp_path):
    layout = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel"
    check_layout(GATED, f"{FINE} {SHARED}", layout, [], dense, upcycled, tmp_path)
