"""State of the learning-rate and weight-decay schedules in a checkpoint.

Megatron-LM stores the parameters of its scheduler and requires the same ones on resume, unless
--override-opt_param-scheduler (use the flags) or --use-checkpoint-opt_param-scheduler (use the checkpoint) is given.
Unlike there, the length of a constant weight decay is not compared.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_trainer.optim.schedules import LrSchedule, WeightDecaySchedule

# Megatron's name, index of the schedule (learning rate, weight decay), its field, what sets it
_FIELDS = (
    ("max_lr", 0, "max_lr", "--lr"),
    ("min_lr", 0, "min_lr", "--min-lr"),
    ("lr_warmup_steps", 0, "warmup_samples", "the warmup"),
    ("lr_decay_steps", 0, "decay_samples", "the length of the decay"),
    ("lr_decay_style", 0, "style", "--lr-decay-style"),
    ("start_wd", 1, "start", "--start-weight-decay (--weight-decay)"),
    ("end_wd", 1, "end", "--end-weight-decay (--weight-decay)"),
    ("wd_incr_steps", 1, "samples", "the length of the training"),
    ("wd_incr_style", 1, "style", "--weight-decay-incr-style"),
)


def scheduler_state_dict(lr: LrSchedule, weight_decay: WeightDecaySchedule, samples: int) -> dict[str, Any]:
    """Return the state under Megatron's names ("steps" are samples).

    Args:
        samples: samples of updated iterations so far.
    """
    schedules = (lr, weight_decay)
    return {name: getattr(schedules[index], field) for name, index, field, _ in _FIELDS} | {"num_steps": samples}


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
    schedules: tuple[Any, Any] = (lr, weight_decay)
    changes: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    differences = []
    is_constant = weight_decay.style == saved.get("wd_incr_style") == "constant"
    for name, index, field, source in _FIELDS:
        current = getattr(schedules[index], field)
        if name in saved and saved[name] != current:
            changes[index][field] = saved[name]
            if name != "wd_incr_steps" or not is_constant:
                differences.append(f"{source} is {current} in this run and {saved[name]} in the checkpoint ({name})")
    if use_saved:
        return dataclasses.replace(lr, **changes[0]), dataclasses.replace(weight_decay, **changes[1])
    if differences:
        raise ValueError(
            f"the schedules differ from the checkpoint's: {'; '.join(differences)}. --override-opt_param-scheduler "
            "uses the values of this command line, --use-checkpoint-opt_param-scheduler those of the checkpoint"
        )
    return lr, weight_decay
