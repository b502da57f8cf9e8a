"""The flex dispatcher with the real libraries against the all-to-all, on two GPUs of one machine.

Everything that can be shown without them is in tests/moe/test_flex.py; this is the rest: that the libraries mean what the stand-in means.
"""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from moe.layers import build_shard, sections

from arguments.mechanisms.dispatchers import BACKENDS
from moe_trainer.backends import BackendPolicy
from moe_trainer.declared_module import load_module
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.dispatch.flex import DispatchBufferSpec
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.parallel.state import ParallelState

HIDDEN, TOKENS, RANKS = 512, 64, 2


def library_problem(backend: str) -> str | None:
    """Why the library of a backend cannot be used; None if it has none."""
    declaration = BACKENDS[backend]
    return None if declaration.package is None else load_module(declaration).problem()


def by_expert(rows: torch.Tensor, counts: list[int]) -> list[list]:
    """The rows of every expert, whatever their order: DeepEP 2 keeps it in deterministic runs only."""
    return [sorted(part.tolist()) for part in rows.split(counts)]


def one_rank(rank: int, folder: str, backend: str, topk: int, ranks: int = RANKS) -> None:
    """Rows bit for bit; results and gradients to bf16's rounding."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "nccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks, device_id=device
    )
    ps = ParallelState.create(ranks, rank, ep=ranks)
    args = sections(
        num_experts=4 * ranks,
        hidden_size=HIDDEN,
        ffn_hidden_size=256,
        moe_router_topk=topk,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        moe_flex_dispatcher_num_sms=20,
        moe_hierarchical_domain_size=1,
    )
    layer = build_shard(args, ps, torch.bfloat16).to(device)
    rows = DispatchBufferSpec(HIDDEN, TOKENS, torch.bfloat16, device)
    flex = build_dispatcher(args.moe, ps, rows, BackendPolicy("error", cuda=True))
    assert flex.declaration is BACKENDS[backend]
    plain = build_dispatcher(sections(moe_token_dispatcher_type="alltoall").moe, ps)
    results = []
    for dispatcher in (plain, flex):
        attach_dispatcher([layer], dispatcher)
        layer.zero_grad()
        x = (
            torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank))
            .to(device, torch.bfloat16)
            .requires_grad_()
        )
        probs, routing = layer.router(x)
        sent = dispatcher.dispatch(x.flatten(0, 1), probs, routing)
        results.append([sent.x_RH.detach(), sent.tokens_per_expert_e])
        y = layer(x)
        (y.float() ** 2).mean().backward()
        results[-1] += [y.detach(), x.grad, *(param.grad for param in layer.parameters())]
    (rows_plain, counts_plain, *expected), (rows_flex, counts_flex, *ours) = results
    assert counts_plain == counts_flex and by_expert(rows_plain, counts_plain) == by_expert(rows_flex, counts_flex)
    for one, other in zip(ours, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()
    dist.barrier()
    flex.close()
    dist.destroy_process_group()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_flex_dispatcher_equals_alltoall_on_two_gpus(backend, topk):
    if problem := library_problem(backend):
        pytest.skip(problem)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, args=(folder, backend, topk), nprocs=RANKS)
