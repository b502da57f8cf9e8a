"""TensorBoard's event files of a run that goes on: what is going to be logged again is taken out of them.

A run that was killed has logged iterations after its last checkpoint. TensorBoard's own remedy (a purge step in the new
file) hides by step only, and the curves over samples count their steps in samples: it would hide them nearly whole. So the
old files are rewritten without those events; a file that holds none of them is left alone.

Format (TFRecord): per record length (uint64, little-endian), 4 bytes of checksum, the event, 4 bytes of checksum. Records are
copied as they stand. What follows a torn record (a killed writer) cannot be read by TensorBoard either and is cut off.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

OVER_SAMPLES = " vs samples"  # ends the name of a curve whose steps are samples
_HEADER, _CHECKSUM = 12, 4


def drop_after(folder: Path, iteration: int, samples: int) -> int:
    """Drop the events of iterations after `iteration` (of curves over samples: after `samples`).

    Returns: how many were dropped. Raises: OSError.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    dropped = 0
    for path in _event_files(folder):
        content = path.read_bytes()
        kept, here = [], 0
        for record in _records(content):
            event = Event.FromString(record[_HEADER:-_CHECKSUM])
            tags = [value.tag for value in event.summary.value]
            limit = samples if any(tag.endswith(OVER_SAMPLES) for tag in tags) else iteration
            if tags and event.step > limit:
                here += 1
            else:
                kept.append(record)
        if here:
            temporary = path.with_name(f".rewritten-{os.getpid()}")
            temporary.write_bytes(b"".join(kept))
            os.replace(temporary, path)
        dropped += here
    return dropped


def move_aside(folder: Path) -> Path | None:
    """Move the event files into a folder earlier-N beside them, where TensorBoard shows them as another run.

    Returns: that folder, None where there was nothing to move. Raises: OSError.
    """
    files = _event_files(folder)
    if not files:
        return None
    number = 1
    while (target := folder / f"earlier-{number}").exists():
        number += 1
    target.mkdir()
    for path in files:
        path.rename(target / path.name)
    return target


def _event_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file()) if folder.is_dir() else []


def _records(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + _HEADER <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + _HEADER + length + _CHECKSUM
        if end > len(content):
            return
        yield content[at:end]
        at = end
