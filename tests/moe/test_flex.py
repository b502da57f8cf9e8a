"""The flex dispatcher's adapters against the all-to-all, over a stand-in for deep_ep that has its signatures and its meaning."""

import importlib.machinery
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from harness import run_ranks
from moe.fake_deep_ep import Signatures, make_hybrid, make_v1, make_v2
from moe.layers import HIDDEN, build_shard, sections
from training.layouts import compare, make_argv, shallow, train

from moe_trainer import backends
from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.model import build
from moe_trainer.moe.dispatch import deepep
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.flex import DispatchBufferSpec, LibrarySettings
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import Group, ParallelState

# what is recorded of which version, and the qualified name of the class there
VERSIONS = {
    "DeepEP 1.0": ("pypi deep-ep 1.0.0 sdist", "deep_ep.buffer.Buffer"),
    "DeepEP 2, old buffer": ("github main dd758ca (2026-07-14)", "deep_ep.buffers.legacy.Buffer"),
    "DeepEP of the hybrid branch": ("github hybrid-ep", "deep_ep.buffer.Buffer"),
    "DeepEP 2": ("github main dd758ca (2026-07-14)", "deep_ep.buffers.elastic.ElasticBuffer"),
    "HybridEP": ("github hybrid-ep", "deep_ep.hybrid_ep_buffer.HybridEPBuffer"),
}

LIBRARIES = ("DeepEP 1.0", "DeepEP 2", "HybridEP")


class StandIn(NamedTuple):
    """Another library than deep_ep.

    Attributes:
        backend: value of --moe-flex-dispatcher-backend.
        install: makes the library what this process imports.
        flags: destinations of flags of this backend alone.
    """

    backend: str
    install: Callable[[], Signatures]
    flags: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def recorded(shared) -> dict:
    return json.loads((shared / "reference" / "deep_ep_api.json").read_text())


def make_fake_deep_ep(recorded: dict, version: str) -> tuple[ModuleType, Signatures]:
    """A module that replaces deep_ep of this version."""
    source, name = VERSIONS[version]
    signatures = Signatures(recorded[source])
    module = ModuleType("deep_ep")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    if version == "DeepEP 2":
        module.ElasticBuffer = make_v2(signatures, name)
    elif version == "HybridEP":
        module.HybridEPBuffer = make_hybrid(signatures, name)
    else:
        module.Buffer = make_v1(signatures, name)
    return module, signatures


def flex_dispatcher(recorded, version, ps, max_tokens=50, **changes):
    """Made by the chooser, as on a CUDA device where that version is installed."""
    if isinstance(version, StandIn):
        backend, signatures = version.backend, version.install()
    else:
        module, signatures = make_fake_deep_ep(recorded, version)
        sys.modules["deep_ep"] = module
        backend = "hybridep" if version == "HybridEP" else "deepep"
    moe = sections(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, **changes).moe
    width = (
        deepep.V2_HIDDEN_MULTIPLE if version == "DeepEP 2" else HIDDEN
    )  # of the buffer, which the stand-in does not hold rows against
    rows = DispatchBufferSpec(width, max_tokens, torch.bfloat16, torch.device("cpu"))
    policy = BackendPolicy(cuda=True, typed=frozenset({"moe_flex_dispatcher_num_sms"}))
    with mock.patch.object(
        backends, "nccl_version", return_value=None
    ):  # a CUDA build of torch brings one, perhaps old
        made = build_dispatcher(moe, ps, rows, policy)
    assert made.declaration.key == backend
    return made, signatures


def random_routing(rank, num_tokens, topk, which):
    """Choices of a rank's tokens: 8 experts, at most topk a token, fewer where something was dropped."""
    generator = torch.Generator().manual_seed(10 + rank)
    scores = torch.rand(num_tokens, 8, generator=generator)
    if which == "nothing for the last rank":
        scores[:, 4:] = -1
    elif which == "all to one expert":
        scores[:, 2], topk = 2, 1
    elif which == "an expert without tokens":
        scores[:, 5] = -1
    routing = torch.zeros(num_tokens, 8, dtype=torch.bool).scatter_(1, scores.topk(topk)[1], True)
    if which == "drops":
        routing &= torch.rand(num_tokens, 8, generator=generator) < 0.5
        routing[:1] = False  # a token without any expert
    if which == "no tokens":
        routing[:] = False
    probs = torch.where(routing, torch.rand(num_tokens, 8, generator=generator), 0.0)
    return probs, routing


def run_dispatcher(dispatcher, x, probs, routing, weight):
    """Return the rows of this rank's experts, the combined rows, and the gradients."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    sent = dispatcher.dispatch(x, probs, routing)
    assert sum(sent.tokens_per_expert_e) == len(sent.x_RH) == len(sent.probs_R)
    expert_R = torch.repeat_interleave(torch.tensor(sent.tokens_per_expert_e))
    y = torch.tanh(sent.x_RH * (1.0 + expert_R.unsqueeze(1))) * sent.probs_R.unsqueeze(1)
    y = dispatcher.combine(y.to(x.dtype), sent)
    (y.float() * weight).sum().backward()
    return sent.x_RH.detach(), sent.probs_R.detach(), sent.tokens_per_expert_e, y.detach(), x.grad, probs.grad


def _run_alltoall_and_flex(rank, n, recorded, version, cases, dtype):
    """For every case (top-k, kind of routing, tokens of every rank) what the all-to-all and flex give."""
    ps = ParallelState.create(n, rank, ep=n)
    results = []
    for topk, which, sizes in cases:
        probs, routing = random_routing(rank, sizes[rank], topk, which)
        x, weight = torch.randn(2, sizes[rank], HIDDEN, generator=torch.Generator().manual_seed(rank))
        changes = {"moe_hybridep_pad_uneven_dispatch_inputs": len(set(sizes)) > 1, "moe_router_topk": topk}
        flex, _ = flex_dispatcher(recorded, version, ps, **changes)
        results.append(
            [
                run_dispatcher(dispatcher, x.to(dtype), probs, routing, weight)
                for dispatcher in (AllToAllDispatcher(ps, Permutation()), flex)
            ]
        )
    return results


EMPTY = ("nothing for the last rank", "all to one expert", "an expert without tokens", "drops", "no tokens")
UNEVEN = ((5, 1, 8, 3), (4, 0, 7, 0), (0, 1, 0, 0), (0, 0, 0, 0))


def assert_same(n, recorded, version, cases, dtype=torch.float32, tolerance=1e-6, sums_exact=True):
    for rank in run_ranks(_run_alltoall_and_flex, n, recorded, version, cases, dtype):
        for (topk, *_), pair in zip(cases, rank, strict=True):
            assert_same_pair(*pair, tolerance, topk <= 2 and sums_exact)


def assert_same_pair(plain, flex, tolerance, sums_exact):
    for (rows, *ours), (flex_rows, *theirs) in [(plain, flex)]:
        assert torch.equal(rows, flex_rows), "dispatched rows"
        for name, one, other in zip(
            ("probabilities", "counts", "combined", "gradient of x", "gradient of probs"), ours, theirs
        ):
            if name in ("probabilities", "counts") or sums_exact:
                same = one == other if isinstance(one, list) else torch.equal(one, other)
                assert same, name
            else:
                torch.testing.assert_close(
                    other, one, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize(("version", "n"), [(version, 4 if version in LIBRARIES else 2) for version in VERSIONS])
def test_flex_rows_equal_all_to_all_bitwise(recorded, version, n):
    """At top-k up to 2 the combined rows and all gradients too; beyond, within 1e-6: a token's results are added rank by rank."""
    assert_same(n, recorded, version, [(topk, "plain", (6,) * n) for topk in (1, 2, 4)])


@pytest.mark.parametrize("version", LIBRARIES)
def test_flex_with_empty_ranks_and_dropped_tokens(recorded, version):
    assert_same(2, recorded, version, [(2, kind, (6, 6)) for kind in EMPTY])


@pytest.mark.parametrize("version", LIBRARIES)
def test_flex_with_uneven_token_counts(recorded, version):
    """HybridEP needs equal numbers: its option fills up, or it would hang (modelscope/ms-swift issue 8393)."""
    assert_same(4, recorded, version, [(2, "plain", sizes) for sizes in UNEVEN])


@pytest.mark.parametrize("version", LIBRARIES)
def test_flex_in_half_precision(recorded, version):
    """Rows bit for bit; sums within a bf16 step: the local sum's kernel on CPU rounds ties away, an addition to even."""
    assert_same(2, recorded, version, [(2, "plain", (6, 6))], torch.bfloat16, 2.0**-6, False)


MXFP8 = {
    "forward": {"moe_dispatch_fwd_dtype": "mxfp8"},
    "backward": {"moe_combine_bwd_dtype": "mxfp8"},
    "both": {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8"},
}


def _run_mxfp8(rank, n, recorded, version):
    """As _run_alltoall_and_flex, in 8 bits, for every choice of directions."""
    ps, results = ParallelState.create(n, rank, ep=n), []
    for changes in MXFP8.values():
        probs, routing = random_routing(rank, 6, 2, "drops")
        x, weight = torch.randn(2, 6, 512, generator=torch.Generator().manual_seed(rank))
        flex, _ = flex_dispatcher(recorded, version, ps, **changes)
        dispatchers = AllToAllDispatcher(ps, Permutation(), flex.mxfp8), flex, AllToAllDispatcher(ps, Permutation())
        results.append([run_dispatcher(dispatcher, x, probs, routing, weight) for dispatcher in dispatchers])
    return results


@pytest.mark.parametrize("version", VERSIONS)
def test_mxfp8_over_flex_equals_the_all_to_all(recorded, version):
    """Bit for bit, in each direction; and other numbers than without it."""
    for rank in run_ranks(_run_mxfp8, 2, recorded, version):
        for ours, theirs, unrounded in rank:
            assert_same_pair(ours, theirs, 0.0, True)
            assert not all(
                torch.equal(one, other) for one, other in zip(ours, unrounded) if isinstance(one, torch.Tensor)
            )


def _layers(rank, n, recorded, version, cases):
    return [
        _layer(rank, ParallelState.create(n, rank, **sizes), recorded, version, changes) for sizes, changes in cases
    ]


def _layer(rank, ps, recorded, version, changes):
    """A full layer with the all-to-all and with flex: two microbatches in flight, ended in the other order."""
    args = sections(
        moe_token_dispatcher_type="alltoall", sequence_parallel=ps.tp.size > 1, moe_aux_loss_coeff=0.1, **changes
    )
    layer = build_shard(args, ps, torch.float32)
    flex, signatures = flex_dispatcher(recorded, version, ps, **changes)
    results = []
    for dispatcher in (layer.dispatcher, flex):
        layer.set_dispatcher(dispatcher)
        layer.zero_grad()
        xs = [
            torch.randn(8, 1, HIDDEN, generator=torch.Generator().manual_seed(2 * rank + i)).requires_grad_()
            for i in (0, 1)
        ]
        ys = [layer(x, PassInputs(grad_scale=0.7)) for x in xs]
        for y in reversed(ys):
            (y * y).sum().backward()
        results.append(
            [*(y.detach() for y in ys), *(x.grad for x in xs), *(param.grad for param in layer.parameters())]
        )
    return results, [name.rsplit(".", 1)[-1] for name, _ in signatures.calls]


FINE_LAYERS = {
    name: (
        sizes,
        {
            "finermoe_intermediate_granularity": 2,
            "finermoe_output_granularity": 2,
            "finermoe_intermediate_expansion": 1,
            "finermoe_output_expansion": 2,
            "moe_ffn_hidden_size": 12,
            "moe_router_enable_expert_bias": True,
            **more,
        },
    )
    for name, sizes, more in (
        ("fine", {"ep": 2}, {}),
        ("fine, drops", {"ep": 2}, {"moe_expert_capacity_factor": 0.6, "moe_shared_expert_intermediate_size": 20}),
        ("fine, expert tensor ranks", {"tp": 2, "ep": 2, "etp": 2}, {}),
    )
}
LAYERS = {
    **FINE_LAYERS,
    "plain": ({"ep": 2}, {}),
    "drops": ({"ep": 2}, {"moe_expert_capacity_factor": 0.5}),
    "shared expert during the exchange": (
        {"ep": 2},
        {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_overlap": True},
    ),
    "sequence parallel": ({"tp": 2, "ep": 2}, {"moe_shared_expert_intermediate_size": 20}),
    "expert tensor ranks": ({"tp": 2, "ep": 2, "etp": 2}, {}),
    "expert tensor ranks alone": ({"etp": 2}, {"add_bias_linear": True}),
    "top-4": ({"ep": 2}, {"moe_router_topk": 4}),
}


@pytest.mark.parametrize("version", LIBRARIES)
def test_layers_with_flex_equal_those_with_the_all_to_all(recorded, version):
    check_layers(recorded, version)


def check_layers(recorded, version):
    four = [name for name in LAYERS if name.endswith("expert tensor ranks")]
    two = [name for name in LAYERS if name not in four]
    for n, names in ((2, two), (4, four)):
        for rank in run_ranks(_layers, n, recorded, version, [LAYERS[name] for name in names]):
            for name, ((ours, theirs), _) in zip(names, rank, strict=True):
                # partial results of expert tensor ranks, and more than two experts' results, are added in another order
                exact = name != "top-4" and "expert tensor" not in name
                for one, other in zip(ours, theirs, strict=True):
                    same = torch.equal(one, other) if exact else (other - one).norm() <= 1e-6 * one.norm()
                    assert same, name


def _dispatch_with_recompute(rank, n, recorded, version):
    """Result and gradients of a dispatch that is recomputed and of one that is not; dispatches that read the counts on the host."""
    ps, activations, found = (
        ParallelState.create(n, rank, ep=n),
        ActivationPolicy(frozenset({"moe"}), uses_global_rng=False),
        [],
    )
    flex, signatures = flex_dispatcher(recorded, version, ps)
    probs, routing = random_routing(rank, 6, 2, "plain")
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(rank))

    def there_and_back(x, probs):
        sent = flex.start_token_dispatch(flex.dispatch_preprocess(x, probs, routing), activations.cached_for_recompute)
        sent = flex.dispatch_postprocess(flex.finish_token_dispatch(sent))
        return flex.combine(torch.tanh(sent.x_RH) * sent.probs_R.unsqueeze(1), sent)

    for run in (there_and_back, lambda *tensors: activations.recompute_region("moe", there_and_back, *tensors)):
        inputs = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        before = len(signatures.calls)
        y = run(*inputs)
        y.square().sum().backward()
        dispatches = [
            bound
            for name, bound in signatures.calls[before:]
            if name.rpartition(".")[2] in ("dispatch", "dispatch_with_permute")
        ]
        found.append(
            (
                len(dispatches),
                sum("handle" not in bound for bound in dispatches),
                *(x.tolist() for x in (y, *(x.grad for x in inputs))),
            )
        )
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_recomputed_dispatch_reuses_the_routing(recorded, version):
    """The host reads the counts once."""
    for (once, counts_read, *expected), (again, counts_read_again, *found) in run_ranks(
        _dispatch_with_recompute, 2, recorded, version
    ):
        assert (once, counts_read, again, counts_read_again) == (2, 1, 3, 1) and found == expected


def test_backward_calls_mirror_the_forward_calls(recorded):
    """One dispatch and one combine forward; backward the combine's dispatch along the same way, then the dispatch's combine."""
    [[(_, calls)], _] = run_ranks(_layers, 2, recorded, "DeepEP 1.0", [({"ep": 2}, {})])
    made = [name for name in calls if name in ("dispatch", "combine")]
    assert made == ["dispatch", "combine"] * 2 + ["dispatch", "combine"] * 2


def _uneven_without_padding(rank, n, recorded):
    ps = ParallelState.create(n, rank, ep=n)
    flex, _ = flex_dispatcher(recorded, "HybridEP", ps)
    probs, routing = random_routing(rank, 3 + rank, 2, "plain")
    with pytest.raises(AssertionError, match="different numbers of tokens"):
        flex.dispatch(torch.zeros(3 + rank, HIDDEN), probs, routing)


def test_fake_deep_ep_detects_uneven_hybridep_inputs(recorded):
    run_ranks(_uneven_without_padding, 2, recorded)


def _constructed(rank, n, recorded, version, changes):
    ps = ParallelState.create(n, rank, ep=n)
    made, signatures = flex_dispatcher(recorded, version, ps, max_tokens=40, **changes)
    buffer = made.buffer if version == "HybridEP" else made.buffer.buffer
    assert buffer.group is ps.tp_ep.handle
    constructed = next(bound for name, bound in signatures.calls if name == VERSIONS[version][1])
    return {name: value for name, value in constructed.items() if name != "group"}, getattr(
        type(buffer), "num_sms", None
    )


def test_flags_are_passed_to_the_libraries(recorded):
    v1 = run_ranks(_constructed, 2, recorded, "DeepEP 1.0", {"moe_flex_dispatcher_num_sms": 12})[0]
    assert v1 == ({"num_nvl_bytes": 3 * 2 * HIDDEN * 2, "num_rdma_bytes": 0}, 12)
    v2 = run_ranks(_constructed, 2, recorded, "DeepEP 2", {"moe_flex_dispatcher_num_sms": 12})[0][0]
    assert v2 == {
        "num_max_tokens_per_rank": 40,
        "hidden": deepep.V2_HIDDEN_MULTIPLE,
        "num_topk": 2,
        "deterministic": False,
    }
    hybrid = run_ranks(
        _constructed,
        2,
        recorded,
        "HybridEP",
        {
            "moe_flex_dispatcher_num_sms": 12,
            "moe_hybridep_num_blocks_permute": 3,
            "moe_hybridep_num_sms_preprocessing": 99,
        },
    )[0][0]
    assert hybrid == {
        "hidden_dim": HIDDEN,
        "max_num_of_tokens_per_rank": 40,
        "num_local_experts": 4,
        "num_sms_dispatch_api": 12,
        "num_sms_combine_api": 12,
        "num_sms_preprocessing_api": 99,
        "num_blocks_permute": 3,
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_deep_ep_2_keeps_the_order_of_tokens_in_deterministic_mode(monkeypatch, deterministic):
    library, given = ModuleType("deep_ep"), {}
    library.ElasticBuffer = lambda group, **options: given.update(options)
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    moe = sections(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep").moe
    rows = DispatchBufferSpec(deepep.V2_HIDDEN_MULTIPLE, 8, torch.bfloat16, torch.device("cpu"), deterministic)
    deepep.make_dispatcher(LibrarySettings(ParallelState.single(), moe, Permutation(), buffer=rows))
    assert given.get("deterministic", False) == deterministic


def _fused(rank, n, recorded):
    ps = ParallelState.create(n, rank, ep=n)
    flex, signatures = flex_dispatcher(recorded, "HybridEP", ps, moe_permute_fusion_into_hybridep=True)
    probs, routing = random_routing(rank, 4, 2, "plain")
    run_dispatcher(flex, torch.randn(4, HIDDEN), probs, routing, torch.ones(4, HIDDEN))
    names = {"dispatch_with_permute": "fuse_permute_dispatch", "combine_with_unpermute": "fuse_unpermute_combine"}
    calls = [(name.rsplit(".", 1)[-1], bound) for name, bound in signatures.calls]
    assert [bound[names[name]] for name, bound in calls if name in names] == [True] * 4


def test_fused_permutation_is_requested_in_all_four_calls(recorded):
    run_ranks(_fused, 2, recorded)


# ---- the decision

TWO = replace(ParallelState.single(), **{name: Group(name, (0, 1), 0, 2) for name in ("ep", "tp_ep")})
FLEX = {"moe_token_dispatcher_type": "flex"}
BF16 = DispatchBufferSpec(HIDDEN, 8, torch.bfloat16, torch.device("cpu"))
TYPED = frozenset({"moe_token_dispatcher_type"})


@pytest.fixture
def without_deep_ep(monkeypatch):
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_cpu_ranks_fall_back_to_all_to_all_with_one_log_line(without_deep_ep, caplog, backend):
    check_fallback(caplog, backend)


def check_fallback(caplog, backend):
    with caplog.at_level(logging.INFO):
        moe = sections(**FLEX, moe_flex_dispatcher_backend=backend).moe
        assert type(build_dispatcher(moe, TWO, BF16, BackendPolicy(typed=TYPED))) is AllToAllDispatcher
    assert len(caplog.messages) == 1 and backend in caplog.messages[0] and "CPU" in caplog.messages[0]


@pytest.mark.parametrize(("backend", "branch"), [("deepep", "deepseek-ai/DeepEP"), ("hybridep", "DeepEP@hybrid-ep)")])
def test_missing_deep_ep_on_cuda_gives_install_instructions(without_deep_ep, backend, branch):
    moe = sections(**FLEX, moe_flex_dispatcher_backend=backend).moe
    with pytest.raises(MissingBackendError) as error:
        build_dispatcher(moe, TWO, BF16, BackendPolicy(typed=TYPED, cuda=True))
    for part in (
        f"--moe-flex-dispatcher-backend {backend}",
        "package deep_ep is not installed",
        "pip install",
        branch,
        "--on-missing-backend fallback",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("backends", "stops"),
    [
        (BackendPolicy(cuda=True), False),  # from a recipe, not typed
        (BackendPolicy(typed=TYPED), False),
        (BackendPolicy(typed=TYPED, cuda=True), True),
        (BackendPolicy("fallback", TYPED, cuda=True), False),
        (BackendPolicy("error"), True),
        (BackendPolicy("error", cuda=True), True),
    ],
)
def test_which_policies_require_deep_ep(without_deep_ep, backends, stops):
    moe = sections(**FLEX).moe
    if stops:
        with pytest.raises(MissingBackendError):
            build_dispatcher(moe, TWO, BF16, backends)
    else:
        assert type(build_dispatcher(moe, TWO, BF16, backends)) is AllToAllDispatcher


def test_deep_ep_without_hybrid_buffer_is_reported(recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake_deep_ep(recorded, "DeepEP 1.0")[0])
    moe = sections(**FLEX, moe_flex_dispatcher_backend="hybridep").moe
    with pytest.raises(MissingBackendError, match="has no HybridEPBuffer"):
        build_dispatcher(moe, TWO, BF16, BackendPolicy(typed=TYPED, cuda=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_rows_than_bf16_are_rejected_by_deep_ep(monkeypatch, dtype):
    monkeypatch.setattr(deepep, "problem", lambda: None)
    with pytest.raises(ValueError, match="supports bf16 tokens only.*--bf16"):
        build_dispatcher(sections(**FLEX).moe, TWO, replace(BF16, dtype=dtype), BackendPolicy(cuda=True))


def test_unsupported_row_width_of_deep_ep_2_is_rejected(recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake_deep_ep(recorded, "DeepEP 2")[0])
    monkeypatch.setattr("moe_trainer.backends.nccl_version", lambda: None)
    with pytest.raises(ValueError, match="multiple of 256, this one is 2880"):
        build_dispatcher(sections(**FLEX).moe, TWO, replace(BF16, hidden_size=2880), BackendPolicy(cuda=True))


@pytest.mark.parametrize(("nccl", "is_usable"), [((2, 28, 9), False), ((2, 30, 4), True), (None, True)])
def test_an_old_nccl_is_reported_before_a_run(recorded, monkeypatch, nccl, is_usable):
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake_deep_ep(recorded, "DeepEP 2")[0])
    check_nccl(monkeypatch, deepep, nccl, is_usable)


def check_nccl(monkeypatch, adapter, nccl, is_usable):
    monkeypatch.setattr("moe_trainer.backends.nccl_version", lambda: nccl)
    if is_usable:
        assert adapter.problem() is None
        return
    moe = sections(**FLEX, moe_flex_dispatcher_backend=adapter.__name__.rpartition(".")[2]).moe
    with pytest.raises(
        MissingBackendError, match="needs NCCL 2.30.4 or later, and this process has 2.28.9.*nvidia-nccl"
    ):
        build_dispatcher(moe, TWO, BF16, BackendPolicy(typed=TYPED, cuda=True))


def test_deep_ep_1_needs_no_new_nccl(recorded, monkeypatch):
    monkeypatch.setattr("moe_trainer.backends.nccl_version", lambda: (2, 28, 9))
    monkeypatch.setitem(sys.modules, "deep_ep", make_fake_deep_ep(recorded, "DeepEP 1.0")[0])
    assert deepep.problem() is None


def test_one_expert_rank_uses_the_local_dispatcher(without_deep_ep):
    made = build_dispatcher(sections(**FLEX).moe, ParallelState.single(), BF16, BackendPolicy("error", TYPED, True))
    assert type(made) is LocalDispatcher


def _train_with(rank, n, recorded, version, argv):
    ps = ParallelState.create(n, rank, ep=n)

    def flex(moe, ps, rows, *_):
        return flex_dispatcher(recorded, version, ps, max_tokens=rows.max_tokens)[0]

    build.build_dispatcher = flex  # in a forked process
    return train(argv, rank, ps, 2)


SELECTIVE = "--recompute-granularity selective --recompute-modules moe layernorm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


@pytest.mark.parametrize(("version", "how"), [("DeepEP 1.0", FULL), ("DeepEP 2", SELECTIVE), ("HybridEP", SELECTIVE)])
def test_flex_training_equals_one_process(recorded, version, how):
    check_training(recorded, version, how)


def check_training(recorded, version, how):
    """Several layers share the buffer, whose size is that of the microbatch; gradients accumulate over microbatches.

    A layer that is recomputed dispatches twice what was routed once.
    """
    argv = [*shallow(make_argv("accumulation")), "--moe-shared-expert-intermediate-size", "16"]
    spread = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "flex"]
    expected = train(argv, 0, ParallelState.single(), 2)
    outcome = run_ranks(_train_with, 2, recorded, version, [*argv, *spread, *how.split()])[0]
    differences = compare(expected, outcome)
    assert not differences, "\n".join(map(str, differences[:8]))
