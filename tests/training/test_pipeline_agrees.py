"""Training over pipeline stages equals one process: losses, every gradient, the norm, the weights after two steps."""

import pytest
from harness import run_ranks
from training.layouts import assert_equal, make_argv, train_one_process, train_ranks

EIGHT = ["--num-layers", "8"]
PP2, PP4 = (["--pipeline-model-parallel-size", size] for size in "24")
LATE_HEAD = ["--defer-embedding-wgrad-compute"]
ZERO_BUBBLE = ["--pipeline-schedule", "zero-bubble"]
MTP = ["--mtp-num-layers", "1", "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
BASES = ["--mtp-num-layers", "1", "--rotary-base-per-layer", "10", "100", "40", "70"]
MTP2 = ["--mtp-num-layers", "2", "--position-embedding-type", "rope"]


def layout(text):
    return ["--pipeline-model-parallel-layout", text]


# name -> (ranks, kind of model, flags of the model, flags of the layout)
CASES = {
    "pp2": (2, "plain", [], PP2),
    "pp2, one microbatch": (2, "plain", ["--global-batch-size", "2"], PP2),
    "pp2, uneven": (2, "plain", BASES, [*PP2, "--decoder-first-pipeline-num-layers", "1"]),
    "pp2 vpp2": (2, "accumulation", [], [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "pp2 vpp2, groups of 3": (
        2,
        "plain",
        ["--global-batch-size", "16"],
        [
            *PP2,
            "--num-layers-per-virtual-pipeline-stage",
            "1",
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "3",
        ],
    ),
    "pp2 vpp2, overlapped gradients": (
        2,
        "distributed optimizer, overlap",
        [],
        [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"],
    ),
    "pp2, tied head": (2, "biases, tied head", [], PP2),
    "pp2, learned positions, tied head": (
        2,
        "biases, tied head",
        ["--position-embedding-type", "learned_absolute"],
        PP2,
    ),
    "pp2, bf16, fp32 residual": (2, "plain", ["--bf16", "--fp32-residual-connection"], PP2),
    "pp2, per-token loss": (2, "per-token loss, MTP, distributed optimizer", [], PP2),
    "pp2, deepseek, MTP with the loss": (2, "deepseek", [], PP2),
    "pp2, empty first stage, loss apart": (2, "plain", [], [*PP2, *layout("E|t|ttt|L")]),
    "pp3, account for both ends": (
        3,
        "plain",
        [],
        [
            "--pipeline-model-parallel-size",
            "3",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ],
    ),
    "pp3, MTP on a separate stage": (
        3,
        "deepseek",
        [],
        ["--pipeline-model-parallel-size", "3", *layout("Ett|ttm|L")],
    ),
    "pp4, two MTP depths, tied, an empty stage behind them": (
        4,
        "biases, tied head",
        [*MTP2],
        [*PP4, *layout("Ett|tt|mm|L")],
    ),
    "pp4 vpp2, MTP apart": (4, "per-token loss", [*EIGHT, *MTP], [*PP4, *layout("Et|t|t|t||tttt|m|L")]),
    "zero bubble pp2": (2, "accumulation", [], [*PP2, *ZERO_BUBBLE]),
    "zero bubble pp2, overlapped gradients": (2, "distributed optimizer, overlap", [], [*PP2, *ZERO_BUBBLE]),
    "zero bubble pp2, tied head with biases": (2, "biases, tied head", [], [*PP2, *ZERO_BUBBLE]),
    "zero bubble pp2 vpp2": (2, "plain", [], [*PP2, "--num-virtual-stages-per-pipeline-rank", "2", *ZERO_BUBBLE]),
    "zero bubble pp3, deepseek, MTP apart": (
        3,
        "deepseek",
        [],
        ["--pipeline-model-parallel-size", "3", *layout("Ett|ttm|L"), *ZERO_BUBBLE],
    ),
    "zero bubble pp4, per-token loss, repeated MTP layer": (
        4,
        "per-token loss",
        ["--mtp-num-layers", "2", "--mtp-use-repeated-layer"],
        [*PP4, *ZERO_BUBBLE],
    ),
    "zero bubble pp2 tp2": (
        4,
        "plain",
        [],
        [*PP2, *ZERO_BUBBLE, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ),
    "zero bubble pp2 ep2": (4, "deepseek", [], [*PP2, *ZERO_BUBBLE, "--expert-model-parallel-size", "2"]),
    "pp2 tp2, tied head, MTP": (
        4,
        "biases, tied head",
        MTP2,
        [
            *PP2,
            *layout("Ettt|tmmL"),
            "--tensor-model-parallel-size",
            "2",
            "--sequence-parallel",
            "--expert-tensor-parallel-size",
            "1",
        ],
    ),
    "pp3 tp2, sequence parallel, MTP apart": (
        6,
        "deepseek",
        [],
        [
            "--pipeline-model-parallel-size",
            "3",
            *layout("Ett|ttm|L"),
            "--tensor-model-parallel-size",
            "2",
            "--sequence-parallel",
        ],
    ),
    "pp3 tp2 vpp2, two MTP depths apart, tied": (
        6,
        "biases, tied head",
        [*EIGHT, *MTP2, "--global-batch-size", "12"],
        [
            "--pipeline-model-parallel-size",
            "3",
            *layout("Et|t|tt|ttt|tmm|L"),
            "--tensor-model-parallel-size",
            "2",
            "--expert-tensor-parallel-size",
            "1",
        ],
    ),
    "head's gradient last, pp2": (2, "distributed optimizer, overlap", [], [*PP2, *LATE_HEAD]),
    "head's gradient two late, pp2 vpp2": (
        2,
        "accumulation",
        [],
        [*PP2, "--num-virtual-stages-per-pipeline-rank", "2", *LATE_HEAD, "--wgrad-deferral-limit", "2"],
    ),
    "head's gradient last, tied": (2, "biases, tied head", [], [*PP2, *LATE_HEAD]),
    "pp4, accumulation": (4, "accumulation", [], PP4),
    "pp2 dp2": (
        4,
        "plain",
        [],
        [*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
    "pp2 vpp2 ep2": (
        4,
        "plain",
        ["--global-batch-size", "16"],
        [
            *PP2,
            "--num-virtual-stages-per-pipeline-rank",
            "2",
            "--expert-model-parallel-size",
            "2",
            "--moe-token-dispatcher-type",
            "alltoall",
        ],
    ),
}


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_pipeline_parallel_training_equals_one_process(n):
    cases = {name: case for name, case in CASES.items() if case[0] == n}
    ranks = run_ranks(train_ranks, n, [[*make_argv(kind), *model, *flags] for _, kind, model, flags in cases.values()])
    for name, outcome, *others in zip(cases, *ranks, strict=True):
        _, kind, model, _ = CASES[name]
        assert_equal(outcome, train_one_process(*make_argv(kind), *model), name)
        for other in others:  # every stage logs and clips alike
            assert other.losses == outcome.losses and other.grad_norms == outcome.grad_norms, name
