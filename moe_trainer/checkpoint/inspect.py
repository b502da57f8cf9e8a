"""Inspect checkpoints of any mapping from the command line, without a model.

    python -m moe_trainer.checkpoint.inspect ls PATH [--checksums] [--expand] [--match REGEX]
    python -m moe_trainer.checkpoint.inspect verify PATH
    python -m moe_trainer.checkpoint.inspect diff PATH PATH [--rtol X] [--atol X] [--weights-only]

PATH is a checkpoint folder (iter_0000010), the folder above it, in which the tracker file (or --ckpt-step N) selects
one, or a Hugging Face folder. Reads checkpoints of this program and of Megatron-LM: torch_dist, and the legacy format
(mp_rank_* folders), whose shards are combined. Exit codes: 0 valid or equal; 1 incomplete, damaged or different; 2 not
readable. One logical tensor is in memory at a time.
"""

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from arguments.paths import local_path
from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import COMPLETE, INDEX, TRACKER, describe_complete, folder_name, read_tracker
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.flavors import has_hybrid_names, to_flavor
from moe_trainer.checkpoint.folder_format import READABLE, detect_format, is_hf_folder, is_legacy_folder
from moe_trainer.checkpoint.index import check, read_index, stored_bytes
from moe_trainer.checkpoint.logical import LogicalTensor, logical_tensors, read_logical
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.checkpoint.virtual_index import ForeignMetadata
from moe_trainer.exit_codes import ExitCode

_STATE = re.compile(r"^(chained_\d+\.)?optimizer\.state\.[^.]+\.")
_MAIN, _SHARDED_MAIN = "optimizer.state.fp32_param.", "optimizer.state.param."
MAX_LISTED = 12
# a choice of what fits a line, which no property of a flag says
_SHOWN_FLAGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "world_size",
)


def select_checkpoint(path: Path, ckpt_step: int | None = None) -> Path:
    """Return the checkpoint folder that a path names. Changes nothing on disk.

    Raises:
        CheckpointError: if there is none, or it is in another format.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} {'is not a directory' if path.exists() else 'does not exist'}")
    folder = path
    if (
        ckpt_step is not None
        or not any((path / name).exists() for name in (COMPLETE, INDEX))
        and not is_legacy_folder(path)
        and not is_hf_folder(path)
    ):
        wanted = ckpt_step if ckpt_step is not None else read_tracker(path)
        if wanted is None:
            raise CheckpointError(
                f"{path} is neither a checkpoint nor a folder of checkpoints: {INDEX} and {TRACKER} are missing. "
                + describe_complete(path)
            )
        folder = path / (wanted if wanted == "release" else folder_name(int(wanted)))
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist. " + describe_complete(path))
    kind = detect_format(folder)
    if kind not in (None, *READABLE):
        raise CheckpointError(
            f"{folder} is in the format {kind!r}; only torch_dist and legacy checkpoints (mp_rank_* folders) and "
            "Hugging Face folders can be looked at"
        )
    return folder


def describe(folder: Path) -> dict[str, tuple[tuple[int, ...], str] | None]:
    """Return the global shape and dtype of every key of a checkpoint, None for non-tensor entries.

    Raises:
        CheckpointError: if the index is missing or damaged.
    """
    return {
        key: (tuple(entry.size), _short(entry.properties.dtype)) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in read_index(folder).state_dict_metadata.items()
    }


def checksum(values: Tensor) -> str:
    """Return the first 16 hex digits of the SHA-256 of a tensor's elements in row-major order, for any mapping."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()[:16]


class CheckpointComparison(NamedTuple):
    """Comparison of two checkpoints.

    Attributes:
        lines: one for every logical tensor that differs.
        equal: number of equal tensors.
        differing: number of tensors that differ in values, shape or format.
        only: number of tensors in the first and in the second one only.
    """

    lines: list[str]
    equal: int
    differing: int
    only: tuple[int, int]

    def summary(self) -> str:
        if not self.lines:
            return f"all tensors are equal ({self.equal})"
        alone = [f"{count} only in the {which}" for count, which in zip(self.only, ("first", "second")) if count]
        return ", ".join(
            [f"{len(self.lines)} logical tensors differ: {self.equal} equal, {self.differing} not", *alone]
        )


def differences(left: Path, right: Path, rtol: float = 0.0, atol: float = 0.0, weights_only: bool = False) -> list[str]:
    """Return the lines of `compare_checkpoints`."""
    return compare_checkpoints(left, right, rtol, atol, weights_only).lines


def compare_checkpoints(
    left: Path, right: Path, rtol: float = 0.0, atol: float = 0.0, weights_only: bool = False
) -> CheckpointComparison:
    """Compare two checkpoints, logical tensor by logical tensor, with tolerances.

    Layers may be stacked or not, norms fused or not: tensors are compared by their names in the model; those of a GPT
    model get the names of a hybrid one if the other has them. Main parameters have one name with a distributed
    optimizer and another without; if a checkpoint has none, its fp32 weights are the main parameters. Non-tensor
    entries are not compared.

    Raises:
        CheckpointError: if one of them is damaged.
    """
    indices = [read_index(folder) for folder in (left, right)]
    ours, theirs = (
        {
            tensor.name.replace(_SHARDED_MAIN, _MAIN): tensor
            for tensor in logical_tensors(index)
            if not weights_only or "optimizer." not in tensor.name
        }
        for index in indices
    )
    if has_hybrid_names(ours) != has_hybrid_names(theirs):
        ours, theirs = (each if has_hybrid_names(each) else _hybrid_names(each) for each in (ours, theirs))
    for one, other in ((ours, theirs), (theirs, ours)):
        for name in [name for name in other if name.startswith(_MAIN) and name not in one]:
            weight = one.get(name.removeprefix(_MAIN))
            if weight is not None and weight.dtype == torch.float32:
                one[name] = weight
    lines = [f"{name}: only in {left}" for name in ours if name not in theirs]
    lines += [f"{name}: only in {right}" for name in theirs if name not in ours]
    only = len(ours.keys() - theirs.keys()), len(theirs.keys() - ours.keys())
    common = [(name, first, theirs[name]) for name, first in ours.items() if name in theirs]
    for name, first, second in common:
        if first.shape != second.shape or first.dtype != second.dtype:
            lines.append(f"{name}: {first.shape} {_short(first.dtype)} and {second.shape} {_short(second.dtype)}")
            continue
        left_values, right_values = (
            read_logical(folder, index, tensor)
            for folder, index, tensor in zip((left, right), indices, (first, second))
        )
        if not _equal(left_values, right_values, rtol, atol):
            gap = (left_values.double() - right_values.double()).abs()
            lines.append(
                f"{name}: differs by up to {gap.max().item():.3e} in {int((gap != 0).sum())} of {gap.numel()} elements"
            )
    differing = len(lines) - sum(only)
    return CheckpointComparison(lines, len(common) - differing, differing, only)


def _hybrid_names(tensors: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Return the tensors of a GPT model under the names of a hybrid model with the same layers."""
    prefixes = {name: match[0] if (match := _STATE.match(name)) else "" for name in tensors}
    return {
        prefixes[name] + to_flavor(name.removeprefix(prefixes[name]), hybrid=True): tensor
        for name, tensor in tensors.items()
    }


def _equal(one: Tensor, other: Tensor, rtol: float, atol: float) -> bool:
    if rtol == atol == 0.0:
        return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
    return torch.allclose(one.double(), other.double(), rtol=rtol, atol=atol, equal_nan=True)


def flag_differences(left: Path, right: Path) -> list[str]:
    """Return recorded flags and counters that differ.

    Raises:
        CheckpointError: if a common state is missing or damaged.
    """
    records = []
    for folder in (left, right):
        state, _, _ = common_state.parse(common_state.read(folder, read_index(folder)))
        records.append(
            {"iteration": state.iteration, "consumed_train_samples": state.consumed_train_samples, **state.args}
        )
    return [
        f"{name}: {records[0].get(name)!r} and {records[1].get(name)!r}"
        for name in sorted(records[0].keys() | records[1].keys())
        if records[0].get(name) != records[1].get(name)
    ]


# ---- the command line


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _header(folder: Path, index: Metadata) -> Iterator[str]:
    foreign = index if isinstance(index, ForeignMetadata) else None
    if foreign is not None and foreign.title is not None:
        yield f"{folder}: {foreign.title}"
    else:
        state, _, from_megatron = common_state.parse(common_state.read(folder, index))
        sizes = ", ".join(f"{name} {state.args[name]}" for name in _SHOWN_FLAGS if state.args.get(name) is not None)
        yield (
            f"{folder}: iteration {state.iteration}, {state.consumed_train_samples} samples, written by "
            f"{'Megatron-LM' if from_megatron else 'moe-trainer'} ({sizes})"
        )
    tensors = [
        (key, entry) for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    ]
    weights = sum(entry.size.numel() for key, entry in tensors if "optimizer." not in key)
    if foreign is not None:
        yield from foreign.remarks
        if foreign.state_problem is not None:
            yield f"its optimizer state cannot be read: {foreign.state_problem}"
    yield (
        f"{len(tensors)} stored tensors, {weights:,} weights, "
        f"{len({i.relative_path for i in index.storage_data.values()})} files, {_bytes(stored_bytes(index))}"
    )


def _order(name: str) -> list:
    """Return a sort key: weights before optimizer states, layers by number."""
    block = ("embedding", "decoder", "mtp", "output_layer")
    place = next((index for index, start in enumerate(block) if name.startswith(start)), len(block))
    return [place, *((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))]


def _select_complete(path: Path, ckpt_step: int | None) -> Path:
    folder = select_checkpoint(path, ckpt_step)
    if problems := check(folder):
        raise CheckpointError("\n".join(problems))
    return folder


def _ls(options: argparse.Namespace) -> int:
    folder = _select_complete(options.paths[0], options.ckpt_step)
    index = read_index(folder)
    for line in _header(folder, index):
        print(line)
    groups: dict[str, list[LogicalTensor]] = {}
    for tensor in logical_tensors(index):
        name = tensor.name if options.expand else tensor.key
        if options.match is None or options.match.search(name):
            groups.setdefault(name, []).append(tensor)
    width = max(map(len, groups), default=0)
    for name, members in sorted(groups.items(), key=lambda group: _order(group[0])):
        shape = members[0].shape if options.expand else members[0].full
        sums = [checksum(read_logical(folder, index, tensor)) for tensor in members] if options.checksums else []
        total = sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()[:16]
        print(f"{name:{width}}  {_short(members[0].dtype):8}  {list(shape)}" + (f"  {total}" if sums else ""))
    return 0


def _verify(options: argparse.Namespace) -> int:
    folder = select_checkpoint(options.paths[0], options.ckpt_step)
    report = verify_checkpoint(folder)
    for line in report.notes:
        print(f"note: {line}")
    for line in report.problems:
        print(line)
    if report.problems:
        print(f"{folder}: {len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}")
        return ExitCode.FAILED
    print(f"{folder} is whole: {report.num_tensors} logical tensors, {_bytes(report.num_bytes)} read")
    return 0


def _diff(options: argparse.Namespace) -> int:
    left, right = [_select_complete(path, options.ckpt_step) for path in options.paths]
    for line in flag_differences(left, right):
        print(f"(flag) {line}")
    comparison = compare_checkpoints(left, right, options.rtol, options.atol, options.weights_only)
    for line in _grouped(comparison.lines):
        print(line)
    if not options.weights_only and any("optimizer." in line and ": only in" in line for line in comparison.lines):
        print("(--weights-only leaves the optimizer's state out)")
    print(comparison.summary())
    return int(bool(comparison.lines))


def _grouped(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a comparison; many tensors of an optimizer state on one side only are counted, not listed."""
    counts: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        name, _, rest = line.partition(": ")
        state = _STATE.match(name)
        if state and rest.startswith("only in "):
            counts.setdefault((state[0], rest), []).append(line)
        else:
            yield line
    for (prefix, rest), members in counts.items():
        yield from members if len(members) <= MAX_LISTED else (f"{prefix}* ({len(members)} tensors): {rest}",)


def _pattern(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error


def main(argv: list[str] | None = None, prog: str = "python -m moe_trainer.checkpoint.inspect") -> int:
    """Run one command and return its exit code (argparse exits with 2 on a wrong command line)."""
    parser = argparse.ArgumentParser(prog=prog, description="Look at torch_dist and legacy checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("ls", _ls, "list the tensors"),
        ("verify", _verify, "read every byte; name what is missing, damaged or foreign"),
        ("diff", _diff, "compare two checkpoints tensor by tensor"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("paths", metavar="PATH", type=local_path, nargs=2 if name == "diff" else 1)
        command.add_argument(
            "--ckpt-step", type=int, help="the iteration to look at, if PATH is a folder of checkpoints"
        )
        if name == "ls":
            command.add_argument(
                "--checksums", action="store_true", help="a checksum of every tensor, the same for every mapping"
            )
            command.add_argument(
                "--expand", action="store_true", help="every layer and expert by itself, under its name in the model"
            )
            command.add_argument("--match", type=_pattern, help="only names in which this regular expression is found")
        if name == "diff":
            command.add_argument("--rtol", type=float, default=0.0, help="relative tolerance; 0: bit for bit")
            command.add_argument("--atol", type=float, default=0.0, help="absolute tolerance")
            command.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER_ERROR
    except PermissionError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
