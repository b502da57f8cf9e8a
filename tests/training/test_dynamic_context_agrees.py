"""Dynamic context parallelism: ranks that share sequences in groups of several sizes equal one process."""

import functools
from dataclasses import replace

import pytest
from harness import run_ranks
from training.layouts import SEQ, VOCAB, assert_equal, create_groups
from training.test_packed_sequences_agree import GQA, MLA, make_packed_argv

from arguments import parse_args
from moe_trainer.data.packing import PackFormat, PackingPlanner
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace
from moe_trainer.verification.synthetic_data import PackLayout, VaryingTokenDataset

DYNAMIC = ["--dynamic-context-parallel"]
BATCH = 4
CAPACITY = {2: 8, 4: 6}
"""Tokens of a rank, by the number of ranks that may share a sequence."""
SEQUENCE_BALANCING = f"{MLA} --moe-router-load-balancing-type seq_aux_loss"
# sums of counts over the ranks of a microbatch, so all of them share its sequences, as one process has them
GLOBAL_BALANCING = f"{GQA} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"
SHARDED_PARAMS = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"
CASES = {
    2: (
        ("sinks", "--cp-comm-type a2a"),
        ("yarn", ""),
        ("recompute", "--context-parallel-size 2"),
        ("gqa", "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"),
        (f"{GQA} --qk-clip --log-max-attention-logit", ""),
        (GLOBAL_BALANCING, "--min-dynamic-context-parallel-size 2"),
        ("window", "--context-parallel-size 2"),
        ("linear attention", ""),
        ("indexer loss", "--cp-comm-type allgather"),
        ("selective recompute", ""),
    ),
    4: (
        ("gqa", "--expert-model-parallel-size 4"),
        ("sinks", "--pad-packed-seq-alignment 4 --min-dynamic-context-parallel-size 2"),
        ("learned positions", "--cp-comm-type a2a --tensor-model-parallel-size 2"),
        (SEQUENCE_BALANCING, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
        ("mtp", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
        ("mtp", "--context-parallel-size 4"),
        ("gqa", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
        (GLOBAL_BALANCING, "--min-dynamic-context-parallel-size 4 --expert-model-parallel-size 2"),
        ("gqa", f"--tensor-model-parallel-size 2 --sequence-parallel {SHARDED_PARAMS}"),
    ),
}


def make_case(kind, flags, ranks):
    """Command lines of one process and of ranks, and what their packs depend on."""
    more = flags.split()
    layers = more[more.index("--num-layers") :] if "--num-layers" in more else []
    argv = [*make_packed_argv(kind), *layers, *f"--micro-batch-size 1 --global-batch-size {BATCH}".split()]
    sharing = ranks // (2 if "--tensor" in flags or "--pipeline" in flags else 1)
    ranked = [*argv, *DYNAMIC, "--max-seqlen-per-dp-cp-rank", str(CAPACITY[sharing]), *more]
    args = parse_args(ranked, ranks)
    num_data_ranks = sharing // args.parallel.context_parallel_size
    return argv, ranked, PackLayout(PackFormat.from_args(args), num_data_ranks, 2 if layers else 1)


def train_cases(rank, n):
    outcomes = []
    for case in CASES[n]:
        _, argv, layout = make_case(*case, n)
        ps = create_groups(argv, rank, n)
        outcomes.append(training_trace.train(parse_args(argv, n), rank, ps, 2, layout=layout))
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    """Return the outcome of a case on its ranks, which run all their cases."""
    return functools.cache(lambda ranks: dict(zip(CASES[ranks], run_ranks(train_cases, ranks)[0])))


@pytest.mark.parametrize("ranks, case", [(ranks, case) for ranks, cases in CASES.items() for case in cases])
def test_layouts_agree(outcomes, ranks, case):
    argv, _, layout = make_case(*case, ranks)
    expected = training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), 2, layout=layout)
    # sums of outputs are those of other tokens: padding, and the packs of all groups
    assert_equal(outcomes(ranks)[case], replace(expected, forward=[]), case)


@pytest.mark.parametrize("ranks, sizes", [(2, {1, 2}), (4, {1, 2, 4})])
def test_cases_use_groups_of_every_size(ranks, sizes):
    layout = make_case("gqa", "", ranks)[2]
    planner = PackingPlanner(VaryingTokenDataset(0, SEQ, VOCAB).length, float, layout.format, 1, ranks)
    steps = [planner.plan(first, BATCH).packs for first in (0, BATCH)]
    assert {pack.cp_size for step in steps for packs in step for pack in packs} == sizes
