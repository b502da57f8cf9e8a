"""Routing health of full jobs: each token is counted once under recompute, CUDA graphs and parallelism."""

import pytest
import torch
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
        (
            "--triton-kernels none --cuda-graph-impl local --cuda-graph-warmup-steps 1 "
            "--cuda-graph-modules attn moe_router moe_preprocess --expert-model-parallel-size 2",
            2,
        ),
        (
            "--recompute-granularity selective --recompute-modules moe --mlp-chunks-for-training 2 "
            "--expert-model-parallel-size 2",
            2,
        ),
        ("--context-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 2", 2),
    ],
    ids=["recompute", "recompute moe", "graphs", "tp sp ep", "ep graphs", "ep recompute", "cp", "pp"],
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
        if ranks == 1:
            assert "between_ranks" not in routing
            continue
        received = [sum(sum(loads[at : at + 2]) for loads in routing["tokens_per_expert"]) for at in (0, 2)]
        assert routing["between_ranks"]["ranks_per_row"] == 1
        tokens = routing["between_ranks"]["tokens"]
        assert [sum(column) for column in zip(*tokens, strict=True)] == received and sum(tokens[0]) == sum(tokens[1])


def test_counting_does_not_change_the_training(tmp_path):
    plain = [each for each in JOB if each != "--moe-per-layer-logging"]
    runs = [
        pretrain([*job, "--expert-model-parallel-size", "2"], tmp_path / name, 2)
        for name, job in (("counted", JOB), ("plain", plain))
    ]
    (counted, weights), (uncounted, others) = runs
    assert [each["lm loss"] for each in counted] == [each["lm loss"] for each in uncounted]
    assert "routing" in counted[0] and "routing" not in uncounted[0]
    assert weights.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in weights.items())
