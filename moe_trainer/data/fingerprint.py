"""Fingerprints of the files that a run trains on, so that a resumed run can tell when they were replaced.

The flags that select the samples belong to them: the same files give other samples with others.

A token file is read in samples (its size, both ends and blocks in between), not as a whole: a corpus has terabytes,
and a file that was rebuilt differs almost everywhere. An object in object storage is known by its size and version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from arguments.blend import get_blends_per_split, get_phase_blends
from arguments.data import DataArgs
from arguments.regular_file import regular_file
from moe_trainer.data.object_storage import describe_version, is_remote
from moe_trainer.data.sources import data_prefixes, source_flag
from moe_trainer.data.text_sequences import is_text_file
from moe_trainer.errors import UserError

_BLOCK_BYTES, _NUM_BLOCKS = 4096, 64
_MAX_SHOWN = 3

Fingerprint = dict[str, dict[str, str]]
"""{"data": {prefix: digest}, "tokenizer": {file: digest}, "samples": {"flags": those that select them}}; with the data
set up, "order": see sample_order.py."""


def make_fingerprint(data: DataArgs, tokenizer_files: Iterable[Path], is_streamed: bool = False) -> Fingerprint:
    """Read samples of all data files and the whole of all tokenizer files. Files that cannot be read are left out.

    `is_streamed`: --dataloader-type external. Its own state tells whether its files are the same (stream.py).
    """
    flags = ["--dataloader-type external"] * is_streamed + [data.sequences_flag] * data.has_sequences
    found: Fingerprint = {"data": {}, "tokenizer": {}, "samples": {"flags": " ".join(flags)}}
    for prefix in () if data.mock_data or is_streamed else data_prefixes(data):
        try:
            files = (prefix,) if data.sft or is_text_file(prefix) else (prefix + ".idx", prefix + ".bin")
            found["data"][prefix] = "".join(map(_sampled, files))
        except (OSError, UserError):
            continue  # its reader says what is wrong with it
    for path in tokenizer_files:
        try:
            found["tokenizer"][str(path)] = hashlib.blake2b(regular_file(path).read_bytes(), digest_size=8).hexdigest()
        except OSError:
            continue
    return found


def _sampled(path: str) -> str:
    if is_remote(path):
        return describe_version(path)
    size = os.stat(regular_file(path)).st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with open(path, "rb") as file:
        for block in range(_NUM_BLOCKS + 1):
            file.seek(max(size - _BLOCK_BYTES, 0) * block // _NUM_BLOCKS)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def warn_of_training_text(data: DataArgs, digests: Mapping[str, str]) -> list[str]:
    """Return a warning for validation and for test data that the run also trains on.

    Files are the same if they have one path, or one digest: a copy has another name. The splits of one file (--split)
    share no document.

    Args:
        data: the flags of data.
        digests: by prefix, as in a fingerprint; prefixes without one are compared by their paths.

    Raises:
        ValueError: for a blend that cannot be read.
    """
    blends = get_blends_per_split(data) or (None, None, None)
    trained: dict[str, str] = {}
    for blend in (blends[0], *get_phase_blends(data)):
        for prefix in () if blend is None else blend.prefixes:
            for key in _keys(prefix, digests):
                trained.setdefault(key, prefix)
    warnings = []
    for number, words in ((1, "validation"), (2, "test")):
        names = []
        for prefix in dict.fromkeys(() if (blend := blends[number]) is None else blend.prefixes):
            same = next((trained[key] for key in _keys(prefix, digests) if key in trained), None)
            if same is not None:
                names.append(prefix if same == prefix else f"{prefix} (the content of {same})")
        if names:
            text = (
                f"{source_flag(data, number)}: {words} text is training text ({source_flag(data, 0)}): {_join(names)}"
            )
            warnings.append(f"{text}. Its loss does not tell how the model does on text that it has not seen")
    return warnings


def _keys(prefix: str, digests: Mapping[str, str]) -> tuple[str, ...]:
    """Return what tells whether two prefixes are the same: the path, and the digest if it is known."""
    path = prefix if is_remote(prefix) else os.path.realpath(prefix)
    return (path, digests[prefix]) if prefix in digests else (path,)


def compare_fingerprints(saved: Mapping[str, Mapping[str, str]], current: Fingerprint) -> list[str]:
    """Return one warning for the data and one for the tokenizer, where the contents are not those of the checkpoint.

    Contents count, not names: a file that was moved is the same. Files are not compared where other flags select the
    samples.
    """
    warnings = []
    other_samples = "the run does not continue where it stopped: samples are repeated, left out or new"
    before, now = saved.get("samples") or current["samples"], current["samples"]
    selects_others = before != now
    if selects_others:
        was, is_now = (_describe_samples(flags["flags"]) for flags in (before, now))
        warnings.append(f"the checkpoint was saved with {was}, and this run has {is_now}; {other_samples}")
    for kind, flag, effect in (
        ("data", "--data-path", other_samples),
        ("tokenizer", "--tokenizer-model", "ids may have another meaning than those that the model has learned"),
    ):
        if kind == "data" and selects_others:
            continue
        before, now = saved.get(kind) or {}, current[kind]
        if not before or sorted(before.values()) == sorted(now.values()):
            continue
        replaced = [name for name, digest in now.items() if before.get(name) not in (None, digest)]
        added = [name for name, digest in now.items() if name not in before and digest not in before.values()]
        missing = [name for name, digest in before.items() if name not in now and digest not in now.values()]
        changes = [
            f"{text} {_join(names)}"
            for text, names in (("other content in", replaced), ("new:", added), ("no longer there:", missing))
            if names
        ] or ["a file is used more or less often"]
        warnings.append(f"{flag}: the {kind} is not that of the checkpoint ({'; '.join(changes)}); {effect}")
    return warnings


def _describe_samples(flags: str) -> str:
    return flags or "samples of --seq-length from token files"


def _join(names: list[str]) -> str:
    rest = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
