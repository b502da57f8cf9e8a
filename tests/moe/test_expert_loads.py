"""Loads of the experts over tensor, context, data, expert and pipeline ranks: exactly those of one process on the same tokens."""

from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from moe.layers import Chunk, build_layer, build_shard, sections
from moe.test_balancing_ranks import SCALE, S, microbatches
from moe.test_dispatch_ranks import Layout

from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe import expert_loads
from moe_trainer.moe.balancing import collect_moe_metrics, reset_iteration, update_expert_bias
from moe_trainer.moe.expert_loads import _num_rank_rows, collect_expert_loads
from moe_trainer.parallel.state import Group, ParallelState

KINDS = {
    "plain": {},
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
    },
}
MAPPINGS = (
    Layout(2, tp=2),
    Layout(2, cp=2),
    Layout(2, ep=2),
    Layout(4, tp=2, ep=2, etp=2, sp=True),
    Layout(4, tp=2, cp=2, sp=True),
    Layout(4),
)


def collect_loads(args, ps, dp_ranks):
    """Two iterations' tables of one layer, whose data ranks are these."""
    layer, tables = build_shard(args, ps), []
    for _ in range(2):
        for dp_rank in dp_ranks:
            for x in microbatches(dp_rank):
                x = x.chunk(ps.cp.size)[ps.cp.rank]
                layer(x.chunk(ps.tp.size)[ps.tp.rank] if args.sp else x, PassInputs(grad_scale=SCALE))
        update_expert_bias([Chunk(layer)], ps)
        tables.append(collect_expert_loads([Chunk(layer)], ps, 8, 2)[0])
        collect_moe_metrics([Chunk(layer)], ps, 2, args.moe, 2)
    return tables


def make_arguments(changes, sp=False):
    args = sections(moe_token_dispatcher_type="alltoall", sequence_parallel=sp, moe_per_layer_logging=True, **changes)
    args.sp = sp
    return args


def _collect_on_rank(rank, n, layout):
    ps = layout.state(rank)
    return [collect_loads(make_arguments(changes, layout.sp), ps, [ps.dp.rank]) for changes in KINDS.values()]


@pytest.mark.parametrize("layout", MAPPINGS, ids=str)
def test_expert_loads_equal_one_process(layout):
    dp = layout.n // (layout.tp * layout.cp)
    expected = [collect_loads(make_arguments(changes), ParallelState.single(), range(dp)) for changes in KINDS.values()]
    for every in run_ranks(_collect_on_rank, layout.n, layout):
        for tables, wanted in zip(every, expected, strict=True):
            for table, want in zip(tables, wanted, strict=True):
                assert (
                    table.dtype == torch.float64 and table[0, :8].sum() == dp * 2 * S * 2 * 2
                )  # microbatches, tokens, sequences, top-k
                torch.testing.assert_close(table[:, :12], want[:, :12], rtol=1e-7, atol=0)
                assert torch.equal(table[:, 12:], table[:, :8].view(2, layout.ep, -1).sum(2)), (
                    "every rank computes the tokens of its own experts"
                )
    assert expected[1][1][0, 10] > 0.0  # the bias has moved


def _collect_with_drops(rank, n):
    ps = ParallelState.create(n, rank, ep=n)
    args = make_arguments({"moe_expert_capacity_factor": 0.5})
    return collect_loads(args, ps, [ps.dp.rank])[0]


def test_dropped_tokens_count_as_load():
    """Capacity is per rank and microbatch, so data ranks drop what one process drops of their microbatches."""
    expected = collect_loads(make_arguments({"moe_expert_capacity_factor": 0.5}), ParallelState.single(), range(2))[0]
    for table in run_ranks(_collect_with_drops, 2):
        assert table[0, 8] == expected[0, 8] > 0
        assert torch.equal(table[0, :8], expected[0, :8]) and table[0, :8].sum() == 2 * 2 * S * 2 * 2


def _stage(rank, n):
    ps = ParallelState.create(n, rank, pp=2)
    args = make_arguments({})
    layers = []
    if ps.pp.rank == 1:
        layer = build_layer(args, ps, layer_number=2)
        layer(microbatches(ps.dp.rank)[0], PassInputs(grad_scale=SCALE))
        layers.append(layer)
    return collect_expert_loads([Chunk(*layers)], ps, 8, 2)[0]


def test_stages_without_experts_receive_all_loads():
    first, second = run_ranks(_stage, 2)
    assert torch.equal(first, second)
    assert first[0].sum() == 0 and first[1, :8].sum() == S * 2 * 2 and first[1, 11] == 1.0


def test_evaluation_and_recomputation_do_not_count():
    args = make_arguments({})
    layer = build_shard(args, ParallelState.single())
    with torch.no_grad():
        layer(microbatches(0)[0], PassInputs(grad_scale=SCALE))
    layer.eval()
    layer(microbatches(0)[0], PassInputs(grad_scale=SCALE))
    assert layer.router.tokens_per_expert.sum() == 0


def test_loads_are_not_counted_without_the_flag():
    layer = build_shard(sections(), ParallelState.single())
    assert layer.router.tokens_per_expert is None


def _cloning(rank, n):
    ps = ParallelState.create(n, rank, ep=n)
    layer, planned = build_shard(make_arguments({"moe_clone_hot_experts": 2}), ps), []
    with torch.no_grad():  # the first rank's experts are the hot ones
        layer.router.weight[:, 0] = torch.tensor([9.0, 6.0, 5.0, 4.0, 0.0, -3.0, -6.0, -9.0])
    plan = layer.placement.plan
    layer.placement.plan = lambda *given: planned.append(plan(*given)) or planned[-1]
    run, computed = layer.experts.forward, []
    layer.experts.forward = lambda x_RH, *given, **options: computed.append(len(x_RH)) or run(x_RH, *given, **options)
    for _ in range(2):  # the iteration is repeated
        reset_iteration([Chunk(layer)])
        planned.clear()
        computed.clear()
        for x in microbatches(ps.dp.rank):
            layer(x.abs(), PassInputs(grad_scale=SCALE))
    table, _ = collect_expert_loads([Chunk(layer)], ps, 8, 2)
    found = table, sum(routing.plan.num_tokens.sum().item() for routing, _ in planned), sum(computed)
    layer.eval()
    layer(microbatches(ps.dp.rank)[0].abs(), PassInputs(grad_scale=SCALE))
    assert not layer.placement.moved_tokens_2P.any(), "evaluations are not counted"
    return found


def test_rows_of_clones_are_counted_once():
    """Also the load of each rank with its clones, which is what its experts have computed."""
    from moe_trainer.metrics.routing_health import routing_health

    (table, planned, first), (other, again, second) = run_ranks(_cloning, 2)
    assert torch.equal(table, other) and table[0, 9] == planned == again > 0
    assert table[0, 12:].tolist() == [first, second]
    found = routing_health(table, expert_ranks=2, layer_share=0.1)
    before = table[0, :4].sum() / table[0, :8].sum() * 2
    assert found["rank_max_over_mean_before_cloning"] == [before] and 1 <= found["rank_max_over_mean"][0] < before
    assert found["straggler_cost"] == pytest.approx(0.1 * (found["rank_max_over_mean"][0] - 1))


SENT = (
    (Layout(2, ep=2), {}),
    (Layout(4, tp=2, ep=2, etp=2, sp=True), {}),
    (Layout(4, tp=2, ep=2, sp=True), {"moe_expert_capacity_factor": 0.5}),
    (Layout(4, ep=2), {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}),
    (Layout(4, ep=4), {"moe_clone_hot_experts": 2}),
)


def _send(rank, n, layout, changes):
    """Tokens between ranks of a repeated iteration, and what the dispatcher has sent to each rank in it."""
    ps = layout.state(rank)
    layer, sent = build_shard(make_arguments(changes, layout.sp), ps), []
    with torch.no_grad():  # the first experts are the hot ones
        layer.router.weight[:, 0] = torch.linspace(9.0, -9.0, 8)
    start = layer.dispatcher.start_token_dispatch

    def record(*given):
        state = start(*given)
        sent.append(state.handle.sizes.send)
        return state

    layer.dispatcher.start_token_dispatch = record
    for _ in range(2):
        reset_iteration([Chunk(layer)])
        sent.clear()
        for x in microbatches(ps.dp.rank):
            layer((x.chunk(ps.tp.size)[ps.tp.rank] if layout.sp else x).abs(), PassInputs(grad_scale=SCALE))
    with torch.no_grad():
        layer(x.chunk(ps.tp.size)[ps.tp.rank] if layout.sp else x, PassInputs(grad_scale=SCALE))
    between_ranks, again = (collect_expert_loads([Chunk(layer)], ps, 8, 2)[1] for _ in range(2))
    assert not again.any()
    return between_ranks, ps.ep.rank, torch.tensor(sent[:2]).sum(0)


@pytest.mark.parametrize(
    "layout, changes", SENT, ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value)
)
def test_tokens_between_ranks_are_those_that_the_dispatcher_sends(layout, changes):
    ranks = run_ranks(_send, layout.n, layout, changes)
    expected = torch.zeros(layout.ep, layout.ep, dtype=torch.float64)
    for _, ep_rank, sent in ranks:
        expected[ep_rank] += sent
    assert all(torch.equal(between_ranks, expected) for between_ranks, *_ in ranks)
    chosen = layout.n // layout.tp * 2 * S * 2 * 2  # data ranks, microbatches, tokens, sequences, top-k
    assert 0 < expected.sum() < chosen if changes.get("moe_expert_capacity_factor") == 0.5 else expected.sum() >= chosen


def test_neighboring_ranks_share_a_row_where_there_are_many(monkeypatch):
    assert [_num_rank_rows(ranks) for ranks in (2, 64, 72, 256, 67)] == [2, 64, 36, 64, 1]
    monkeypatch.setattr(expert_loads, "MAX_RANK_ROWS", 2)
    layer = build_shard(make_arguments({}), ParallelState.single())
    layer.sent_tokens_P = torch.tensor([1, 2, 3, 4])
    ps = replace(ParallelState.single(), ep=Group("ep", (0, 1, 2, 3), 2, 4))
    _, between_ranks = collect_expert_loads([Chunk(layer)], ps, 8, 2)
    assert between_ranks.tolist() == [[0, 0], [3, 7]]
