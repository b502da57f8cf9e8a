"""Parallel training equals one process: losses, every gradient, the norm, the expert bias, the weights after two steps.

The ordinary suite proves few cases of 2 to 4 ranks that exercise every feature (features.py). The full matrix - every
factorisation of 2, 4 and 8 ranks, two models each with their options - takes minutes and has a separate command:

    OMP_NUM_THREADS=1 python -m pytest tests/training/test_layouts_agree.py -m slow
"""

import random

import pytest
from training.agreement import Row, check_cases, check_rows
from training.features import FEATURES, choose_covering_cases, features
from training.layouts import KINDS, make_argv, shallow, train_one_process

from moe_trainer.verification.mapping import ParallelMapping
from moe_trainer.verification.random_layouts import draw, matrix

MODELS = 2
CANDIDATES = 4  # models per mapping among which few are chosen
AT_ONCE = 20  # every case leaves its groups open


def test_every_feature_equals_one_process_on_few_ranks():
    deep = [
        draw(random.Random(number), ParallelMapping(pp=4)) for number in range(90)
    ]  # a stage for MTP alone needs stages
    cases = choose_covering_cases([*matrix(2, CANDIDATES), *matrix(4, CANDIDATES), *filter(None, deep)])
    assert frozenset().union(*map(features, cases)) == FEATURES.keys() and len(cases) <= 15
    check_cases({str(case): case for case in cases})


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_of_a_world_size_equals_one_process(world):
    cases = matrix(world, MODELS)
    assert len(cases) >= {2: 22, 4: 112, 8: 340}[world], "the rules allow two models for nearly every factorisation"
    failed = []
    for start in range(0, len(cases), AT_ONCE):
        try:
            check_cases({str(case): case for case in cases[start : start + AT_ONCE]})
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n".join(failed)


def test_every_model_kind_with_expert_parallelism_equals_one_process():
    """The dispatchers differ in what is exchanged where tokens are dropped, padded or counted.

    Plain layers: "accumulation". Overlapped optimizers: test_optimizer_layouts.py.
    """
    by_allgather = ("deepseek", "capacity", "padded capacity")
    by_alltoall = KINDS.keys() - {"plain", "distributed optimizer", "distributed optimizer, overlap", "per-token loss"}
    check_rows({
        f"{kind}, {dispatcher}": Row(
            4, shallow(make_argv(kind)), f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}"
        )
        for dispatcher, kinds in (("alltoall", sorted(by_alltoall)), ("allgather", by_allgather))
        for kind in kinds
    })  # fmt: skip


def test_model_kinds_exercise_capacity_mtp_and_expert_bias():
    assert min(train_one_process(*shallow(make_argv("capacity"))).dropped) > 0
    assert "mtp_1 loss" in train_one_process(*shallow(make_argv("deepseek"))).losses[0]
    bias = train_one_process(*shallow(make_argv("deepseek"))).weights["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.abs().max() > 0
    first = train_one_process(*shallow(make_argv("plain"))).grads
    assert all(grad.abs().max() > 0 for grad in first.values()), "an expert without tokens proves nothing"
