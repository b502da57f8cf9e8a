"""The form of a legacy checkpoint: names, order, shapes, types and the values by which Megatron-LM's loader recognizes a parameter group.

tests/data/legacy_forms.json holds those of checkpoints that Megatron-LM main (d98e8a64) wrote on CPUs, with the flags of each run.
"""

from pathlib import Path
from typing import Any

import numpy
import torch

from moe_trainer.checkpoint.archive import load_mapped

# the identity of a group, all of which its loader compares
IDENTITY = ("is_expert_parallel", "default_config", "wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr")


def describe_form(value: Any, key: Any = None) -> Any:
    """Types and shapes instead of values, but for the identity of parameter groups."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, numpy.ndarray):
        return f"numpy {value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        found = {str(name): describe_form(item, name) for name, item in value.items()}
        return (
            [list(pair) for pair in found.items()] if key == "model" else dict(sorted(found.items()))
        )  # a model's order gives its parameters their numbers
    if isinstance(value, list | tuple):
        found = [describe_form(item, key) for item in value]
        return (
            [len(found), found[0]]
            if len(found) > 8 and key != "params" and all(item == found[0] for item in found)
            else found
        )
    return value if key in IDENTITY else "number" if key == "step" else type(value).__name__


def describe_forms(folder: Path) -> dict[str, Any]:
    """Of every file of an iteration's folder; the flags and what only this program keeps are left out."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*/*.pt")):
        content = load_mapped(path)
        if isinstance(content, dict):
            content = {name: value for name, value in content.items() if name not in ("args", "moe_trainer")}
        found[f"{path.parent.name}/{path.name}"] = describe_form(content)
    return found
