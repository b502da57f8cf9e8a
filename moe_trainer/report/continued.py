"""Files that a run makes longer while it goes on, and that a resumed run continues: lines of JSON, and bytes that such lines point into."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ContinuedFile:
    """A file that grows at its end. What a failed append has left behind the end is overwritten by the next one."""

    def __init__(self, path: Path, end: int = 0):
        """end: what of an older file stays, in bytes."""
        self.path, self.end = path, end

    def append(self, data: bytes) -> int:
        """Write behind the end. Returns: where the data begin. Raises: OSError; the end then stays where it was."""
        begin = self.end
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.truncate(begin)
            file.seek(begin)
            file.write(data)
        self.end = begin + len(data)
        return begin


def end_before(path: Path, key: str, value: int, kept: Callable[[dict[str, Any]], None] = lambda record: None) -> int:
    """Where, in bytes, the first line stands whose `key` is not below `value`, or that is torn; 0 without a file. The keys must ascend.

    kept: called with every record before it. Raises: OSError.
    """
    end = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                    if not line.endswith(b"\n") or record[key] >= value:
                        break
                except (ValueError, LookupError, TypeError, RecursionError):
                    break
                kept(record)
                end += len(line)
    except FileNotFoundError:
        return 0
    return end
