"""Plan the export of a native checkpoint as a Hugging Face folder that transformers reads.

Every Hugging Face tensor is a part of a native one, or a slice of a stack of parts; parts of one native tensor are
requested consecutively and read once. Before anything is written, the checkpoint's tensors must be exactly those that
its flags describe.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.format_kinds.eight_bit import SCALING_PREFIX
from arguments.mtp import without_mtp
from arguments.vocabulary import padded_vocab_size
from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.adapters import NativeAdapters
from moe_trainer.checkpoint.hf.config import write_config, write_notes
from moe_trainer.checkpoint.hf.conversion_job import (
    ConversionJob,
    PlannedTensor,
    fingerprint,
    split_by_size,
    write_safetensors,
    write_text,
)
from moe_trainer.checkpoint.hf.families import FAMILIES, Families
from moe_trainer.checkpoint.hf.files import CONFIG, GENERATION_CONFIG, INDEX, SINGLE
from moe_trainer.checkpoint.hf.folder import SENTENCEPIECE_CONFIG, tokenizer_files
from moe_trainer.checkpoint.hf.names import (
    VOCABULARY,
    HFTensor,
    TensorMapping,
    duplicated_tensors,
    head_name,
    model_sizes,
    raise_problems,
    tensor_mappings,
)
from moe_trainer.checkpoint.hf.quantized_export import QuantizedExport, plan_quantization
from moe_trainer.checkpoint.hf.rules import Names
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.logical import LogicalTensor, logical_tensors, read_logical
from moe_trainer.io import flush_file

logger = logging.getLogger(__name__)

_SCALING, _MTP = SCALING_PREFIX, "mtp."
_SENTENCEPIECE = ("SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer")


def yarn_length(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positions that YaRN's factor reaches, which transformers expects in max_position_embeddings."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "yarn":
        return {}
    reached = round(scaling["factor"] * scaling["original_max_position_embeddings"])
    configured = config.get("max_position_embeddings")
    if configured == reached:
        return {}
    logger.info(
        "  max_position_embeddings: %d, as far as YaRN reaches (factor %g x %d original positions); the run had %s",
        reached,
        scaling["factor"],
        scaling["original_max_position_embeddings"],
        configured,
    )
    return {"max_position_embeddings": reached}


@dataclass(frozen=True)
class Vocabulary:
    """Which rows of the embedding are written: by default those before the padding of the vocabulary.

    Attributes:
        rows: how many, None for that default.
        keep_padding: all of them.
        tokens: of the tokenizer, None if unknown.
    """

    rows: int | None = None
    keep_padding: bool = False
    tokens: int | None = None


@dataclass(frozen=True)
class ExportFormat:
    """In which format weights are written.

    Attributes:
        dtype: None for that of the checkpoint.
        quantize: one of quantized_export.FORMATS for the weights that it is for.
    """

    dtype: torch.dtype | None = None
    quantize: str | None = None


@dataclass(frozen=True)
class TokenizerParts:
    """What a folder has of its tokenizer: keys of config.json, and the folder whose files are copied."""

    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


_DEFAULT_VOCABULARY, _SAME_FORMAT, _NO_TOKENIZER = Vocabulary(), ExportFormat(), TokenizerParts()


def plan_hf_folder(
    folder: Path,
    target: Path,
    most: int,
    kind: str | None = None,
    families: Families = FAMILIES,
    vocabulary: Vocabulary = _DEFAULT_VOCABULARY,
    export_format: ExportFormat = _SAME_FORMAT,
    tokenizer: TokenizerParts = _NO_TOKENIZER,
    drop_mtp: bool = False,
) -> ConversionJob:
    """Plan the weights of a native checkpoint folder as a Hugging Face folder with files of at most `most` bytes.

    Low-rank adapters are merged into the weights.

    `kind`: the model type, by default the first of `families` that can express the model. `drop_mtp`: leave out the
    layers of multi-token prediction.

    Raises:
        CheckpointError: naming what is missing, unexpected or of another shape, or flags that no model type supports.
    """
    index = read_index(folder)
    state, _, _ = common_state.parse(common_state.read(folder, index))
    left_out = (_SCALING, _MTP) if drop_mtp else (_SCALING,)
    tensors = {
        tensor.name: tensor
        for tensor in logical_tensors(index)
        if tensor.state is None and not tensor.name.startswith(left_out)
    }
    adapters = NativeAdapters.of(tensors, state.args)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in adapters.tensors}
    embedding = tensors.get("embedding.word_embeddings.weight")
    if embedding is None:
        raise CheckpointError(f"{folder} has no embedding.word_embeddings.weight")
    stored, rows, dtype = embedding.shape[0], vocabulary.rows, export_format.dtype
    if rows is not None and not 0 < rows <= stored:
        raise CheckpointError(f"--vocab-size {rows}: the embedding has {stored} rows")
    if rows is None and not vocabulary.keep_padding:
        rows = rows_of_vocabulary(state.args, stored, vocabulary.tokens)
    flags = (without_mtp(state.args) if drop_mtp else dict(state.args)) | {"rows": stored}
    family, config = write_config(flags, rows or stored, kind, families)
    config |= yarn_length(config)
    mappings = tensor_mappings(family.names, flags)
    _check_native(mappings, tensors)
    cut = rows if rows not in (None, stored) else None
    quantize = export_format.quantize
    quantized = None if quantize is None else plan_quantization(quantize, family.name, mappings)
    read = adapters.merged(partial(read_logical, folder, index))
    items = _plan_items(read, mappings, tensors, family.names, flags, cut, dtype, quantized)
    runs = split_by_size(items, most)
    words = str(embedding.dtype if dtype is None else dtype).removeprefix("torch.")
    for note in write_notes(flags, config, families):
        logger.info("  %s", note)
    config |= (
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        | dict(tokenizer.config)
        | {"torch_dtype": words, **family.auto_map}
    )
    if quantized is not None:
        config["quantization_config"] = quantized.config
        for note in quantized.notes:
            logger.info("  %s", note)
    options = {
        "to": "hf",
        "most": most,
        "rows": rows,
        "dtype": dtype,
        "config": json.dumps(config, sort_keys=True, default=str),
    }
    finish = partial(
        _finish_folder,
        config=config,
        num_bytes=sum(item.num_bytes for item in items),
        copied=(*(() if tokenizer.folder is None else tokenizer_files(tokenizer.folder)), *family.code_files),
        is_sentencepiece=flags.get("tokenizer_type") in _SENTENCEPIECE,
        quantized=quantized,
    )
    data = sorted(path for path in folder.iterdir() if path.is_file())
    return ConversionJob(
        target,
        fingerprint(data, **options),
        tuple(zip(_file_names(len(runs)), map(tuple, runs), strict=True)),
        write_safetensors if quantized is None else quantized.write,
        finish,
    )


def known_vocabulary(flags: Mapping[str, Any]) -> int | None:
    """Return --vocab-size if no row after it was trained; the ids of a null tokenizer do not end there."""
    return None if flags.get("tokenizer_type") == "NullTokenizer" else flags.get("vocab_size") or None


def rows_of_vocabulary(flags: Mapping[str, Any], stored: int, tokens: int | None) -> int | None:
    """Return the rows of the embedding before its padding, None if unknown."""
    if flags.get("tokenizer_type") == "NullTokenizer":
        rows = tokens or flags.get("vocab_size") or stored
        logger.info("  vocab_size: %d, all rows of the embedding, as any id may be trained with NullTokenizer", stored)
        if rows < stored:
            logger.info("  --vocab-size %d leaves %d of them out, if they are padding", rows, stored - rows)
        return None
    known = [size for size in (tokens, _recorded_vocabulary(flags, stored)) if size is not None and size <= stored]
    if not known:
        logger.info("  vocab_size: %d, all rows of the embedding; how many of them are padding is not recorded", stored)
        return None
    rows = max(known)
    if rows < stored:
        logger.info(
            "  vocab_size: %d; %d rows of padding are left out, for which no tokenizer has tokens "
            "(--keep-vocab-padding keeps them)",
            rows,
            stored - rows,
        )
    if tokens is not None and tokens < rows:
        logger.info(
            "  vocab_size: %d as recorded, and the tokenizer has %d tokens; --vocab-size %d leaves the others out",
            rows,
            tokens,
            tokens,
        )
    return rows


def _recorded_vocabulary(flags: Mapping[str, Any], stored: int) -> int | None:
    """Return the recorded --vocab-size if the embedding was made for it, and not for the tokens of a tokenizer."""
    recorded = known_vocabulary(flags)
    if recorded is None:
        return None
    divisible_by, tp = flags.get("make_vocab_size_divisible_by") or 1, flags.get("tensor_model_parallel_size") or 1
    return recorded if stored in (recorded, padded_vocab_size(recorded, divisible_by, tp)) else None


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def _plan_items(
    read: Callable[[LogicalTensor], Tensor],
    mappings: Sequence[TensorMapping],
    tensors: Mapping[str, LogicalTensor],
    names: Names,
    flags: Mapping[str, Any],
    rows: int | None,
    dtype: torch.dtype | None,
    quantized: QuantizedExport | None = None,
) -> list[PlannedTensor]:
    """Plan the Hugging Face tensors of a model whose embedding has `rows` rows, all of them if None."""

    def make_parts(mapping: TensorMapping) -> Sequence[Tensor]:
        native = [read(tensors[name]) for name in mapping.siblings or (mapping.native,)]
        return mapping.transform.to_hf(native if mapping.siblings else native[0], model_sizes(flags))

    last = _LastTensorCache(make_parts)
    items = _join_stacks(
        item
        for mapping in mappings
        if mapping.native == (mapping.siblings or (mapping.native,))[0]
        for item in (
            quantized.plan(mapping, last)
            if quantized is not None and mapping.native in quantized.natives
            else _plan_hf_tensors(mapping, last, tensors[mapping.native].dtype, rows, dtype)
        )
    )
    by_name = {item.name: item for item in items}
    return items + [
        PlannedTensor(name, by_name[original].dtype, by_name[original].shape, by_name[original].make)
        for name, original in duplicated_tensors(names, flags).items()
        if name != head_name(names)
    ]


def _finish_folder(
    folder: Path,
    notes: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    num_bytes: int,
    copied: Iterable[Path],
    is_sentencepiece: bool,
    quantized: QuantizedExport | None,
) -> None:
    """Write the files next to the weights: tokenizer and modeling code (`copied`), index, configurations.

    Report on quantized weights.
    """
    for line in () if quantized is None else quantized.report(notes, num_bytes):
        logger.info("  %s", line)
    for path in copied:
        # the only name under which other programs find it
        name = "tokenizer.model" if is_sentencepiece and path.suffix == ".model" else path.name
        flush_file(Path(shutil.copyfile(path, folder / name)))
    if is_sentencepiece and {path.name for path in folder.glob("tokenizer*")} == {"tokenizer.model"}:
        write_text(folder / "tokenizer_config.json", json.dumps(dict(SENTENCEPIECE_CONFIG)) + "\n")
    if len(notes) > 1:
        table = {name: file for file, known in notes.items() for name in known}
        write_text(folder / INDEX, json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": table}, indent=1))
    special = {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}
    if special and not (folder / GENERATION_CONFIG).is_file():
        write_text(folder / GENERATION_CONFIG, json.dumps(special, indent=2) + "\n")
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _check_native(mappings: Sequence[TensorMapping], tensors: Mapping[str, LogicalTensor]) -> None:
    """Check that the checkpoint has exactly the tensors of the mappings.

    Raises:
        CheckpointError: naming every tensor that is missing, unexpected or of another shape.
    """
    problems = []
    for mapping in mappings:
        tensor = tensors.get(mapping.native)
        if tensor is None:
            problems.append(f"{mapping.native} is missing; {list(mapping.shape)} is needed")
        elif tensor.shape != mapping.shape:
            problems.append(f"{mapping.native} has the shape {list(tensor.shape)}, and {list(mapping.shape)} is needed")
    known = {mapping.native for mapping in mappings}
    problems += [
        f"{name} is there, and no tensor of the other model is made of it" for name in tensors if name not in known
    ]
    raise_problems(problems)


class _LastTensorCache:
    """Parts of the last native tensor: gate and up, or queries, keys and values, are requested consecutively."""

    def __init__(self, read: Callable[[TensorMapping], Sequence[Tensor]]):
        self._read, self._native = read, ""
        self._parts: Sequence[Tensor] = ()

    def part(self, mapping: TensorMapping, position: int) -> Tensor:
        if self._native != mapping.native:
            self._parts = ()  # free it before the next one is read
            self._native, self._parts = mapping.native, self._read(mapping)
        return self._parts[position]


def _plan_hf_tensors(
    mapping: TensorMapping, last: _LastTensorCache, stored: torch.dtype, rows: int | None, dtype: torch.dtype | None
) -> Iterator[tuple[HFTensor, PlannedTensor]]:
    """Yield the Hugging Face tensors of a mapping, or slices of them."""
    kept = mapping.fixed_dtypes[1] if mapping.fixed_dtypes else dtype or stored
    vocabulary = mapping.native in VOCABULARY
    for position, ref in enumerate(mapping.sources):

        def make(position: int = position) -> Iterator[Tensor]:
            value = last.part(mapping, position)
            yield (value[:rows] if vocabulary else value).to(kept)

        shape = (rows, *ref.shape[1:]) if vocabulary and rows is not None else ref.shape
        yield ref, PlannedTensor(ref.name, kept, shape, make)


def _join_stacks(parts: Iterable[tuple[HFTensor, PlannedTensor]]) -> list[PlannedTensor]:
    """Combine the slices of each stack, which come in order, into one tensor, which is made slice by slice."""
    members: dict[str, list[tuple[HFTensor, PlannedTensor]]] = {}
    for ref, item in parts:
        members.setdefault(ref.name, []).append((ref, item))
    items = []
    for slices in members.values():
        ref, item = slices[0]
        if ref.index is not None:

            def make(slices: Sequence[tuple[HFTensor, PlannedTensor]] = slices) -> Iterator[Tensor]:
                for _, each in slices:
                    yield from each.make()

            item = PlannedTensor(ref.name, item.dtype, (ref.stack, *item.shape), make)
        items.append(item)
    return items
