"""Low-rank adapters of a model: which linears get one, and what stays trainable."""

from collections.abc import Sequence

from torch import nn

from arguments.lora import is_adapter, is_lora_target
from arguments.model import ModelArgs
from moe_trainer.errors import UserError
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.lora import LoRA, add_lora
from moe_trainer.moe.expert_lora import ExpertLoRA
from moe_trainer.moe.experts import Experts
from moe_trainer.parallel.params import freeze_all_but, get_param_info
from moe_trainer.parallel.rng import ShardRNG

_LINEARS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


def add_adapters(chunk: nn.Module, model: ModelArgs, stream: ShardRNG | None) -> None:
    """Add the adapters of --lora-target-modules to a chunk; no effect without --lora-dim.

    Args:
        stream: the chunk's random stream of tensor-parallel shards.
    """
    if model.lora_dim is None:
        return
    options = model.lora_dim, model.lora_alpha / model.lora_dim, model.lora_dropout, stream
    for module in list(chunk.modules()):
        if isinstance(module, Experts):
            adapters = []
            for linear in (module.linear_fc1, module.linear_fc2):
                before, _, after = get_param_info(linear.weight).names[0].partition(".local_experts.")
                name = f"{before}.{after.split('.')[1]}"
                is_target = is_lora_target(name, model.lora_target_modules)
                adapters.append(ExpertLoRA(linear.weight, *options) if is_target else None)
            if adapters != [None, None]:
                module.add_adapters(*adapters)
        elif isinstance(module, _LINEARS):
            name = get_param_info(module.weight).names[0].removesuffix(".weight")
            if is_lora_target(name, model.lora_target_modules):
                add_lora(module, LoRA(module, name, *options))


def freeze_all_but_adapters(chunks: Sequence[nn.Module], model: ModelArgs) -> None:
    """Freeze all other parameters, so that none has a gradient or an optimizer state.

    Raises:
        UserError: if this rank has no adapter.
    """
    freeze_all_but(chunks, is_adapter)
    if not any(param.requires_grad for chunk in chunks for param in chunk.parameters()):
        raise UserError(
            f"--lora-target-modules {' '.join(model.lora_target_modules)} selects no linear of this rank's layers; "
            "every pipeline stage needs one"
        )
