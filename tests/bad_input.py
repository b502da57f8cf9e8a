"""Bad input: damage to files, hostile content, and what every refusal must be.

A refusal has exit code 2, no traceback, one screen of text with the words that a test asks for (which flag or file, what
was given, what is needed), and leaves the files that a test names as they were.
"""

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import run

DEEP = b"[" * 100_000
TEXTS = {
    "deep lists": DEEP,
    "deep tables": b'{"a":' * 100_000,
    "number": b"7",
    "list": b"[1, 2]",
    "nothing": b"",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\x00",
    "digits": b"9" * 5000,
    "NaN": b"NaN",
    "text": b'"text"',
    "other keys": b'{"a": NaN, "b": Infinity, "c": 1e999}',
    "zeros": bytes(1000),
    "object": b"!!python/object/apply:os.system ['touch ran']",
    "bomb": b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (at + 1, at + 1, at, at) for at in range(97, 121)),
    "a pickle": pickle.dumps({"a": 1}),
}
"""JSON and YAML that readers meet."""


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable, *args: Any):
        self.call = function, args

    def __reduce__(self):
        return self.call


RUNS = Call(os.system, "touch ran")
"""Creates a file in the current folder where its pickle is executed."""


def check_refusal(code: int, message: str, words: Iterable[str], about: object = "") -> None:
    """Assert that a command that ended like this has refused its input."""
    assert code == 2, (str(about), code, message[-4000:])
    assert "Traceback" not in message, (str(about), message)
    for word in words:
        assert word in message, (str(about), word, message)


def refused(
    argv: list[str], cwd: Path, *words: str, ranks: int = 1, keeps: Iterable[Path] = (), about: object = "", **how: Any
) -> str:
    """Run the command line and check its refusal; `keeps` are files and folders that it must not change."""
    before = [contents(path) for path in keeps]
    ended = run(argv, cwd, ranks, **how)
    check_refusal(ended.returncode, ended.stderr, words, about or " ".join(argv[-6:]))
    assert len(ended.stderr.splitlines()) <= 40, (str(about), ended.stderr)
    assert [contents(path) for path in keeps] == before, about
    return ended.stderr


def contents(path: Path) -> dict[str, bytes | None]:
    """Return the bytes of a file, or of all files of a folder, by path; None for what is no file."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file): file.read_bytes() if file.is_file() else None for file in files}


def error_of(kind: type[Exception] | tuple, read: Callable[..., Any], *args: Any, words: Iterable[str] = ()) -> str:
    """Call a reader and return its error, which must contain the words."""
    with pytest.raises(kind) as caught:
        read(*args)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value)[:2000])
    return str(caught.value)


def cut(path: Path, length: int | float) -> None:
    """Truncate a file to a length, or to a share of its length; a negative length cuts from the end."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * length) if isinstance(length, float) else length])


def flip(path: Path, place: float = 1.0, count: int = 1, mask: int = 0xFF) -> None:
    """Change bytes from a place (a share of the length; 1.0: the last byte) on."""
    content = bytearray(path.read_bytes())
    start = min(int(len(content) * place), len(content) - 1)
    content[start : start + count] = bytes(byte ^ mask for byte in content[start : start + count])
    path.write_bytes(content)


def safetensors(table: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with this header (a table, or its bytes) and, if given, another length of it."""
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> None:
    """Write files by path in a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
