"""Blends: the command-line forms that describe one, and which the flags name.

No token file is opened here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from arguments.data import DataArgs
from arguments.regular_file import regular_file
from arguments.schema import is_text

SPLIT_NAMES = ("train", "valid", "test")


class Blend(NamedTuple):
    """Data prefixes and their weights (None: in proportion to their sizes)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(items: Sequence[str], flag: str = "--data-path") -> Blend:
    """Read `w1 p1 w2 p2 ...` or `p1 p2 ...`.

    An even number of items whose odd ones are all numbers has weights; anything else is a list of prefixes. One shell
    word that holds blanks ("1.0 /data/a") is split, unless a dataset of that very name exists.

    Raises:
        ValueError: if the list is empty, only some of the odd items are numbers, a weight is negative, or a prefix
            cannot be a file's name.
    """
    words: list[str] = []
    for item in items:
        item = item.strip()
        if not is_text(item):
            raise ValueError(
                f"{flag}: {ascii(item)} has a zero byte or half of a surrogate pair, so it is no file's name"
            )
        words.extend([item] if os.path.exists(item + ".idx") else item.split())
    if not words:
        raise ValueError(f"{flag}: no data prefix was given")
    if len(words) % 2 == 1:
        return Blend(tuple(words), None)
    not_numbers = [word for word in words[::2] if not _is_number(word)]
    if len(not_numbers) == len(words) // 2:
        return Blend(tuple(words), None)
    if not_numbers:
        raise ValueError(
            f'{flag}: "{not_numbers[0]}" is given where a weight is needed; give a weight before every prefix, or '
            "before none"
        )
    weights = [float(word) for word in words[::2]]
    if any(not 0 <= weight < math.inf for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"{flag}: weights {weights}: needed non-negative numbers with a positive sum")
    return Blend(tuple(words[1::2]), tuple(weights))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_blend_file(path: str, flag: str = "--data-args-path") -> Blend:
    """Read the words of `--data-path` in a text file, which `flag` names."""
    return parse_blend(_read_text(path, flag).split(), f"{flag} {path}")


def read_split_blends_file(path: str) -> tuple[Blend | None, ...]:
    """Read `--per-split-data-args-path`: JSON with train, valid, test, each a list of words, one string or null."""
    try:
        content = json.loads(_read_text(path, "--per-split-data-args-path"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--per-split-data-args-path {path}: not JSON (line {error.lineno}: {error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--per-split-data-args-path {path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"--per-split-data-args-path {path}: needed an object with the keys train, valid, test")
    blends = []
    for split in SPLIT_NAMES:
        value = content.get(split)
        if not isinstance(value, str | list | None):
            raise ValueError(f"--per-split-data-args-path {path}, {split}: needed a list of words, one string or null")
        words = value.split() if isinstance(value, str) else [str(word) for word in value or ()]
        blends.append(parse_blend(words, f"--per-split-data-args-path {path}, {split}") if words else None)
    return tuple(blends)


def _read_text(path: str, flag: str) -> str:
    try:
        return regular_file(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path}: the file is not text") from None


def get_phase_blends(data: DataArgs) -> tuple[Blend, ...]:
    """Return the blend of every training phase, none without --phase-data-args-path.

    Raises:
        ValueError: if one cannot be read.
    """
    return tuple(read_blend_file(path, "--phase-data-args-path") for path in data.phase_data_args_path or ())


def get_common_blend(data: DataArgs) -> Blend | None:
    """Return the blend that all splits are taken of, None where there is none.

    Raises:
        ValueError: if it cannot be read.
    """
    if data.data_args_path is not None:
        if data.data_path is not None:
            raise ValueError("--data-path and --data-args-path both name the data; give one")
        return read_blend_file(data.data_args_path)
    return None if data.data_path is None else parse_blend(data.data_path)


def get_blends_per_split(data: DataArgs) -> tuple[Blend | None, ...] | None:
    """Return the blend of each split, None where the splits have no separate files.

    That of the first phase stands for training.

    Raises:
        ValueError: if one cannot be read, or both kinds of flags name the data.
    """
    paths = [(f"--{name}-data-path", getattr(data, f"{name}_data_path")) for name in SPLIT_NAMES]
    given = [flag for flag, items in paths if items is not None]
    phases = get_phase_blends(data)
    if data.per_split_data_args_path is not None:
        if given:
            raise ValueError(f"{given[0]} and --per-split-data-args-path both name the data; give one")
        return read_split_blends_file(data.per_split_data_args_path)
    if not given and not phases:
        return None
    train, valid, test = (None if items is None else parse_blend(items, flag) for flag, items in paths)
    return phases[0] if phases else train, valid, test


def get_stream_blends(data: DataArgs) -> tuple[Blend | None, ...]:
    """Return the blend of each split of streamed text; --data-path is training text.

    Raises:
        ValueError: if one cannot be read.
    """
    common = get_common_blend(data)
    return (common, None, None) if common is not None else get_blends_per_split(data) or (None, None, None)


def get_training_blend(data: DataArgs) -> Blend | None:
    """Return the blend of training, of the first phase if there are several; None where there is none.

    Raises:
        ValueError: if it cannot be read.
    """
    per_split = get_blends_per_split(data)
    return get_common_blend(data) if per_split is None else per_split[0]
