"""The schedules' entry in a checkpoint, and what a resumed run makes of it.

Megatron-LM stores the parameters of its scheduler and, on resume, insists that they are the same, unless
--override-opt_param-scheduler says that the flags count or --use-checkpoint-opt_param-scheduler that the checkpoint does.
One thing is kinder here: the length of a weight decay that never changes is not compared.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moe_trainer.optim.schedules import LrSchedule, WeightDecaySchedule

_LR_FIELDS = MappingProxyType({
    "max_lr": "max_lr", "min_lr": "min_lr", "lr_warmup_steps": "warmup_samples", "lr_decay_steps": "decay_samples",
    "lr_decay_style": "style"})
_WEIGHT_DECAY_FIELDS = MappingProxyType({
    "start_wd": "start", "end_wd": "end", "wd_incr_steps": "samples", "wd_incr_style": "style"})
_FLAGS = MappingProxyType({
    "max_lr": "--lr", "min_lr": "--min-lr", "lr_warmup_steps": "the warmup", "lr_decay_steps": "the length of the decay",
    "lr_decay_style": "--lr-decay-style", "start_wd": "--start-weight-decay (--weight-decay)",
    "end_wd": "--end-weight-decay (--weight-decay)", "wd_incr_steps": "the length of the training",
    "wd_incr_style": "--weight-decay-incr-style"})


def schedule_record(lr: LrSchedule, weight_decay: WeightDecaySchedule, samples: int) -> dict[str, Any]:
    """The entry under Megatron's names ("steps" are samples). samples: those of updated iterations so far."""
    return {**{name: getattr(lr, field) for name, field in _LR_FIELDS.items()},
            **{name: getattr(weight_decay, field) for name, field in _WEIGHT_DECAY_FIELDS.items()},
            "num_steps": samples}


def resume_schedules(lr: LrSchedule, weight_decay: WeightDecaySchedule, saved: Mapping[str, Any], *, override: bool,
                     use_saved: bool) -> tuple[LrSchedule, WeightDecaySchedule]:
    """Reconcile the flags' schedules with a checkpoint's entry (entries that it lacks are not compared).

    override: --override-opt_param-scheduler, the flags count. use_saved: --use-checkpoint-opt_param-scheduler.
    Raises: ValueError naming every difference when neither is given.
    """
    if override:
        return lr, weight_decay
    fields = [(lr, _LR_FIELDS), (weight_decay, _WEIGHT_DECAY_FIELDS)]
    differing = [(name, getattr(owner, field), saved[name]) for owner, names in fields for name, field in names.items()
                 if name in saved and saved[name] != getattr(owner, field)]
    if not use_saved:
        if weight_decay.style == saved.get("wd_incr_style") == "constant":
            differing = [entry for entry in differing if entry[0] != "wd_incr_steps"]
        if differing:
            told = "; ".join(f"{_FLAGS[name]} is {ours} here and {theirs} in the checkpoint ({name})"
                             for name, ours, theirs in differing)
            raise ValueError(f"the schedules differ from the checkpoint's: {told}. --override-opt_param-scheduler takes the "
                             "values of this command line, --use-checkpoint-opt_param-scheduler those of the checkpoint")
        return lr, weight_decay
    theirs = {name: value for name, _, value in differing}
    return tuple(dataclasses.replace(owner, **{field: theirs[name] for name, field in names.items() if name in theirs})
                 for owner, names in fields)
