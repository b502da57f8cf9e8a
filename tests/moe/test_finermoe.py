"""FineRMoE's layer against its equations: choice, output, every gradient, losses; what it becomes at the edges of its numbers."""

from dataclasses import replace

import pytest
import torch
from moe.layers import HIDDEN, build_layer, sections
from moe.test_layer import AUX, compare
from moe.test_narrow_rows import TOPK, check_widths

from arguments import parse_args
from arguments.mechanisms.dispatchers import ALLTOALL, DispatcherCapability
from arguments.mechanisms.selection_kinds.finermoe import ExpertGrid, expert_grid, is_asked
from arguments.mechanisms.support import NoEffect
from arguments.moe import MoEArgs
from moe_trainer.estimate import memory
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.plan import make_plan
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe.selections.finermoe import SlicedPermutation, choose_slices


def fine(cuts, slices, copies, candidates, each=1, **changes):
    """Sections of a layer: hidden 16, dense width 24."""
    grid = ExpertGrid(slices, candidates, cuts * copies)
    numbers = {
        "finermoe_intermediate_granularity": cuts,
        "finermoe_output_granularity": slices,
        "finermoe_intermediate_expansion": copies,
        "finermoe_output_expansion": candidates,
    }
    return sections(
        num_experts=grid.num_experts,
        moe_router_topk=slices * each,
        moe_ffn_hidden_size=24 // cuts,
        **numbers,
        **changes,
    )


SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True}
SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
ALL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
    "moe_z_loss_coeff": 0.05,
}
KINDS = {
    "2-2-1-2": fine(2, 2, 1, 2, **SHARED, **SEQUENCE),
    "4-2-1-2, two of a group": fine(4, 2, 1, 2, 2, **SHARED, **ALL),
    "2-4-2-3": fine(2, 4, 2, 3, **AUX),
    "3-1-1-2, two of a group": fine(3, 1, 1, 2, 2, **SEQUENCE),
    "1-4-1-1": fine(1, 4, 1, 1, **SEQUENCE),
    "2-2-1-2, concat_proj": fine(2, 2, 1, 2, moe_concat_proj=True, **SHARED, **SEQUENCE),
    "2-2-1-2, expert bias": fine(2, 2, 1, 2, 2, moe_router_enable_expert_bias=True, **ALL),
    "2-2-1-2, drops": fine(2, 2, 1, 2, moe_expert_capacity_factor=0.7, **SHARED, **SEQUENCE),
    "2-2-1-2, padded": fine(
        2, 2, 1, 2, 2, moe_expert_capacity_factor=0.7, moe_pad_expert_input_to_capacity=True, **SEQUENCE
    ),
    "2-2-1-2, biases": fine(2, 2, 1, 2, add_bias_linear=True, **SEQUENCE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_finermoe_layer_follows_the_equations(kind):
    compare(KINDS[kind])


@pytest.mark.parametrize("grouped", [False, True])
def test_finermoe_in_single_precision(grouped):
    compare(fine(2, 4, 2, 2, moe_grouped_gemm=grouped, **SHARED, **ALL), dtype=torch.float32, tolerance=2e-5)


@pytest.mark.parametrize("grid", [ExpertGrid(2, 3, 4), ExpertGrid(4, 1, 5), ExpertGrid(1, 2, 6)])
@pytest.mark.parametrize("each", [1, 3])
def test_selection_equals_two_masks(grid, each):
    """The selected experts as the product of two masks, as in the paper."""
    logits = torch.randn(200, grid.num_experts, generator=torch.Generator().manual_seed(0))
    groups = logits.view(200, grid.slices * grid.candidates, grid.group_size)
    largest = torch.zeros_like(groups).scatter_(2, groups.topk(each, dim=2)[1], 1.0).view(200, -1).bool()
    sums = groups.sum(2).view(200, grid.slices, grid.candidates)
    winning = (sums == sums.max(2, keepdim=True)[0]).view(200, -1, 1).expand_as(groups).reshape(200, -1)
    mask = torch.zeros_like(logits).scatter_(1, choose_slices(logits, grid, grid.slices * each), 1.0).bool()
    assert torch.equal(mask, largest & winning)
    assert (mask.view(200, grid.slices, -1).sum(2) == each).all()
    assert (mask.view(200, grid.slices, grid.candidates, -1).any(3).sum(2) == 1).all()


def test_first_of_equal_groups_wins():
    assert choose_slices(torch.zeros(1, 12), ExpertGrid(2, 3, 2), 4).sort()[0].tolist() == [[0, 1, 6, 7]]


def test_group_sums_are_computed_in_fp32():
    """Rounded to bf16, 259 and 259.5 are both 260, and the first would win."""
    logits = torch.tensor([[256.0, 1, 1, 1, 260, -0.5, 0, 0]], dtype=torch.bfloat16)
    assert choose_slices(logits, ExpertGrid(1, 2, 4), 1).tolist() == [[4]]


def test_one_slice_and_one_group_are_ordinary_top_k():
    plain = {"num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 6, **ALL}
    ordinary, special = build_layer(sections(**plain)), build_layer(fine(4, 1, 2, 1, 4, **ALL))
    x = torch.randn(5, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    outputs = [layer(x, PassInputs(grad_scale=0.7)) for layer in (ordinary, special)]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)
    for y in outputs:
        y.square().sum().backward()
    for one, other in zip(ordinary.parameters(), special.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(ordinary.router.loss_sums, special.router.loss_sums)


def test_experts_sliced_from_a_dense_mlp_sum_to_it():
    """Every slice's group has all pieces of the width, all chosen with equal weights: the dense output over their number."""
    layer = build_layer(fine(4, 2, 1, 2, each=4))
    generator = torch.Generator().manual_seed(5)
    gate, up, down = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((24, 16), (24, 16), (16, 24))
    )
    with torch.no_grad():
        layer.router.weight.zero_()
        for expert in range(16):
            piece, part = slice(expert % 4 * 6, expert % 4 * 6 + 6), slice(expert // 8 * 8, expert // 8 * 8 + 8)
            layer.experts.linear_fc1.weight[expert] = torch.cat([gate[piece], up[piece]])
            layer.experts.linear_fc2.weight[expert] = down[part, piece]
    x = torch.randn(3, 2, 16, dtype=torch.float64, generator=generator)
    dense = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    torch.testing.assert_close(layer(x), dense / 8, atol=1e-12, rtol=1e-12)


def test_slices_without_rows_are_zero():
    permutation, routing = SlicedPermutation(2, 2), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]]).bool()
    _, _, routes = permutation.permute(torch.zeros(3, 4), torch.zeros(3, 4), routing)
    y = permutation.unpermute(torch.tensor([[1.0, 1], [2, 2], [4, 4], [8, 8]]), routes)  # experts 0, 1, 1, 3
    assert y.tolist() == [[3, 3, 0, 0], [0, 0, 0, 0], [4, 4, 8, 8]]


def test_defaults_of_omitted_finermoe_sizes():
    assert not is_asked(MoEArgs())
    assert expert_grid(MoEArgs(finermoe_output_granularity=4)) == ExpertGrid(4, 4, 1)
    assert expert_grid(MoEArgs(finermoe_intermediate_granularity=3)) == ExpertGrid(1, 1, 9)
    assert MoEArgs(finermoe_intermediate_granularity=3, finermoe_intermediate_expansion=2).expert_widths(16) == (16, 16)
    assert MoEArgs(finermoe_output_granularity=4).expert_widths(16) == (16, 4)
    assert MoEArgs(moe_latent_size=6).expert_widths(16) == (6, 6)


def test_finermoe_router_has_no_fused_kernel():
    grid = {f"finermoe_{part}": 2 for part in ("output_granularity", "intermediate_granularity", "output_expansion")}
    router = build_layer(sections(finermoe_intermediate_expansion=1, **grid)).router
    router.use_kernels(pytest.fail, None)
    assert router(torch.randn(6, 1, HIDDEN, dtype=torch.float64))[1].any()


def test_rows_of_experts_are_as_wide_in_the_plan_as_the_declaration_says(monkeypatch):
    """FineRMoE's experts make narrow rows; those that a library sorts have full width, whatever else acts."""
    argv = (
        "--preset finermoe_tiny --mock-data --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()
    )
    args, hardware = parse_args([*argv, "--moe-grouped-gemm", "--bf16"], 2), find_hardware("h100")
    kernels = {DispatcherCapability.PERMUTATION_KERNELS: NoEffect("of a test")}
    planned = []
    for changes in ({}, {"capabilities": dict(ALLTOALL.capabilities) | kernels}, {"sorts_tokens": True}):
        monkeypatch.setattr(memory, "get_dispatcher", lambda _moe, changes=changes: replace(ALLTOALL, **changes))
        planned.append(max(stage.total for stage in make_plan(args, 2, hardware).memory))
    assert planned[0] == planned[1] < planned[2]


@pytest.mark.parametrize("backward", [False, True])
def test_slices_are_sent_back(backward):
    changes = {"finermoe_output_granularity": 4, "finermoe_output_expansion": 2, "moe_router_topk": TOPK}
    check_widths(changes, 16, 4, backward)
