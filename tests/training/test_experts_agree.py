"""Experts folded over tensor, context and data ranks, through full steps of the program: training equals one process."""

import pytest
from harness import run_ranks
from training.layouts import assert_equal, make_argv, shallow, train_one_process, train_ranks

TP2, CP2, SP = "--tensor-model-parallel-size 2", "--context-parallel-size 2", "--sequence-parallel"
NODES = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hierarchical --moe-hierarchical-domain-size"
SHARED = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
# name: (ranks, kind, flags of the model, flags of the mapping)
CASES = {
    "experts over tensor ranks": (
        2,
        "plain",
        "",
        f"{TP2} {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    "experts over tensor and data ranks": (
        4,
        "deepseek",
        "",
        f"{TP2} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    ),
    "experts over tensor and context ranks": (
        4,
        "accumulation",
        SHARED,
        f"{TP2} {CP2} {SP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    ),
    "cut experts over context ranks": (
        4,
        "plain",
        SHARED,
        f"{CP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
    ),
    "cut experts, one expert rank": (2, "distributed optimizer", SHARED, "--expert-tensor-parallel-size 2"),
    "cut experts as wide as four ranks": (4, "per-token loss", "", f"{TP2} {SP} --expert-tensor-parallel-size 4"),
    "experts on both sides": (
        4,
        "distributed optimizer, overlap",
        SHARED,
        f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
    ),
    "shared expert during the exchange": (
        4,
        "accumulation",
        f"{SHARED} --moe-shared-expert-overlap",
        f"{TP2} {SP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --use-distributed-optimizer",
    ),
    "four nodes, recomputed": (
        4,
        "deepseek",
        f"{NODES} 1",
        "--expert-model-parallel-size 4 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "two nodes of two ranks, shared expert during the exchange": (
        4,
        "accumulation",
        f"{SHARED} --moe-shared-expert-overlap {NODES} 2",
        f"{TP2} {SP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
        "--recompute-granularity selective --recompute-modules mlp layernorm",
    ),
    "flex on CPU ranks": (
        2,
        "plain",
        "--moe-token-dispatcher-type flex --moe-router-dtype fp32",
        "--expert-model-parallel-size 2",
    ),
}
# Megatron-LM issue 5916: the norm missed gradients with expert and tensor ranks together, and with etp other than tp
NORMS = {
    "ep and tp": f"{TP2} {SP} --expert-model-parallel-size 2",
    "ep 2, etp 1, tp 2": f"{TP2} {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "ep 1, etp 1, tp 2": f"{TP2} --expert-tensor-parallel-size 1",
    "ep 2, etp 2, tp 1": "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
}


@pytest.mark.parametrize(
    ("name", "dispatcher"),
    [
        (name, dispatcher)
        for name, case in CASES.items()
        for dispatcher in ("alltoall", "allgather")
        if dispatcher == "alltoall" or not {"flex", "--moe-shared-expert-overlap"} & set(case[2].split())
    ],
)
def test_folded_expert_parallelism_equals_one_process(name, dispatcher):
    n, kind, model, mapping = CASES[name]
    plain = model.partition(NODES)[0].replace("--moe-shared-expert-overlap", "")
    plain = plain.replace("--moe-token-dispatcher-type flex", "")
    choice = [] if "flex" in model else ["--moe-token-dispatcher-type", dispatcher]
    argv = [*shallow(make_argv(kind)), *model.split(), *mapping.split(), *choice]
    outcome, *others = [rank[0] for rank in run_ranks(train_ranks, n, [argv])]
    assert_equal(outcome, train_one_process(*shallow(make_argv(kind)), *plain.split()))
    for other in others:  # every rank logs and clips alike
        assert other.losses == outcome.losses and other.grad_norms == outcome.grad_norms


@pytest.mark.parametrize("name", NORMS)
def test_M5916_gradient_norm_with_expert_and_tensor_ranks(name):
    argv = [*shallow(make_argv("plain")), *NORMS[name].split(), "--moe-token-dispatcher-type", "alltoall"]
    for outcome in [rank[0] for rank in run_ranks(train_ranks, 4, [argv])]:
        assert outcome.grad_norms == pytest.approx(train_one_process(*shallow(make_argv("plain"))).grad_norms, rel=2e-6)
