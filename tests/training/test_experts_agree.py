"""Experts folded over tensor, context and data ranks, through full steps of the program: training equals one process.

Norms too (Megatron-LM issue 5916: with expert and tensor ranks together, and with etp other than tp, gradients were
missing).
"""

import pytest
from training.agreement import Row, check_rows
from training.layouts import make_argv, shallow

TP2, CP2, SP = "--tensor-model-parallel-size 2", "--context-parallel-size 2", "--sequence-parallel"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ETP1, ETP2 = "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2"
NODES = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hierarchical --moe-hierarchical-domain-size"
ALLTOALL, ALLGATHER = (f"--moe-token-dispatcher-type {kind}" for kind in ("alltoall", "allgather"))
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules mlp layernorm"


def row(ranks: int, kind: str, flags: str, shared: bool = False) -> Row:
    expert = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate".split()
    has_data_ranks = ranks > 2 ** sum(word in flags for word in (TP2, CP2))
    batch = [] if has_data_ranks else ["--global-batch-size", "4"]
    return Row(ranks, [*shallow(make_argv(kind)), *batch, *(expert if shared else [])], flags)


ROWS = {
    "over tensor ranks": row(2, "plain", f"{TP2} {SP} {EP2} {ETP1} {ALLGATHER}"),
    "cut, one expert rank": row(2, "distributed optimizer", f"{ETP2} {ALLTOALL}", shared=True),
    "over tensor and data ranks": row(4, "deepseek", f"{TP2} {EP4} {ETP1} {ALLTOALL}"),
    "over tensor and context ranks": row(4, "plain", f"{TP2} {CP2} {SP} {EP4} {ETP1} {ALLTOALL}", shared=True),
    "over tensor and data ranks, gathered": row(4, "plain", f"{TP2} {EP4} {ETP1} {ALLGATHER}"),
    "cut, over context ranks": row(4, "plain", f"{CP2} {EP2} {ETP2} {ALLGATHER}", shared=True),
    "cut as wide as four ranks": row(4, "per-token loss", f"{TP2} {SP} --expert-tensor-parallel-size 4 {ALLGATHER}"),
    "on both sides": row(4, "distributed optimizer, overlap", f"{TP2} {EP2} {ETP2} {ALLTOALL}", shared=True),
    "shared expert during the exchange": row(
        4,
        "plain",
        f"{TP2} {SP} {EP4} {ETP1} {ALLTOALL} --moe-shared-expert-overlap --use-distributed-optimizer",
        shared=True,
    ),
    "four nodes, recomputed": row(4, "deepseek", f"{NODES} 1 {EP4} {FULL}"),
    "two nodes of two ranks, shared expert during the exchange": row(
        4, "plain", f"{NODES} 2 {TP2} {SP} {EP4} {ETP1} --moe-shared-expert-overlap {SELECTIVE}", shared=True
    ),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_folded_expert_parallelism_equals_one_process(ranks):
    check_rows({name: row for name, row in ROWS.items() if row.ranks == ranks})
