"""muP on several ranks: losses, gradients and weights equal one process; every multiplier has an effect."""

import pytest
from harness import run_ranks
from training.layouts import compare, make_argv, shallow, train, train_ranks

from moe_trainer.parallel.state import ParallelState

MUP = "--use-mup --mup-base-hidden-size 4 --mup-embedding-mult 3 --mup-base-head-dim 2"
TP, PP, CP, EP = (f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "context", "expert-model"))
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
# (kind of model, optimizer, flags of the ranks)
CASES = (
    ("plain", "adam", f"{TP} --sequence-parallel --expert-tensor-parallel-size 1"),
    ("plain", "adam", f"{PP} {SHARDED}"),
    ("plain", "adam", f"{EP} {SHARDED}"),
    ("plain", "adam", CP),
    ("plain", "adam", "--use-torch-fsdp2"),
    (
        "plain",
        "adam",
        f"{SHARDED} --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer",
    ),
    ("biases, tied head", "sgd", f"{PP} {SHARDED}"),
    ("biases, tied head", "sgd", f"{EP} --use-distributed-optimizer"),
    ("per-token loss, MTP, distributed optimizer", "sgd", f"{TP} --sequence-parallel --expert-tensor-parallel-size 1"),
    ("plain", "muon", f"{TP} --sequence-parallel"),
)


MORE = {
    "sgd": "--lr 2e-2",
    "muon": "--muon-fp32-matmul-prec high",
}


def mup_argv(kind: str, optimizer: str) -> list[str]:
    return [*shallow(make_argv(kind)), *MUP.split(), "--optimizer", optimizer, *MORE.get(optimizer, "").split()]


def test_mup_training_under_every_mapping_equals_one_process():
    found = run_ranks(train_ranks, 2, [[*mup_argv(kind, optimizer), *more.split()] for kind, optimizer, more in CASES])
    alone = {}
    for (kind, optimizer, more), outcome in zip(CASES, found[0], strict=True):
        if (kind, optimizer) not in alone:
            alone[kind, optimizer] = train(mup_argv(kind, optimizer), 0, ParallelState.single())
        differences = compare(alone[kind, optimizer], outcome)
        assert not differences, f"{kind}, {optimizer}, {more}: {len(differences)} differ, first\n" + "\n".join(
            map(str, differences[:8])
        )


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_mup_multiplier_changes_training(optimizer):
    flags = mup_argv("plain", optimizer)
    full = train(flags, 0, ParallelState.single())
    for other in (
        ["--mup-embedding-mult", "2"],
        ["--mup-base-head-dim", "3"],
        ["--mup-output-mult", "0.5"],
        ["--mup-base-hidden-size", "16"],
    ):
        assert compare(full, train([*flags, *other], 0, ParallelState.single())), other
