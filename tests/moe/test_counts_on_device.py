"""HybridEP with a budget: counts that stay on the device, rows that are not there, and an iteration that is repeated because rows were lost."""

import logging
import sys
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from moe.fake_deep_ep import HYBRID_EP
from moe.layers import HIDDEN, build_shard, sections
from moe.test_flex import StandIn, flex_dispatcher
from moe.test_receive_buffer import KINDS, run_passes
from training.layouts import create_groups, make_argv, shallow

from arguments import parse_args
from arguments.mechanisms.placements import PLACEMENTS
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.model import build
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.dispatch.hybridep import HybridEPDispatcher
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.receive import agreement
from moe_trainer.moe.receive.budget import ReceiveBudget, count_overflows, get_stashes, receive_scope
from moe_trainer.ops.expert_mlp import ExpertMLPKernels, ExpertWeights, expert_mlp
from moe_trainer.ops.grouped_gemm import GROUPED_MM
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training import step
from moe_trainer.verification import training_trace

RECORDED = {"github hybrid-ep": HYBRID_EP}
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
FUSED = "--moe-permute-fusion-into-hybridep"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PAD = "--moe-hybridep-pad-uneven-dispatch-inputs"
DROPOUT = "--hidden-dropout 0.1"
RECOMPUTE = (
    DROPOUT,
    f"{DROPOUT} --recompute-granularity selective --recompute-modules moe",
    f"{DROPOUT} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)
ALL_TO_ALL = f"--moe-token-dispatcher-type alltoall {DROPOUT}"


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", [Activation("silu", gated=True), Activation("gelu")])
def test_values_in_unused_rows_have_no_effect(activation, biases):
    generator, counts, rows = torch.Generator().manual_seed(1), [3, 0, 4], 12
    width = 16 if activation.gated else 8
    w1, w2 = torch.randn(3, width, 4, generator=generator), torch.randn(3, 4, 8, generator=generator)
    x, p, weight = (
        torch.randn(7, 4, generator=generator),
        torch.rand(7, generator=generator),
        torch.randn(7, 4, generator=generator),
    )
    results = []
    for behind in (0, rows - 7):

        def padded(x, behind=behind):
            return torch.cat([x, torch.full((behind, *x.shape[1:]), torch.nan)]).requires_grad_()

        tensors = padded(x), padded(p), w1.clone().requires_grad_(), w2.clone().requires_grad_()
        added = {name: w[:, :, 0].clone().requires_grad_() for name, w in (("b1_eG", w1), ("b2_eH", w2)) if biases}
        x_RH, probs_R, *weights = tensors
        tokens = torch.tensor(counts) if behind else counts
        kernels = ExpertMLPKernels(gemms=GROUPED_MM)
        y = expert_mlp(x_RH, probs_R, ExpertWeights(*weights, **added), tokens, activation, kernels=kernels)
        y.backward(padded(weight).detach())
        results.append(
            [each[:7] for each in (y, tensors[0].grad, tensors[1].grad)] + [tensors[2].grad, tensors[3].grad]
        )
        results[-1] += [bias.grad for bias in added.values()]
    for one, other in zip(*results, strict=True):
        assert not other.isnan().any()
        torch.testing.assert_close(other, one, rtol=1e-6 if biases else 0.0, atol=1e-6 if biases else 0.0)


def test_device_counts_require_grouped_gemm():
    x, w1, w2 = torch.zeros(4, 4), torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    with pytest.raises(ValueError, match="need a grouped GEMM"):
        expert_mlp(x, None, ExpertWeights(w1, w2), torch.tensor([4]), Activation("gelu"), allow_grouped=False)


class Observer:
    """An observer of an iteration."""

    def attach(self) -> None:
        pass

    again = before_update = attach


def watch_reads(reads: Counter) -> None:
    """Count the reads of tensor values in moe_trainer/moe by file: each would be a host wait on a device."""

    def counted(read):
        def asked(tensor, *rest):
            _, here, file = sys._getframe(1).f_code.co_filename.partition("moe_trainer/moe/")
            reads.update([file] if here else [])
            return read(tensor, *rest)

        return asked

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
        setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))


def train(
    rank: int,
    n: int,
    flags: str,
    small: tuple[int, ...] = (),
    kind: str = "deepseek",
    watched: bool = False,
    library: str | StandIn | None = "HybridEP",
) -> dict:
    """Train three steps over a stand-in, or without one: then the all-to-all replaces the library. On four ranks two microbatches.

    small: at the second step the first MoE layer of these ranks has space for hardly any row. watched: by an observer.
    """
    argv = [*shallow(make_argv(kind)), *f"--expert-model-parallel-size 2 --global-batch-size {2 * n} {flags}".split()]
    ps, log_lines = create_groups(argv, rank, n), []
    found = {
        "attempts": [],
        "counts": set(),
        "evaluated": set(),
        "factors": [],
        "pages": [],
        "repeats": [],
        "asked": 0,
        "reads": Counter(),
        "passes": 0,
    }
    if "flex" in argv and library:
        build.build_dispatcher = lambda moe, ps, rows, *_: flex_dispatcher(
            RECORDED,
            library,
            ps,
            max_tokens=rows.max_tokens,
            moe_hybridep_pad_uneven_dispatch_inputs=PAD in argv,
            moe_permute_fusion_into_hybridep=FUSED in argv,
            **{each.dest: getattr(moe, each.dest) for each in PLACEMENTS if each.dest},
            **{dest: getattr(moe, dest) for dest in (library.flags if isinstance(library, StandIn) else ())},
        )[0]
    attempt, train_step, forward = step.forward_backward_reduce, training_trace.train_step, Experts.forward

    def shrinking(run, state, *rest):
        layers = [layer for chunk in run.chunks for layer in chunk.moe_layers()]
        if state.iteration and rank in small:
            # what was enough for one iteration may be too little for the next
            layers[0].receive.budget.adopt(0.1 if state.iteration == 1 else 3.0)
        if watched:
            rest = (*rest, Observer())
        before, passes = Counter(reads), found["passes"]
        result = train_step(run, state, *rest)
        found["reads"], found["passes"] = reads - before, found["passes"] - passes
        found["pages"].append([pool.num_device for stash in get_stashes(run.chunks) for pool in stash.pools])
        moved = (layer.placement.moved_tokens_2P for layer in layers)
        found["moved"] = sum(int(each_2P[0].sum()) for each_2P in moved if each_2P is not None)
        found["repeats"].append(result.num_repeats)
        found["factors"].append([layer.receive.budget.factor for layer in layers if layer.receive.budgets])
        return result

    def counting(*args, **kwargs):
        found["attempts"].append(kwargs.get("counts_on_host", False))
        return attempt(*args, **kwargs)

    def looking(self, x_RH, probs_R, counts_e, *rest, **options):
        found["counts" if self.training else "evaluated"].add(type(counts_e))
        found["passes"] += self.training
        return forward(self, x_RH, probs_R, counts_e, *rest, **options)

    def reducing(x, *rest, **options):
        found["asked"] += sys._getframe(1).f_code.co_name == "count_small_buffers"
        return all_reduce(x, *rest, **options)

    class LineHandler(logging.Handler):
        def emit(self, record):
            log_lines.append(record.getMessage())

    all_reduce, collectives.all_reduce = collectives.all_reduce, reducing
    reads = Counter()
    watch_reads(reads)
    step.forward_backward_reduce, training_trace.train_step, Experts.forward = (
        counting,
        shrinking,
        looking,
    )  # in a forked process
    agreement.logger.addHandler(LineHandler())
    outcome = training_trace.train(parse_args(argv, n), rank, ps, 3)
    return {
        **found,
        "log_lines": log_lines,
        "losses": outcome.losses,
        "norms": outcome.grad_norms,
        "weights": outcome.weights,
        "evaluation": outcome.evaluation,
    }


@cache
def trained(ranks: int, flags: str, *rest) -> list[dict]:
    """Return what `train` finds on the ranks; the tests share the runs with equal flags."""
    return run_ranks(train, ranks, flags, *rest)


def assert_equal(one: dict, other: dict, tolerance: float = 0.0) -> None:
    for name in ("losses", "norms", "evaluation"):
        assert one[name] == (
            other[name]
            if tolerance == 0.0
            else pytest.approx(other[name], rel=tolerance)
            if name != "losses"
            else [pytest.approx(losses, rel=tolerance) for losses in other[name]]
        ), name
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, other["weights"][name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_device_counts_give_the_results_of_all_to_all(recompute):
    check_device_counts(f"{FLEX} --moe-expert-rank-capacity-factor 3 {recompute}")


def check_device_counts(flags, library="HybridEP"):
    ours = trained(2, flags, (), "deepseek", False, library)
    for result in ours:
        assert result["counts"] == {torch.Tensor} and result["attempts"] == [False] * 3 and not result["log_lines"]
    assert_equal(trained(2, ALL_TO_ALL)[0], ours[0], 1e-5)


CLONES = "--moe-clone-hot-experts 1"
BLOCKWISE = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise"


@pytest.mark.parametrize(
    ("library", "more"),
    [
        ("HybridEP", RECOMPUTE[1]),
        (None, DROPOUT),
        ("HybridEP", BLOCKWISE),
        ("HybridEP", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer"),
    ],
    ids=["HybridEP", "all-to-all", "HybridEP, fp8", "HybridEP, MXFP8 with gathered weights"],
)
def test_clones_are_planned_without_the_host(library, more):
    """Equal to training without clones (in fp8 other blocks of tokens share scales), and the host reads nothing."""
    check_clones(FLEX, library, more)


def check_clones(flex, library, more):
    flags = f"{flex} --moe-expert-rank-capacity-factor 3 {more}"
    ours = trained(2, f"{flags} {CLONES}", (), "deepseek", False, library)
    for result in ours:
        assert result["counts"] == {torch.Tensor} and set(result["reads"]) <= {"balancing.py"}, result["reads"]
        assert result["moved"] > 0
    plain = trained(2, flags if "fp8" in more else ALL_TO_ALL)
    assert_equal(plain[0], ours[0], 2e-2 if "fp8" in more else 1e-5)


STASH = "--moe-paged-stash --moe-paged-stash-page-size 4 --moe-paged-stash-buffer-size-factor-cuda"
ZERO_BUBBLE = "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"


def check_stash(ranks: int, flags: str, factor: float) -> list[dict]:
    """Train with a stash: nothing but the iteration that measures has counts on the host."""
    flags = f"{FLEX} --moe-expert-rank-capacity-factor 3 {flags}"
    plain, ours = trained(ranks, flags), trained(ranks, f"{flags} {STASH} {factor}")
    for one, other in zip(plain, ours, strict=True):
        for name in ("losses", "norms", "evaluation"):
            assert one[name] == other[name], name
        assert set(other["reads"]) <= {"balancing.py"}, "in the last iteration"
    assert_equal(plain[0], ours[0])
    return ours


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (
            4,
            "--moe-layer-freq 1 --num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        ),
        (4, f"{ZERO_BUBBLE} {DROPOUT}"),
    ],
)
def test_paged_stash_with_device_counts_changes_nothing(ranks, flags):
    """With layers of multi-token prediction."""
    for result in check_stash(ranks, flags, 3.0):
        assert result["attempts"] == [False] * 3 and not result["log_lines"]


def test_iteration_with_a_full_stash_is_repeated_exactly():
    """And ranks grow their stash together: the one that receives fewer tokens may receive more in the next iteration."""
    results = check_stash(2, DROPOUT, 0.5)
    assert all(result["attempts"][:3] == [False, False, True] for result in results)
    assert "iteration 2: the paged stash was full" in results[0]["log_lines"][0]
    pages, other = (result["pages"] for result in results)
    assert pages == other and 0 < pages[1][0] < pages[2][0]


def test_ranks_agree_on_buffers_that_grow_while_the_stash_measures():
    """Their factors are enough for the next iteration, so nothing is repeated, and one line says so."""
    two_microbatches = f"{DROPOUT} --global-batch-size 8"
    results = trained(2, f"{FLEX} --moe-expert-rank-capacity-factor 0.3 {two_microbatches} {STASH} 4")
    for result in results:
        assert result["attempts"][:2] == [False, False], "the second iteration fits"
        assert result["factors"][0] == results[0]["factors"][0]
    assert "iteration 1: " in results[0]["log_lines"][0] and "no token is lost" in results[0]["log_lines"][0]
    assert not any("iteration 1" in line for line in results[0]["log_lines"][1:] + results[1]["log_lines"])
    assert_equal(trained(2, f"{FLEX} --moe-expert-rank-capacity-factor 3 {two_microbatches}")[0], results[0])


def test_ranks_with_host_counts_log_an_iteration_of_growth_in_one_line():
    tight = f"{FLEX} {FUSED} --moe-expert-rank-capacity-factor 0.3"
    for rank, result in enumerate(trained(2, tight)):
        assert result["attempts"] == [False] * 3
        lines = [line for line in result["log_lines"] if line.startswith("iteration 1: ")]
        assert len(lines) == 1 and f"on rank {rank} grew from 0.3 to" in lines[0] and "ranks: 1" in lines[0]
        assert len(result["log_lines"]) == len({line.partition(":")[0] for line in result["log_lines"]})


def test_quantized_experts_give_the_bits_of_host_counts():
    """The library pads each expert's tokens while it sorts them."""
    host = trained(2, f"{FLEX} {BLOCKWISE}")
    device = trained(2, f"{FLEX} --moe-expert-rank-capacity-factor 3 {BLOCKWISE}")
    for ours, theirs in zip(device, host, strict=True):
        assert ours["counts"] == {torch.Tensor} and theirs["counts"] == {list}
        assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("ranks", "flags", "more", "small"),
    [
        (2, RECOMPUTE[0], "", (0,)),
        (2, RECOMPUTE[1], "", (0, 1)),
        (2, f"{OVERLAP} --moe-per-layer-logging", "", (0,)),
        (2, RECOMPUTE[2], "--rerun-mode disabled --no-check-for-nan-in-loss-and-grad", (1,)),
        (4, "--pipeline-model-parallel-size 2", "", (3,)),  # the first stage has no such layers at all
    ],
)
def test_iteration_with_lost_rows_is_repeated_exactly(ranks, flags, more, small):
    """It is repeated with space for all rows: the same numbers to the last bit as with space from the start (experts with biases: to rounding)."""
    argv = f"{FLEX} --moe-expert-rank-capacity-factor 3 {flags}"
    enough, results = trained(ranks, argv), trained(ranks, f"{argv} {more}", small)
    for rank, result in enumerate(results):
        assert result["attempts"] == [False, False, True, False] and result["repeats"] == [0, 1, 0]
        for name in ("losses", "norms", "evaluation"):
            assert result[name] == enough[rank][name], name
    # ranks agree, so that all have buffers of one size
    assert len({tuple(result["factors"][1]) for result in results if result["factors"][1]}) == 1
    assert_equal(enough[0], results[0])
    [line] = results[0]["log_lines"]
    assert "iteration 2" in line and "repeated" in line and not any(result["log_lines"] for result in results[1:])
    assert "grew from 0.1 to " in line, "the factor that was in force"


def test_capacity_factor_named_in_the_log_suffices():
    tight = f"{FLEX} --moe-expert-rank-capacity-factor 0.3"
    results = trained(2, tight)
    assert results[0]["attempts"][:2] == [False, True]
    factor = max(max(result["factors"][-1]) for result in results)
    named = [
        line
        for line in results[0]["log_lines"]
        if f"--moe-expert-rank-capacity-factor {factor:g} would have been enough" in line
    ]
    assert named[-1:] == results[0]["log_lines"][-1:]
    again = trained(2, f"{FLEX} --moe-expert-rank-capacity-factor {factor:g}")
    assert again[0]["attempts"] == [False] * 3
    assert_equal(again[0], results[0])


@pytest.mark.parametrize(
    ("ranks", "flags", "small"),
    [
        (2, RECOMPUTE[1], (0, 1)),
        (2, RECOMPUTE[2], (0, 1)),
        (2, "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", (0, 1)),
        (4, "--pipeline-model-parallel-size 2", (2, 3)),  # the first stage has no such layers
    ],
)
def test_all_to_all_without_host_counts_loses_no_token(ranks, flags, small):
    """Without the library: an iteration whose tokens do not fit is repeated, and all bits are those of a run without a budget."""
    # recomputed values have the same bits
    plain = trained(ranks, ALL_TO_ALL if DROPOUT in flags else f"--moe-token-dispatcher-type alltoall {flags}")
    command = f"{FLEX} --moe-expert-rank-capacity-factor 3 {flags}"
    results = trained(ranks, command, small, "deepseek", False, None)
    for ours, theirs in zip(results, plain, strict=True):
        assert ours["attempts"] == [False, False, True, False] and ours["counts"] <= {torch.Tensor, list}
        assert_equal(ours, theirs)
    [line] = results[0]["log_lines"]
    factor = max(max(result["factors"][1], default=0) for result in results)
    assert "iteration 2" in line and f"--moe-expert-rank-capacity-factor {max(factor, 3):g} would" in line


def one_layer(rank: int, n: int, layout: dict, kind: str, factor: float) -> tuple[list, list[int], int]:
    """Results of a layer with counts on the host and, in fixed buffers, on the device; whether tokens did not fit, and the factor that would do."""
    ps = ParallelState.create(n, rank, **layout) if n > 1 else ParallelState.single()
    x, weight = torch.randn(2, 12, 1, HIDDEN, generator=torch.Generator().manual_seed(rank))
    layer = build_shard(
        sections(
            moe_token_dispatcher_type="alltoall",
            moe_expert_rank_capacity_factor=factor,
            **{**KINDS[kind], "moe_grouped_gemm": True},
        ),
        ps,
        torch.float32,
    )
    assert layer.receive.budget.allows_device_counts
    results, counts = [], []
    for layer.receive.budget.counts_on_device in (False, True):
        layer.zero_grad()
        (host, _) = run_passes(layer, x, weight, 1)
        results.append(host)
        counts.append(0 if layer.receive.budget.overflow is None else int(layer.receive.budget.overflow))
    return results, counts, layer.receive.budget.factor


@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "shared, sigmoid"])
def test_fixed_slots_equal_host_counts(layout, kind):
    n = layout.get("ep", 1) * layout.get("etp", 1)
    for (host, device), overflow, factor in run_ranks(one_layer, n, layout, kind, 4.0):
        assert overflow == [0, 0] and factor == 4.0
        for one, other in zip(host, device, strict=True):
            assert torch.equal(one, other)


def test_sufficient_factor_holds_the_fullest_pair_of_ranks():
    """A rank may receive few tokens in all, and more from one rank than their slot holds."""
    found = run_ranks(one_layer, 2, {"ep": 2}, "plain", 0.4)
    assert [max(overflow) for _, overflow, _ in found] == [1, 1]
    sufficient = max(factor for *_, factor in found)
    assert not any(max(overflow) for _, overflow, _ in run_ranks(one_layer, 2, {"ep": 2}, "plain", sufficient))
    assert any(max(overflow) for _, overflow, _ in run_ranks(one_layer, 2, {"ep": 2}, "plain", sufficient - 0.09))


@pytest.mark.parametrize("flags", [*RECOMPUTE, PAD])
def test_host_reads_counts_only_in_evaluation(flags):
    """An evaluation's flags are not read. Waits are counted on devices, too (tests/emulated_cuda/test_deep_ep.py)."""
    for result in trained(2, f"{FLEX} --moe-expert-rank-capacity-factor 3 {flags}"):
        assert result["counts"] == {torch.Tensor} and result["evaluated"] == {list}
        assert set(result["reads"]) <= {"balancing.py"}  # the losses of the routers, once per iteration
    for result in trained(2, f"{FLEX} {PAD}"):
        assert result["counts"] == {list} and result["reads"]["dispatch/hybridep.py"] == result["passes"] > 0


@pytest.mark.parametrize(
    ("ranks", "flags", "asked"), [(2, FUSED, 0), (2, DROPOUT, 3), (4, "--pipeline-model-parallel-size 2", 3)]
)
def test_lost_rows_are_checked_only_if_possible(ranks, flags, asked):
    """All ranks alike: the first of two stages has no MoE layer."""
    results = trained(ranks, f"{FLEX} --moe-expert-rank-capacity-factor 3 {flags}")
    assert [result["asked"] for result in results] == [asked] * ranks


def test_step_records_use_host_counts():
    """With counts on the device, rows after the last one are undefined and would be recorded."""
    for result in trained(2, f"{FLEX} --moe-expert-rank-capacity-factor 3", (), "deepseek", True):
        assert result["counts"] == {list}


def test_device_counts_are_enabled_only_within_the_context():
    receive = ReceiveBudget("layer", 1.0, 2)
    receive.allows_device_counts = True
    receive.allocate_flag(torch.device("cpu"))
    layer = SimpleNamespace(receive=SimpleNamespace(budgets=[receive]), activations=ActivationPolicy())
    chunk = type("Chunk", (), {"moe_layers": lambda self: [layer]})()
    assert not receive.counts_on_device
    with receive_scope([chunk]):
        assert receive.counts_on_device
        receive.note_overflow(torch.tensor([0], dtype=torch.int32))
        assert count_overflows([chunk], torch.device("cpu")).tolist() == [0.0]
        receive.note_overflow(torch.tensor([1], dtype=torch.int32))
        receive.note_overflow(torch.tensor([0], dtype=torch.int32))
    assert not receive.counts_on_device and count_overflows([chunk], torch.device("cpu")).tolist() == [1.0]
    with receive_scope([chunk], enabled=False):
        assert not receive.counts_on_device and count_overflows([chunk], torch.device("cpu")).tolist() == [0.0]


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({}, None),
        ({"add_bias_linear": True}, None),
        ({"moe_grouped_gemm": False}, "one by one"),
        ({"moe_permute_fusion_into_hybridep": True}, "fused combine"),
    ],
)
def test_reason_for_host_wait_is_logged_once(caplog, changes, because):
    args = sections(**{"moe_grouped_gemm": True, "moe_expert_rank_capacity_factor": 1.5, **changes})
    layers = [build_shard(args, ParallelState.single(), torch.float32) for _ in range(2)]
    dispatcher = HybridEPDispatcher(ParallelState.single(), None, fused=args.moe.moe_permute_fusion_into_hybridep)
    with caplog.at_level(logging.INFO):
        attach_dispatcher(layers, dispatcher)
    log_lines = [line for line in caplog.messages if "--moe-expert-rank-capacity-factor" in line]
    assert len(log_lines) == (because is not None) and all(because in line for line in log_lines)
    assert all(layer.receive.budget.allows_device_counts == (because is None) for layer in layers)
