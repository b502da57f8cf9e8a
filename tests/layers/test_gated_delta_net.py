"""The layer around the rule of ops/gated_delta_rule.py.

Exchange under context parallelism, documents, refusals, initialization.
"""

import math
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from layers.test_tensor_parallel import DELTA, SHORT, B, H, _fill

from arguments.mechanisms.sublayers import variant_of
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.gated_delta_net import SIGMOID, SILU, OutputGate
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.model.block import load_class
from moe_trainer.parallel.rng import init_parameters
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ParallelState

LENGTH = 16
IDS = torch.tensor([[0] * 5 + [1] * 11, [0] * 3 + [1] * 6 + [2] * 7])


def make(ps=None, model=DELTA):
    return load_class(variant_of(model))(
        model, ps or ParallelState.single(), name="layer", layer_number=1, factory=LOCAL
    )


def random_rows(seed):
    return torch.randn(LENGTH, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run_layer(layer, x, weight, packed):
    x = x.clone().requires_grad_()
    y = layer(x, None, AttentionMask.of(None, IDS) if packed else None)
    (y * weight).sum().backward()
    return y.detach(), x.grad, {name: param.grad for name, param in layer.named_parameters()}


def _on_ranks(rank, n, model):
    ps = ParallelState.create(n, rank, cp=n)
    shard, found = SequenceShard(ps.cp), []
    for packed in (False, True):
        y, grad, grads = run_layer(
            _fill(make(ps, model)), shard.local(random_rows(1), 0), shard.local(random_rows(2), 0), packed
        )
        found.append((shard.full(y, 0), shard.full(grad, 0), grads))
    return found


@pytest.mark.parametrize(("n", "model"), [(2, DELTA), (4, DELTA), (2, SHORT)], ids=["2", "4", "convolution"])
def test_context_parallel_ranks_equal_one_process(n, model):
    """Heads are distributed, each with its own gates, rates and channels.

    Gradients of weights add up over the ranks.
    """
    assert_ranks_equal_one_process(n, model)


def assert_ranks_equal_one_process(n, model):
    ranks = run_ranks(_on_ranks, n, model)
    for number, packed in enumerate((False, True)):
        y, grad, grads = run_layer(_fill(make(model=model)), random_rows(1), random_rows(2), packed)
        for found in ranks:
            torch.testing.assert_close(found[number][0], y, rtol=0, atol=1e-11)
            torch.testing.assert_close(found[number][1], grad, rtol=0, atol=1e-11)
        for name, expected in grads.items():
            torch.testing.assert_close(
                sum(found[number][2][name] for found in ranks),
                expected,
                rtol=0,
                atol=1e-10,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("model", [DELTA, SHORT], ids=["gated DeltaNet", "convolution"])
def test_documents_do_not_depend_on_previous_ones(model):
    layer, x = _fill(make(model=model)), random_rows(1)
    packed, alone = layer(x, None, AttentionMask.of(None, IDS)), layer(x[5:, :1], None, None)
    torch.testing.assert_close(packed[5:, :1], alone, rtol=0, atol=1e-12)
    assert (packed - layer(x, None, None)).abs().max() > 1e-3


@pytest.mark.parametrize("model", [DELTA, SHORT], ids=["gated DeltaNet", "convolution"])
def test_an_explicit_mask_is_refused(model):
    with pytest.raises(ValueError, match="explicit attention mask"):
        make(model=model)(random_rows(1), None, AttentionMask(mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)))


def test_initial_values_equal_megatron_core():
    """As in Megatron-Core: exp(A_log) from 1 to 16, dt_bias one, the convolution uniform up to 1 / sqrt(width)."""
    layer = make(model=replace(DELTA, linear_num_key_heads=64, linear_num_value_heads=512))
    for param in layer.parameters():
        init_parameters([param], 1)
    rates = layer.A_log.exp()
    assert 1.0 <= rates.min() < 1.5 and 15.5 < rates.max() <= 16.0 and 8.0 < rates.mean() < 9.0
    assert (layer.dt_bias == 1).all()
    bound = 1 / math.sqrt(DELTA.linear_conv_kernel_dim)
    assert (
        0.99 * bound < layer.conv1d.weight.abs().max() <= bound
        and abs(layer.conv1d.weight.std() - bound / math.sqrt(3)) < 0.01 * bound
    )


def test_a_sigmoid_gates_the_output():
    torch.manual_seed(3)
    y, z = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for gate, function in ((SILU, torch.nn.functional.silu), (SIGMOID, torch.sigmoid)):
        assert torch.allclose(OutputGate.apply(y, z, gate), y * function(z), rtol=0, atol=1e-12)
        assert torch.autograd.gradcheck(lambda *x, gate=gate: OutputGate.apply(*x, gate), (y, z))
