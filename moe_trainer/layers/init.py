"""Initial distributions of weights, and the parameters that carry them."""

import math
from typing import NamedTuple

import torch
from torch.nn import Parameter

from arguments.model import ModelArgs
from moe_trainer.parallel.params import ParamInfo, set_param_info


class Init(NamedTuple):
    """Distribution of a weight: `kind` as in ParamInfo.init, `std` read by "normal"."""

    kind: str
    std: float = 0.0


def hidden_init(model: ModelArgs) -> Init:
    """Return the distribution of weights that read the hidden state: qkv, fc1, router, output head."""
    if model.init_method_xavier_uniform:
        return Init("xavier_uniform")
    return Init("normal", hidden_std(model))


def hidden_std(model: ModelArgs) -> float:
    """Return the std of weights that read the hidden state; muP divides it by the root of the width multiplier."""
    return model.init_method_std / math.sqrt(model.width_mult)


def residual_init(model: ModelArgs) -> Init:
    """Return the distribution of weights that write to the residual stream: std / sqrt(number of sublayers).

    A layer of a hybrid model has one sublayer, as Megatron-Core counts them, any other two.
    """
    if model.init_method_xavier_uniform:
        return Init("xavier_uniform")
    num_sublayers = model.num_layers * (1 if model.hybrid_layer_pattern else 2)
    return Init("normal", hidden_std(model) / math.sqrt(num_sublayers))


def embedding_init(model: ModelArgs) -> Init:
    """Return the distribution of token and position embeddings, independent of the width."""
    if model.embedding_init_method_std is not None and model.embedding_init_method_std != model.init_method_std:
        return Init("normal", model.embedding_init_method_std)
    return Init("xavier_uniform") if model.init_method_xavier_uniform else Init("normal", model.init_method_std)


def output_init(model: ModelArgs) -> Init:
    """Return the distribution of an untied output layer; muP treats it as an embedding and scales its logits."""
    return embedding_init(model) if model.use_mup else hidden_init(model)


def make_parameter(shape: tuple[int, ...], info: ParamInfo) -> Parameter:
    """Return an uninitialized fp32 parameter on the default device, with its info."""
    param = Parameter(torch.empty(shape, dtype=torch.float32))
    set_param_info(param, info)
    return param
