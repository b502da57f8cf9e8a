"""Overlapped passes of two microbatches and delayed weight gradients give the results of sequential passes."""

import pytest
from harness import run_ranks
from training.layouts import compare, create_groups, make_argv, make_run, shallow, train_ranks

from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

EP2 = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--bf16"]
NODES = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hierarchical --moe-hierarchical-domain-size 1"
OVERLAP = ["--overlap-moe-expert-parallel-comm"]
DELAY = [*OVERLAP, "--delay-wgrad-compute", "--transformer-impl", "transformer_engine"]
WGRAD_OVERLAP = ["--overlap-dispatch-backward-with-experts-wgrad"]
FSDP = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
VPP = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
ALL = (OVERLAP, DELAY, WGRAD_OVERLAP)
# name -> (ranks, kind of model, flags of the model and its mapping, ways to overlap)
CASES = {
    "ep2, overlapped gradients": (2, "distributed optimizer, overlap", EP2, ALL),
    "ep2, deepseek": (2, "deepseek", EP2, ALL),
    "ep2 of two nodes": (2, "accumulation", [*EP2, *NODES.split()], [OVERLAP, WGRAD_OVERLAP]),
    "ep2, one microbatch": (2, "plain", [*EP2, "--global-batch-size", "4"], [DELAY]),
    "ep2 pp2 vpp2, per-token loss, MTP": (
        4,
        "per-token loss, MTP, distributed optimizer",
        [*EP2, *VPP, "--global-batch-size", "16"],
        ALL,
    ),
    "ep2, fully sharded, three layers": (2, "accumulation", [*EP2, *FSDP, "--num-layers", "3"], [DELAY]),
    "ep2, fully sharded, deepseek": (2, "deepseek", [*EP2, *FSDP], ALL),
    "ep2 pp2 vpp2, fully sharded": (4, "accumulation", [*EP2, *VPP, *FSDP], [OVERLAP]),
    "ep2 over tp2, sequence parallel": (
        2,
        "accumulation",
        [*EP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1"],
        [OVERLAP, DELAY],
    ),
}


def model_of(name: str) -> list[str]:
    """Return the model's flags: two layers, or four where a rank has two stages."""
    _, kind, flags, _ = CASES[name]
    return make_argv(kind) if "--pipeline-model-parallel-size" in flags else shallow(make_argv(kind))


@pytest.mark.parametrize("n", [2, 4])
def test_expert_parallel_overlap_does_not_change_training(n):
    names = [name for name, case in CASES.items() if case[0] == n]
    argvs = [[*model_of(name), *CASES[name][2], *how] for name in names for how in ([], *CASES[name][3])]
    outcomes = iter(run_ranks(train_ranks, n, argvs)[0])
    for name in names:
        plain = next(outcomes)
        for how in CASES[name][3]:
            differences = compare(plain, next(outcomes))
            assert not differences, f"{name} {how[-1]}: first\n" + "\n".join(map(str, differences[:8]))


def _turns(rank, n, argv, microbatches):
    run = make_run(argv, rank, create_groups(argv, rank, n), 1)
    overlap_executor, log = run.chunks[0].overlap_executor, []
    plain = overlap_executor.yield_turn

    def yield_turn(side):
        if not any(overlap_executor._ended):
            log.append("FB"[side])
        plain(side)

    overlap_executor.yield_turn = yield_turn
    train_step(run, TrainState(), microbatches)
    return "".join(log)


def test_overlapped_passes_alternate_equally_on_all_ranks():
    first, second = run_ranks(_turns, 2, [*make_argv("accumulation"), *EP2, *OVERLAP], 4)
    assert first == second
    # 4 microbatches are 3 pairs; 4 layers exchange twice in each direction; the last pass of a pair continues alone
    assert first == ("BF" * 8) * 3
