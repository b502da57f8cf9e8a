"""Compare the tensors that a family's rules make for a config.json with those of its folder, without loading any.

The safetensors headers have names and shapes. Where files are missing, model.safetensors.index.json has the names, so a
mapping file can be checked before the weights are downloaded.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.families import Families
from moe_trainer.checkpoint.hf.family import Family, TextPart
from moe_trainer.checkpoint.hf.files import (
    BLOCK_SCALES,
    BLOCKS,
    INDEX,
    PACKED,
    PARTS,
    SCALE,
    WEIGHT,
    SafetensorsFolder,
    listed_tensors,
)
from moe_trainer.checkpoint.hf.folder import is_unread, read_flags, read_text_config
from moe_trainer.checkpoint.hf.names import TensorMapping, duplicated_tensors, tensor_mappings

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        flags: of the model, by destination, with "rows".
        num_tensors: of the folder.
        has_shapes: whether shapes were compared too.
        notes: remarks for the user.
        problems: one line for each group of tensors that do not fit; empty if all do.
    """

    family: Family
    flags: Mapping[str, Any]
    mappings: tuple[TensorMapping, ...]
    num_tensors: int
    has_shapes: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def compare_folder(folder: Path, families: Families) -> Comparison:
    """Compare a folder with config.json, and safetensors files or their index.

    Raises:
        CheckpointError: if one of these files cannot be read, or config.json does not describe a model.
    """
    config, text_part = read_text_config(folder, families)
    stored, has_shapes = _stored_shapes(folder, text_part)
    family, flags, notes = read_flags(folder, config, list(stored), families)
    mappings = tuple(
        tensor_mappings(family.names, flags, lambda name: (stored[name] or ()) if name in stored else None)
    )
    if not has_shapes:
        notes.append(f"the files of {INDEX} are not all there: names are compared, and shapes are not")
    repeated = set(duplicated_tensors(family.names, flags))
    problems = tuple(_problems(mappings, stored, lambda name: name in repeated or is_unread(name, family.names)))
    return Comparison(family, flags, mappings, len(stored), has_shapes, tuple(notes), problems)


def _stored_shapes(folder: Path, text_part: TextPart | None) -> tuple[dict[str, Shape | None], bool]:
    """Return the shape of each tensor, None if its file is missing, and whether all files are there."""
    rename = None if text_part is None else text_part.rename
    if not (folder / INDEX).is_file():
        source = SafetensorsFolder(folder, rename)
        if not source.names:
            raise CheckpointError(f"{folder} has neither {INDEX} nor safetensors files to compare with")
        return {name: source.shape(name) for name in source.names}, True
    files = listed_tensors(folder)
    if all((folder / file).is_file() for file in set(files.values())):
        source = SafetensorsFolder(folder, rename)
        return {name: source.shape(name) for name in source.names}, True
    renamed = [rename(name) if rename is not None else name for name in files]
    return dict.fromkeys(_unquantized({name for name in renamed if name is not None})), False


def _unquantized(names: set[str]) -> Iterator[str]:
    """Yield the names of weights: those of fp8 without their scales, those of fp4 and int4 for their parts."""
    packed = {name.removesuffix(PACKED) for name in names if name.endswith(PACKED)}
    yield from (module + WEIGHT for module in sorted(packed))
    parts = {module + ending for module in packed for ending in (PACKED, *PARTS)}
    for name in sorted(names - parts):
        of_blocks = name.removesuffix(BLOCKS) + BLOCK_SCALES
        of_scales = name.removesuffix(BLOCK_SCALES) + BLOCKS
        if name.endswith(BLOCKS) and of_blocks in names:
            yield name.removesuffix(BLOCKS)
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in names) and not (
            name.endswith(BLOCK_SCALES) and of_scales in names
        ):
            yield name


def _problems(
    mappings: Iterable[TensorMapping], stored: Mapping[str, Shape | None], is_unneeded: Callable[[str], bool]
) -> Iterator[str]:
    needed: dict[str, tuple[Shape, TensorMapping]] = {}
    for mapping in mappings:
        for ref in mapping.sources:
            shape = (ref.stack, *ref.shape) if ref.index is not None else ref.shape
            needed.setdefault(ref.name, (shape, mapping))
    unused = [name for name in stored if name not in needed and not is_unneeded(name)]
    patterns = _by_pattern(unused)
    for pattern, names in _by_pattern(name for name in needed if name not in stored).items():
        shape, mapping = needed[names[0]]
        near = difflib.get_close_matches(pattern, patterns, n=1)
        hint = f"; perhaps {near[0]}, which nothing reads" if near else ""
        yield f"missing: {_shown(pattern, names)} {list(shape)}, needed for {mapping.native} ({mapping.origin}){hint}"
    for pattern, names in patterns.items():
        size = stored[names[0]]
        near = difflib.get_close_matches(pattern, _by_pattern(needed), n=1)
        hint = f"; the nearest that is read: {near[0]}" if near else ""
        yield f"unexpected: {_shown(pattern, names)}{'' if size is None else f' {list(size)}'}: no rule reads it{hint}"
    differing = {
        name: (found, wanted, mapping.origin)
        for name, (wanted, mapping) in needed.items()
        if (found := stored.get(name)) is not None and found != wanted
    }
    for pattern, names in _by_pattern(differing).items():
        found, wanted, origin = differing[names[0]]
        yield f"shape: {_shown(pattern, names)} is {list(found)}, and {origin} makes {list(wanted)} of config.json"


def compare_native(written: Mapping[str, Shape], built: Mapping[str, Shape], kind: str) -> Iterator[str]:
    """Yield where the native tensors that the rules make differ from those of the model that the flags build."""
    for pattern, names in _by_pattern(name for name in built if name not in written).items():
        yield f"native: no rule of {kind} makes {_shown(pattern, names)} {list(built[names[0]])}, which the model has"
    for pattern, names in _by_pattern(name for name in written if name not in built).items():
        near = difflib.get_close_matches(pattern, _by_pattern(built), n=1)
        hint = f"; perhaps {near[0]}" if near else ""
        yield f"native: a rule of {kind} makes {_shown(pattern, names)}, and the model has no such tensor{hint}"
    differing = [name for name in written if name in built and written[name] != built[name]]
    for pattern, names in _by_pattern(differing).items():
        yield (
            f"native: {_shown(pattern, names)} becomes {list(written[names[0]])}, and the model has "
            f"{list(built[names[0]])}"
        )


def _by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ in numbers of layers and experts only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return groups


def _shown(pattern: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{pattern} ({len(names)} tensors, such as {names[0]})"
