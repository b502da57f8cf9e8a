"""Kimi delta attention: ranks of a context, initialization; test_tensor_parallel.py has tensor-parallel ranks."""

from dataclasses import replace

import torch
from layers.test_gated_delta_net import assert_ranks_equal_one_process, make
from layers.test_tensor_parallel import BY_CHANNEL

from arguments.mechanisms.sublayers import KIMI_DELTA_ATTENTION
from moe_trainer.layers.rotary import make_rotary
from moe_trainer.parallel.rng import init_parameters

KDA = BY_CHANNEL[KIMI_DELTA_ATTENTION.name]


def test_context_parallel_ranks_equal_one_process():
    assert_ranks_equal_one_process(2, KDA)


def test_initial_decays_by_channel_are_those_of_kimi_linear():
    """As in transformers: steps from 1e-3 to 0.1, each channel its own."""
    layer = make(model=replace(KDA, linear_num_key_heads=64, linear_num_value_heads=512))
    for param in layer.parameters():
        init_parameters([param], 1)
    steps = torch.nn.functional.softplus(layer.dt_bias)
    assert steps.shape == (512 * 6,)
    assert 1e-3 <= steps.min() < 2e-3 and 0.09 < steps.max() <= 0.1 and steps.median() < 0.015


def test_latent_attention_next_to_it_may_have_no_positions():
    """Without this sublayer --position-embedding-type none rotates latent attention, as in Megatron-LM."""
    model = replace(KDA, multi_latent_attention=True, rope_type="rope", position_embedding_type="none")
    assert make_rotary(model) is None
    assert make_rotary(replace(model, experimental_attention_variant=None)) is not None
