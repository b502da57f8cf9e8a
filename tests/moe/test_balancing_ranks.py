"""Balancing losses, their gradients, counts and metrics under tensor, context, data and pipeline ranks, against one process.

Bug classes that users of Megatron-LM reported stand in the names of the tests, by issue number.
"""

import functools

import pytest
import torch
from harness import run_ranks
from moe.layers import HIDDEN, Chunk, RankGrads, build_layer, build_shard, collect_metrics, sections, total_grads
from moe.test_dispatch_ranks import Layout
from training.layouts import MODEL, create_groups

from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe.balancing import (
    LOSS_NAMES,
    LossSettings,
    balancing_losses,
    collect_moe_metrics,
    start_iteration,
    update_expert_bias,
)
from moe_trainer.moe.router import TopKRouter
from moe_trainer.ops.packed_sequences import ValidTokens
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import ParallelState

S, SCALE = 8, 0.7
LOSSES = {
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "z": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.2},
    "all, sigmoid": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.05,
        "moe_router_score_function": "sigmoid",
    },
}
MAPPINGS = (
    Layout(2, tp=2),
    Layout(2, tp=2, sp=True),
    Layout(2, cp=2),
    Layout(4, tp=2, cp=2, sp=True),
    Layout(4, tp=2, cp=2),
    Layout(4, tp=2, ep=2, etp=2, sp=True),
    Layout(4, cp=2, ep=4),
)


def microbatches(dp_rank: int, sequences: int = 2, count: int = 2) -> list[torch.Tensor]:
    """The microbatches of one data rank, [S, sequences, H] each."""
    generator = torch.Generator().manual_seed(100 + dp_rank)
    every = torch.randn(count * sequences, S, HIDDEN, generator=generator, dtype=torch.float64)
    return [part.transpose(0, 1) for part in every.split(sequences)]


def run_iteration(layer, inputs, scale=SCALE):
    """Forward and backward of one iteration; only the auxiliary losses enter the gradient."""
    start_iteration([Chunk(layer)])
    for x in inputs:
        (layer(x, PassInputs(grad_scale=scale)) * 0.0).sum().backward()


def _run_rank(rank, n, layout, cases, sequences, count):
    ps = layout.state(rank)
    results = []
    for changes in cases:
        args = sections(moe_token_dispatcher_type="alltoall", sequence_parallel=layout.sp, **changes)
        layer = build_shard(args, ps)
        inputs = [x.chunk(ps.cp.size)[ps.cp.rank] for x in microbatches(ps.dp.rank, sequences, count)]
        if layout.sp:
            inputs = [x.chunk(ps.tp.size)[ps.tp.rank] for x in inputs]
        # a mean over dp_cp follows in training, and the scale of the auxiliary losses contains cp for it: here they are summed
        run_iteration(layer, inputs)
        results.append((RankGrads.of(layer, ps), collect_metrics(args, [layer], count, ps)))
    return results


def run_cases(layout: Layout, cases: list[dict], sequences: int = 2, count: int = 2) -> list:
    """Per case the router's gradient summed over all ranks, and the metrics that every rank agrees on."""
    found = []
    for ranks in zip(*run_ranks(_run_rank, layout.n, layout, cases, sequences, count)):
        assert all(metrics == ranks[0][1] for _, metrics in ranks)
        found.append((total_grads([grads for grads, _ in ranks])["decoder.layers.0.mlp.router.weight"], ranks[0][1]))
    return found


@functools.cache
def run_data_ranks(dp: int, per_token: bool) -> list:
    """The oracle, for every kind of loss: the same data ranks without any other dimension (one process for one of them)."""
    return run_cases(Layout(dp), [dict(changes, calculate_per_token_loss=per_token) for changes in LOSSES.values()])


def assert_same(ours, expected):
    (grad, metrics), (want_grad, want) = ours, expected
    assert want_grad.abs().max() > 1e-3
    torch.testing.assert_close(grad, want_grad, atol=1e-12, rtol=1e-9)
    for name, value in want.losses.items():
        assert metrics.losses[name] == pytest.approx(value, rel=1e-6)
        assert metrics.per_layer[name] == pytest.approx(want.per_layer[name], rel=1e-6)


@pytest.mark.parametrize("layout", MAPPINGS, ids=str)
def test_M5047_aux_losses_are_independent_of_tp_and_cp(layout):
    """Megatron-LM issues 5047 and 7452: with tensor ranks the gradient of the auxiliary loss came out too large."""
    dp = layout.n // (layout.tp * layout.cp)
    for ours, expected in zip(run_cases(layout, list(LOSSES.values())), run_data_ranks(dp, False), strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("layout", [Layout(2, cp=2), Layout(2, tp=2), Layout(4, tp=2, cp=2, sp=True)], ids=str)
def test_M1652_per_token_loss_with_context_ranks(layout):
    """Megatron-LM issue 1652: with --calculate-per-token-loss the scale of the auxiliary loss missed the context ranks."""
    cases = [dict(changes, calculate_per_token_loss=True) for changes in LOSSES.values()]
    for ours, expected, per_microbatch in zip(
        run_cases(layout, cases), run_data_ranks(1, True), run_data_ranks(1, False), strict=True
    ):
        assert_same(ours, expected)
        # by definition: times the tokens of the microbatch
        torch.testing.assert_close(ours[0], per_microbatch[0] * (S * 2), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("layout", [Layout(4, tp=2, sp=True), Layout(4, cp=2), Layout(4, tp=2, ep=2)], ids=str)
def test_M3672_global_loss_over_data_ranks_and_accumulation(layout):
    """Megatron-LM issue 3672. Counts: running mean over the iteration's microbatches of sums over tp, cp and dp."""
    cases = [LOSSES["global"]]
    assert_same(run_cases(layout, cases, count=3)[0], run_cases(Layout(2), cases, count=3)[0])


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2, sp=True), Layout(2, cp=2)], ids=str)
def test_M5798_sequence_aux_loss_is_independent_of_micro_batch_size(layout):
    """Megatron-LM issue 5798. Four sequences at once, or in twos, or one by one: the same mean loss and gradient."""
    grads, values = [], []
    for sequences in (4, 2, 1):
        count = 4 // sequences
        grad, metrics = run_cases(layout, [LOSSES["sequence"]], sequences, count)[0]
        grads.append(grad / count)
        values.append(metrics.losses["seq_load_balancing_loss"])
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], atol=1e-12, rtol=1e-9)


def _bias(rank, n, layout):
    ps = layout.state(rank)
    args = sections(
        moe_token_dispatcher_type="alltoall",
        sequence_parallel=layout.sp,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
    )
    layer = build_shard(args, ps)
    for x in microbatches(ps.dp.rank):
        x = x.chunk(ps.cp.size)[ps.cp.rank]
        layer(x.chunk(ps.tp.size)[ps.tp.rank] if layout.sp else x, PassInputs(grad_scale=SCALE))
    counts = layer.router.local_tokens_per_expert.clone()
    update_expert_bias([Chunk(layer)], ps)
    return counts, layer.router.expert_bias


@pytest.mark.parametrize("layout", MAPPINGS, ids=str)
def test_M7452_tokens_are_counted_once_under_every_mapping(layout):
    """Megatron-LM issue 7452: the count of a rank's tokens was wrong under tensor and sequence parallelism."""
    dp = layout.n // (layout.tp * layout.cp)
    expected, results = run_ranks(_bias, dp, Layout(dp)), run_ranks(_bias, layout.n, layout)
    assert torch.equal(sum(counts for counts, _ in results), sum(counts for counts, _ in expected))
    assert sum(counts.sum() for counts, _ in results) == dp * 2 * S * 2 * 2  # microbatches, tokens, sequences, top-k
    for _, bias in results:
        torch.testing.assert_close(bias, expected[0][1])


def _stage(rank, n, moe_stage):
    """A pipeline of two stages of which one has the only MoE layer; its number is 1 or 2."""
    ps = ParallelState.create(n, rank, pp=2)
    args = sections(**LOSSES["aux"])
    layers = []
    if ps.pp.rank == moe_stage:
        layer = build_layer(args, ps, layer_number=moe_stage + 1)
        layer(microbatches(ps.dp.rank)[0], PassInputs(grad_scale=SCALE))
        layers.append(layer)
    update_expert_bias([Chunk(*layers)], ps)
    return collect_metrics(args, layers, 1, ps)


@pytest.mark.parametrize("moe_stage", [0, 1])
@pytest.mark.parametrize("n", [2, 4])
def test_torchtitan1689_stages_without_experts_join_the_collectives(n, moe_stage):
    """A stage of dense layers must not leave the others waiting, and every rank gets the metrics of all stages."""
    results = run_ranks(_stage, n, moe_stage)
    assert all(metrics == results[0] for metrics in results)
    value = results[0].losses["load_balancing_loss"]
    assert value > 0.5
    assert results[0].per_layer["load_balancing_loss"] == ([value, 0.0] if moe_stage == 0 else [0.0, value])


def test_dense_models_run_no_metric_collectives():
    metrics = collect_moe_metrics([Chunk()], ParallelState.single(), 1, sections(num_experts=None).moe, 2)
    assert (metrics.losses, metrics.dropped_tokens) == ({}, 0)


def test_parameters_with_partial_gradients_are_declared():
    """The router sees a rank's own rows under tensor ranks, the shared expert's gate with sequence parallelism only."""

    def declared(rank, n, sp):
        ps = ParallelState.create(n, rank, tp=2)
        args = sections(
            sequence_parallel=sp,
            add_bias_linear=True,
            moe_shared_expert_intermediate_size=20,
            moe_shared_expert_gate=True,
        )
        infos: dict[str, ParamInfo] = {path: param.info for path, param in build_layer(args, ps).named_parameters()}
        return {path for path, info in infos.items() if info.is_grad_partial}

    assert run_ranks(declared, 2, False)[0] == {"router.weight", "router.bias"}
    assert run_ranks(declared, 2, True)[0] == {"router.weight", "router.bias", "shared_experts.gate_weight"}


def _noise(rank, n, changes):
    """Logits of equal rows on two tensor ranks, and the global generator's state afterwards."""
    ps = ParallelState.create(n, rank, tp=n)
    args = sections(sequence_parallel=True, **changes)
    factory = LOCAL.for_chunk(stream=ShardRNG(5, "here", rank))
    router = TopKRouter(args.model, args.moe, ps, "router", 1, stream=factory.stream)
    torch.nn.init.constant_(router.weight, 0.1)
    router.recorder = []
    torch.manual_seed(1)
    router(torch.ones(4, 1, HIDDEN))
    return router.recorder[0]["logits"], torch.rand(1)


@pytest.mark.parametrize("changes", [{"moe_input_jitter_eps": 0.1}, {"moe_router_force_load_balancing": True}])
def test_tensor_ranks_draw_different_router_noise(changes):
    """And the global stream, which replicated tensors share, stays in step."""
    (first, after), (second, other) = run_ranks(_noise, 2, changes)
    assert not torch.equal(first, second) and torch.equal(after, other)


# by microbatch, the number of ranks that share the sequences of every rank
GROUPS = ((2, 2, 1, 1), (1, 1, 2, 2), (4, 4, 4, 4))
DYNAMIC = [*MODEL, *"--use-varlen-dataset --dynamic-context-parallel --calculate-per-token-loss".split()]


def _tokens(microbatch: int, rank: int) -> torch.Tensor:
    """Packs of different lengths, on every rank and in every microbatch."""
    generator = torch.Generator().manual_seed(10 * microbatch + rank)
    return torch.randn(3 + 2 * rank + 5 * (microbatch % 2), 8, dtype=torch.float64, generator=generator)


def _global_losses(rank, n, argv, groups, per_token_loss):
    """Loss and gradient of a rank's tokens in every microbatch; `groups`: how many ranks share them."""
    ps, running = create_groups(argv, rank, n), (torch.zeros(8), torch.zeros(()))
    results = []
    for microbatch, sizes in enumerate(groups):
        logits_TE, size = _tokens(microbatch, rank), sizes[rank]
        sharing = range(rank // size * size, rank // size * size + size)
        total = sum(len(_tokens(microbatch, other)) for other in sharing)
        found = balancing_losses(
            logits_TE,
            LossSettings(
                2,
                "softmax",
                {name: 0.3 if name.startswith("global") else 0.0 for name in LOSS_NAMES},
                None,
                per_token_loss,
            ),
            num_sequences=1,
            running=running,
            ps=ps,
            valid=ValidTokens(
                torch.ones(len(logits_TE), dtype=torch.bool), total, cp_size=size if ps.dynamic_cp else None
            ),
        )
        results.append((float(found.values[2]), found.grad_TE))
    return results


def _define_global_loss(microbatches):
    """E * sum_e f_e * P_e for every microbatch: frequencies of all choices so far, mean probabilities of its tokens."""
    counts_E = torch.zeros(8, dtype=torch.float64)
    for logits_TE in microbatches:
        leaf_TE = logits_TE.clone().requires_grad_()
        counts_E += torch.bincount(logits_TE.topk(2)[1].flatten(), minlength=8)
        loss = 8 * (counts_E / counts_E.sum() * leaf_TE.softmax(-1).mean(0)).sum()
        (slope_TE,) = torch.autograd.grad(loss, leaf_TE)
        yield loss.item(), 0.3 * slope_TE


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize(("argv", "groups"), [(DYNAMIC, GROUPS), (MODEL, ((1, 1, 1, 1),) * 4)])
def test_global_loss_of_packs_equals_its_definition(argv, groups, per_token_loss):
    """Counts are those of all ranks, whatever groups they form, and a pack counts by its tokens.

    With a loss per token, gradients are divided by the tokens of the global batch, and so multiplied by those of the
    microbatch, of which the ranks that share a sequence have their part.
    """
    ranks = run_ranks(_global_losses, 4, argv, groups, per_token_loss)
    microbatches = [torch.cat([_tokens(number, rank) for rank in range(4)]) for number in range(len(groups))]
    for number, (expected, expected_TE) in enumerate(_define_global_loss(microbatches)):
        found = [results[number] for results in ranks]
        assert sum(loss for loss, _ in found) == pytest.approx(expected, rel=1e-6) and expected > 0
        parts = expected_TE.split([len(_tokens(number, rank)) for rank in range(4)])
        for (_, grad_TE), part_TE, size in zip(found, parts, groups[number]):
            scale = len(expected_TE) * size / 4 if per_token_loss else 1.0
            torch.testing.assert_close(grad_TE, part_TE * scale, rtol=1e-6, atol=1e-9)
