"""Fused kernels of TransformerEngine: which calls are made, against the recorded signatures, and what they give, from plain torch."""

import json
import logging
import sys
from dataclasses import replace

import pytest
import torch
from layers.fake_te import PYTORCH, make_module
from moe.fake_deep_ep import Signatures
from moe.layers import HIDDEN, build_layer, sections

from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.layers.te import FusedPermutation
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.dispatch.select import build_dispatcher, build_permutation
from moe_trainer.moe.selections.build import select_fused_topk
from moe_trainer.moe.selections.topk import score_topk
from moe_trainer.ops.permute import Permutation, make_permute_map, permute, permute_probs, unpermute
from moe_trainer.parallel.state import ParallelState

CUDA = BackendPolicy(cuda=True)


@pytest.fixture
def fake_transformer_engine(shared, monkeypatch):
    """The recorded functions, computed by plain torch."""
    recorded = Signatures(json.loads((shared / "reference" / "te_api.json").read_text()))
    permutation, router = make_module(f"{PYTORCH}.permutation"), make_module(f"{PYTORCH}.router")

    def moe_permute_with_probs(*args, **kwargs):
        bound = recorded.bind(f"{PYTORCH}.permutation.moe_permute_with_probs", args, kwargs)
        routes = make_permute_map(bound["routing_map"])
        assert bound["num_out_tokens"] == len(routes.token_R) > 0
        return permute(bound["inp"], routes), permute_probs(bound["probs"], routes), routes

    def moe_unpermute(*args, **kwargs):
        bound = recorded.bind(f"{PYTORCH}.permutation.moe_unpermute", args, kwargs)
        y_TH = unpermute(bound["inp"], bound["row_id_map"])
        assert y_TH.shape == bound["restore_shape"]
        return y_TH

    def fused_topk_with_score_function(*args, **kwargs):
        bound = dict(recorded.bind(f"{PYTORCH}.router.fused_topk_with_score_function", args, kwargs))
        return score_topk(
            bound.pop("logits"),
            bound.pop("topk"),
            pre_softmax=bound.pop("use_pre_softmax"),
            expert_bias_E=bound.pop("expert_bias"),
            **bound,
        )

    permutation.moe_permute_with_probs, permutation.moe_unpermute = moe_permute_with_probs, moe_unpermute
    router.fused_topk_with_score_function = fused_topk_with_score_function
    package, pytorch = make_module("transformer_engine"), make_module(PYTORCH)
    for made in (package, pytorch, permutation, router):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return recorded


@pytest.fixture
def without_te(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_topk": 4,
        },
        {"moe_router_pre_softmax": True, "moe_expert_capacity_factor": 0.5},
    ],
)
def test_layers_with_fused_kernels_compute_the_same(fake_transformer_engine, changes):
    results = []
    for fused in (False, True):
        args = sections(moe_permute_fusion=fused, moe_router_fusion=fused, moe_aux_loss_coeff=0.1, **changes)
        layer = build_layer(args, dtype=torch.float32)
        dispatcher = build_dispatcher(args.moe, ParallelState.single(), backends=CUDA)
        attach_dispatcher([layer], dispatcher, select_fused_topk(args.moe, CUDA))
        x = torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x, PassInputs(grad_scale=0.7))
        y.square().sum().backward()
        results.append([y, x.grad, *(param.grad for param in layer.parameters())])
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)
    called = {name.rsplit(".", 1)[-1] for name, _ in fake_transformer_engine.calls}
    assert called == {"moe_permute_with_probs", "moe_unpermute", "fused_topk_with_score_function"}


def test_no_kernel_is_launched_for_zero_rows(fake_transformer_engine):
    fused = FusedPermutation()
    x, probs = torch.zeros(3, HIDDEN, requires_grad=True), torch.zeros(3, 8, requires_grad=True)
    x_RH, probs_R, routes = fused.permute(x, probs, torch.zeros(3, 8, dtype=torch.bool))
    (fused.unpermute(x_RH, routes).sum() + probs_R.sum()).backward()
    assert x_RH.shape == (0, HIDDEN) and x.grad.eq(0).all() and not fake_transformer_engine.calls


@pytest.mark.parametrize("flag", ["moe_permute_fusion", "moe_router_fusion"])
def test_fallback_is_logged_or_refused(without_te, caplog, flag):
    moe, choose = (
        sections(**{flag: True}).moe,
        build_permutation if flag == "moe_permute_fusion" else select_fused_topk,
    )
    plain = Permutation if flag == "moe_permute_fusion" else type(None)
    with caplog.at_level(logging.INFO):
        assert type(choose(moe, BackendPolicy(typed=frozenset({flag})))) is plain
        assert type(choose(moe, CUDA)) is plain  # from a recipe
    first, second = caplog.messages
    assert "computes on a CPU" in first and "package transformer_engine is not installed" in second
    with pytest.raises(MissingBackendError, match="pip install .*transformer_engine.*--on-missing-backend fallback"):
        choose(moe, BackendPolicy(typed=frozenset({flag}), cuda=True))
    caplog.clear()
    assert type(choose(sections().moe, CUDA)) is plain and not caplog.messages  # not asked for


@pytest.mark.parametrize("flag", ["moe_permute_fusion", "moe_router_fusion"])
def test_te_kernels_precede_own_kernels_unless_requested(fake_transformer_engine, flag):
    ours = Kernels(permutation=Permutation, fused_topk=print)
    moe, choose = (
        sections(**{flag: True}).moe,
        build_permutation if flag == "moe_permute_fusion" else select_fused_topk,
    )
    own = Permutation if flag == "moe_permute_fusion" else type(print)
    assert type(choose(moe, CUDA, ours)) is not own
    assert type(choose(sections().moe, CUDA, ours)) is own
    assert type(choose(moe, replace(CUDA, typed=frozenset({"triton_kernels"})), ours)) is own


def test_older_te_without_the_kernel_falls_back(fake_transformer_engine):
    del sys.modules[f"{PYTORCH}.permutation"].moe_unpermute
    with pytest.raises(MissingBackendError, match="has no transformer_engine.pytorch.permutation.moe_unpermute"):
        build_permutation(sections(moe_permute_fusion=True).moe, BackendPolicy("error", cuda=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_router_dtype": "fp64"}, "--moe-router-dtype is fp64"),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_group_score_topk": 1},
            "--moe-router-group-score-topk 1",
        ),
    ],
)
def test_unsupported_router_settings_use_no_kernel(fake_transformer_engine, caplog, changes, reason):
    with caplog.at_level(logging.INFO):
        assert select_fused_topk(sections(moe_router_fusion=True, **changes).moe, CUDA) is None
    assert reason in caplog.text


def test_selection_that_ignores_the_kernel_needs_no_library(without_te, caplog):
    moe = sections(moe_router_fusion=True, moe_router_load_balancing_type="sinkhorn").moe
    typed = BackendPolicy(typed=frozenset({"moe_router_fusion"}), cuda=True)
    with caplog.at_level(logging.INFO):
        assert select_fused_topk(moe, typed) is None and not caplog.messages
