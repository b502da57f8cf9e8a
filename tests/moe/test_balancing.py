"""Expert bias and balancing losses across iterations and data-parallel ranks."""

from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from moe.layers import Chunk, build_layer, collect_metrics, sections
from reference import Balance, add_balance

from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe import balancing
from moe_trainer.moe.balancing import LossSettings, balancing_losses, logged_losses, start_iteration, update_expert_bias
from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.ops.packed_sequences import ValidTokens
from moe_trainer.parallel.state import Group, ParallelState

SIGMOID_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
MICROBATCHES = 4
"""Of an iteration: the running mean of the third and of the fourth one count as well."""
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3}


def tokens(seed: int) -> torch.Tensor:
    return torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_expert_bias_update_and_reset_of_counts():
    layer = build_layer(sections(**SIGMOID_BIAS))
    before = layer.router.expert_bias.clone()
    counts = torch.zeros(8)
    for seed in range(3):
        counts += layer.router(tokens(seed))[1].sum(0)
    update_expert_bias([Chunk(layer)], ParallelState.single())
    moved = layer.router.expert_bias - before
    torch.testing.assert_close(moved, 0.01 * torch.sign(counts.mean() - counts))
    assert layer.router.local_tokens_per_expert.eq(0).all()


def test_expert_bias_balances_the_load():
    layer = build_layer(sections(**dict(SIGMOID_BIAS, moe_router_bias_update_rate=0.02)))
    x = torch.randn(64, 4, 16, dtype=torch.float64) + 0.5
    loads = []
    for _ in range(100):
        loads.append(layer.router(x)[1].sum(0).double())
        update_expert_bias([Chunk(layer)], ParallelState.single())
    assert loads[-1].std() < 0.2 * loads[0].std()


def test_layers_without_expert_bias_are_unchanged():
    layer = build_layer(sections())
    update_expert_bias([Chunk(layer)], ParallelState.single())
    assert layer.router.expert_bias is None


def bias_of_rank(rank, world_size):
    ps = ParallelState.create(world_size, rank)
    layers = [build_layer(sections(**SIGMOID_BIAS), ps, layer_number=n, seed=n) for n in (1, 2)]
    for layer in layers:
        for seed in (rank, rank + world_size):
            layer.router(tokens(seed))
    update_expert_bias([Chunk(*layers)], ps)
    return [layer.router.expert_bias for layer in layers]


def test_expert_bias_uses_counts_of_all_ranks():
    ranks = run_ranks(bias_of_rank, 2)
    layers = [build_layer(sections(**SIGMOID_BIAS), layer_number=n, seed=n) for n in (1, 2)]
    for layer in layers:
        for seed in range(4):
            layer.router(tokens(seed))
    update_expert_bias([Chunk(*layers)], ParallelState.single())
    for biases in ranks:
        for ours, expected in zip(biases, layers):
            assert torch.equal(ours, expected.router.expert_bias)


def global_loss_of_rank(rank, world_size):
    ps = ParallelState.create(world_size, rank)
    args = sections(**GLOBAL, moe_z_loss_coeff=0.1, moe_expert_capacity_factor=0.5)
    layer = build_layer(args, ps)
    start_iteration([Chunk(layer)])
    for microbatch in range(MICROBATCHES):
        probs, _ = layer.router(tokens(world_size * microbatch + rank), PassInputs(grad_scale=0.125))
        (probs * 0).sum().backward()
    return layer.router.weight.grad, collect_metrics(args, [layer], MICROBATCHES, ps)


def test_global_aux_loss_over_ranks_equals_definition():
    """Counts: running mean over microbatches of the sums over ranks; tokens: of all ranks; each rank sums its own scores."""
    ranks = run_ranks(global_loss_of_rank, 2)
    args = sections(**GLOBAL, moe_z_loss_coeff=0.1, moe_expert_capacity_factor=0.5)
    weight = build_layer(args).router.weight.detach()
    grads = [torch.zeros_like(weight), torch.zeros_like(weight)]
    logged = {"global": 0.0, "z": 0.0}
    counts = []
    for microbatch in range(MICROBATCHES):
        logits, chosen = [], []
        for rank in range(2):
            own = weight.clone().requires_grad_()
            logits.append((own, tokens(2 * microbatch + rank).flatten(0, 1) @ own.t()))
            top = logits[-1][1].topk(2)[1]
            chosen.append(torch.zeros(12, 8, dtype=torch.float64).scatter(1, top, 1.0))
        counts.append(sum(c.sum(0) for c in chosen))
        mean_E = sum(counts) / len(counts)
        for rank, (own, logits_TE) in enumerate(logits):
            loss = 8 / (2 * 24**2) * (logits_TE.softmax(-1).sum(0) * mean_E).sum()
            z = logits_TE.logsumexp(-1).square().mean()
            (0.125 * (0.3 * loss + 0.1 * z)).backward()
            grads[rank] += own.grad
            logged["global"] += loss.item() / MICROBATCHES  # summed over ranks, mean over microbatches
            logged["z"] += z.item() / (2 * MICROBATCHES)  # mean over ranks and microbatches
    for (grad, metrics), expected in zip(ranks, grads):
        torch.testing.assert_close(grad, expected, atol=1e-9, rtol=1e-6)  # counts are means in fp32
        assert abs(metrics.losses["global_load_balancing_loss"] - logged["global"]) < 1e-6 * logged["global"]
        assert abs(metrics.losses["z_loss"] - logged["z"]) < 1e-6 * logged["z"]
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1].dropped_tokens > 0


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 64, 65536.0])
@pytest.mark.parametrize("losses", [{"moe_aux_loss_coeff": 0.3}, {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}, GLOBAL,
                                    {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}])  # fmt: skip
def test_gradients_of_balancing_losses_are_proportional_to_their_scale(losses, scale):
    """With many microbatches the scale is small (1 / num_microbatches), with fp16 it is large."""
    grads = []
    for factor in (1.0, scale):
        router = build_layer(sections(**losses)).router
        (router(tokens(0), PassInputs(grad_scale=factor))[0] * 0).sum().backward()
        grads.append(router.weight.grad)
    assert grads[0].abs().max() > 1e-4
    torch.testing.assert_close(grads[1], grads[0] * scale, atol=0, rtol=1e-9)


def aux_loss_of_rank(rank, world_size):
    ps = ParallelState.create(world_size, rank)
    kinds = ["aux_loss", "seq_aux_loss"]
    args = sections(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=[0.1, 0.1])
    layer = build_layer(args, ps)
    layer.router(tokens(rank))
    return collect_metrics(args, [layer], 1, ps).losses


def test_local_aux_losses_are_averaged_over_ranks():
    ranks = run_ranks(aux_loss_of_rank, 2)
    assert ranks[0] == ranks[1]
    kinds = ["aux_loss", "seq_aux_loss"]
    args = sections(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=[0.1, 0.1])
    weight = build_layer(args).router.weight.detach()
    balances = []
    for rank in range(2):
        balances.append(Balance())
        add_balance(tokens(rank).flatten(0, 1) @ weight.t(), (6, 2), args.moe, "x", balances[-1], [])
    for name in ("load_balancing_loss", "seq_load_balancing_loss"):
        expected = (balances[0].values["x", name] + balances[1].values["x", name]) / 2
        assert abs(ranks[0][name] - expected) < 1e-6 * expected


def test_kernels_of_a_sequence_loss_get_the_counts_of_its_ranks(monkeypatch):
    monkeypatch.setattr(balancing, "all_reduce", lambda counts, group: counts * group.size)
    ps = replace(ParallelState.single(), tp_cp=Group("tp_cp", (0, 1), 0, 2))
    given = []
    kernels = Balancing(
        count=lambda *_: (None, torch.tensor([[3, 1]]), None),
        gradient=lambda logits_TE, counted, counts_BE, *_: given.append(counts_BE.tolist()) or (None, None),
        attach=None,
    )
    coefficients = dict.fromkeys(balancing.LOSS_NAMES, 0.0) | {"seq_load_balancing_loss": 0.1}
    balancing._by_kernels(kernels, torch.zeros(4, 2), LossSettings(1, "softmax", coefficients), 1, None, ps)
    assert given == [[[6, 2]]]


def test_new_iteration_resets_the_counts():
    args = sections(**GLOBAL)
    layer = build_layer(args)
    values = []
    for _ in range(2):
        start_iteration([Chunk(layer)])
        layer.router(tokens(0))
        layer.router(tokens(1))
        values.append(collect_metrics(args, [layer], 2).losses)
    assert values[0] == values[1]


def test_names_of_logged_losses():
    assert logged_losses(sections().moe) == ("load_balancing_loss",)
    assert logged_losses(sections(moe_router_load_balancing_type="none").moe) == ()
    assert logged_losses(sections(moe_router_load_balancing_type="seq_aux_loss", moe_z_loss_coeff=0.1).moe) == (
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "z_loss",
    )
    assert logged_losses(
        sections(moe_router_load_balancing_type=["global_aux_loss"], moe_aux_loss_coeff=[0.1]).moe
    ) == ("global_load_balancing_loss",)


def test_counts_stay_exact_in_a_half_precision_model():
    layer = build_layer(sections(**SIGMOID_BIAS), dtype=torch.bfloat16)
    for _ in range(5):
        layer.router(torch.ones(100, 2, 16, dtype=torch.bfloat16))
    assert layer.router.local_tokens_per_expert.max() == 1000


ALL_LOSSES = {"load_balancing_loss": 0.1, "seq_load_balancing_loss": 0.2, "global_load_balancing_loss": 0.3}


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_padding_does_not_count(score_function, per_token_loss):
    """Losses and gradients are those of the other tokens alone, and padding has no gradient."""
    logits_TE = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask_T = torch.tensor([True, True, False, True] * 3)

    def losses(logits_TE, valid=None):
        return balancing_losses(
            logits_TE,
            LossSettings(2, score_function, ALL_LOSSES, 1e-2, per_token_loss),
            num_sequences=1,
            running=(torch.zeros(8), torch.zeros(())),
            ps=ParallelState.single(),
            valid=valid,
        )

    found, expected = losses(logits_TE, ValidTokens(mask_T, 9)), losses(logits_TE[mask_T])
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(found.grad_TE[mask_T], expected.grad_TE)
    assert not found.grad_TE[~mask_T].any() and expected.grad_TE.any()
    for name, whole in vars(losses(logits_TE, ValidTokens(torch.ones(12, dtype=torch.bool), 12))).items():
        torch.testing.assert_close(whole, getattr(losses(logits_TE), name))


PACKS = (6, 2, 12, 4)
"""Numbers of tokens of an iteration's packs."""


def losses_of_packs(logits: list[torch.Tensor], score_function: str, per_token_loss: bool = True):
    """All balancing losses of consecutive packs, and their gradients."""
    running = torch.zeros(8), torch.zeros(())
    for logits_TE in logits:
        yield balancing_losses(
            logits_TE,
            LossSettings(2, score_function, ALL_LOSSES, None, per_token_loss),
            num_sequences=1,
            running=running,
            ps=ParallelState.single(),
            valid=ValidTokens(torch.ones(len(logits_TE), dtype=torch.bool), len(logits_TE)),
        )


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_bounds_of_balancing_losses_hold_for_packs_of_different_lengths(score_function):
    """1 with equal probabilities, whatever is chosen; E / k if all tokens choose the same experts with all probability."""
    even = [torch.zeros(size, 8, dtype=torch.float64) for size in PACKS]
    sure = [torch.tensor([[300.0, 300.0] + [-300.0] * 6], dtype=torch.float64).expand(size, 8) for size in PACKS]
    for logits, bound in ((even, 1.0), (sure, 4.0)):
        for losses in losses_of_packs(logits, score_function):
            torch.testing.assert_close(losses.values[:3], torch.full((3,), bound, dtype=torch.float64))


def test_equal_tokens_of_packs_of_different_lengths_have_equal_losses_and_gradients():
    """With a loss per token."""
    row_TE = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = list(losses_of_packs([row_TE.repeat(size // 2, 1) for size in PACKS], "softmax"))
    for losses in found[1:]:
        torch.testing.assert_close(losses.values, found[0].values)
        torch.testing.assert_close(losses.grad_TE[:2], found[0].grad_TE[:2])
    assert found[0].grad_TE.abs().max() > 1e-3


@pytest.mark.parametrize("pads", [False, True])
def test_expert_bias_counts_choices_where_experts_are_padded_to_capacity(pads):
    """Padded experts have equally many tokens, which would never move a bias. Without padding drops do not count, as in Megatron-LM."""
    options = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": pads}
    chosen_TE = build_layer(sections(**SIGMOID_BIAS)).router(tokens(0))[1]
    layer = build_layer(sections(**SIGMOID_BIAS, **options))
    before_E = layer.router.expert_bias.clone()
    padded_TE = layer.router(tokens(0))[1]
    counts_E = chosen_TE.sum(0).float()
    assert counts_E.max() > 3 > counts_E.min(), "capacity is 3"
    assert torch.equal(padded_TE.sum(0).float(), torch.full((8,), 3.0) if pads else counts_E.clamp(max=3))
    assert torch.equal(layer.router.local_tokens_per_expert, counts_E if pads else counts_E.clamp(max=3))
    update_expert_bias([Chunk(layer)], ParallelState.single())
    assert (layer.router.expert_bias - before_E).abs().max() == pytest.approx(0.01)


def test_padding_does_not_count_in_expert_bias():
    layer = build_layer(sections(**SIGMOID_BIAS))
    x_SBH = tokens(0)
    num_tokens = x_SBH.shape[0] * x_SBH.shape[1]
    mask_T = torch.arange(num_tokens) % 3 > 0
    _, routing_TE = layer.router(x_SBH, PassInputs(valid=ValidTokens(mask_T, int(mask_T.sum()))))
    assert torch.equal(layer.router.local_tokens_per_expert, routing_TE[mask_T].sum(0).float())


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pads", [False, True])
def test_padding_takes_no_capacity(policy, pads):
    """Padding before the tokens, all with the same experts, and an expert with less capacity than there is padding."""
    options = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": policy}
    layer = build_layer(sections(**options, moe_pad_expert_input_to_capacity=pads, moe_router_topk=2))
    x_SBH = torch.randn(8, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x_SBH[:4] = x_SBH[4] * 2  # the experts of a token, with larger probabilities
    chosen_TE = build_layer(sections(moe_router_topk=2)).router(x_SBH)[1]
    probs_TE, routing_TE = layer.router(x_SBH, PassInputs(valid=ValidTokens(torch.arange(8) >= 4, 4)))
    counts_E = chosen_TE[4:].sum(0)
    assert torch.equal((routing_TE & chosen_TE)[4:].sum(0), counts_E.clamp(max=2)) and not probs_TE[:4].any()
    assert layer.router.dropped == (counts_E - 2).clamp(min=0).sum()
