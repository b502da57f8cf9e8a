"""Routing health of full jobs: each token is counted once under recompute, CUDA graphs and parallelism."""

import pytest
from training.forked import pretrain
from training.tiny import MOCK, TINY

# the eps keeps rounding from moving weights whose gradient is next to nothing, and with them choices
JOB = [
    *TINY,
    *MOCK,
    "--train-iters",
    "4",
    "--moe-per-layer-logging",
    "--moe-token-dispatcher-type",
    "alltoall",
    "--adam-eps",
    "1e-5",
]


def health(tmp_path, flags="", n=1):
    records, _ = pretrain([*JOB, *flags.split()], tmp_path, n, device="--cuda-graph-impl" in flags)
    return [record["routing"] for record in records if "routing" in record]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    found = health(tmp_path_factory.mktemp("alone"))
    assert len(found) == 4
    for routing in found:
        assert [sum(loads) for loads in routing["tokens_per_expert"]] == [
            4 * 32 * 2
        ] * 2  # samples, tokens, top-k; two layers
    return found


@pytest.mark.parametrize(
    "flags, n",
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        ("--recompute-granularity selective --recompute-modules moe", 1),
        (
            "--triton-kernels none --cuda-graph-impl local --cuda-graph-warmup-steps 1 --cuda-graph-modules attn moe_router",
            1,
        ),
        # the vocabulary is padded to a multiple of this times tp
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
            "--make-vocab-size-divisible-by 64",
            2,
        ),
        ("--context-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 2", 2),
    ],
    ids=["recompute", "recompute moe", "graphs", "tp sp ep", "cp", "pp"],
)
def test_expert_loads_are_independent_of_recompute_and_parallelism(one_process, tmp_path, flags, n):
    found = health(tmp_path, flags, n)
    assert [routing["tokens_per_expert"] for routing in found] == [
        routing["tokens_per_expert"] for routing in one_process
    ]
    ranks = 2 if "expert-model" in flags else 1
    for routing in found:
        for layer, loads in enumerate(routing["tokens_per_expert"]):
            halves = [sum(loads[at : at + 4 // ranks]) for at in range(0, 4, 4 // ranks)]
            assert routing["rank_max_over_mean"][layer] == pytest.approx(max(halves) * ranks / sum(loads))
