"""Verify a checkpoint: read every byte, and look for every tensor that the recorded model must have.

Required tensors follow from the recorded flags (layers, experts, MTP layers, tied head) and from the checkpoint itself:
layers of one kind hold the same tensors, every weight has the same optimizer states. So a lost expert of one layer is
named, although the files are not damaged.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from arguments.layer_pattern import hybrid_letters, mtp_layer_pattern, recorded_moe_layers
from arguments.mechanisms.selections import SELECTIONS
from arguments.mtp import mtp_depths, num_mtp_depths
from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import COMPLETE, INDEX, INTEGRITY
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.flavors import final_norm, is_hybrid
from moe_trainer.checkpoint.index import check_mark, read_index, stored_bytes
from moe_trainer.checkpoint.logical import BUFFERS, LogicalTensor, coverage, logical_tensors
from moe_trainer.checkpoint.native_index import modified_files, truncated_files
from moe_trainer.checkpoint.reading import decode, read_object
from moe_trainer.checkpoint.virtual_index import ForeignMetadata

_KNOWN = re.compile(
    r"^(embedding\.(word|position|tokentype)_embeddings\.|decoder\.|mtp\.|output_layer\.|(chained_\d+\.)?optimizer\.)"
)
_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\blocal_experts\.(\d+)\.")
_ANY_EXPERT = "local_experts.*."
_TABLES = frozenset(f"mlp.router.{name}" for each in SELECTIONS for name in each.tables)
_BIASES = frozenset(f"mlp.router.{name}" for each in SELECTIONS for name in ("expert_bias", *each.biases))


@dataclass
class VerificationReport:
    """Problems make a checkpoint unusable; notes are possible problems of a complete one."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_bytes: int = 0


def verify_checkpoint(folder: Path) -> VerificationReport:
    """Check structure, content and completeness of a checkpoint folder, torch_dist or legacy. Reads everything."""
    report = VerificationReport(check_mark(folder))
    try:
        index = read_index(folder)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    report.problems += truncated_files(folder, index)
    if (folder / INTEGRITY).is_file():
        report.problems += modified_files(folder)
    tensors = list(logical_tensors(index))
    report.num_tensors = len(tensors)
    report.problems += [line for tensor in tensors for line in _stored_once(tensor)]
    _read_everything(folder, index, report)
    report.num_bytes = stored_bytes(index)
    if isinstance(index, ForeignMetadata) and index.state_problem is not None:
        report.notes.append(f"its optimizer state cannot be read: {index.state_problem}")
    report.notes += _foreign_files(folder, index)
    args = _recorded_args(folder, index, report)
    if args is not None:
        report.problems += _incomplete(tensors, args)
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _stored_once(tensor: LogicalTensor) -> Iterator[str]:
    stored, twice = coverage(tensor)
    if twice:
        yield f"{tensor.name}: some of its elements are stored twice"
    elif stored != tensor.numel:
        yield (
            f"{tensor.name} is missing"
            if stored == 0
            else f"{tensor.name}: {stored} of {tensor.numel} elements are stored"
        )


def _read_everything(folder: Path, index: Metadata, report: VerificationReport) -> None:
    """Decode every entry, file by file."""
    chunks = {
        (key, tuple(chunk.offsets)): chunk
        for key, entry in index.state_dict_metadata.items()
        if not isinstance(entry, BytesStorageMetadata)
        for chunk in entry.chunks
    }
    in_order = sorted(index.storage_data.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    for place, info in in_order:
        if not (folder / info.relative_path).is_file():
            continue  # named already
        try:
            if place.offset is None:
                read_object(folder, index, place.fqn)
            elif (chunk := chunks.get((place.fqn, tuple(place.offset)))) is not None:
                values = decode(folder, index, place.fqn, chunk)
                if values.is_floating_point() and not torch.isfinite(values).all():
                    report.notes.append(f"{place.fqn} at {tuple(place.offset)} holds NaN or infinite values")
        except CheckpointError as error:
            report.problems.append(str(error).splitlines()[0])


def _foreign_files(folder: Path, index: Metadata) -> list[str]:
    if isinstance(index, ForeignMetadata):
        paths = index.unlisted_files()
    else:
        known = {COMPLETE, INDEX, INTEGRITY, common_state.OLD_FILE}
        known |= {info.relative_path for info in index.storage_data.values()}
        paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in known)
    return [f"{path} belongs to no entry of the index" for path in paths]


def _recorded_args(folder: Path, index: Metadata, report: VerificationReport) -> Mapping[str, Any] | None:
    try:
        state, _, _ = common_state.parse(common_state.read(folder, index))
    except CheckpointError as error:
        report.problems.append(str(error).splitlines()[0])
        return None
    if "num_layers" not in state.args:
        report.problems.append("the recorded flags do not say what model it is (no num_layers)")
        return None
    return state.args


def _incomplete(tensors: list[LogicalTensor], args: Mapping[str, Any]) -> list[str]:
    """Return missing and unexpected tensors, by the recorded flags and the other layers."""
    weights = {tensor.name: tensor for tensor in tensors if tensor.state is None and "optimizer." not in tensor.name}
    problems = [f"{name} is foreign: no part of such a model" for name in weights if not _KNOWN.match(name)]
    wanted = ["embedding.word_embeddings.weight", f"{final_norm(is_hybrid(args))}weight"]
    wanted += ["output_layer.weight"] if args.get("untie_embeddings_and_output_weights") else []
    wanted += ["output_layer.bias"] if args.get("add_output_layer_bias") else []
    problems += [f"{name} is missing" for name in wanted if name not in weights]
    try:
        pattern, num_experts = recorded_moe_layers(args), int(args.get("num_experts") or 0)
    except (TypeError, ValueError) as error:
        return [*problems, f"the recorded flags are damaged: {error}"]
    hybrid = args.get("hybrid_layer_pattern") or ""
    depths = num_mtp_depths(args)
    depths = min(depths, 1) if args.get("mtp_use_repeated_layer") else depths
    mtp = (any(mtp_layer_pattern(pattern, hybrid)),) * depths
    ratios, ahead = args.get("csa_compress_ratios") or (), mtp_depths(hybrid)[:depths]
    for block, kinds, letters in (("decoder", pattern, hybrid_letters(hybrid)), ("mtp", mtp, ahead)):
        alike: Sequence[object] = letters or (tuple(zip(kinds, ratios)) if ratios else kinds)
        problems += _layers(block, weights, kinds, num_experts, alike)
    freezes = any(args.get(flag) for flag in ("lora_dim", "freeze_backbone", "dsa_indexer_warmup"))
    return [*problems, *_states(tensors, weights, freezes)]


def _layers(
    block: str, weights: Iterable[str], is_moe: tuple[bool, ...], num_experts: int, kinds: Sequence[object]
) -> Iterator[str]:
    """Check that layers of one kind hold the same tensors, and that every expert exists.

    Args:
        kinds: what is alike: the letters of a hybrid model and the ratios of compressed attention say more than is_moe.
    """
    by_layer: dict[int, dict[str, set[int]]] = {number: {} for number in range(len(is_moe))}
    for name in weights:
        match = _LAYER.match(name)
        if match and match[1] == block:
            expert = _EXPERT.search(match[3])
            experts = by_layer.setdefault(int(match[2]), {}).setdefault(_EXPERT.sub(_ANY_EXPERT, match[3]), set())
            experts.update({int(expert[1])} if expert else ())
    common = {
        kind: set().union(*(by_layer[number] for number, each in enumerate(kinds) if each == kind))
        for kind in set(kinds)
    }
    for number, held in sorted(by_layer.items()):
        prefix = f"{block}.layers.{number}."
        if number >= len(is_moe):
            yield f"{prefix}* is foreign: the model has {len(is_moe)} such layers"
            continue
        if not held:
            yield f"{prefix}* is missing: the whole layer"
            continue
        if is_moe[number] != any(_ANY_EXPERT in rest for rest in held):
            yield (
                f"{prefix}* is {'a dense' if is_moe[number] else 'an MoE'} layer and should be "
                f"{'MoE' if is_moe[number] else 'dense'}"
            )
            continue
        other = _BIASES if _TABLES & held.keys() else _TABLES  # a hash-routed layer has its table instead of a bias
        yield from (f"{prefix}{rest} is missing" for rest in sorted(common[kinds[number]] - set(held) - other))
        for rest, experts in sorted(held.items()):
            if _ANY_EXPERT in rest:
                yield from (
                    f"{prefix}{rest.replace('*', str(expert))} is missing"
                    for expert in range(num_experts)
                    if expert not in experts
                )
                yield from (
                    f"{prefix}{rest.replace('*', str(expert))} is foreign: the model has {num_experts} experts"
                    for expert in sorted(experts)
                    if expert >= num_experts
                )


def _states(tensors: list[LogicalTensor], weights: Mapping[str, LogicalTensor], freezes: bool = False) -> Iterator[str]:
    """Check that every trained weight has every optimizer state, in the weight's shape.

    With `freezes` the run trained some of the weights: those with any state.
    """
    by_state: dict[str, dict[str, LogicalTensor]] = {}
    for tensor in tensors:
        if tensor.state is not None:
            by_state.setdefault(tensor.state, {})[tensor.weight] = tensor
    updated = set[str]().union(*by_state.values()) if freezes else set(weights)
    for state, held in by_state.items():
        trained = {
            name
            for name, weight in weights.items()
            if name in updated
            and not name.endswith(BUFFERS)
            and (state not in ("fp32_param", "param") or weight.dtype != torch.float32)
        }
        prefix = next(iter(held.values())).name.partition(f"{state}.")[0] + f"{state}."
        yield from (f"{prefix}{name} is missing" for name in sorted(trained - held.keys()))
        yield from (
            f"{held[name].name} is foreign: there is no such weight" for name in sorted(held.keys() - weights.keys())
        )
        yield from (
            f"{held[name].name}: {held[name].shape}, its weight has {weights[name].shape}"
            for name in sorted(trained & held.keys())
            if held[name].shape != weights[name].shape
        )
