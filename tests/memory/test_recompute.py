"""Recompute: side effects happen once, random numbers are replayed, memory is freed in time."""

import gc

import pytest
import torch
from harness import run_ranks
from memory.measure import measure_retained
from memory.one_pass import (
    BATCH,
    EVERYTHING,
    FULL,
    GROUPED,
    LATENT,
    OFFLOAD,
    SELECTIVE,
    SEQ,
    batch,
    build,
    compute_loss,
    parsed,
)

from arguments.mechanisms.selections import SELECTING, SELECTIONS
from moe_trainer.declared_module import load_module
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.moe.receive import capacity
from moe_trainer.moe.selections import sinkhorn as sinkhorn_module
from moe_trainer.moe.selections.selection import ExpertSelection
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import ParallelState

UNIFORM = f"{FULL} uniform --recompute-num-layers 1"
CHOOSING = {
    kind
    for each in SELECTIONS
    for kind in vars(load_module(each)).values()
    if isinstance(kind, type) and issubclass(kind, ExpertSelection) and "select" in vars(kind)
}
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def gradients(chunk):
    return [param.grad for param in chunk.parameters()]


@pytest.mark.parametrize("how", [f"{SELECTIVE} moe", UNIFORM])
@pytest.mark.parametrize(
    "routing",
    [
        BIAS,
        *(f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0" for kind in SELECTING),
        "",
        "--moe-expert-capacity-factor 0.6",
        "--G-I 2 --G-O 2 --R-I 1 --R-O 1",
        "--moe-enable-routing-replay",
    ],
)
def test_recompute_repeats_the_routing_of_the_first_pass(how, routing, monkeypatch):
    """A different choice at recompute time, from a changed bias or without given experts, must not affect gradients."""

    def run(disturb):
        (chunk,) = build(parsed(GROUPED, routing, how))
        for layer in chunk.moe_layers():
            if layer.router.moe.moe_enable_routing_replay:
                layer.router.given_TK = torch.arange(2 * SEQ * BATCH).view(-1, 2) % 4
        loss = compute_loss(chunk, 0)
        if disturb:
            for kind in CHOOSING:
                monkeypatch.setattr(kind, "select", lambda self, keys_TE: keys_TE.topk(self.topk, largest=False)[1])
            monkeypatch.setattr(sinkhorn_module, "sinkhorn", lambda cost_TE: -cost_TE)
            monkeypatch.setattr(capacity, "_within_capacity", lambda probs, routing, *_: ~routing)
            for layer in chunk.moe_layers():
                layer.router.given_TK = None
                for _, bias_E in layer.router.state_buffers():
                    bias_E += torch.randn(4) * 10
        loss.backward()
        monkeypatch.undo()
        return gradients(chunk)

    assert all(torch.equal(plain, other) for plain, other in zip(run(False), run(True), strict=True))


def test_recompute_repeats_the_jitter_of_the_router():
    def run(how):
        (chunk,) = build(parsed(GROUPED, "--moe-input-jitter-eps 0.1", how))
        torch.manual_seed(5)
        compute_loss(chunk, 0).backward()
        return gradients(chunk)

    assert all(torch.equal(plain, other) for plain, other in zip(run(""), run(UNIFORM), strict=True))


@pytest.mark.parametrize("how", ["", f"{SELECTIVE} moe", UNIFORM])
def test_routers_count_once_under_recompute(how):
    (chunk,) = build(parsed(GROUPED, BIAS, how))
    for layer in chunk.moe_layers():
        layer.router.recorder = []
    compute_loss(chunk, 0).backward()
    for layer in chunk.moe_layers():
        assert len(layer.router.recorder) == 1
        assert layer.router.local_tokens_per_expert.sum() == 2 * 16 * 2


@pytest.mark.parametrize(("how", "times"), [("", 1), (UNIFORM, 2), (f"{SELECTIVE} moe", 2), (f"{SELECTIVE} core_attn", 1),
                                            (f"{FULL} block --recompute-num-layers 1", 1)])  # fmt: skip
def test_recomputed_modules_run_twice_others_once(how, times):
    (chunk,) = build(parsed(GROUPED, how))
    calls, last = [], chunk.decoder.layers[-1].mlp.router
    last.register_forward_hook(lambda *_: calls.append(chunk.activations.is_recomputing))
    loss = compute_loss(chunk, 0)
    assert calls == [False]
    loss.backward()
    assert calls == [False, True][:times] and not chunk.activations.is_recomputing


def test_recompute_is_inactive_without_gradients():
    (chunk,) = build(parsed(GROUPED, UNIFORM))
    calls = []
    chunk.decoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        first = compute_loss(chunk, 0)
    assert len(calls) == 1 and torch.equal(first, compute_loss(chunk, 0).detach())


def test_norm_is_recomputed_once_for_all_its_users():
    """Latent attention has two projections behind the norm, the experts a router, experts and shared experts."""
    (chunk,) = build(parsed(GROUPED, LATENT.replace("--mtp-num-layers 1", ""), f"{SELECTIVE} layernorm"))
    layer, calls = chunk.decoder.layers[1], []
    layer.input_layernorm.register_forward_hook(lambda *_: calls.append("attention"))
    layer.pre_mlp_layernorm.register_forward_hook(lambda *_: calls.append("experts"))
    loss = compute_loss(chunk, 0)
    assert calls == ["attention", "experts"]
    loss.backward()
    assert calls == ["attention", "experts", "experts", "attention"]


def test_views_of_a_discarded_output_are_restored():
    activations = ActivationPolicy(frozenset({"part"}))
    x = torch.randn(4, 6, requires_grad=True)
    y, inside = activations.recompute_output("part", lambda x: x * 2.0, x)
    with inside:
        z = y[1:, 2:].square() + y.t()[2:, 1:].square().t()
    del y
    z.sum().backward()
    expected = torch.zeros(4, 6)
    expected[1:, 2:] = 16 * x.detach()[1:, 2:]
    torch.testing.assert_close(x.grad, expected)


def test_full_recompute_spans_include_mtp_layers():
    (chunk,) = build(parsed(GROUPED, LATENT, f"{FULL} uniform --recompute-num-layers 2"))
    assert chunk.spans == ((0, 2, True), (2, 3, True)) and chunk.activations.recomputed == {"full", "mtp"}
    (chunk,) = build(parsed(GROUPED, LATENT, f"{FULL} block --recompute-num-layers 2"))
    assert chunk.spans == ((0, 1, True), (1, 2, True), (2, 3, False)) and chunk.activations.recomputed == {"full"}


def test_failed_recompute_keeps_no_state():
    activations = ActivationPolicy(frozenset({"part"}))
    calls = []

    def fn(x):
        calls.append(activations.is_recomputing)
        if len(calls) == 2:
            raise ArithmeticError("once more")
        return (x * x).exp()

    y = activations.recompute_region("part", fn, torch.ones(3, requires_grad=True))
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    assert calls == [False, True] and activations.cached_for_recompute(lambda: 7) == 7


def test_recompute_restores_the_dropout_stream():
    stream, cpu = ShardRNG(1, "here"), torch.device("cpu")
    activations = ActivationPolicy(frozenset({"part"}), stream=stream)

    def fn(x):
        with stream.fork_rng(cpu):
            return torch.nn.functional.dropout(x * x, 0.5)

    x = torch.ones(64, requires_grad=True)
    y = activations.recompute_region("part", fn, x)
    with stream.fork_rng(cpu):
        torch.rand(7)  # of the next microbatch, before this one's backward
    before, shared = stream.generator(cpu).get_state(), torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach()) and 0 < int((y == 0).sum()) < 64
    assert torch.equal(stream.generator(cpu).get_state(), before) and torch.equal(torch.get_rng_state(), shared)


def _recompute_on_two_ranks(rank, n):
    activations = ActivationPolicy(frozenset({"part"}), shared_by=ParallelState.create(n, rank, tp=n).tp)
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    y = activations.recompute_region("part", lambda x: (x * x).exp().sin(), x * 0.1)
    part = y.grad_fn  # the graph is all that holds anything
    y.sum().backward()
    return x.grad, part is not None


def test_saved_inputs_are_distributed_over_tensor_ranks():
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    ((x * 0.1) * (x * 0.1)).exp().sin().sum().backward()
    for grad, _ in run_ranks(_recompute_on_two_ranks, 2):
        assert torch.allclose(grad, x.grad)


def test_recompute_keeps_the_boundaries_of_packed_documents():
    def run(how):
        (chunk,) = build(parsed(GROUPED, "--attention-dropout 0.2", how))
        torch.manual_seed(9)
        documents_BS = batch(0)[0].cumsum(1) // 100
        compute_loss(chunk, 0, borders=SequenceBorders(document_ids_BS=documents_BS)).backward()
        return gradients(chunk)

    for how in (UNIFORM, f"{SELECTIVE} core_attn"):
        assert all(torch.equal(plain, other) for plain, other in zip(run(""), run(how), strict=True))


@pytest.mark.parametrize(
    "how",
    [
        "",
        UNIFORM,
        f"{SELECTIVE} core_attn layernorm mlp moe",
        f"{SELECTIVE} layernorm mla_up_proj {OFFLOAD} {EVERYTHING}",
    ],
)
def test_activations_are_freed_after_backward(how):
    """Without help of the garbage collector, which --manual-gc runs rarely."""
    (chunk,) = build(parsed(GROUPED, LATENT, how))
    compute_loss(chunk, 0).backward()
    tokens_BS, positions_BS, labels_BS = batch(1)

    def step():
        chunk(tokens_BS, positions_BS, labels_BS, grad_scale=0.5).sum().backward()
        for param in chunk.parameters():
            param.grad = None
        return torch.zeros(())

    gc.collect()
    gc.disable()
    try:
        left, _ = measure_retained(step)
    finally:
        gc.enable()
    assert left.device == 0, left.tensors
