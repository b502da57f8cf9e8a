"""Muon against its equations and torch's own, and under every dimension against one process."""

import math

import pytest
import torch
from harness import run_ranks
from optim.sharded_toy_model import (
    EAGER,
    LAYOUTS,
    MODES,
    OVERLAPPED,
    ZERO1,
    assert_equal,
    one_process,
    train_on_ranks,
    with_flags,
)
from torch import nn
from toy import build_training

from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.newton_schulz import COEFFICIENTS, coefficients, orthogonalize
from moe_trainer.optim.buckets import MAX_IMBALANCE, plan_layouts
from moe_trainer.optim.param_groups import ParamGroup, adam_eps
from moe_trainer.optim.update_rules.muon import Muon
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

HIGH = {"optimizer": "muon", "muon_fp32_matmul_prec": "high"}


class ParameterModule(nn.Module):
    """A module with the given parameters under the given names."""

    def __init__(self, **params):
        super().__init__()
        for name, (value, info) in params.items():
            param = nn.Parameter(value.clone())
            param.info = info
            self.register_parameter(name, param)


def step(model, grads, built, targets, **rates):
    built.zero_grad()
    sum((param * grad).sum() for param, grad in zip(model.parameters(), targets)).backward()
    grads.finish()
    return built.step(rates.get("lr", 0.1), rates.get("weight_decay", 0.1))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize(
    "mode, extra, torch_mode", [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")]
)
def test_muon_equals_torch(nesterov, shape, mode, extra, torch_mode):
    model = ParameterModule(weight=(random(*shape), ParamInfo(("fc.weight",))))
    grads, built = build_training(
        model,
        optimizer="muon",
        muon_coefficient_type="simple",
        muon_momentum=0.95,
        muon_nesterov=nesterov,
        muon_scale_mode=mode,
        muon_extra_scale_factor=extra,
        clip_grad=0.0,
    )
    expected = nn.Parameter(model.weight.detach().clone())
    torchs = torch.optim.Muon(
        [expected], lr=0.1, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=torch_mode
    )
    for number in range(3):
        expected.grad = random(*shape, seed=number + 1)
        step(model, grads, built, [expected.grad])
        torchs.step()
    torch.testing.assert_close(
        model.weight.detach(), expected.detach(), rtol=0, atol=0.1 * 3 * 2e-2
    )  # both iterate in bf16
    assert (model.weight - random(*shape)).abs().max() > 0.05


def orthogonalize_reference(x, kind, steps):
    """Reference implementation in fp64."""
    x = x.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    for number in range(steps):
        sets = COEFFICIENTS[kind]
        a, b, c = sets[
            min(number, len(sets) - 1) if kind in ("polar_express", "cans", "deepseekv4") else number % len(sets)
        ]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.parametrize(
    "kind, steps",
    [
        ("quintic", 5),
        ("quintic", 7),
        ("simple", 6),
        ("polar_express", 9),
        ("cans", 5),
        ("aol", 4),
        ("deepseekv4", 10),
        ("cubic5", 5),
    ],
)
def test_orthogonalization_with_every_coefficient_set(kind, steps):
    for shape in ((6, 15), (15, 6)):
        x = random(*shape)
        found = orthogonalize(x[None], kind, steps)[0]
        torch.testing.assert_close(found.double(), orthogonalize_reference(x, kind, steps), rtol=1e-3, atol=2e-4)
        assert len(list(coefficients(kind, steps))) == steps
        values = torch.linalg.svdvals(found)
        if steps != 7:  # a set that starts again ends well at its end only
            assert values.min() > 0.3 and values.max() < 1.7, f"{kind}: singular values {values}"


def test_muon_gemms_use_bf16_if_enabled():
    x = random(2, 6, 15)
    rounded, exact = (orthogonalize(x, "quintic", 5, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert rounded.dtype == exact.dtype == torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(exact, exact.bfloat16().float())
    torch.testing.assert_close(rounded, exact, rtol=0, atol=3e-2)


@pytest.mark.parametrize("precision, rounds", [("medium", True), ("high", False)])
def test_matmul_precision_follows_the_flag(precision, rounds):
    model = ParameterModule(weight=(torch.zeros(6, 15), ParamInfo(("fc.weight",))))
    grads, built = build_training(
        model, optimizer="muon", muon_fp32_matmul_prec=precision, muon_scale_mode="unit_rms_norm", clip_grad=0.0
    )
    step(model, grads, built, [random(6, 15)], lr=-1.0, weight_decay=0.0)
    factor = model.weight.detach() / math.sqrt(6 / 15)
    assert bool((factor - factor.bfloat16().float()).abs().max() < 1e-6) is rounds


def _query_group_over_ranks(rank, n):
    """Return this rank's rows after one step, and the same rows of a full matrix."""
    full, grad, blocks = random(24, 10), random(24, 10, seed=1), (16, 4, 4)

    def stepped(ps, rows, **cut):
        param = nn.Parameter(full[rows].clone())
        param.info = ParamInfo(("linear_qkv.weight",), row_blocks=blocks, **cut)
        main, momentum = param.detach().flatten().clone(), torch.zeros(param.numel())
        settings = OptimizerArgs(
            optimizer="muon", muon_fp32_matmul_prec="high", muon_tp_mode="distributed", muon_split_qkv=True
        )
        Muon(settings, ps).update(param, main, grad[rows].flatten(), {"momentum_buffer": momentum}, 0.1, 0.1)
        return main.view(-1, 10)

    ps = ParallelState.create(n, rank, tp=n)
    rows = slice(24 // n * rank, 24 // n * (rank + 1))
    mine = stepped(ps, rows, sharded_dim=0, shard_rank=ps.tp.rank, shard_count=n)
    return mine, stepped(ParallelState.single(), slice(None))[rows]


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_without_rows_of_a_projection_join_its_collectives(n):
    """One query group over several ranks: some hold queries alone, the last one the key and the value."""
    for mine, expected in run_ranks(_query_group_over_ranks, n):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_zero_gradient_gives_no_update():
    assert orthogonalize(torch.zeros(2, 3, 5), "quintic", 5).abs().max() == 0


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("split", [True, False])
def test_projections_and_experts_are_orthogonalized_separately(mode, split):
    """Two groups of [2 heads of queries, gates, key, value] in a fused weight, and a stack of experts."""
    qkv, experts = random(2 * 12, 5), random(3, 4, 6, seed=1)
    blocks = (4, 4, 2, 2)
    model = ParameterModule(
        qkv=(qkv, ParamInfo(("linear_qkv.weight",), row_blocks=blocks)),
        experts=(experts, ParamInfo(tuple(f"experts.{e}.weight" for e in range(3)), kind="expert", stacked=True)),
    )
    grads, built = build_training(
        model, **HIGH, muon_scale_mode=mode, muon_split_qkv=split, muon_extra_scale_factor=0.5, clip_grad=0.0
    )
    targets = [random(*qkv.shape, seed=2), random(*experts.shape, seed=3)]
    step(model, grads, built, targets, lr=0.1, weight_decay=0.2)

    def update(x):  # momentum 0.9 from zero: a tenth of the gradient, whose length does not matter
        rows, columns = x.shape
        scale = {
            "spectral": math.sqrt(max(rows, columns)),
            "unit_rms_norm": math.sqrt(rows / columns),
            "shape_scaling": math.sqrt(max(1, rows / columns)),
        }[mode]
        return orthogonalize_reference(x, "quintic", 5).float() * scale * 0.5

    if split:
        by_group = targets[0].view(2, 12, 5)
        parts = [update(part.reshape(-1, 5)).view(2, -1, 5) for part in by_group.split(blocks, dim=1)]
        wanted = torch.cat(parts, dim=1).view(24, 5)
    else:
        wanted = update(targets[0])
    torch.testing.assert_close(model.qkv.detach(), 0.98 * qkv - 0.1 * wanted, rtol=1e-4, atol=1e-5)
    for number in range(3):
        torch.testing.assert_close(
            model.experts[number].detach(),
            0.98 * experts[number] - 0.1 * update(targets[1][number]),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("scalar", ["adam", "lion"])
def test_vectors_embeddings_and_output_layer_use_adam(scalar):
    infos = {
        "embedding": "embedding.word_embeddings.weight",
        "head": "output_layer.weight",
        "norm": "final_layernorm.weight",
        "matrix": "mlp.linear_fc1.weight",
    }
    values = {
        "embedding": random(8, 6),
        "head": random(8, 6, seed=1),
        "norm": random(6, seed=2),
        "matrix": random(6, 6, seed=3),
    }
    targets = [random(*value.shape, seed=9) for value in values.values()]

    def trained(**optimizer):
        model = ParameterModule(**{name: (value, ParamInfo((infos[name],))) for name, value in values.items()})
        grads, built = build_training(model, **optimizer)
        step(model, grads, built, targets)
        return model, {(state.param.info.names[0], state.state_name) for state in built.tensors()}

    model, names = trained(**HIGH, muon_scalar_optimizer=scalar)
    alone, _ = trained(optimizer=scalar)
    for name in ("embedding", "head", "norm"):
        assert torch.equal(getattr(model, name), getattr(alone, name)), name
    assert not torch.equal(model.matrix, alone.matrix)
    moments = {"adam": {"exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}}[scalar]
    assert names == {(infos[name], moment) for name in ("embedding", "head", "norm") for moment in moments} | {
        ("mlp.linear_fc1.weight", "momentum_buffer")
    }


def test_lion_follows_its_equations():
    value, vector = random(5, 4), random(4, seed=1)
    model = ParameterModule(matrix=(value, ParamInfo(("a.weight",))), vector=(vector, ParamInfo(("norm.weight",))))
    grads, built = build_training(model, optimizer="lion", clip_grad=0.0, lion_beta1=0.8, lion_beta2=0.7)
    momentum = torch.zeros(5, 4)
    for number in range(3):
        targets = random(5, 4, seed=number + 5)
        step(model, grads, built, [targets, random(4, seed=number)], lr=0.01, weight_decay=0.5)
        value = value * (1 - 0.01 * 0.5) - 0.01 * torch.sign(0.8 * momentum + 0.2 * targets)
        momentum = 0.7 * momentum + 0.3 * targets
    torch.testing.assert_close(model.matrix.detach(), value)
    assert {state.state_name for state in built.tensors()} == {"exp_avg"}


def test_epsilon_of_its_adam_is_not_scaled():
    assert adam_eps(OptimizerArgs(optimizer="muon", adam_eps=1e-3), ParamGroup(1.0, 0.25, False, False)) == 1e-3


def _equals_one_process(rank, n, degrees, vpp, modes, optimizer):
    ps = ParallelState.create(n, rank, **degrees)
    expected, _, weights = one_process(ps.dp_cp.size, ps.edp.size, 2, **HIGH)
    for mode, tp_mode in modes:
        outcomes, _, chunks, built, _ = train_on_ranks(
            ps, with_flags(**MODES[mode]), 2, vpp=vpp, **optimizer, muon_tp_mode=tp_mode
        )
        assert [outcome.updated for outcome in outcomes] == [True, True]
        assert [outcome.num_zeros for outcome in outcomes] == [reference.num_zeros for reference in expected]
        assert [outcome.grad_norm for outcome in outcomes] == pytest.approx(
            [reference.grad_norm for reference in expected], rel=1e-6
        )
        assert_equal(chunks, ps, weights, 2e-4)


# the matrices of every kind of rank; who reduces and owns them depends on the mode; tensor parallelism has modes too
MODES_OF_LAYOUTS = {
    "tp2": (("plain", "duplicated"), ("plain", "distributed"), ("zero1", "duplicated"), ("zero1", "distributed")),
    "pp2_vpp2": (("overlapped", "duplicated"),),
    "cp2_dp2": (("zero1", "duplicated"),),
    "tp2_dp2_ep2_over_dp": (("eager", "duplicated"), ("overlapped", "distributed")),
    "tp2_dp2_ep4_above_dp": (("overlapped", "duplicated"), ("overlapped", "distributed")),
    "tp1_etp2_ep2": (("zero1", "duplicated"), ("zero1", "distributed")),
}


@pytest.mark.parametrize("layout", MODES_OF_LAYOUTS)
def test_layouts_and_modes_equal_one_process(layout):
    n, degrees, vpp = LAYOUTS[layout]
    sizes = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
    one_process(n // (sizes["tp"] * sizes["pp"]), n // (sizes["etp"] * sizes["ep"] * sizes["pp"]), 2, **HIGH)
    run_ranks(_equals_one_process, n, degrees, vpp, MODES_OF_LAYOUTS[layout], HIGH)


def test_blockwise_muon_differs_from_full_matrix_muon():
    one_process(1, 1, 2, **HIGH)
    run_ranks(_train_blockwise, 2)


def _train_blockwise(rank, n):
    ps = ParallelState.create(n, rank, tp=2)
    _, _, weights = one_process(1, 1, 2, **HIGH)
    _, _, chunks, *_ = train_on_ranks(ps, with_flags(), 2, **HIGH, muon_tp_mode="blockwise")
    with pytest.raises(AssertionError):
        assert_equal(chunks, ps, weights, 1e-2)


def _check_momentum_owner(rank, n, degrees, flags):
    ps = ParallelState.create(n, rank, **degrees)
    *_, built, _ = train_on_ranks(ps, with_flags(**flags), 1, **HIGH)
    states = [state for state in built.tensors() if state.state_name == "momentum_buffer"]
    for state in states:
        assert (state.start, state.stop) == (0, state.param.numel()), "an owner has all of a matrix"
    return (
        ps.dp_cp.rank,
        ps.edp.rank,
        [(state.param.info.kind, state.param.info.names[0], state.tensor.numel()) for state in states],
    )


@pytest.mark.parametrize("degrees", [{}, {"ep": 2}, {"tp": 2}])
@pytest.mark.parametrize("flags", [ZERO1, OVERLAPPED])
def test_momentum_is_stored_on_one_rank_only(degrees, flags):
    found = run_ranks(_check_momentum_owner, 4, degrees, flags)
    owners = {}
    for dense, expert, held in found:
        for kind, name, _ in held:
            owners.setdefault((kind, name), set()).add(expert if kind == "expert" else dense)
    assert all(len(ranks) == 1 for ranks in owners.values())
    loads = [sum(size for *_, size in held) for *_, held in found]
    assert max(loads) < 1.5 * min(loads), f"distributed unevenly: {loads}"


def test_matrix_buckets_are_balanced_over_ranks():
    class Two:
        size, rank = 2, 1

    ps = ParallelState.single()
    object.__setattr__(ps, "dp_cp_inner", Two)
    matrices = []
    for number, rows in enumerate((64, 64, 640, 64, 64, 64, 64, 320)):
        matrices.append(nn.Parameter(torch.zeros(rows, 8)))
        matrices[-1].info = ParamInfo((f"m{number}.weight",))
    (layout,) = plan_layouts(matrices, ps, with_flags(**EAGER, use_distributed_optimizer=True), lambda param: True)
    assert layout.has_whole_params and sorted(slot.position for slot in layout.slots) == list(range(8))
    for bucket in layout.buckets:
        half = (bucket.stop - bucket.start) // 2
        parts = [
            [slot for slot in bucket.slots if (slot.start >= bucket.start + half) == bool(owner)] for owner in range(2)
        ]
        assert all(slot.stop <= bucket.start + half for slot in parts[0]), "a matrix spans two parts"
    assert layout.size <= MAX_IMBALANCE * sum(param.numel() for param in matrices) + 256 * len(layout.buckets)
