"""Fully sharded data parallelism equals one process: losses, every gradient, norms, weights after two steps."""

import pytest
import torch
from harness import run_ranks
from training.agreement import Row, check_rows
from training.layouts import FP32, compare, create_groups, make_argv, shallow, train

from moe_trainer.moe.router import TopKRouter

TORCH = "--use-torch-fsdp2"
MEGATRON = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
HYBRID = f"{MEGATRON} --num-distributed-optimizer-instances 2"
EP2, PP2, TP2 = (f"--{name}-model-parallel-size 2" for name in ("expert", "pipeline", "tensor"))
ONE_MICROBATCH = "--global-batch-size 4"


def row(ranks: int, kind: str, flags: str, model: str = "") -> Row:
    """Two layers, but for virtual stages and where the units in the middle matter."""
    deep = "virtual" in flags or (kind, flags) == ("plain", TORCH)
    return Row(ranks, [*(make_argv(kind) if deep else shallow(make_argv(kind))), *model.split()], flags)


ROWS = dict(
    enumerate((
        row(2, "plain", TORCH),
        row(2, "plain", f"{TORCH} --torch-fsdp2-no-reshard-after-forward"),
        row(2, "per-token loss", TORCH),
        row(2, "deepseek", TORCH),
        row(2, "biases, tied head", TORCH),
        row(2, "plain", f"{MEGATRON} {EP2} --moe-token-dispatcher-type alltoall"),
        row(2, "plain", MEGATRON),
        row(2, "plain", f"{MEGATRON} --data-parallel-sharding-strategy optim_grads"),
        row(2, "plain", f"{MEGATRON} --data-parallel-sharding-strategy optim"),
        row(2, "plain", f"{MEGATRON} --data-parallel-sharding-strategy no_shard"),
        row(
            4,
            "deepseek",
            f"{MEGATRON} {EP2}",
            "--num-layers 3 --moe-layer-freq ([0]*1+[1]*2)",
        ),
        row(4, "per-token loss", f"{MEGATRON} --expert-model-parallel-size 4"),
        row(4, "plain", f"{MEGATRON} {TP2} --sequence-parallel {EP2}"),
        row(4, "plain", f"{MEGATRON} {TP2}", ONE_MICROBATCH),
        row(4, "biases, tied head", f"{MEGATRON} {PP2}"),
        row(4, "plain", f"{MEGATRON} --context-parallel-size 2", ONE_MICROBATCH),
        row(4, "plain", HYBRID),
        row(4, "accumulation", f"{HYBRID} --outer-dp-sharding-strategy optim"),
        row(4, "plain", f"{HYBRID} {EP2} --enable-full-sharding-in-hsdp"),
        # 6 experts do not divide over 4 ranks: cut along their rows
        row(4, "plain", f"{MEGATRON} --overlap-grad-reduce --overlap-param-gather", "--num-experts 6"),
        row(4, "plain", f"{MEGATRON} {PP2} --num-virtual-stages-per-pipeline-rank 2"),
    ))
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_fully_sharded_training_equals_one_process(ranks):
    check_rows({name: row for name, row in ROWS.items() if row.ranks == ranks})


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
