"""Training over pipeline stages equals one process: losses, every gradient, the norm, the weights after two steps."""

import pytest
from training.agreement import Row, check_rows
from training.layouts import make_argv, shallow

PP2, PP4 = (f"--pipeline-model-parallel-size {size}" for size in (2, 4))
LATE_HEAD = "--defer-embedding-wgrad-compute"
ZERO_BUBBLE = "--pipeline-schedule zero-bubble"
LAYOUT = "--pipeline-model-parallel-layout"
BASES = "--num-layers 3 --mtp-num-layers 1 --rotary-base-per-layer 10 100 40"
SIX = "--global-batch-size 12"  # microbatches
STAGES3 = "--pipeline-model-parallel-size 3"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP = "--num-virtual-stages-per-pipeline-rank 2"


def row(ranks: int, kind: str, flags: str, model: str = "") -> Row:
    """A layer for each of two stages, and four layers for more stages or a layout."""
    is_deep = ranks == 3 or any(word in flags for word in (PP4, LAYOUT, "virtual"))
    argv = make_argv(kind) if is_deep else shallow(make_argv(kind))
    return Row(ranks, [*argv, *model.split()], flags)


# Overlapped gradients and gathers of stages: test_optimizer_layouts.py
ROWS = {
    "one microbatch": row(2, "plain", PP2, "--global-batch-size 2"),
    "uneven": row(2, "plain", f"{PP2} --decoder-first-pipeline-num-layers 1", BASES),
    "virtual stages, groups of 3": row(
        2,
        "plain",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 3",
        SIX,
    ),
    "learned positions, tied head": row(2, "biases, tied head", PP2, "--position-embedding-type learned_absolute"),
    "bf16, fp32 residual": row(2, "plain", PP2, "--bf16 --fp32-residual-connection"),
    "per-token loss": row(2, "per-token loss, MTP, distributed optimizer", PP2),
    "deepseek, MTP with the loss": row(2, "deepseek", PP2),
    "empty first stage, loss apart": row(2, "plain", f"{PP2} {LAYOUT} E|t|ttt|L"),
    "zero bubble": row(2, "plain", f"{PP2} {ZERO_BUBBLE}", SIX),
    "zero bubble, virtual stages": row(2, "plain", f"{PP2} {VPP} {ZERO_BUBBLE}"),
    "head's gradient last": row(2, "distributed optimizer, overlap", f"{PP2} {LATE_HEAD}"),
    "head's gradient two late, virtual stages": row(2, "plain", f"{PP2} {VPP} {LATE_HEAD} --wgrad-deferral-limit 2"),
    "head's gradient last, tied": row(2, "biases, tied head", f"{PP2} {LATE_HEAD}"),
    "3 stages, account for both ends": row(
        3, "plain", f"{STAGES3} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    ),
    "3 stages, MTP on a separate stage": row(3, "deepseek", f"{STAGES3} {LAYOUT} Ett|ttm|L"),
    "zero bubble, 3 stages, MTP apart": row(3, "deepseek", f"{STAGES3} {LAYOUT} Ett|ttm|L {ZERO_BUBBLE}"),
    "4 stages, two MTP depths, tied, an empty stage behind them": row(
        4, "biases, tied head", f"{PP4} {LAYOUT} Ett|tt|mm|L", "--mtp-num-layers 2 --position-embedding-type rope"
    ),
    "4 stages, virtual ones, MTP apart": row(
        4,
        "per-token loss",
        f"{PP4} {LAYOUT} Et|t|t|t||t|m|L",
        "--num-layers 5 --mtp-num-layers 1 --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    ),
    "zero bubble, 4 stages, per-token loss, repeated MTP layer": row(
        4, "per-token loss", f"{PP4} {ZERO_BUBBLE}", "--mtp-num-layers 2 --mtp-use-repeated-layer"
    ),
    "zero bubble, tensor ranks": row(4, "plain", f"{PP2} {ZERO_BUBBLE} {TP2}"),
    "zero bubble, expert ranks": row(4, "plain", f"{PP2} {ZERO_BUBBLE} --expert-model-parallel-size 2"),
    "tensor ranks, tied head, MTP": row(
        4,
        "biases, tied head",
        f"{PP2} {LAYOUT} Ettt|tmmL {TP2} --expert-tensor-parallel-size 1",
        "--mtp-num-layers 2 --position-embedding-type rope",
    ),
    "4 stages, six microbatches": row(4, "plain", PP4, SIX),
    "virtual stages, expert ranks": row(
        4, "plain", f"{PP2} {VPP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    ),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipeline_parallel_training_equals_one_process(ranks):
    check_rows({name: row for name, row in ROWS.items() if row.ranks == ranks})
