"""TensorBoard event files that a resumed run continues: drops the events that it logs again.

A run that was killed has logged iterations after its last checkpoint. TensorBoard's own remedy (a purge step in the
new file) hides events by step only; the curves over samples, whose steps are samples, would be hidden nearly
completely. So the old files are rewritten without those events; a file that contains none of them is left alone.

Format (TFRecord), per record: length (uint64, little-endian), 4 bytes of checksum, the event, 4 bytes of checksum.
Records are copied unchanged. Whatever follows a torn record (of a killed writer) is dropped, because TensorBoard
cannot read it either.
"""

import os
import struct
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from moe_trainer.io import atomic_path

OVER_SAMPLES = " vs samples"  # ends the name of a curve whose steps are samples
_HEADER, _CHECKSUM = 12, 4


def drop_events_after(folder: Path, iteration: int, samples: int) -> int:
    """Drop the events of iterations after `iteration` (of curves over samples: after `samples`), and count them."""
    from tensorboard.compat.proto.event_pb2 import Event

    num_dropped = 0
    for path in _event_files(folder):
        records, kept = list(_records(path.read_bytes())), []
        for record in records:
            event = Event.FromString(record[_HEADER:-_CHECKSUM])
            tags = [value.tag for value in event.summary.value]
            limit = samples if any(tag.endswith(OVER_SAMPLES) for tag in tags) else iteration
            if not tags or event.step <= limit:
                kept.append(record)
        if len(kept) < len(records):
            # TensorBoard would read a temporary file with "tfevents" in its name.
            with atomic_path(path, temporary=path.with_name(f".rewritten-{os.getpid()}")) as temporary:
                temporary.write_bytes(b"".join(kept))
        num_dropped += len(records) - len(kept)
    return num_dropped


def archive_event_files(folder: Path) -> Path | None:
    """Move the event files into a subdirectory earlier-N, which TensorBoard shows as another run, and return it."""
    files = _event_files(folder)
    if not files:
        return None
    target = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    target.mkdir()
    for path in files:
        path.rename(target / path.name)
    return target


def _event_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file()) if folder.is_dir() else []


def _records(content: bytes) -> Iterator[bytes]:
    begin = 0
    while begin + _HEADER <= len(content):
        (length,) = struct.unpack_from("<Q", content, begin)
        end = begin + _HEADER + length + _CHECKSUM
        if end > len(content):
            return
        yield content[begin:end]
        begin = end
