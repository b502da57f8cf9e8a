"""The non-tensor part of a checkpoint, in Megatron's format, with an entry of this program.

Megatron's loader finds args, iteration, checkpoint_version, optimizer, opt_param_scheduler, ...; the entry
`moe_trainer` holds what only this program needs for bitwise resume, in builtin types.
"""

import argparse
import io
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from arguments.mechanisms.optimizers import find_optimizer
from moe_trainer.checkpoint.archive import load_bytes
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.optimizer_record import content_metadata, optimizer_entry
from moe_trainer.checkpoint.options import CheckpointState
from moe_trainer.checkpoint.reading import read_object
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS, to_builtin
from moe_trainer.checkpoint.virtual_index import VirtualMetadata

KEY = "common_state/shard_0_1"
OLD_FILE = "common.pt"
_NATIVE_ENTRY = "moe_trainer"
_STEPS = ("common_step", "step")
# counters that Megatron keeps in its args
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def dump_object(value: Any) -> bytes:
    """Encode as Megatron's sharded objects are: torch.save of a list of one."""
    return dump_file([value])


def dump_file(content: Any) -> bytes:
    """Encode as torch.save does, such as the file that Megatron-LM up to core_v0.18 reads."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def build(state: CheckpointState, optimizer_scalars: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of the common_state entry."""
    args = argparse.Namespace(**to_builtin(dict(state.args)))
    for name in _COUNTERS:
        setattr(args, name, getattr(state, name))
    common: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.num_floating_point_operations_so_far,
        "opt_param_scheduler": to_builtin(dict(state.scheduler)),
        "content_metadata": content_metadata(state.args),
        _NATIVE_ENTRY: {"version": 1, "extra": to_builtin(dict(state.extra))},
    }
    if optimizer_scalars is not None:
        scalars = to_builtin(dict(optimizer_scalars))
        common[_NATIVE_ENTRY]["optimizer"] = scalars
        common["optimizer"] = to_builtin(optimizer_entry(state.args, scalars))
    return common


def read(folder: Path, index: Metadata) -> dict[str, Any]:
    """Decode the common state of a checkpoint folder.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    if isinstance(index, VirtualMetadata) and index.common:
        check_types(folder, index.common)
        return index.common
    if KEY in index.state_dict_metadata:
        value = read_object(folder, index, KEY)
    elif (folder / OLD_FILE).is_file():
        try:
            value = load_bytes((folder / OLD_FILE).read_bytes())
        except DECODE_ERRORS as error:
            raise CheckpointError(f"{folder / OLD_FILE} is damaged: {error}") from error
    else:
        raise CheckpointError(f"{folder} has no common state: neither the entry {KEY} nor the file {OLD_FILE}")
    if not isinstance(value, dict) or "args" not in value:
        raise CheckpointError(f"{folder}: the common state holds no args")
    check_types(folder, value)
    return value


def check_types(folder: Path, common: Mapping[str, Any]) -> None:
    """Check the types of the values that a run resumes from.

    Raises:
        DamagedError: naming the first wrong value.
    """
    try:
        state, scalars, _ = parse(common)
        for name in ("iteration", *_COUNTERS):
            _count(name, getattr(state, name))
        if not 0 <= float(state.num_floating_point_operations_so_far) < math.inf:
            raise ValueError(
                f"num_floating_point_operations_so_far is {state.num_floating_point_operations_so_far!r:.60}"
            )
        _count("opt_param_scheduler.num_steps", state.scheduler.get("num_steps", 0))
        for name, value in state.scheduler.items():
            if not (
                value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
            ):
                raise ValueError(f"opt_param_scheduler.{name} is {value!r:.60}")
        for what, value in (
            ("moe_trainer.extra", state.extra),
            ("optimizer", scalars),
            ("grad_scaler", scalars.get("grad_scaler") or {}),
        ):
            if not isinstance(value, dict):
                raise ValueError(f"{what} is {value!r:.60}")
        if "step" in scalars:
            _count("the step of the optimizer", int(scalars["step"]))
    except DECODE_ERRORS as error:
        raise DamagedError(f"{folder}: the common state is damaged: {str(error) or type(error).__name__}") from error


def _count(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r:.60}, a non-negative integer is needed")


def parse(common: Mapping[str, Any]) -> tuple[CheckpointState, dict[str, Any], bool]:
    """Return (state, optimizer scalars, whether Megatron-LM wrote it) from a decoded common state."""
    args = to_builtin(common["args"])
    native = common.get(_NATIVE_ENTRY)
    counters = {name: args.pop(name, 0) or 0 for name in _COUNTERS}
    values = {
        "iteration": int(common.get("iteration", 0)),
        "args": args,
        "num_floating_point_operations_so_far": common.get("num_floating_point_operations_so_far", 0.0),
        "scheduler": to_builtin(common.get("opt_param_scheduler") or {}),
        "extra": native["extra"] if native else {},
        **counters,
    }
    assert set(values) == {item.name for item in fields(CheckpointState)}
    uncounted = {"step": values["iteration"]} if not find_optimizer(args.get("optimizer")).counts_steps else {}
    scalars = native.get("optimizer", {}) if native else uncounted | _megatron_scalars(common.get("optimizer"))
    return CheckpointState(**values), scalars, native is None


def _megatron_scalars(optimizer: Any) -> dict[str, Any]:
    """Return the scalars of Megatron's optimizers (plain, mixed precision, or a chain) under native names."""
    scalars: dict[str, Any] = {}
    steps: dict[str, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key in _STEPS and isinstance(item, (int, float, torch.Tensor)):
                    steps.setdefault(key, int(item))
                elif key == "grad_scaler" and isinstance(item, dict):
                    scalars.setdefault("grad_scaler", to_builtin(item))
                else:
                    visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(optimizer)
    # a group may keep the step of the program that wrote the checkpoint before
    stored = [steps[key] for key in _STEPS if key in steps]
    return ({"step": stored[0]} if stored else {}) | scalars
