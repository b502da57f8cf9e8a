"""Fingerprints of the files that a run trains on, so that a resumed run can tell when they were replaced.

A token file is read in samples (its size, both ends and blocks in between), not as a whole: a corpus has terabytes,
and a file that was rebuilt differs almost everywhere. An object in object storage is known by its size and version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from arguments.data import DataArgs
from arguments.regular_file import regular_file
from moe_trainer.data.object_storage import describe_version, is_remote
from moe_trainer.data.sources import data_prefixes
from moe_trainer.data.text_sequences import is_text_file
from moe_trainer.errors import UserError

_BLOCK_BYTES, _NUM_BLOCKS = 4096, 64
_MAX_SHOWN = 3

Fingerprint = dict[str, dict[str, str]]
"""{"data": {prefix: digest}, "tokenizer": {file: digest}}."""


def make_fingerprint(data: DataArgs, tokenizer_files: Iterable[Path]) -> Fingerprint:
    """Read samples of all data files and the whole of all tokenizer files. Files that cannot be read are left out."""
    found: Fingerprint = {"data": {}, "tokenizer": {}}
    for prefix in () if data.mock_data else data_prefixes(data):
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


def compare_fingerprints(saved: Mapping[str, Mapping[str, str]], current: Fingerprint) -> list[str]:
    """Return one warning for the data and one for the tokenizer, where the contents are not those of the checkpoint.

    Contents count, not names: a file that was moved is the same.
    """
    warnings = []
    for kind, flag, effect in (
        ("data", "--data-path", "the run does not continue where it stopped: samples are repeated, left out or new"),
        ("tokenizer", "--tokenizer-model", "ids may have another meaning than those that the model has learned"),
    ):
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


def _join(names: list[str]) -> str:
    rest = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
