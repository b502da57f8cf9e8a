"""Options of the layers that no reference model covers."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from arguments import parse_args
from arguments.checkpoint_args import same_meaning
from arguments.container import OPTIONS
from arguments.layer_pattern import uses_window
from arguments.model import ModelArgs
from arguments.parse import resolve_command_line
from arguments.query_temperature import QUERY_TEMPERATURES
from moe_trainer.layers.attention import SelfAttention
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.layers.init import Init, embedding_init, hidden_init, residual_init
from moe_trainer.layers.layer_factory import LOCAL, select_layer_factory
from moe_trainer.layers.linear import ColumnParallelLinear, RowParallelLinear
from moe_trainer.layers.mlp import make_activation
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.query_temperature import QueryTemperature
from moe_trainer.layers.rotary import _layer_changes, make_rotary, skips_rope
from moe_trainer.parallel.rng import init_parameters
from moe_trainer.parallel.state import ParallelState
from tests.arguments.test_tokens import TOY

MODEL = ModelArgs(
    num_layers=8,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    group_query_attention=True,
    kv_channels=8,
    ffn_hidden_size=64,
    max_position_embeddings=16,
    attention_dropout=0.0,
)
SINGLE = ParallelState.single()


def built(module):
    for param in module.parameters():
        init_parameters([param], 1)
    return module


def test_linears_name_their_parameters():
    column = ColumnParallelLinear(4, 6, name="a.b", group=SINGLE.tp, init=Init("normal", 0.1), bias=True)
    row = RowParallelLinear(4, 6, name="a.c", group=SINGLE.tp, init=Init("normal", 0.1), bias=True)
    assert column.weight.info.names == ("a.b.weight",) and column.bias.info.names == ("a.b.bias",)
    assert (column.weight.info.sharded_dim, column.bias.info.sharded_dim) == (0, 0)
    assert (row.weight.info.sharded_dim, row.bias.info.sharded_dim) == (1, None)


def test_zero_centered_norm_starts_with_unit_gain():
    for kind in ("RMSNorm", "LayerNorm"):
        plain = built(Norm(8, replace(MODEL, normalization=kind), name="n"))
        centred = built(Norm(8, replace(MODEL, normalization=kind, layernorm_zero_centered_gamma=True), name="n"))
        x = torch.randn(3, 8)
        assert torch.equal(plain.weight, torch.ones(8)) and torch.equal(centred.weight, torch.zeros(8))
        assert torch.equal(plain(x), centred(x))


def test_initialization_of_each_weight_kind():
    assert hidden_init(MODEL) == ("normal", 0.02)
    assert residual_init(MODEL) == ("normal", 0.02 / 4)
    assert embedding_init(MODEL) == ("normal", 0.02)
    assert embedding_init(replace(MODEL, embedding_init_method_std=1.0)) == ("normal", 1.0)
    xavier = replace(MODEL, init_method_xavier_uniform=True)
    assert {hidden_init(xavier).kind, residual_init(xavier).kind, embedding_init(xavier).kind} == {"xavier_uniform"}


@pytest.mark.parametrize(
    "freq, windowed", [(None, [True] * 4), (2, [True, False, True, False]), ([1, 0, 0, 1], [True, False, False, True])]
)
def test_window_attn_skip_freq_selects_layers_with_full_attention(freq, windowed):
    model = replace(MODEL, window_size=(2, 0), window_attn_skip_freq=freq)
    assert [uses_window(model, number) for number in range(1, 5)] == windowed
    assert not uses_window(replace(model, window_size=None), 1)


@pytest.mark.parametrize(
    "freq, skipped", [(None, [False] * 4), (2, [False, True, False, True]), ([0, 1, 1, 0], [False, True, True, False])]
)
def test_no_rope_freq_selects_layers_without_rope(freq, skipped):
    model = replace(MODEL, no_rope_freq=freq)
    assert [skips_rope(model, number) for number in range(1, 5)] == skipped


def test_layers_with_chunks_norms_and_temperatures():
    """Of eight layers every second one is full, without positions and norms, and has the factors."""
    model = replace(
        MODEL,
        attention_chunk_size=4,
        window_attn_skip_freq=2,
        no_rope_freq=2,
        qk_l2_norm=True,
        qk_l2_norm_rope_layers_only=True,
        attn_temperature_tuning="llama4",
    )
    for number in range(1, 5):
        layer = SelfAttention(model, SINGLE, name="a", layer_number=number, factory=LOCAL)
        is_full = number % 2 == 0
        assert (layer.core_attention.chunk is None) == is_full
        assert (layer.q_layernorm is None) == is_full
        assert (layer.temperature is not None) == is_full
        everywhere = replace(model, qk_l2_norm_rope_layers_only=False, attn_temperature_tuning="mistral4")
        layer = SelfAttention(everywhere, SINGLE, name="a", layer_number=number, factory=LOCAL)
        assert layer.q_layernorm is not None and layer.temperature is not None


def test_every_kind_of_temperature_is_a_value_of_the_flag():
    assert tuple(QUERY_TEMPERATURES) == OPTIONS["attn_temperature_tuning"].choices


@pytest.mark.parametrize(("kind", "first"), [("llama4", 1), ("mistral4", 0)])
def test_temperature_grows_with_the_logarithm_of_the_position(kind, first):
    model = replace(
        MODEL, attn_temperature_tuning=kind, attn_temperature_scale=0.5, attn_temperature_floor=4, no_rope_freq=1
    )
    factors = QueryTemperature.of(model, 1, SINGLE.context).factors(10, None, torch.device("cpu"))
    expected = [1 + 0.5 * math.log(1 + (position + first) // 4) for position in range(10)]
    torch.testing.assert_close(factors, torch.tensor(expected).view(10, 1, 1, 1))


def test_a_layer_without_rope_ignores_the_tables():
    model = replace(MODEL, position_embedding_type="rope", no_rope_freq=[0, 1] * 4)
    tables = make_rotary(model).tables(6, torch.device("cpu"))
    x = torch.randn(6, 2, 32)
    for number, reads in ((1, True), (2, False)):
        layer = built(SelfAttention(model, SINGLE, name="a", layer_number=number, factory=LOCAL))
        assert torch.equal(layer(x, tables, None), layer(x, None, None)) != reads


def test_the_output_gate_is_a_sigmoid_per_head_and_channel():
    """Rows of linear_qkv are [q q g g k v] for each of the two groups.

    Without the gates the layer is the ungated one.
    """
    model = replace(MODEL, add_bias_linear=False)
    plain = built(SelfAttention(model, SINGLE, name="a", layer_number=1, factory=LOCAL))
    gated = built(
        SelfAttention(replace(model, attention_output_gate=True), SINGLE, name="a", layer_number=1, factory=LOCAL)
    )
    gates = torch.randn(2, 2, 8, 32)
    with torch.no_grad():
        gated.linear_proj.weight.copy_(plain.linear_proj.weight)
        queries, others = plain.linear_qkv.weight.view(2, 4, 8, 32).split([2, 2], 1)
        gated.linear_qkv.weight.copy_(torch.cat([queries, gates, others], 1).reshape(-1, 32))
    attended = []
    plain.linear_proj.register_forward_pre_hook(lambda module, inputs: attended.append(inputs[0]))
    x = torch.randn(6, 2, 32)
    plain(x, None, None)
    expected = plain.linear_proj(attended[0] * torch.sigmoid(x @ gates.view(32, 32).t()))
    torch.testing.assert_close(gated(x, None, None), expected)


def test_rotary_tables_are_cached_per_length():
    rotary = make_rotary(replace(MODEL, position_embedding_type="rope"))
    first = rotary.tables(6, torch.device("cpu"))
    assert rotary.tables(6, torch.device("cpu"))[0] is first[0]
    assert rotary.tables(8, torch.device("cpu"))[0].shape == (8, 4)


def test_rotary_interleaved_is_a_permutation_of_halves():
    """Scores agree when the rows of q and k are reordered: pairs (2i, 2i+1) instead of (i, i + D/2)."""
    order = torch.arange(8).view(2, 4).t().flatten()
    base = replace(MODEL, position_embedding_type="rope")
    halves = built(SelfAttention(base, SINGLE, name="a", layer_number=1, factory=LOCAL))
    pairs = SelfAttention(replace(base, rotary_interleaved=True), SINGLE, name="a", layer_number=1, factory=LOCAL)
    pairs.load_state_dict(halves.state_dict())
    with torch.no_grad():
        rows = pairs.linear_qkv.weight.view(2, 4, 8, 32)  # groups, [q q k v], head dim, hidden
        rows[:, :3] = halves.linear_qkv.weight.view(2, 4, 8, 32)[:, :3][:, :, order]
    tables = make_rotary(base).tables(6, torch.device("cpu"))
    x = torch.randn(6, 2, 32)
    torch.testing.assert_close(pairs(x, tables, None), halves(x, tables, None))
    assert not torch.allclose(pairs(x, tables, None), pairs(x, None, None))


def test_qk_l2_norm_is_parameterless_and_bounds_scores():
    layer = built(SelfAttention(replace(MODEL, qk_l2_norm=True), SINGLE, name="a", layer_number=1, factory=LOCAL))
    assert {name for name, _ in layer.named_parameters()} == {
        "linear_qkv.weight",
        "linear_qkv.bias",
        "linear_proj.weight",
        "linear_proj.bias",
    }
    x = torch.randn(6, 2, 32)
    with torch.no_grad():
        expected = layer(x, None, None)
        rows = layer.linear_qkv.weight.view(2, 4, 8, 32)
        rows[:, :3] *= 1000  # scales q and k only
        torch.testing.assert_close(layer(x, None, None), expected, rtol=1e-2, atol=1e-4)


def test_attention_dropout_acts_in_training_only():
    core = CoreAttention(replace(MODEL, attention_dropout=0.5), 1, head_dim=8)
    q = torch.randn(6, 2, 4, 8)
    assert not torch.equal(core(q, q, q, None), core(q, q, q, None))
    core.eval()
    assert torch.equal(core(q, q, q, None), core(q, q, q, None))


def test_sliding_window_is_combined_with_explicit_mask():
    core = CoreAttention(replace(MODEL, window_size=(2, 0)), 1, head_dim=8)
    q = torch.randn(6, 1, 4, 8)
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    assert torch.equal(core(q, q, q, AttentionMask(mask=causal)), core(q, q, q))


def test_unsupported_position_embedding_is_named():
    with pytest.raises(ValueError, match="--position-embedding-type mrope"):
        make_rotary(replace(MODEL, position_embedding_type="mrope"))


def test_scaling_flags_without_effect_on_mla_are_noted():
    words = ["--use-rope-scaling", "--rotary-seq-len-interpolation-factor", "2", "--position-embedding-type", "rope"]
    why = "with --multi-latent-attention"
    for more, noted in (([], []), (["--multi-latent-attention"], [(words[0], why), (" ".join(words[1:3]), why)])):
        settings, _ = resolve_command_line([*TOY, *words, *more], 1)
        assert sorted(settings.no_effect, reverse=True) == noted
    latent = replace(MODEL, position_embedding_type="rope", multi_latent_attention=True, rope_type="rope")
    plain = make_rotary(latent)
    scaled = make_rotary(replace(latent, use_rope_scaling=True, rotary_seq_len_interpolation_factor=4))
    assert torch.equal(plain.inv_freq, scaled.inv_freq) and plain.position_scale == scaled.position_scale


def test_latent_attention_rotates_whatever_the_position_embedding_is():
    """As in Megatron-LM (d98e8a64): its latent attention has rotary positions besides those of the embedding."""
    latent = replace(MODEL, multi_latent_attention=True, rope_type="rope")
    rope = make_rotary(replace(latent, position_embedding_type="rope")).inv_freq
    for kind in ("learned_absolute", "none"):
        assert torch.equal(make_rotary(replace(latent, position_embedding_type=kind)).inv_freq, rope)
        assert make_rotary(replace(MODEL, position_embedding_type=kind)) is None
    settings, _ = resolve_command_line([*TOY, *"--multi-latent-attention --position-embedding-type none".split()], 1)
    assert settings.position_embedding_type == "rope"
    record = settings.values | {"position_embedding_type": "none"}  # Megatron-LM's
    assert same_meaning("position_embedding_type", settings.values, record)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, ("gelu_tanh", False)),
        ({"bias_gelu_fusion": False}, ("gelu", False)),
        ({"add_bias_linear": False}, ("gelu", False)),
        ({"swiglu": True}, ("silu", True)),
        ({"squared_relu": True}, ("squared_relu", False)),
        ({"quick_geglu": True}, ("quick_gelu", True)),
    ],
)
def test_activation_follows_the_flags(change, expected):
    act = make_activation(replace(MODEL, **change))
    assert (act.kind, act.gated) == expected


def test_reason_for_not_using_transformer_engine_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        local = select_layer_factory(parse_args([*TOY, "--transformer-impl", "local"], 1), ParallelState.single())
        assert local.column_linear is LOCAL.column_linear and not caplog.records
        assert select_layer_factory(parse_args(TOY, 1), ParallelState.single()).name == "local"
    assert "transformer_engine" in caplog.text and len(caplog.records) == 1


def test_prediction_depths_rotate_with_the_base_of_the_last_layer():
    """Layers after those of the list, which multi-token prediction adds."""
    argv = "--preset qwen3_tiny --mock-data --rotary-base-per-layer"
    num_layers = parse_args("--preset qwen3_tiny --mock-data".split(), 1).model.num_layers
    bases = [str(1000 * (layer + 1)) for layer in range(num_layers)]
    model = parse_args([*argv.split(), *bases], 1).model
    assert (
        _layer_changes(model, num_layers + 1) == _layer_changes(model, num_layers) == {"rotary_base": 1000 * num_layers}
    )
