"""Quantile balancing: the estimate, the effect of the bias, and equal biases under every mapping."""

from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from memory.one_pass import FULL, GROUPED, SELECTIVE, build, compute_loss, parsed
from moe.layers import EXPERTS, build_layer, sections
from training.layouts import compare, create_groups, make_argv, make_run, shallow, train_ranks

from arguments import ArgumentError, parse_args
from moe_trainer.moe.balancing import reset_iteration, update_biases
from moe_trainer.moe.selections.quantile_balancing import choose_and_estimate
from moe_trainer.moe.selections.topk import score_topk
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

ON = {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0}
FLAGS = "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0 --moe-router-quantile-balancing-ema 0.5".split()


def with_quantiles(argv):
    """A command line of training/layouts.py with quantile balancing and no auxiliary loss."""
    return [*argv, *FLAGS]


def fake_chunk(layer):
    return SimpleNamespace(moe_layers=lambda: [layer])


def naive_estimate(logits, topk, bias):
    """Written as the definition reads: sort, count, look."""
    tokens, experts = logits.shape
    thresholds = [sorted((logits[t] - bias).tolist(), reverse=True)[topk] for t in range(tokens)]
    return [
        sorted((logits[t, e].item() - thresholds[t] for t in range(tokens)), reverse=True)[tokens * topk // experts]
        for e in range(experts)
    ]


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(64, 8, 2), (40, 8, 1), (12, 4, 1), (16, 8, 7)])
def test_bias_estimate_equals_the_column_quantile(tokens, experts, topk):
    logits, bias = torch.randn(tokens, experts), torch.randn(experts) * 0.3
    indices, estimate = choose_and_estimate(logits, topk, bias, estimate=True)
    assert torch.equal(indices.sort(1)[0], (logits - bias).topk(topk, dim=1)[1].sort(1)[0])
    assert estimate.tolist() == pytest.approx(naive_estimate(logits, topk, bias), abs=1e-6)
    again, nothing = choose_and_estimate(logits, topk, bias, estimate=False)
    assert torch.equal(again, indices) and nothing is None


def test_quantile_bias_balances_a_skewed_router():
    """Tokens of the same distribution, batch after batch: loads within a tenth of even, from one expert with more than half."""
    layer = build_layer(sections(moe_router_topk=1, moe_router_pre_softmax=True, add_bias_linear=True, **ON))
    with torch.no_grad():
        layer.router.weight.mul_(0.2)
        layer.router.bias.copy_(torch.linspace(2, 0, EXPERTS))
    x = torch.randn(512, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    before = layer.router(x)[1].sum(0)
    update_biases([fake_chunk(layer)], ParallelState.single())
    for _ in range(8):
        layer.router(x)
        update_biases([fake_chunk(layer)], ParallelState.single())
    after = layer.router(x)[1].sum(0)
    assert (
        before.max() > 2 * 1024 / EXPERTS and after.max() < 1.1 * 1024 / EXPERTS and after.min() > 0.9 * 1024 / EXPERTS
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_quantile_bias_affects_selection_but_not_weights(score):
    layer = build_layer(sections(moe_router_score_function=score, moe_router_topk_scaling_factor=2.5, **ON))
    layer.router.recorder = []
    layer.router.selection.bias_E.copy_(torch.tensor([9.0] * 4 + [0.0] * 4))
    probs, routing = layer.router(torch.randn(8, 2, 16, dtype=torch.float64))
    assert not routing[:, :4].any() and (routing.sum(1) == 2).all()
    logits = layer.router.recorder[0]["logits"].masked_fill(~routing, float("-inf"))
    torch.testing.assert_close(probs, score_topk(logits, 2, score, scaling_factor=2.5)[0])


def test_quantile_bias_update_is_centered_and_smoothed():
    layer = build_layer(sections(moe_router_quantile_balancing_ema=0.75, **ON))
    quantile, x = layer.router.selection, torch.randn(8, 2, 16, dtype=torch.float64)
    old = torch.linspace(-1, 1, EXPERTS)
    quantile.bias_E.copy_(old)
    layer.router(x)
    layer.router(2 * x)
    estimate = quantile.sum_E / 2
    assert quantile.count == 2 and estimate.abs().sum() > 0
    layer.eval()
    layer.router(x)
    with torch.no_grad():
        layer.train().router(x)
    assert quantile.count == 2 and torch.equal(quantile.sum_E / 2, estimate)  # evaluation leaves no trace
    update_biases([fake_chunk(layer)], ParallelState.single())
    expected = 0.75 * old + 0.25 * estimate
    torch.testing.assert_close(quantile.bias_E, expected - expected.mean())
    assert quantile.count == 0 and not quantile.sum_E.any()


def test_discarded_and_frozen_passes_do_not_update_the_bias():
    layer = build_layer(sections(**ON))
    layer.router(torch.randn(8, 2, 16, dtype=torch.float64))
    reset_iteration([fake_chunk(layer)])
    assert layer.router.selection.count == 0
    layer.router(torch.randn(8, 2, 16, dtype=torch.float64))
    update_biases([fake_chunk(layer)], ParallelState.single(), frozen=True)
    assert layer.router.selection.count == 0 and not layer.router.selection.bias_E.any()


def test_quantile_bias_stays_fp32_in_half_precision():
    layer = build_layer(sections(**ON), dtype=torch.bfloat16)
    assert {buffer.dtype for buffer in layer.router.selection.buffers()} == {torch.float32}
    assert [name for name, _ in layer.named_state_buffers()] == ["decoder.layers.0.mlp.router.qb_beta"]


def test_no_kernel_replaces_the_choice_by_quantiles():
    router = build_layer(sections(**ON)).router
    router.use_kernels(pytest.fail, None)
    router(torch.randn(8, 2, 16, dtype=torch.float64))
    assert router.selection.count == 1


@pytest.mark.parametrize("how", ["", f"{SELECTIVE} moe", f"{FULL} uniform --recompute-num-layers 1"])
def test_quantile_balancing_updates_once_under_recompute(how):
    (chunk,) = build(parsed(GROUPED, " ".join(FLAGS), how))
    compute_loss(chunk, 0).backward()
    assert [layer.router.selection.count.item() for layer in chunk.moe_layers()] == [1.0] * len(chunk.moe_layers())


def _train(rank, n, argvs):
    """Outcomes, and the biases of this rank's routers by name, of several command lines."""
    results = []
    for argv in argvs:
        (outcome,) = train_ranks(rank, n, [argv])
        run = make_run(argv, rank, create_groups(argv, rank, n), 2)
        count = run.args.training.global_batch_size // (run.args.training.micro_batch_size * run.ps.dp.size)
        for number in range(2):
            train_step(run, TrainState(iteration=number), count)
        results.append(
            (outcome, {name: buffer.clone() for chunk in run.chunks for name, buffer in chunk.named_state_buffers()})
        )
    return results


MAPPINGS = {
    "tensor, sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context": "--context-parallel-size 2",
    "experts over data ranks": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    "stages": "--pipeline-model-parallel-size 2",
}


def test_quantile_biases_under_every_mapping_equal_one_process():
    base = [*with_quantiles(shallow(make_argv("plain"))), "--moe-token-dispatcher-type", "alltoall"]
    ((expected, biases),) = _train_single(base)
    assert len(biases) == 2 and all(bias.abs().max() > 0.01 for bias in biases.values())
    results = run_ranks(_train, 2, [[*base, *mapping.split()] for mapping in MAPPINGS.values()])
    for index, name in enumerate(MAPPINGS):
        assert not compare(expected, results[0][index][0]), name
        found = {key: value for rank in results for key, value in rank[index][1].items()}
        assert found.keys() == biases.keys()
        for key, bias in biases.items():
            torch.testing.assert_close(
                found[key], bias, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def _train_single(argv):
    return run_ranks(_train, 1, [argv])[0]


MOE = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear".split()


@pytest.mark.parametrize(("extra", "named"), [
    ("--moe-router-topk 8", "--moe-router-topk 8"),
    ("--seq-length 17", "--seq-length 17"),
    ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1"),
    ("--moe-router-fusion", "--moe-router-fusion"),
    ("--moe-router-num-groups 4 --moe-router-group-topk 2", "--moe-router-group-topk 2"),
    ("--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0"),
])  # fmt: skip
def test_incompatible_quantile_flags_are_rejected(extra, named):
    with pytest.raises(ArgumentError) as caught:
        parse_args([*with_quantiles(shallow(make_argv("plain"))), *MOE, *extra.split()], 1)
    assert any(named in violation.message for violation in caught.value.violations)
