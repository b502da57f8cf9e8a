"""Preprocessing in shards: parts of the input that processes or SLURM tasks tokenize independently, merged in order.

Shard i of n holds the documents that begin in its n-th of the input bytes. JSONL files are divided; a compressed file,
or one of plain text, belongs as a whole to the shard in which it begins. So the merged files are those of one process,
byte for byte.

Duplicates are dropped when shards are merged: each has the digests of its documents, and of equal ones the first in the
order of the input stays, whatever the number of shards.

A complete shard has a `.done.json` next to its token files, which records what they were made from, and so have the
merged files. A repeated command makes only what has none, or another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from arguments.data import DataArgs
from moe_trainer.data.document_sources import COMPRESSED, FilePart
from moe_trainer.data.indexed import merge_token_files
from moe_trainer.data.preprocess import (
    DIGEST_BYTES,
    PreprocessOptions,
    Totals,
    build_eod_tokenizer,
    expand_inputs,
    is_json_file,
    output_prefixes,
    write_token_files,
)
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.data.tokenizer_record import record_path, recorded_tokenizer
from moe_trainer.errors import UserError
from moe_trainer.io import atomic_write


def plan_shards(paths: Sequence[str], num_shards: int) -> list[list[FilePart]]:
    """Divide files into shards of about the same number of bytes."""
    sizes = [os.path.getsize(path) for path in paths]
    bounds = [sum(sizes) * number // num_shards for number in range(num_shards + 1)]
    shards: list[list[FilePart]] = [[] for _ in range(num_shards)]
    first = 0
    for path, size in zip(paths, sizes):
        is_divided = is_json_file(path) and not path.endswith(COMPRESSED)
        for shard, low, high in zip(shards, bounds, bounds[1:]):
            begin, end = max(low - first, 0), min(high - first, size)
            if is_divided and begin < end:
                shard.append(FilePart(path, begin, end))
            elif not is_divided and size and low <= first < high:
                shard.append(FilePart(path, 0, None))
        first += size
    return shards


def preprocess_shards(
    options: PreprocessOptions, data: DataArgs, num_shards: int, only: int | None, report: TextIO = sys.stderr
) -> tuple[str, ...]:
    """Tokenize one shard, or all that are missing, one after the other.

    Args:
        options: as for one process.
        data: the flags of the tokenizer.
        num_shards: into which the input is divided.
        only: the shard to make; None for all.
        report: where progress is written.

    Returns:
        The prefixes of the shards' token files that are complete now, none if they are merged already.

    Raises:
        ValueError: naming the file and line, flag or tokenizer that is wrong. Complete shards are preserved.
    """
    paths = expand_inputs(options.inputs)
    tokenizer = build_eod_tokenizer(options, data)
    os.makedirs(os.path.dirname(options.output_prefix) or ".", exist_ok=True)
    identity = _identify(paths, options, data, tokenizer.unique_identifiers, num_shards)
    if _read_merged(options, identity) is not None:
        print(f"{options.output_prefix} is complete", file=report)
        return ()
    made: list[str] = []
    for number, parts in enumerate(plan_shards(paths, num_shards)):
        if only is not None and number != only:
            continue
        prefix = _shard_prefix(options.output_prefix, number, num_shards)
        if _read_complete(prefix, options).get("identity") == identity:
            print(f"shard {number} of {num_shards} is complete", file=report)
        else:
            for ending in ("done.json", "digests"):
                Path(f"{prefix}.{ending}").unlink(missing_ok=True)
            digests_path = f"{prefix}.digests" if options.drop_duplicates else None
            totals = write_token_files(
                parts, output_prefixes(prefix, options), options, tokenizer, report, True, digests_path
            )
            _write_marker(prefix, identity, totals)
        made += output_prefixes(prefix, options)
    return tuple(made)


def merge_shards(options: PreprocessOptions, data: DataArgs, num_shards: int, report: TextIO = sys.stderr) -> Totals:
    """Merge complete shards into one dataset per key, without duplicates if they are to be dropped, and remove them.

    Does nothing but remove shards if the merged files are complete.

    Raises:
        ValueError: naming the shards that are missing or were made from something else.
    """
    tokenizer = build_eod_tokenizer(options, data)
    identity = _identify(expand_inputs(options.inputs), options, data, tokenizer.unique_identifiers, num_shards)
    prefixes = [_shard_prefix(options.output_prefix, number, num_shards) for number in range(num_shards)]
    totals = _read_merged(options, identity)
    if totals is None:
        totals = _merge(options, prefixes, identity, tokenizer, report)
        _write_marker(options.output_prefix, identity, totals)
    for path in _shard_files(prefixes, options):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            print(f"{path} cannot be removed ({error.strerror}); it is not needed any more", file=report)
    return totals


def _merge(
    options: PreprocessOptions, prefixes: Sequence[str], identity: str, tokenizer: Tokenizer, report: TextIO
) -> Totals:
    markers = [_read_complete(prefix, options) for prefix in prefixes]
    missing = [number for number, marker in enumerate(markers) if "identity" not in marker]
    if missing:
        raise UserError(
            f"--output-prefix {options.output_prefix}: {len(missing)} of {len(prefixes)} shards are not complete (the "
            f"first is {missing[0]}); run them again with --shard-id"
        )
    others = [number for number, marker in enumerate(markers) if marker["identity"] != identity]
    if others:
        raise UserError(
            f"--output-prefix {options.output_prefix}: {len(others)} of {len(prefixes)} shards (the first is "
            f"{others[0]}) were made with different inputs, tokenizers or flags; run them again with those of --merge"
        )
    if not any(marker["documents"] for marker in markers):
        raise UserError(f"--output-prefix {options.output_prefix}: no documents in any shard")
    keep = find_first_documents(prefixes) if options.drop_duplicates else None
    documents = tokens = 0
    outputs = output_prefixes(options.output_prefix, options)
    for number, output in enumerate(outputs):
        shards = [output_prefixes(prefix, options)[number] for prefix in prefixes]
        with recorded_tokenizer(output, tokenizer):
            documents, num_tokens = merge_token_files(shards, output, keep)
        tokens += num_tokens
    if keep is not None:
        dropped = sum(marker["documents"] for marker in markers) - documents
        print(f"Dropped {dropped} documents that repeat earlier ones; {documents} stay", file=report)
    return Totals(documents, tokens, None, outputs)


def _read_merged(options: PreprocessOptions, identity: str) -> Totals | None:
    """Return the totals of complete merged files, None if they are missing or were made from something else."""
    marker = _read_complete(options.output_prefix, options)
    if marker.get("identity") != identity:
        return None
    return Totals(marker["documents"], marker["tokens"], None, output_prefixes(options.output_prefix, options))


def _describe_files(paths: Iterable[str]) -> list[list[int]] | None:
    """Return sizes and times of files, which show that another command wrote them; None if one is missing."""
    try:
        statuses = [os.stat(path) for path in paths]
    except OSError:
        return None
    return [[status.st_size, status.st_mtime_ns] for status in statuses]


def _describe_outputs(prefixes: Sequence[str]) -> list[list[int]] | None:
    return _describe_files(f"{prefix}.{ending}" for prefix in prefixes for ending in ("bin", "idx"))


def find_first_documents(prefixes: Sequence[str]) -> list[np.ndarray]:
    """Return for every shard which documents repeat none before, by their digests: bool [documents].

    Takes about 50 bytes of memory a document.

    Raises:
        ValueError: if a shard has no digests.
    """
    found = []
    for prefix in prefixes:
        try:
            found.append(np.fromfile(f"{prefix}.digests", dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8))
        except (OSError, ValueError) as error:
            raise UserError(
                f"--drop-duplicates: {prefix}.digests cannot be read ({error}); remove {prefix}.done.json and make the "
                "shard again"
            ) from None
    digests = np.concatenate(found)
    order = np.lexsort(digests.T)  # stable: of equal digests the first document comes first
    is_repeated = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
    is_first = np.ones(len(digests), dtype=bool)
    is_first[order[1:][is_repeated]] = False
    return np.split(is_first, np.cumsum([len(each) for each in found])[:-1])


def _shard_files(prefixes: Sequence[str], options: PreprocessOptions) -> Iterator[Path]:
    for prefix in prefixes:
        yield from (Path(f"{prefix}.done.json"), Path(f"{prefix}.digests"))
        for each in output_prefixes(prefix, options):
            yield from (Path(f"{each}.bin"), Path(f"{each}.idx"), Path(record_path(each)))


def _shard_prefix(prefix: str, number: int, num_shards: int) -> str:
    return f"{prefix}-{number:05d}-of-{num_shards:05d}"


def _write_marker(prefix: str, identity: str, totals: Totals) -> None:
    """Say that token files are complete."""
    outputs = _describe_outputs(totals.prefixes)
    with atomic_write(f"{prefix}.done.json") as file:
        json.dump(
            {"identity": identity, "documents": totals.documents, "tokens": totals.tokens, "outputs": outputs}, file
        )


def _read_complete(prefix: str, options: PreprocessOptions) -> dict[str, Any]:
    """Return what is known of complete token files; nothing if they are missing or not those that were written."""
    try:
        content = json.loads(Path(f"{prefix}.done.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    outputs = _describe_outputs(output_prefixes(prefix, options))
    return content if isinstance(content, dict) and outputs is not None and content.get("outputs") == outputs else {}


def _identify(
    paths: Sequence[str], options: PreprocessOptions, data: DataArgs, tokenizer: dict[str, Any], num_shards: int
) -> str:
    """Return a digest of everything that the content of a shard depends on."""
    tokenizer_paths: list[str] = []
    for path in (data.tokenizer_model, data.vocab_file, data.merge_file):
        if path is not None and os.path.isdir(path):
            tokenizer_paths += sorted(entry.path for entry in os.scandir(path) if entry.is_file())
        elif path is not None and os.path.isfile(path):  # otherwise a name on the hub
            tokenizer_paths.append(path)
    files = [[*paths, *tokenizer_paths], _describe_files([*paths, *tokenizer_paths])]
    chosen = {name: asdict(options)[name] for name in ("json_keys", "append_eod", "text_unit", "drop_duplicates")}
    described = json.dumps([files, chosen, tokenizer, num_shards], sort_keys=True, default=str)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
