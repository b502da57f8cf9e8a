"""Kimi delta attention: ranks of a context, initialization, kernels, estimates. tests/layers/test_tensor_parallel.py has its ranks."""

import importlib.util
from dataclasses import replace

import torch
from layers.test_gated_delta_net import assert_ranks_equal_one_process, make
from layers.test_kernels import RULES
from layers.test_tensor_parallel import BY_CHANNEL

from arguments.mechanisms.sublayers import KIMI_DELTA_ATTENTION
from arguments.model import ModelArgs
from moe_trainer.layers.kernels import BackendPolicy, Kernels, with_delta_rule
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


def test_decays_by_channel_have_no_kernels(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: RULES)
    found = [
        with_delta_rule(Kernels(), [], model, torch.bfloat16, BackendPolicy(cuda=True)) for model in (ModelArgs(), KDA)
    ]
    assert found[0].gated_delta is repr and found[1] == Kernels()
