"""Graphed training on two ranks, with an emulated device each, equals eager training bit for bit."""

import pytest
from emulated_cuda.run import on_device
from memory.graphed import full, line, list_differences, local, same_accumulation_flags
from training.layouts import train_ranks

ROUTED = local("attn moe_router moe_preprocess")
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
FORCED = "--moe-router-force-load-balancing --recompute-granularity selective"
PP2 = "--pipeline-model-parallel-size 2"
# name -> (kind of model, mapping, flags of graphs); two ranks each
CASES = {
    "pipeline": ("accumulation", PP2, ROUTED),
    "pipeline, weight gradients that wait": ("accumulation", f"{PP2} --pipeline-schedule zero-bubble", ROUTED),
    "pipeline, virtual stages": ("accumulation", f"{PP2} --num-virtual-stages-per-pipeline-rank 2", ROUTED),
    "tensor parallel, rows cut": ("plain", SP2, ROUTED),
    "tensor parallel": ("deepseek", "--tensor-model-parallel-size 2", local("attn mlp moe_router moe_preprocess")),
    "tensor parallel, forced routing and recompute": (
        "plain",
        f"{SP2} {FORCED} --recompute-modules layernorm moe_act",
        ROUTED,
    ),
    "tensor parallel, forced routing, full iteration": (
        "padded capacity",
        f"{SP2} {FORCED} --recompute-modules moe --expert-tensor-parallel-size 1",
        full(),
    ),
    "context parallel": ("plain", "--context-parallel-size 2", ROUTED),
    "expert parallel": ("accumulation", EP2, ROUTED),
    "expert parallel, all-gather": (
        "plain",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
        ROUTED,
    ),
    "expert parallel, weights kept in 8 bits": (
        "accumulation",
        f"{EP2} --bf16 --use-distributed-optimizer --fp8-param-gather --fp8-format e4m3 --fp8-recipe tensorwise",
        ROUTED,
    ),
    "expert parallel, two passes in turns": (
        "accumulation",
        f"{EP2} --overlap-moe-expert-parallel-comm --bf16",
        ROUTED,
    ),
    "expert parallel, padded, full layers": ("padded capacity", EP2, local()),
    "expert parallel, padded, full iteration": ("padded capacity", EP2, full()),
    "data parallel, overlapped": ("distributed optimizer, overlap", "", ROUTED),
    "data parallel, full iteration": ("padded capacity", "--use-distributed-optimizer", full()),
}
HALVES = [list(CASES)[:8], list(CASES)[8:]]


@pytest.mark.parametrize("names", HALVES, ids=["model", "data"])
def test_graphed_training_on_two_ranks_equals_eager(names):
    argvs = [
        argv
        for name in names
        for plain in [[*line(*CASES[name][:2]), *same_accumulation_flags(CASES[name][2])]]
        for argv in (plain, [*plain, *CASES[name][2]])
    ]
    outcomes = iter(on_device(train_ranks, argvs, 3, "cuda", ranks=2, devices=2)[0])
    assert {name: found for name in names if (found := list_differences(next(outcomes), next(outcomes)))} == {}
