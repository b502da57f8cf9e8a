"""The optimizer's entry in a checkpoint, without its tensors, as Megatron-LM's loaders of both formats require it.

Megatron-LM matches the parameter groups of a checkpoint with its own by their settings, since core_v0.19 including the
bounds of the learning rate. With expert parallelism it has a chain of two optimizers, the second one for the experts.

Its Adam is torch's if neither Transformer Engine nor Apex is installed. That one keeps the number of steps with every
parameter, which a checkpoint holds once (`common_step`); Transformer Engine's keeps it in the groups and rejects it
elsewhere. So the entry follows --transformer-impl. A distributed optimizer has it in the groups in both cases.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from arguments.mechanisms.optimizers import find_optimizer
from arguments.mup import mup_lr_mult, recorded_width_mult
from moe_trainer.checkpoint.layer_spec import has_te_names

FULLY_RESHARDABLE = "fully_reshardable"


def param_group(
    record: Mapping[str, Any],
    *,
    decayed: bool,
    decoupled: bool,
    experts: bool,
    step: int | None = None,
    scaled: bool = False,
) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters.

    `decoupled`: its learning rate is that of --decoupled-lr. `experts`: its parameters are distributed over
    expert-parallel ranks. `step`: the number of steps, if the group keeps it. `scaled`: muP scales its learning rate
    (p_scaling.py).
    """
    max_lr: Any = record.get("decoupled_lr") if decoupled else record.get("lr")
    own_min: Any = record.get("decoupled_min_lr") if decoupled else None
    min_lr: Any = record.get("min_lr") if own_min is None else own_min
    optimizer = find_optimizer(record.get("optimizer"))
    eps: Any = record.get("adam_eps")
    if scaled:
        factor = mup_lr_mult(record["optimizer"], recorded_width_mult(record))
        max_lr, min_lr = max_lr * factor, min_lr * factor
        eps = eps * factor if optimizer.epsilon else eps
    common = {
        "is_expert_parallel": experts,
        "default_config": not decoupled and not scaled,
        "wd_mult": float(decayed),
        "lr_mult": 1.0,
        # since core_v0.16 only max_lr tells a group with --decoupled-lr from the others
        "is_decoupled_lr": False,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "lr": max_lr,
        "weight_decay": float(record.get("weight_decay") or 0.0) * decayed,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }
    if step is not None:
        common["step"] = step
    return common | optimizer.record_group(record, eps)


def is_decoupled(group: Mapping[str, Any]) -> bool:
    """Return whether a group of a checkpoint, of any release, has the learning rate of --decoupled-lr."""
    return bool(group.get("is_decoupled_lr")) or group.get("default_config") is False


def group_order_key(record: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[bool, list[tuple[str, float]]]:
    """Return the key by which Megatron-LM sorts the groups of an optimizer: what differs from the flags.

    It matches those of a checkpoint with its own in this order.
    """
    usual = {"max_lr": record.get("lr"), "min_lr": record.get("min_lr"), "eps": record.get("adam_eps"), "wd_mult": 1.0}
    apart = sorted((key, group[key]) for key, value in usual.items() if group.get(key, value) != value)
    return bool(apart), apart


def chained(groups: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the groups (as Optimizer.scalars() has them) of each optimizer of Megatron-LM's chain."""
    both = [[group for group in groups if group["is_expert_parallel"] is experts] for experts in (False, True)]
    return [part for part in both if part]


def optimizer_entry(record: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the `optimizer` entry of a distributed checkpoint's common state, from Optimizer.scalars()."""
    chain = [_of_one(record, scalars, groups) for groups in chained(scalars.get("param_groups", ()))]
    return chain[0] if len(chain) == 1 else dict(enumerate(chain))


def grad_scaler(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a dynamic loss scale, nothing without one.

    Megatron-LM moves the scale to its device, so it is a tensor.
    """
    state = scalars.get("grad_scaler")
    return {"grad_scaler": {**state, "scale": torch.tensor([float(state["scale"])])}} if state else {}


def _of_one(record: Mapping[str, Any], scalars: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    step, distributed = int(scalars["step"]), bool(record.get("use_distributed_optimizer"))
    in_groups = distributed or has_te_names(record)
    described = [
        param_group(
            record,
            decayed=group["wd_mult"] != 0.0,
            decoupled=group["is_decoupled_lr"],
            experts=group["is_expert_parallel"],
            step=step if in_groups else None,
            scaled=group.get("lr_mult", 1.0) != 1.0,
        )
        for group in groups
    ]
    if recorded_width_mult(record) != 1.0:
        described.sort(key=lambda group: group_order_key(record, group))
    if distributed:
        return {
            "optimizer": {"param_groups": described},
            **grad_scaler(scalars),
            "param_state_sharding_type": FULLY_RESHARDABLE,
        }
    inner = {"state": {} if in_groups else {"common_step": torch.tensor(float(step))}, "param_groups": described}
    return {"optimizer": inner, **grad_scaler(scalars)} if record.get("bf16") or record.get("fp16") else inner


def content_metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a distributed checkpoint for Megatron-LM's loader."""
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if record.get("use_distributed_optimizer"):
        content |= {
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    return content
