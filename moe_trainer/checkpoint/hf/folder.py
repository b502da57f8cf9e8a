"""A Hugging Face model folder as a checkpoint: what --load and the conversion read.

`open_hf_model` reads config.json and the tables of all files, and maps Hugging Face tensors to native ones before any
element is read. `HFMetadata` presents them as the index of a native checkpoint (keys of sharding.KeyScheme, one chunk
per tensor of a layer and expert), so every reader of checkpoints reads these folders under any layout. A chunk is made
when it is read, from the tensors that it needs.
"""

import argparse
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from arguments.container import OPTIONS
from arguments.program import other_command
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.config import read_config
from moe_trainer.checkpoint.hf.converters.registry import MTP
from moe_trainer.checkpoint.hf.families import FAMILIES, Families, families_with, get_family
from moe_trainer.checkpoint.hf.family import Family, TextPart
from moe_trainer.checkpoint.hf.files import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    SafetensorsFolder,
    listed_tensors,
    read_json,
)
from moe_trainer.checkpoint.hf.names import (
    TensorMapping,
    check_source,
    duplicated_tensors,
    model_sizes,
    raise_problems,
    tensor_mappings,
)
from moe_trainer.checkpoint.hf.rules import Names
from moe_trainer.checkpoint.sharding import KeyScheme
from moe_trainer.checkpoint.virtual_index import ForeignMetadata, add_chunk

logger = logging.getLogger(__name__)

# tables that old files carry and that are computed
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
TOKENIZER_FILE_PATTERNS = tuple(
    "tokenizer* special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt *.model *.tiktoken "
    "chat_template* generation_config.json tokenization_*.py".split()
)
"""Files to copy with a model's weights and configuration."""
SENTENCEPIECE_CONFIG = MappingProxyType({"tokenizer_class": "PreTrainedTokenizerFast"})
"""tokenizer_config.json of an exported folder whose tokenizer.model is a SentencePiece model.

By the model type alone, transformers would select for Qwen a tokenizer that reads this file in another way.
"""


@dataclass(frozen=True)
class HFModel:
    """An opened Hugging Face model.

    Attributes:
        flags: by destination, with "rows" of the embedding.
        dtype: of all weights, that of the embedding.
        repeated: as `duplicated_tensors`.
        notes: remarks for the user.
    """

    folder: Path
    family: Family
    flags: Mapping[str, Any]
    mappings: tuple[TensorMapping, ...]
    source: SafetensorsFolder
    dtype: torch.dtype
    repeated: Mapping[str, str]
    notes: tuple[str, ...]

    def make(self, mapping: TensorMapping, dtype: torch.dtype | None = None) -> Tensor:
        """Return a native tensor, by default in the dtype of the weights.

        Raises:
            DamagedError: as SafetensorsFolder.read.
            CheckpointError: if the dtype cannot represent a value, or a table of experts by token has no K of them.
        """
        parts = [self.source.read(ref.name, ref.index) for ref in mapping.sources]
        joined = mapping.join(parts, model_sizes(self.flags))
        if mapping.is_expert_table:
            _check_hash_table(joined, mapping.sources[0].name, self.flags["num_experts"])
        value = joined.to(self.target_dtype(mapping, dtype))
        # bf16 has the range of fp32
        if value.dtype == torch.float16 and joined.dtype != value.dtype and not torch.isfinite(value).all():
            names = " and ".join(ref.name for ref in mapping.sources)
            raise CheckpointError(
                f"{names}: numbers up to {joined.abs().max():.3g} are beyond the range of fp16; another --dtype "
                "is needed"
            )
        return value

    def target_dtype(self, mapping: TensorMapping, dtype: torch.dtype | None = None) -> torch.dtype:
        return mapping.fixed_dtypes[0] if mapping.fixed_dtypes else dtype or self.dtype


def _check_hash_table(table_VK: Tensor, name: str, num_experts: int) -> None:
    ordered_VK = table_VK.sort(dim=-1)[0]
    repeats = (ordered_VK.diff(dim=-1) == 0).any(-1)
    outside = (ordered_VK[:, 0] < 0) | (ordered_VK[:, -1] >= num_experts)
    for wrong_V, problem in ((outside, f"experts are 0 to {num_experts - 1}"), (repeats, "distinct ones are needed")):
        if wrong_V.any():
            token = int(wrong_V.nonzero()[0])
            raise CheckpointError(f"{name}: the token {token} has the experts {table_VK[token].tolist()}; {problem}")


def is_computed(name: str) -> bool:
    """Return whether a tensor is a table that follows from the flags."""
    return _COMPUTED.search(name) is not None


def is_unread(name: str, names: Names) -> bool:
    """Return whether no rule reads a tensor of a family, and none needs to."""
    return is_computed(name) or name.startswith(names.left_out)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files to copy with the weights of a folder, each once."""
    return sorted({path for pattern in TOKENIZER_FILE_PATTERNS for path in folder.glob(pattern) if path.is_file()})


def tokenizer_flags(folder: Path, place: Path) -> dict[str, Any]:
    """Return the flags of a folder's tokenizer, whose files will be in `place`.

    Raises:
        CheckpointError: if its tokenizer_config.json cannot be read.
    """
    files = {path.name for path in tokenizer_files(folder)}
    if {name for name in files if name.startswith("tokenizer")} == {"tokenizer.model", "tokenizer_config.json"} and (
        read_json(folder / "tokenizer_config.json") == SENTENCEPIECE_CONFIG
    ):
        model = str(place.absolute() / "tokenizer.model")
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": model}
    if "tokenizer.json" in files or "tokenizer_config.json" in files:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(place.absolute())}
    return {"tokenizer_type": "NullTokenizer", "tokenizer_model": None}


def read_text_config(folder: Path, families: Families = FAMILIES) -> tuple[dict[str, Any], TextPart | None]:
    """Return config.json, or its part that describes the language model, and which tensors that has.

    Raises:
        CheckpointError: if it cannot be read, its model type is unknown, or it has no such part.
    """
    config = read_json(folder / CONFIG)
    family = get_family(config, str(folder / CONFIG), families)
    part = family.text_parts.get(config["model_type"])
    if part is None:
        return config, None
    text = part.read(config)
    if text is None:
        raise CheckpointError(
            f"{folder / CONFIG}: a model of type {config['model_type']} needs the table {'.'.join(part.config)}"
        )
    return {**text, "model_type": family.name}, part


def read_flags(
    folder: Path, config: Mapping[str, Any], names: Sequence[str], families: Families = FAMILIES
) -> tuple[Family, dict[str, Any], list[str]]:
    """Return the flags of a folder's model, with "rows", and remarks; `names` are those of its tensors.

    Raises:
        CheckpointError: naming the key of config.json that no flag supports.
    """
    family, flags, notes = read_config(config, str(folder / CONFIG), families)
    flags["rows"] = flags["vocab_size"]
    beyond = family.names.mtp_prefixes[0].format(l=flags["num_layers"], d=0)
    has_depths = bool(family.names.mtp) and any(name.startswith(beyond) for name in names)
    if family.names.mtp and MTP not in family.converters:  # config.json is silent on it
        flags["mtp_num_layers"] = 1 if has_depths else None
    if flags.get("mtp_num_layers") and not has_depths:
        notes.append(
            f"{CONFIG} names {flags['mtp_num_layers']} multi-token-prediction layers, and the files have none: left out"
        )
        flags["mtp_num_layers"] = None
    return family, flags, notes


def open_hf_model(
    folder: Path, ignore: Callable[[str], bool] = lambda name: False, families: Families = FAMILIES
) -> HFModel:
    """Read everything except the elements; `ignore` selects tensors that may be unused.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected or of another shape.
        DamagedError: if a file is damaged.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: an adapter next to the model, which would stay unread. Move it to a folder of "
            f"its own, from which {other_command('convert')} --adapter imports it"
        )
    config, text_part = read_text_config(folder, families)
    source = SafetensorsFolder(folder, None if text_part is None else text_part.rename)
    family, flags, notes = read_flags(folder, config, source.names, families)
    notes += [f"{name} is left out: {INDEX} does not list it" for name in source.unlisted]
    if text_part is not None:
        left_out = " and ".join(f"{prefix}*" for prefix in text_part.others)
        notes.append(f"only the language model is read; the tensors {left_out} are left out")
    if flags["num_layers"] > len(source.names):
        raise CheckpointError(
            f"{folder / CONFIG}: num_hidden_layers is {flags['num_layers']}, and the files have "
            f"{len(source.names)} tensors in all"
        )
    mappings = tuple(tensor_mappings(family.names, flags, lambda name: source.shape(name) if name in source else None))
    repeated = {name: original for name, original in duplicated_tensors(family.names, flags).items() if name in source}
    unused = [name for name in source.names if is_unread(name, family.names) or ignore(name)]
    check_source(
        mappings,
        lambda name: source.shape(name) if name in source else None,
        source.names,
        repeated,
        set(unused).__contains__,
    )
    notes += [f"{name} is left out" for name in unused if not is_unread(name, family.names)]
    notes += [
        f"the tensors {prefix}* are left out: there are no such layers here"
        for prefix in family.names.left_out
        if any(name.startswith(prefix) for name in unused)
    ]
    if any(is_computed(name) for name in unused):
        notes.append("the tables rotary_emb.inv_freq are left out: they follow from the flags")
    notes += [f"{name} repeats {original}" for name, original in repeated.items()]
    numbers = {ref.name: source.dtype(ref.name) for mapping in mappings for ref in mapping.sources}
    tables = {ref.name for mapping in mappings for ref in mapping.sources if mapping.is_expert_table}
    problems = [
        f"{name} is stored as {dtype}, and floating-point numbers are needed"
        for name, dtype in numbers.items()
        if not dtype.is_floating_point and name not in tables
    ]
    raise_problems(problems)
    dtype = numbers[mappings[0].sources[0].name]
    wider = [
        ref.name
        for mapping in mappings
        if not mapping.fixed_dtypes
        for ref in mapping.sources
        if numbers[ref.name].itemsize > dtype.itemsize
    ]
    if wider:
        notes.append(
            f"{wider[0]}{f' and {len(set(wider)) - 1} more' if len(set(wider)) > 1 else ''}: stored wider than "
            f"the embedding, whose {dtype} all weights get"
        )
    return HFModel(folder, family, flags, mappings, source, dtype, repeated, tuple(notes))


def check_copies(model: HFModel) -> None:
    """Check that tensors that repeat another one are equal to it. Reads both.

    Raises:
        CheckpointError: if one differs.
    """
    for name, original in model.repeated.items():
        if model.source.shape(name) != model.source.shape(original) or not torch.equal(
            model.source.read(name), model.source.read(original)
        ):
            raise CheckpointError(f"{name} should repeat {original}, and differs from it")


class HFMetadata(ForeignMetadata):
    """The index of a native checkpoint with this model; see the head of this file."""

    def __init__(self, model: HFModel):
        super().__init__()
        self.model = model
        self._mappings: dict[MetadataIndex, TensorMapping] = {}
        record = recorded_flags(model)
        self.common = {"args": argparse.Namespace(**record), "iteration": 0}
        scheme = KeyScheme.from_record(record)
        for mapping in model.mappings:
            stored = model.source.tensor(mapping.sources[0].name)
            where = stored.path.name, stored.start, stored.num_bytes
            chunk = add_chunk(self, scheme.locate(mapping.native), mapping.shape, model.target_dtype(mapping), *where)
            self._mappings[chunk] = mapping

    @property
    def files(self) -> list[Path]:
        return list(self.model.source.files)

    @property
    def title(self) -> str:
        return f"a Hugging Face model of type {self.model.family.name}"

    @property
    def remarks(self) -> list[str]:
        encodings = ", ".join(f"{count} in {name}" for name, count in self.model.source.encodings.items())
        return [f"quantized weights, listed as they are read: {encodings}"] if encodings else []

    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        return self.model.make(self._mappings[MetadataIndex(key, chunk.offsets)]).view(chunk.sizes)


def recorded_flags(model: HFModel) -> dict[str, Any]:
    """Return all flags as a checkpoint records them: those of config.json, and the defaults."""
    return _recorded(model.flags, model.family, model.folder)


def _recorded(flags: Mapping[str, Any], family: Family, folder: Path) -> dict[str, Any]:
    known = {name: value for name, value in flags.items() if name in OPTIONS}
    record = {dest: option.default for dest, option in OPTIONS.items()} | known | {"hf_model_type": family.name}
    return record | tokenizer_flags(folder, folder)


def read_planned_flags(folder: Path, mapping_file: str | Path | None = None) -> dict[str, Any]:
    """Return `recorded_flags` of a folder whose weights are not there yet, to plan with.

    Raises:
        CheckpointError: if config.json does not describe a model.
    """
    families = families_with(mapping_file)
    config, text_part = read_text_config(folder, families)
    listed = [text_part.rename(name) if text_part else name for name in listed_tensors(folder)]
    names = [name for name in listed if name is not None]
    family, flags, notes = read_config(config, str(folder / CONFIG), families)
    if names:
        family, flags, notes = read_flags(folder, config, names, families)
    logger.info("  %s: the config.json of a Hugging Face model of type %s, without its weights", folder, family.name)
    for note in notes:
        logger.info("  %s", note)
    return _recorded(flags, family, folder)


def read_index(folder: Path, mapping_file: str | Path | None = None) -> HFMetadata:
    """Return the index of a Hugging Face folder; `mapping_file` describes a family that is not built in.

    Raises:
        CheckpointError: if it cannot be read.
    """
    model = open_hf_model(folder, families=families_with(mapping_file))
    logger.info("  %s: a Hugging Face model of type %s", folder, model.family.name)
    for note in model.notes:
        logger.info("  %s", note)
    return HFMetadata(model)
