"""Modules of a model by their names in Megatron-Core."""

from collections.abc import Iterable, Iterator

from torch import nn

from moe_trainer.model.block import TransformerLayer
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.experts import Experts
from moe_trainer.parallel.params import get_param_info


def named_modules(chunks: Iterable[Transformer]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its own parameters by its name; the experts of a layer as one module."""
    for chunk in chunks:
        for module in chunk.modules():
            own = next(module.parameters(recurse=False), None)
            if isinstance(module, Experts):
                yield get_param_info(module.linear_fc1.weight).names[0].partition(".local_experts.")[0], module
            elif own is not None and not get_param_info(own).stacked:
                yield get_param_info(own).names[0].rpartition(".")[0], module


def named_transformer_layers(chunks: Iterable[Transformer]) -> Iterator[tuple[str, TransformerLayer]]:
    """Yield every transformer layer with its global name: "decoder.layers.3", "mtp.layers.0".

    A depth of a hybrid model has "mtp.layers.0.layers.1".
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield module.name.replace(".mtp_model_layer", ""), module


def named_experts(chunks: Iterable[Transformer]) -> Iterator[tuple[str, Experts]]:
    """Yield the experts of every MoE layer, as `named_modules` does."""
    return ((name, module) for name, module in named_modules(chunks) if isinstance(module, Experts))


def names_of_experts(chunks: Iterable[Transformer]) -> dict[int, list[str]]:
    """Return the names of the local experts of every experts module, by its id."""
    return {
        id(module): [name.partition(".linear_fc1")[0] for name in get_param_info(module.linear_fc1.weight).names]
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Experts)
    }
