"""State of the learning-rate and weight-decay schedules in a checkpoint.

Megatron-LM stores the parameters of its scheduler and requires the same ones on resume, unless
--override-opt_param-scheduler (use the flags) or --use-checkpoint-opt_param-scheduler (use the checkpoint) is given.
Unlike there, the length of a constant weight decay is not compared.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moe_trainer.optim.schedules import LrSchedule, WeightDecaySchedule

_LR_FIELDS = MappingProxyType(
    {
        "max_lr": "max_lr",
        "min_lr": "min_lr",
        "lr_warmup_steps": "warmup_samples",
        "lr_decay_steps": "decay_samples",
        "lr_decay_style": "style",
    }
)
_WEIGHT_DECAY_FIELDS = MappingProxyType(
    {"start_wd": "start", "end_wd": "end", "wd_incr_steps": "samples", "wd_incr_style": "style"}
)
_FLAGS = MappingProxyType(
    {
        "max_lr": "--lr",
        "min_lr": "--min-lr",
        "lr_warmup_steps": "the warmup",
        "lr_decay_steps": "the length of the decay",
        "lr_decay_style": "--lr-decay-style",
        "start_wd": "--start-weight-decay (--weight-decay)",
        "end_wd": "--end-weight-decay (--weight-decay)",
        "wd_incr_steps": "the length of the training",
        "wd_incr_style": "--weight-decay-incr-style",
    }
)


def scheduler_state_dict(lr: LrSchedule, weight_decay: WeightDecaySchedule, samples: int) -> dict[str, Any]:
    """Return the state under Megatron's names ("steps" are samples).

    Args:
        samples: samples of updated iterations so far.
    """
    return {
        **{name: getattr(lr, field) for name, field in _LR_FIELDS.items()},
        **{name: getattr(weight_decay, field) for name, field in _WEIGHT_DECAY_FIELDS.items()},
        "num_steps": samples,
    }


def resume_schedules(
    lr: LrSchedule, weight_decay: WeightDecaySchedule, saved: Mapping[str, Any], *, override: bool, use_saved: bool
) -> tuple[LrSchedule, WeightDecaySchedule]:
    """Reconcile the schedules of the flags with those of a checkpoint; missing entries are not compared.

    Args:
        override: --override-opt_param-scheduler, use the flags.
        use_saved: --use-checkpoint-opt_param-scheduler, use the checkpoint.

    Raises:
        ValueError: the schedules differ and neither option is given; lists every difference.
    """
    if override:
        return lr, weight_decay
    fields = [(lr, _LR_FIELDS), (weight_decay, _WEIGHT_DECAY_FIELDS)]
    differing = [
        (name, getattr(owner, field), saved[name])
        for owner, names in fields
        for name, field in names.items()
        if name in saved and saved[name] != getattr(owner, field)
    ]
    if not use_saved:
        if weight_decay.style == saved.get("wd_incr_style") == "constant":
            differing = [entry for entry in differing if entry[0] != "wd_incr_steps"]
        if differing:
            differences = "; ".join(
                f"{_FLAGS[name]} is {current} in this run and {stored} in the checkpoint ({name})"
                for name, current, stored in differing
            )
            raise ValueError(
                f"the schedules differ from the checkpoint's: {differences}. --override-opt_param-scheduler uses "
                "the values of this command line, --use-checkpoint-opt_param-scheduler those of the checkpoint"
            )
        return lr, weight_decay
    stored_values = {name: value for name, _, value in differing}
    return tuple(
        dataclasses.replace(
            owner, **{field: stored_values[name] for name, field in names.items() if name in stored_values}
        )
        for owner, names in fields
    )
