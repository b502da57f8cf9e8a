"""Dropout under tensor parallelism: equal masks where the tensor is replicated, different ones where it is sharded."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from layers.test_tensor_parallel import LATENT, MODEL, S

from moe_trainer.layers.attention import SelfAttention
from moe_trainer.layers.dropout import Dropout, rng_context
from moe_trainer.layers.init import Init
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.lora import LoRA
from moe_trainer.layers.mla import MultiLatentAttention
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import Group, ParallelState

CPU = torch.device("cpu")


def test_dropout_without_a_stream_equals_torch():
    x = torch.ones(100)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.3), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.3)(x), expected[0]) and torch.equal(torch.rand(1), expected[1])


@pytest.mark.parametrize("stream", [None, ShardRNG(1, "x")])
def test_dropout_draws_nothing_in_evaluation_or_at_rate_zero(stream):
    x, before = torch.ones(10), torch.get_rng_state()
    assert Dropout(0.0, stream)(x) is x and Dropout(0.5, stream).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_is_independent_of_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    stream = ShardRNG(1, "tp 0")
    with rng_context(stream, CPU):
        first = torch.rand(4)
    with rng_context(stream, CPU):
        second = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before), "the global generator did not move"
    full = torch.rand(8, generator=torch.Generator().manual_seed(ShardRNG(1, "tp 0").generator(CPU).initial_seed()))
    assert torch.equal(torch.cat([first, second]), full)
    with rng_context(ShardRNG(1, "tp 1"), CPU):
        assert not torch.equal(torch.rand(4), first)


def test_stream_resumes_from_a_saved_state():
    stream = ShardRNG(1, "tp 0")
    with rng_context(stream, CPU):
        torch.rand(3)
    saved = stream.generator(CPU).get_state()
    with rng_context(stream, CPU):
        expected = torch.rand(3)
    other = ShardRNG(2, "another")
    other.generator(CPU).set_state(saved)
    with rng_context(other, CPU):
        assert torch.equal(torch.rand(3), expected)


def test_error_in_stream_restores_the_global_generator():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), rng_context(ShardRNG(1, "x"), CPU):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def _run_heads(rank, n, model):
    """Return the outputs of every rank's heads with equal weights: they differ by their dropout masks only."""
    ps = ParallelState.create(n, rank, tp=n)
    kind = MultiLatentAttention if model.multi_latent_attention else SelfAttention
    layer = kind(model, ps, name="a", layer_number=1, factory=LOCAL.for_chunk(stream=ShardRNG(7, f"tp {rank}")))
    torch.manual_seed(0)
    for param in layer.parameters():
        param.data = torch.randn(param.shape)
    torch.manual_seed(11)
    x = torch.randn(S, 1, model.hidden_size)
    found = []
    layer.core_attention.register_forward_hook(lambda module, args, output: found.append(output))
    before = torch.get_rng_state()
    layer(x, None, None)
    moved = not torch.equal(torch.get_rng_state(), before)
    layer.eval()(x, None, None)
    return found, moved


@pytest.mark.parametrize("model", [MODEL, LATENT], ids=["grouped queries", "latent"])
def test_ranks_drop_different_attention_weights(model):
    reports = run_ranks(_run_heads, 2, replace(model, attention_dropout=0.5))
    (training, evaluation), moved = reports[0]
    (other_training, other_evaluation), other_moved = reports[1]
    assert torch.equal(evaluation, other_evaluation)
    assert not torch.equal(training, other_training)
    assert not moved and not other_moved, "what is replicated draws the same numbers on both ranks afterwards"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
def test_adapters_drop_the_same_elements_of_a_replicated_input_only(kind, sequence_parallel):
    """With sequence parallelism ranks have other tokens, and row linears have other features."""
    options = {"group": Group("tp", (0, 1), 0, 2), "init": Init("zeros"), "sequence_parallel": sequence_parallel}
    stream = ShardRNG(1, "tp 0")
    adapter = LoRA(kind(4, 6, name="a", **options), "a", 2, 1.0, 0.5, stream)
    is_sharded = sequence_parallel or kind is RowParallelLinear
    assert adapter.dropout.stream is (stream if is_sharded else None)
