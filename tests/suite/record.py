"""The repository's record of its tests: seconds and reached blocks of each, in `record.xz`.

`python tests/suite/make_tiers.py` writes it from a run with --record. Line numbers are not stored: a block is the n-th
of its function, so that the record stays useful while code moves.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import pickle
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from structure.source import ROOT
from suite import blocks

FILE = ROOT / "tests/data/suite/record.xz"


@dataclass(frozen=True)
class Record:
    """Tests with their seconds of processor time, and which of the blocks each reaches."""

    tests: list[str]
    seconds: list[float]
    blocks: list[tuple[str, str, int]]
    """(file, function, number in the function); function "" is the module itself."""
    bits: np.ndarray
    """A row per test; bit b of it (np.packbits) is set if the test reaches block b."""
    skipped: frozenset[str] = frozenset()
    """Of a run: tests that were skipped, of which an earlier record knows more."""

    @cached_property
    def columns(self) -> dict[tuple[str, str | None], list[int]]:
        """Block numbers by (file, function), and by (file, None) for all of a file."""
        found: dict = {}
        for at, (file, function, _) in enumerate(self.blocks):
            found.setdefault((file, function), []).append(at)
            found.setdefault((file, None), []).append(at)
        return found

    def tests_that_reach(self, columns: Iterable[int]) -> np.ndarray:
        """Return the numbers of the tests that reach one of the blocks."""
        mask = np.zeros(self.bits.shape[1], np.uint8)
        for column in columns:
            mask[column >> 3] |= 128 >> (column & 7)
        used = np.flatnonzero(mask)
        return np.flatnonzero((self.bits[:, used] & mask[used]).any(axis=1))


def write(record: Record, path: Path = FILE) -> None:
    """Write the file; tests are sorted by name and stored as differences, since neighbors reach the same code."""
    order = sorted(range(len(record.tests)), key=lambda at: record.tests[at])
    bits = record.bits[order]
    bits[1:] ^= bits[:-1].copy()
    header = json.dumps(
        {
            "tests": [record.tests[at] for at in order],
            "seconds": [round(record.seconds[at], 2) for at in order],
            "blocks": record.blocks,
        }
    ).encode()
    path.write_bytes(lzma.compress(len(header).to_bytes(8, "little") + header + bits.tobytes(), preset=9))


def read(path: Path = FILE) -> Record | None:
    """Return the record of the repository, None where it was never made."""
    if not path.exists():
        return None
    with _open(path) as file:
        header = _read_header(file)
        bits = np.frombuffer(file.read(), np.uint8).reshape(len(header["tests"]), -1)
    blocks = [tuple(block) for block in header["blocks"]]
    return Record(header["tests"], header["seconds"], blocks, np.bitwise_xor.accumulate(bits, axis=0))


def read_seconds(path: Path = FILE) -> dict[str, float]:
    """Return the recorded seconds by test."""
    if not path.exists():
        return {}
    with _open(path) as file:
        header = _read_header(file)
    return dict(zip(header["tests"], header["seconds"]))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with lzma.open(path) as file:
            yield file
    except (EOFError, lzma.LZMAError, ValueError, KeyError) as error:
        raise pytest.UsageError(
            f"{path} is damaged ({error}); take it from git, or renew it (docs/test_suite.md)"
        ) from error


def _read_header(file: BinaryIO) -> dict:
    return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def read_raw(folder: Path) -> Record:
    """Return what the processes of a run with --record wrote into the folder."""
    names = [(file, function) for file, function, _ in json.loads((folder / "blocks.json").read_text())]
    numbered = [(*name, number) for name, number in zip(names, blocks.numbers(names))]
    rows: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    skipped: set[str] = set()
    for path in sorted(folder.glob("reached*.pickles")):
        with path.open("rb") as file:
            while file.peek(1):
                name, seconds[name], data = pickle.load(file)
                if data is None:
                    skipped.add(name)
                else:
                    rows[name] = np.packbits(np.frombuffer(zlib.decompress(data), np.uint8) != 0)
    tests = sorted(rows)
    bits = np.stack([rows[name] for name in tests])
    return Record(tests, [seconds[name] for name in tests], numbered, bits, frozenset(skipped))


def merge(old: Record, new: Record) -> Record:
    """Return the new record, with the old one's tests of other modules that still exist, and of those that were skipped."""
    modules = {name.partition("::")[0] for name in (*new.tests, *new.skipped)}
    kept = [
        at
        for at, name in enumerate(old.tests)
        if (module := name.partition("::")[0]) not in modules
        and (ROOT / module).exists()
        or name in new.skipped
        and old.bits[at].any()
    ]
    numbers = {block: at for at, block in enumerate(new.blocks)}
    pairs = [(at, numbers[block]) for at, block in enumerate(old.blocks) if block in numbers]
    sources, targets = (list(side) for side in zip(*pairs))
    rows = np.zeros((len(kept), len(new.blocks)), np.uint8)
    for row, at in enumerate(kept):
        rows[row, targets] = np.unpackbits(old.bits[at], count=len(old.blocks))[sources]
    return Record(
        [*new.tests, *(old.tests[at] for at in kept)],
        [*new.seconds, *(old.seconds[at] for at in kept)],
        new.blocks,
        np.concatenate([new.bits, np.packbits(rows, axis=1)]),
    )
