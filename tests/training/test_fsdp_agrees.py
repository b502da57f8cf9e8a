"""Fully sharded data parallelism equals one process: losses, every gradient, norms, weights after two steps."""

import pytest
import torch
from harness import run_ranks
from training.layouts import FP32, compare, create_groups, make_argv, shallow, train, train_one_process, train_ranks

from moe_trainer.moe.router import TopKRouter

TORCH = "--use-torch-fsdp2"
MEGATRON = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
HYBRID = f"{MEGATRON} --num-distributed-optimizer-instances 2"
LARGEST = "--megatron-fsdp-max-pool-double-buffer --use-nccl-ub"
CASES = {
    2: [
        ("plain", TORCH),
        ("plain", f"{TORCH} --torch-fsdp2-no-reshard-after-forward"),
        ("per-token loss", TORCH),
        ("deepseek", TORCH),
        ("biases, tied head", TORCH),
        ("plain", f"{MEGATRON} --expert-model-parallel-size 2"),
        ("plain", f"{MEGATRON} --data-parallel-sharding-strategy optim_grads"),
        ("plain", f"{MEGATRON} --data-parallel-sharding-strategy optim"),
        ("plain", f"{MEGATRON} --data-parallel-sharding-strategy no_shard"),
    ],
    4: [
        ("deepseek", f"{MEGATRON} --expert-model-parallel-size 2 {LARGEST} --fsdp-db-use-persist-buf-on-alloc-fail"),
        (
            "accumulation",
            f"{MEGATRON} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --fsdp-double-buffer",
        ),
        ("per-token loss", f"{MEGATRON} --expert-model-parallel-size 4"),
        ("plain", f"{MEGATRON} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
        ("plain", f"{MEGATRON} --tensor-model-parallel-size 2"),
        ("biases, tied head", f"{MEGATRON} --pipeline-model-parallel-size 2"),
        ("plain", f"{MEGATRON} --context-parallel-size 2"),
        ("plain", HYBRID),
        ("accumulation", f"{HYBRID} --outer-dp-sharding-strategy optim"),
        ("plain", f"{HYBRID} --expert-model-parallel-size 2 --enable-full-sharding-in-hsdp --fsdp-double-buffer"),
        # 6 experts do not divide over 4 ranks: cut along their rows
        ("plain", f"{MEGATRON} --num-experts 6 --moe-router-topk 2 --overlap-grad-reduce --overlap-param-gather"),
        ("accumulation", f"{MEGATRON} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    ],
}


def model_argv(kind: str, flags: str) -> list[str]:
    """Two layers, but for virtual stages and where the units in the middle matter: two buffers, and the largest pool."""
    deep = "virtual" in flags or "double-buffer" in flags or flags == TORCH
    return make_argv(kind) if deep else shallow(make_argv(kind))


@pytest.mark.parametrize("n", CASES)
def test_fully_sharded_training_equals_one_process(n):
    argvs = [[*model_argv(kind, flags), *flags.split()] for kind, flags in CASES[n]]
    found = run_ranks(train_ranks, n, argvs)[0]
    wrong = {}
    for (kind, flags), outcome in zip(CASES[n], found, strict=True):
        model = flags.split()[flags.split().index("--num-experts") :][:2] if "--num-experts" in flags else []
        one = train_one_process(*model_argv(kind, flags), *model)
        differences = compare(one, outcome, FP32)
        if differences:
            wrong[kind, flags] = [str(difference) for difference in differences[:3]]
    assert not wrong, wrong


def train_with_idle_experts(rank, n, argvs):
    """Route every token to the first experts: the other expert-parallel ranks receive no tokens."""
    forward = TopKRouter.forward

    def patched(self, *args, **kwargs):
        probs_TE, routing_TE = forward(self, *args, **kwargs)
        topk = int(routing_TE[0].sum())
        chosen = torch.zeros_like(routing_TE)
        chosen[:, :topk] = True
        weights = probs_TE[routing_TE].view(-1, topk)
        return torch.zeros_like(probs_TE).masked_scatter(chosen, weights), chosen

    TopKRouter.forward = patched
    return [train(argv, rank, create_groups(argv, rank, n), 2) for argv in argvs]


def test_fully_sharded_training_with_idle_experts():
    experts = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    argvs = [[*shallow(make_argv("accumulation")), *flags.split()] for flags in (experts, f"{experts} {MEGATRON}")]
    full, sharded = run_ranks(train_with_idle_experts, 4, argvs)[0]
    idle = [name for name in full.grads if ".local_experts.7." in name]
    assert idle and all(not full.grads[name].any() for name in idle)
    assert compare(full, sharded, FP32) == []
