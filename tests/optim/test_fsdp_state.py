"""Parameters sharded by torch's fully_shard: the same numbers as the flat buffers give on the same ranks, and as one process gives."""

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from toy import build_training, make_arguments

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.optim.fsdp_shard import FsdpGrads
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.parallel.fsdp import FullSharding
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.rng import named_generator
from moe_trainer.parallel.shards import local_shards
from moe_trainer.parallel.state import ParallelState

STEPS, VOCAB, HIDDEN, EXPERTS = 3, 37, 19, 2


class Experts(nn.Module):
    """A stack of local experts that are all applied, with a router in front that is partial over tp where there is one."""

    def __init__(self, first: int, count: int):
        super().__init__()
        self.weight = nn.Parameter(
            torch.stack([_random(f"expert.{e}", HIDDEN, HIDDEN) for e in range(first, first + count)])
        )
        self.weight.info = ParamInfo(
            tuple(f"expert.{e}" for e in range(first, first + count)), kind="expert", stacked=True
        )

    def forward(self, x):
        return torch.einsum("bh,ehf->bf", x, self.weight)


class Net(nn.Module):
    """Embedding, norm, experts, head; `share` is this rank's part of the work, for parameters that are partial."""

    def __init__(self, ps: ParallelState):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        local = EXPERTS // ps.ep.size
        self.experts = Experts(ps.ep.rank * local, local)
        self.output_layer = nn.Linear(HIDDEN, VOCAB, bias=False)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if not hasattr(param, "info"):
                    param.copy_(_random(name, *param.shape))
                    param.info = ParamInfo((name,), is_grad_partial="norm" in name and ps.tp.size > 1)

    def forward(self, tokens):
        return self.output_layer(self.experts(self.norm(self.word_embeddings(tokens)))).float()


def _random(name, *shape):
    return torch.randn(shape, generator=named_generator(1, name)) * 0.5


def _mesh(group, outer):
    if outer.size == 1:
        return DeviceMesh.from_group(group.handle, "cpu") if group.size > 1 else None
    return DeviceMesh.from_group(
        [outer.handle, group.handle],
        "cpu",
        mesh=torch.arange(4).view(outer.size, group.size),
        mesh_dim_names=("outer", "inner"),
    )  # four ranks, nothing but data parallelism


def _shard(model, ps, dtype):
    """Shard as parallel/fsdp.py does, on a small scale."""
    infos = {name: param.info for name, param in model.named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    modules = [(model.experts, _mesh(ps.edp_inner, ps.edp_outer)), (model, _mesh(ps.dp_cp_inner, ps.dp_cp_outer))]
    for module, mesh in modules:
        if mesh is not None:
            fully_shard(module, mesh=mesh, mp_policy=policy)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    for name, param in model.named_parameters():
        param.info = infos[name]


def _train(model, grads, optimizer, ps, step_seeds):
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        norm = optimizer.params_norm()
        seeds = step_seeds(step)
        for index, seed in enumerate(seeds):
            tokens = torch.randint(0, VOCAB, (2, 8), generator=named_generator(2, seed))
            with grads.accumulate() if index < len(seeds) - 1 else torch.enable_grad():
                (cross_entropy(model(tokens[0]), tokens[1]) * (optimizer.loss_scale / len(seeds))).backward()
        grads.finish()
        finalize_grads(grads, ps)
        outcome = optimizer.step(0.05, 0.1)
        history.append((norm, outcome.grad_norm, outcome.num_zeros))
    optimizer.wait_params()
    return history


def _train_flat_and_sharded(rank, n, degrees, instances, dtype, per_token):
    """Train with flat buffers and with shards."""
    ps = ParallelState.create(n, rank, optimizer_instances=instances, **degrees)
    precision = PrecisionArgs(bf16=dtype == torch.bfloat16)
    options = {"optimizer": "adam", "adam_eps": 1e-6}

    def step_seeds(step):
        return [100 * step + 10 * index + ps.dp_cp.rank for index in range(2)]

    flat = Net(ps).to(dtype)
    flat_grads, flat_optimizer = build_training(
        flat, ps=ps, precision=precision, count_zeros=True, per_token_loss=per_token, **options
    )
    expected = _train(flat, flat_grads, flat_optimizer, ps, step_seeds)

    model = Net(ps)
    if dtype == torch.bfloat16:
        model.to(dtype).to(torch.float32)
    _shard(model, ps, dtype)
    grads = FsdpGrads(model.parameters(), ps, per_token_loss=per_token)
    args = make_arguments(ParallelArgs(), precision, count_zeros=True, **options)
    optimizer = Optimizer([model], grads, args, ps)
    found = _train(model, grads, optimizer, ps, step_seeds)

    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=tolerance)
    flat_main = {s.param: s.tensor for s in flat_optimizer.tensors() if s.state_name == "fp32_param"}
    grads.gather()
    held = 0
    for (name, full), param in zip(flat.named_parameters(), model.parameters(), strict=True):
        ((part, start, stop),) = local_shards(param)
        main = flat_main.get(full, full.detach().flatten())
        torch.testing.assert_close(part, main[start:stop], rtol=tolerance, atol=tolerance, msg=name)
        torch.testing.assert_close(param.main_grad, full.main_grad, rtol=1e-4, atol=tolerance, msg=name)
        held += part.numel()
    kept = {s.state_name: 0 for s in optimizer.tensors()}
    for state in optimizer.tensors():
        kept[state.state_name] += state.stop - state.start
        assert state.tensor.numel() == state.stop - state.start
    assert set(kept.values()) == {held}
    assert ("fp32_param" in kept) == (dtype == torch.bfloat16)
    return expected, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degrees, instances", [({}, 1), ({"ep": 2}, 1), ({"tp": 2, "etp": 1}, 1), ({}, 2)])
def test_fsdp_shards_equal_flat_buffers(degrees, instances, dtype):
    ranks = run_ranks(_train_flat_and_sharded, 4, degrees, instances, dtype, False)
    assert all(history == ranks[0][0] for history, _ in ranks)
    model = Net(ParallelState.single())
    dense = sum(p.numel() for p in model.parameters() if p.info.kind == "dense")
    experts = model.experts.weight.numel()
    copies = degrees.get("tp", 1)  # dense parameters are whole on every tp rank here; experts are spread over ep
    assert sum(held for _, held in ranks) == (dense * copies + experts) * instances


def _gradients_of_two_instances(rank, n):
    ps = ParallelState.create(n, rank, optimizer_instances=n)
    chunk = nn.Sequential(Net(ps))
    FullSharding(ps, torch.device("cpu"), param_dtype=torch.float32, reduce_dtype=torch.float32).shard(
        chunk, [chunk[0]]
    )
    chunk(torch.randint(0, VOCAB, (8,), generator=named_generator(2, rank))).square().sum().backward()
    return {name: param.grad.full_tensor() for name, param in chunk.named_parameters()}


def test_fsdp_sums_all_gradients_over_the_optimizer_instances():
    first, second = run_ranks(_gradients_of_two_instances, 2)
    assert len(first) == 4 and all(torch.equal(grad, second[name]) for name, grad in first.items())


def test_fsdp_with_per_token_loss():
    run_ranks(_train_flat_and_sharded, 2, {}, 1, torch.float32, True)


def test_a_parameter_without_info_is_refused():
    with pytest.raises(ValueError, match="no ParamInfo"):
        FsdpGrads(nn.Linear(2, 2).parameters(), ParallelState.single(), per_token_loss=False)
