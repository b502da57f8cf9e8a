"""Dispatch by NCCL EP over its stand-in: rows, layers, training, counts on the device, the contexts of the library."""

import importlib.util

import pytest
import torch
from harness import run_ranks
from moe import fake_te_ep
from moe.layers import HIDDEN, sections
from moe.test_cloning import check_library
from moe.test_counts_on_device import RECOMPUTE, assert_equal, check_device_counts, trained
from moe.test_flex import (
    BF16,
    EMPTY,
    FLEX,
    FULL,
    TWO,
    TYPED,
    UNEVEN,
    StandIn,
    assert_same,
    check_fallback,
    check_layers,
    check_nccl,
    check_training,
    flex_dispatcher,
    random_routing,
)

from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.moe.dispatch import ncclep
from moe_trainer.moe.dispatch.base import DispatchHints
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.moe.receive.budget import ReceiveBudget
from moe_trainer.parallel.state import ParallelState

NCCL_EP = StandIn("ncclep", fake_te_ep.install, ("moe_ncclep_zero_copy",))
FLAGS = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep"
USUAL = ((), "deepseek", False)
"""Arguments of `trained` before the library."""


@pytest.mark.parametrize(
    ("n", "cases"),
    [
        (4, [(topk, "plain", (6,) * 4) for topk in (1, 2, 4)]),
        (2, [(2, kind, (6, 6)) for kind in EMPTY]),
        (4, [(2, "plain", sizes) for sizes in UNEVEN]),
    ],
    ids=["plain", "empty", "uneven"],
)
def test_rows_equal_all_to_all_bitwise(n, cases):
    assert_same(n, {}, NCCL_EP, cases)


def test_rows_in_half_precision():
    assert_same(2, {}, NCCL_EP, [(2, "plain", (6, 6))], torch.bfloat16, 2.0**-6, False)


def test_layers_equal_those_with_the_all_to_all():
    check_layers({}, NCCL_EP)


def test_training_equals_one_process():
    check_training({}, NCCL_EP, FULL)


def test_cloning():
    check_library({}, NCCL_EP)


def test_clones_are_planned_without_the_host():
    from moe.test_counts_on_device import check_clones

    check_clones(FLAGS, NCCL_EP, RECOMPUTE[2])


@pytest.mark.parametrize("how", [RECOMPUTE[1], f"--moe-ncclep-zero-copy {RECOMPUTE[2]}"])
def test_device_counts_give_the_results_of_all_to_all(how):
    check_device_counts(f"{FLAGS} --moe-expert-rank-capacity-factor 3 {how}", NCCL_EP)


def test_iteration_with_lost_rows_is_repeated_exactly():
    """Its buffer has a minimum, which is too small for the fullest rank; the repeated iteration raises it for all ranks."""
    enough, tight = (
        trained(2, f"{FLAGS} --moe-expert-rank-capacity-factor {factor} {RECOMPUTE[1]}", *USUAL, NCCL_EP)
        for factor in (3, 0.3)
    )
    for rank, result in enumerate(tight):
        assert enough[rank]["attempts"] == [False] * 3
        assert result["attempts"][:3] == [False, True, False], "the first iteration is repeated, the second is not"
        for name in ("losses", "norms", "evaluation"):
            assert result[name] == enough[rank][name], name
    assert_equal(enough[0], tight[0])


def _context(rank, n, zero_copy):
    """Arguments of the contexts and of the last dispatch's buffer: without a fixed buffer, with one, and without again."""
    ps = ParallelState.create(n, rank, ep=n)
    options = {"moe_flex_dispatcher_num_sms": 12, "moe_ncclep_zero_copy": zero_copy}
    made, signatures = flex_dispatcher({}, NCCL_EP, ps, max_tokens=40, **options)
    made.set_budgets([ReceiveBudget("first", 1.0, 2), ReceiveBudget("second", 1.5 + rank, 2)])
    probs, routing = random_routing(rank, 40, 2, "plain")
    found = []
    for buffer_size in (None, 7, None):
        x, probs_TE = torch.ones(40, HIDDEN, requires_grad=True), probs.clone().requires_grad_()
        state = made.dispatch_preprocess(x, probs_TE, routing, DispatchHints(buffer_size=buffer_size))
        state = made.dispatch_postprocess(made.token_dispatch(state))
        y = made.combine(state.x_RH * 2, state)
        y.sum().backward()
        found.append((y.detach(), x.grad, len(state.x_RH), state.overflow))
    assert all(torch.equal(y, found[0][0]) and torch.equal(grad, found[0][1]) for y, grad, *_ in found)
    made.close()
    calls = signatures.calls
    contexts = [{**bound, "ep_group": None} for name, bound in calls if name == "ep_bootstrap"]
    assert calls[-1][0] == "ep_finalize"
    registered = sum(name == "symm_mem_alloc" for name, _ in calls)
    return contexts, registered, [(num_rows, None if flag is None else int(flag)) for *_, num_rows, flag in found]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_library_has_one_context_for_each_mode(zero_copy):
    """All ranks have the largest budget. The stand-in fails if what is sent with zero copy is not registered."""
    plain = {"ep_group": None, "num_experts": 8, "max_tokens_per_rank": 64, "hidden_dim": HIDDEN, "num_topk": 2}
    plain |= {"recv_capacity_per_rank": None, "max_num_sms": 12, "zero_copy": False, "drop_on_overflow": False}
    fixed = {**plain, "recv_capacity_per_rank": 320, "zero_copy": zero_copy, "drop_on_overflow": True}
    for contexts, registered, rows in run_ranks(_context, 2, zero_copy):
        assert contexts == [plain, fixed, plain] and registered == (3 if zero_copy else 0)
        assert rows[1] == (320, 0) and rows[0] == rows[2] and rows[0][1] is None and rows[0][0] < 160


def test_cpu_ranks_fall_back_to_all_to_all_with_one_log_line(caplog):
    check_fallback(caplog, "ncclep")


def test_missing_library_gives_install_instructions(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    moe = sections(**FLEX, moe_flex_dispatcher_backend="ncclep").moe
    with pytest.raises(MissingBackendError, match="transformer_engine is not installed.*NVTE_WITH_NCCL_EP=1"):
        build_dispatcher(moe, TWO, BF16, BackendPolicy(typed=TYPED, cuda=True))


@pytest.mark.parametrize(("nccl", "is_usable"), [((2, 28, 9), False), ((2, 30, 4), True), (None, True)])
def test_an_old_nccl_is_reported_before_a_run(monkeypatch, nccl, is_usable):
    monkeypatch.setattr(ncclep.te, "problem", lambda module, *names: None)
    check_nccl(monkeypatch, ncclep, nccl, is_usable)
