"""MoE layers and dispatchers over all mappings of a layer against the local one on all tokens: outputs and every gradient."""

import functools
import logging
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from moe.layers import HIDDEN, RankGrads, build_layer, build_shard, sections, total_grads
from structure.declared import classes_of

from arguments.mechanisms.dispatchers import HIERARCHICAL, SELECTABLE
from arguments.moe import MoEArgs
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe import dispatch
from moe_trainer.moe.dispatch.allgather import AllGatherDispatcher
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.flex import DispatcherSettings
from moe_trainer.moe.dispatch.hierarchical import HierarchicalDispatcher
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.moe.dispatch.select import build_dispatcher, load_module
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import Group, ParallelState

DISPATCHERS = {each.key: each for each in SELECTABLE if each.package is None}
"""Those whose tokens are exchanged by collectives, which CPU ranks have too."""
FINE_KINDS = {
    "fine": {
        "finermoe_intermediate_granularity": 2,
        "finermoe_output_granularity": 2,
        "finermoe_intermediate_expansion": 1,
        "finermoe_output_expansion": 2,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
    },
    "fine, four slices": {
        "finermoe_output_granularity": 4,
        "finermoe_output_expansion": 2,
        "moe_router_topk": 4,
        "moe_grouped_gemm": True,
    },
    "fine, bias, drops": {
        "finermoe_output_granularity": 2,
        "finermoe_output_expansion": 4,
        "moe_concat_proj": True,
        "moe_router_enable_expert_bias": True,
        "moe_expert_capacity_factor": 0.6,
        "moe_pad_expert_input_to_capacity": True,
    },
}
KINDS = {
    "plain": {},
    "every expert": {"moe_router_topk": 8},
    "sigmoid, bias, groups, shared": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 20,
    },
    "sigmoid, bias, groups, gated shared": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
    },
    "drops": {"moe_expert_capacity_factor": 0.6},
    "padded": {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True},
    "biases": {"add_bias_linear": True},
    "gelu, biases": {"add_bias_linear": True, "swiglu": False, "moe_grouped_gemm": True},
    "latent": {"moe_latent_size": 10, "moe_shared_expert_intermediate_size": 20},
    "latent, biases": {"moe_latent_size": 10, "add_bias_linear": True},
    **FINE_KINDS,
    "probabilities on the input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
}
# tokens of every rank; capacity depends on a rank's own tokens, so those kinds take the even case
EVEN, UNEVEN, EMPTY, ONE, NONE = (6, 6, 6, 6), (5, 1, 8, 3), (4, 0, 7, 0), (0, 1, 0, 0), (0, 0, 0, 0)


def class_of(dispatcher):
    (made,) = (
        each
        for each in classes_of(dispatch)
        if issubclass(each, TokenDispatcher) and each.__module__ == load_module(dispatcher).__name__
    )
    return made


def make(dispatcher, ps):
    moe = MoEArgs(num_experts=8, **dispatcher.selected_by)
    return load_module(dispatcher).make_dispatcher(DispatcherSettings(ps, moe, Permutation()))


def tokens(sizes, dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, sum(sizes), 1, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return [part.split(list(sizes)) for part in x]


def run_layer(layer, x, weight):
    x = x.clone().requires_grad_()
    y = layer(x, PassInputs(grad_scale=0.7))
    (y * weight).sum().backward()
    return y.detach(), x.grad


@dataclass(frozen=True)
class Layout:
    """Ranks and their parallel sizes; sp: sequence parallelism."""

    n: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    order: str = "tp-cp-ep-dp-pp"
    nodes: int = 2

    def __str__(self):
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "cp", "ep", "etp") if getattr(self, name) > 1]
        return "-".join(
            [f"{self.n}ranks", *sizes, *(["sp"] if self.sp else []), *([] if self.order[:2] == "tp" else [self.order])]
        )

    def state(self, rank: int) -> ParallelState:
        return ParallelState.create(
            self.n,
            rank,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            order=self.order,
            ranks_per_node=self.n // self.nodes,
        )


@dataclass(frozen=True)
class Case:
    """A layer, its ranks, and the tokens of every rank."""

    layout: Layout
    kind: str = "plain"
    sizes: tuple[int, ...] = EVEN
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12

    def __str__(self):
        return f"{self.layout}-{self.kind}-{self.sizes}-{self.dtype}"

    def rank_sizes(self) -> tuple[int, ...]:
        return (self.sizes * 2)[: self.layout.n]


def _one_rank(rank, n, cases):
    states = {layout: layout.state(rank) for layout in dict.fromkeys(case.layout for case in cases)}
    return [[_one_layer(rank, states[case.layout], case, each) for each in DISPATCHERS.values()] for case in cases]


@functools.cache
def _run(cases):
    """Results by case, all on one start of the ranks: of every rank, by dispatcher."""
    return dict(zip(cases, zip(*run_ranks(_one_rank, cases[0].layout.n, cases)), strict=True))


def _one_layer(rank, ps, case, dispatcher):
    layout, kind, sizes, dtype = case.layout, case.kind, case.rank_sizes(), case.dtype
    args = sections(moe_aux_loss_coeff=0.0, sequence_parallel=layout.sp, **dispatcher.selected_by, **KINDS[kind])
    layer = build_shard(args, ps, dtype)
    kind_of = AllToAllDispatcher if dispatcher.groups_by_domain and ps.ep_inter.size == 1 else class_of(dispatcher)
    assert type(layer.dispatcher) is (kind_of if ps.tp_ep.size > 1 else LocalDispatcher)
    xs, weights = tokens(sizes, dtype)
    # without sequence parallelism every rank of tp holds the rows of all
    mine = [rank] if layout.sp else ps.tp.ranks
    x, weight = (torch.cat([every[of] for of in mine]) for every in (xs, weights))
    y, grad_x = run_layer(layer, x, weight)
    if layout.sp or layout.tp == 1:
        return y, grad_x, RankGrads.of(layer, ps)
    own = sum(sizes[of] for of in ps.tp.ranks[: ps.tp.rank])
    return y[own : own + sizes[rank]], grad_x[own : own + sizes[rank]], RankGrads.of(layer, ps)


def compare(case, cases=()):
    """Every dispatcher on these ranks against one process. The other cases with as many ranks run on the same start of them."""
    kind, dtype, tolerance = case.kind, case.dtype, case.tolerance
    full = build_layer(sections(moe_aux_loss_coeff=0.0, **KINDS[kind]), dtype=dtype)
    assert type(full.dispatcher) is LocalDispatcher
    xs, weights = tokens(case.rank_sizes(), dtype)
    # rank by rank through the full layer, as capacity is a rank's own; its gradients add up
    expected = [run_layer(full, x, weight) for x, weight in zip(xs, weights)]
    grads = total_grads([RankGrads.of(full, ParallelState.single())])
    found = _run(tuple(each for each in cases or [case] if each.layout.n == case.layout.n))[case]
    for dispatcher, results in zip(DISPATCHERS, zip(*found, strict=True), strict=True):

        def prefixed(what, dispatcher=dispatcher):
            return lambda text: f"{dispatcher}, {what}: {text}"

        for (y, grad_x, _), (want_y, want_x) in zip(results, expected):
            torch.testing.assert_close(y, want_y, atol=10 * tolerance, rtol=tolerance, msg=prefixed("output"))
            torch.testing.assert_close(
                grad_x, want_x, atol=10 * tolerance, rtol=tolerance, msg=prefixed("gradient of x")
            )
        totals = total_grads([named for _, _, named in results])
        assert totals.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(totals[name], grad, atol=100 * tolerance, rtol=tolerance, msg=prefixed(name))


TWO_RANKS = [Case(Layout(2, ep=2), kind) for kind in KINDS]
FOUR_RANKS = [
    *(Case(Layout(4, ep=4), sizes=sizes) for sizes in (EVEN, UNEVEN, EMPTY, ONE, NONE)),
    *(Case(Layout(4, ep=2), kind) for kind in ("sigmoid, bias, groups, shared", "padded")),
    Case(Layout(4, ep=4), sizes=UNEVEN, dtype=torch.float32, tolerance=2e-6),
]
FOLDED = [
    Case(layout, "sigmoid, bias, groups, gated shared")
    for layout in (
        Layout(2, tp=2),
        Layout(2, tp=2, sp=True),
        Layout(2, tp=2, ep=2),
        Layout(2, tp=2, ep=2, sp=True),
        Layout(2, tp=2, etp=2),
        Layout(2, tp=2, etp=2, sp=True),
        Layout(2, etp=2),
        Layout(4, tp=2, ep=4, sp=True),
        Layout(4, tp=2, ep=2, etp=2),
        Layout(4, tp=2, ep=2, etp=2, sp=True),
        Layout(4, tp=4, ep=2, sp=True),
        Layout(4, tp=4, ep=2, etp=2),
        Layout(4, ep=2, etp=2),
        Layout(4, etp=4),
        Layout(4, cp=2, ep=4),
        Layout(4, tp=2, cp=2, ep=2, etp=2, sp=True),
        Layout(4, tp=2, cp=2, ep=4),
        Layout(4, ep=2, etp=2, order="dp-ep-cp-tp-pp"),
        Layout(4, ep=4, nodes=4),
        Layout(8, tp=2, ep=4, etp=2, sp=True),
        Layout(8, tp=2, cp=2, ep=8),
        Layout(8, ep=8, nodes=4),
    )
]
ETP = Layout(4, tp=2, ep=2, etp=2, sp=True)
ETP_KINDS = [
    Case(ETP, kind)
    for kind in (
        "drops",
        "padded",
        "biases",
        "gelu, biases",
        "probabilities on the input",
        "every expert",
        "latent, biases",
        *FINE_KINDS,
    )
]
ETP_SIZES = [Case(layout, sizes=sizes) for layout in (ETP, Layout(4, etp=4)) for sizes in (UNEVEN, EMPTY, ONE, NONE)]
NO_SEQUENCES = [Case(layout, "drops") for layout in (Layout(2, tp=2), Layout(4, tp=2, ep=2), Layout(4, tp=4, etp=2))]
# Megatron-LM issue 1628: with expert tensor parallelism and one expert rank, gradients were not synchronized rightly
M1628 = [
    Case(layout, "biases") for layout in (Layout(2, etp=2), Layout(2, tp=2, etp=2), Layout(4, tp=2, etp=2, sp=True))
]


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.kind)
def test_dispatch_on_two_ranks_equals_one_process(case):
    compare(case, TWO_RANKS)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_four_ranks_with_uneven_or_no_tokens_equal_one_process(case):
    compare(case, FOUR_RANKS)


@pytest.mark.parametrize("case", FOLDED, ids=lambda case: str(case.layout))
def test_experts_folded_over_tp_cp_and_dp_equal_one_process(case):
    compare(case, FOLDED)


@pytest.mark.parametrize("case", ETP_KINDS, ids=lambda case: case.kind)
def test_every_layer_kind_with_etp_equals_one_process(case):
    """The second bias of an expert is not cut: it must be added once, and its gradient be whole."""
    compare(case, ETP_KINDS)


@pytest.mark.parametrize("case", ETP_SIZES, ids=str)
def test_etp_with_uneven_or_no_tokens_equals_one_process(case):
    compare(case, ETP_SIZES)


@pytest.mark.parametrize("case", M1628, ids=lambda case: str(case.layout))
def test_M1628_expert_tensor_ranks_without_expert_ranks(case):
    compare(case, M1628)


@pytest.mark.parametrize("case", NO_SEQUENCES, ids=lambda case: str(case.layout))
def test_tensor_ranks_without_sequence_parallelism_train(case):
    """Megatron-LM raises in training here."""
    compare(case, NO_SEQUENCES)


def _overlapped(rank, n, layout, dispatcher):
    """Outputs and gradients with and without the overlap, and what was in flight while the shared experts ran."""
    ps = layout.state(rank)
    args = sections(
        **DISPATCHERS[dispatcher].selected_by,
        sequence_parallel=layout.sp,
        moe_aux_loss_coeff=0.1,
        moe_shared_expert_intermediate_size=20,
    )
    results, in_flight = [], []
    for overlap in (False, True):
        args.moe = replace(args.moe, moe_shared_expert_overlap=overlap)
        layer = build_shard(args, ps)
        handles, start = [], layer.dispatcher.start_token_dispatch

        def start_and_remember(*rest, start=start, handles=handles):
            sent = start(*rest)
            handles.append(sent.handle.work)
            return sent

        def look(*_, handles=handles):
            in_flight.append(bool(handles and handles[0].pending))

        layer.dispatcher.start_token_dispatch = start_and_remember
        layer.shared_experts.register_forward_pre_hook(look)
        layer.shared_experts.linear_fc1.weight.register_hook(look)
        x = torch.randn(
            8, 1, HIDDEN, generator=torch.Generator().manual_seed(rank if layout.sp else 0), dtype=torch.float64
        )
        y, grad_x = run_layer(layer, x, torch.ones_like(x))
        results.append((y, grad_x, *(param.grad for param in layer.parameters())))
    assert all(torch.equal(plain, other) for plain, other in zip(*results, strict=True))
    return in_flight


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [
        (Layout(2, ep=2), "alltoall"),
        (Layout(2, tp=2, ep=2, sp=True), "alltoall"),
        (Layout(2, tp=2, ep=2), "alltoall"),
        (Layout(4, ep=4), "hierarchical"),
    ],
    ids=str,
)
def test_overlapped_shared_experts_give_bitwise_equal_results(layout, dispatcher):
    """In forward and backward. The state of the all-to-all (between nodes) is checked inside the shared experts."""
    for in_flight in run_ranks(_overlapped, layout.n, layout, dispatcher):
        assert in_flight == [False, False, True, True]


def _run_indivisible_rows(rank, n):
    layer = build_layer(sections(), ParallelState.create(n, rank, tp=n))
    with pytest.raises(ValueError, match="5 rows do not divide evenly"):
        layer(torch.zeros(5, 1, HIDDEN, dtype=torch.float64))


def test_rows_not_divisible_by_tensor_ranks_are_rejected():
    run_ranks(_run_indivisible_rows, 2)


def test_experts_not_divisible_by_expert_ranks_are_rejected():
    single = Group.single("any")
    for name, size in (("etp", 5), ("ep", 3)):
        ps = replace(ParallelState.single(), **{name: replace(single, ranks=tuple(range(size)), size=size)})
        with pytest.raises(ValueError, match=f"cannot be (sharded|divided evenly) over --expert-.*size {size}"):
            build_layer(sections(), ps)


def _rows(rank, n, dispatcher):
    """Return the rows that the experts of a rank receive; every value encodes its source."""
    ps = ParallelState.create(n, rank, ep=n, ranks_per_node=max(1, n // 2))
    num_tokens = 3 + rank
    generator = torch.Generator().manual_seed(rank)
    x_TH = (100.0 * rank + torch.arange(num_tokens)).unsqueeze(1).expand(-1, 2).contiguous()
    routing_TE = torch.rand(num_tokens, 6, generator=generator) < 0.5
    routing_TE[:, 3] = False  # an expert that no token takes
    probs_TE = torch.where(routing_TE, torch.rand(num_tokens, 6, generator=generator), 0.0)
    made = make(DISPATCHERS[dispatcher], ps)
    # two in flight, ended in the other order
    first, second = made.dispatch(x_TH, probs_TE, routing_TE), made.dispatch(x_TH + 0.5, probs_TE, routing_TE)
    sent_back = made.combine(second.x_RH, second), made.combine(first.x_RH, first)
    counts = routing_TE.sum(1, keepdim=True)
    assert torch.equal(sent_back[0], (x_TH + 0.5) * counts) and torch.equal(sent_back[1], x_TH * counts)
    return x_TH, probs_TE, routing_TE, first.x_RH, first.probs_R, first.tokens_per_expert_e


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("n", [2, 3])
def test_dispatched_rows_are_sorted_by_expert_rank_and_token(n, dispatcher):
    results = run_ranks(_rows, n, dispatcher)
    x, probs, routing = (torch.cat([result[part] for result in results]) for part in range(3))
    local = LocalDispatcher(Permutation()).dispatch(x, probs, routing)
    assert torch.equal(torch.cat([result[3] for result in results]), local.x_RH)
    assert torch.equal(torch.cat([result[4] for result in results]), local.probs_R)
    assert sum((result[5] for result in results), []) == local.tokens_per_expert_e


def _exchange(rank, n, dtype):
    x = torch.randn(4, 3).to(dtype).requires_grad_()
    ps = ParallelState.create(n, rank, ep=n, ranks_per_node=1)
    probs = torch.tensor([[0.5, 0.0, 0.0, 0.5]] * 4, dtype=torch.float32, requires_grad=True)
    results = []
    for each in DISPATCHERS.values():
        sent = make(each, ps).dispatch(x, probs, probs > 0)
        assert sent.x_RH.dtype == dtype and sent.probs_R.dtype == torch.float32
        y = make(each, ps).combine((sent.x_RH * sent.probs_R.unsqueeze(1)).to(dtype), sent)
        assert y.dtype == dtype
        y.float().sum().backward()
        assert x.grad.dtype == dtype and probs.grad.dtype == torch.float32
        results.append((y.detach(), x.grad, probs.grad))
        x.grad = probs.grad = None
    for others in results[1:]:
        assert all(torch.equal(ours, other) for ours, other in zip(results[0], others, strict=True))
    assert torch.equal(results[0][0], x)


def test_half_precision_rows_with_fp32_probabilities():
    run_ranks(_exchange, 2, torch.bfloat16)


def _count_rows_between_nodes(rank, n):
    """Return the rows of tokens that leave the node in a forward and a backward pass, and what is expected."""
    layout = Layout(n, ep=n)
    ps, exchange, sent = layout.state(rank), dist.all_to_all_single, [0]

    def counted(out, x, receive=None, send=None, group=None, async_op=False):
        if x.dim() == 2 and x.shape[1] == HIDDEN:
            ranks = dist.get_process_group_ranks(group)
            sent[0] += sum(rows for peer, rows in zip(ranks, send, strict=True) if peer // 2 != rank // 2)
        return exchange(out, x, receive, send, group=group, async_op=async_op)

    dist.all_to_all_single = counted  # in a forked process
    generator = torch.Generator().manual_seed(rank)
    routing = torch.zeros(20, 8, dtype=torch.bool).scatter_(1, torch.rand(20, 8, generator=generator).topk(4)[1], True)
    x, counts, experts = torch.randn(20, HIDDEN, requires_grad=True), [], []
    for kind in (AllToAllDispatcher, HierarchicalDispatcher):
        sent[0], dispatcher = 0, kind(ps, Permutation())
        state = dispatcher.dispatch(x, routing.float(), routing)
        experts.append((state.x_RH.detach(), state.probs_R.detach(), state.tokens_per_expert_e))
        dispatcher.combine(state.x_RH, state).sum().backward()
        counts.append(sent[0])
    assert all(torch.equal(one, other) for one, other in zip(*(found[:2] for found in experts), strict=True))
    assert experts[0][2] == experts[1][2]
    other_node = routing[:, 4:] if rank < 2 else routing[:, :4]
    return counts, int(other_node.sum()), int(other_node.any(1).sum())


def test_token_crosses_to_a_node_once():
    """Rows that leave the node, of tokens, results and both gradients; the experts get the same rows."""
    counts, pairs, tokens = zip(*run_ranks(_count_rows_between_nodes, 4), strict=True)
    flat, once = map(sum, zip(*counts, strict=True))
    assert (flat, once) == (4 * sum(pairs), 4 * sum(tokens)) and once < 0.6 * flat


def test_one_node_uses_the_all_to_all(caplog):
    ps = replace(ParallelState.single(), **{name: replace(Group.single(name), size=4) for name in ("ep", "tp_ep")})
    with caplog.at_level(logging.INFO):
        assert type(build_dispatcher(sections(**HIERARCHICAL.selected_by).moe, ps)) is AllToAllDispatcher
    assert "in one node" in caplog.text


def test_allgather_sums_over_ranks_in_the_wider_dtype():
    """Of tokens and probabilities, as in Megatron-Core; the result has that of the tokens."""
    dispatcher = AllGatherDispatcher(ParallelState.single(), Permutation())
    routing_TE = torch.ones(3, 2, dtype=torch.bool)
    state = dispatcher.dispatch(torch.ones(3, HIDDEN, dtype=torch.bfloat16), routing_TE.float(), routing_TE)
    assert dispatcher.combine_preprocess(state.x_RH, state).dtype == torch.float32
    assert dispatcher.combine(state.x_RH, state).dtype == torch.bfloat16
