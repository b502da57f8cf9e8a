"""Files whose text is streamed: JSON lines (also .gz, .zst), Parquet and Arrow, local or in object storage.

A part is what one reader opens: a byte range of a JSONL file, a whole compressed or Arrow file, a row group of a
Parquet file. `open_source` also makes a user's own source (--document-source).
"""

from __future__ import annotations

import bisect
import functools
import glob
import gzip
import importlib
import io
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

from arguments.blend import get_stream_blends
from arguments.data import DataArgs
from moe_trainer.data.object_storage import is_remote, list_objects, open_reader
from moe_trainer.data.sources import naming_flag
from moe_trainer.errors import UserError

PART_BYTES = 16 << 20
COMPRESSED = (".gz", ".zst")
_JSON = (".jsonl", ".json", ".ndjson")


class DocumentSource(Protocol):
    """Text that can be streamed; `--document-source MODULE:CALLABLE` names a function from a path to one.

    Both methods give the same result on every rank and in every run.
    """

    def parts(self) -> Sequence[Any]:
        """Return what can be read independently; `str` of a part names it in checkpoints."""
        ...

    def read(self, part: Any, first: int) -> Iterator[str | Sequence[int]]:
        """Yield the documents of a part from number `first` on, as text or as token ids."""
        ...


class FilePart(NamedTuple):
    """Part of a file: a byte range [begin, end) of lines, row group `begin`, or all of it (begin 0, end None)."""

    path: str
    begin: int
    end: int | None

    def __str__(self) -> str:
        """Return the name in messages, and of the part in checkpoints."""
        return self.path if self.end is None else f"{self.path} from {self.begin} to {self.end}"


class FileSource:
    """The documents of files, in the order of their names.

    Args:
        patterns: names, or patterns such as corpus/*.jsonl.
        key: of the text: a key of JSON objects, or a column. Its values are texts or lists of token ids.

    Raises:
        ValueError: for a name without a file, or an unknown ending.
    """

    def __init__(self, patterns: Sequence[str], key: str):
        self._key = key
        self._versions: dict[str, str] = {}  # of objects, which must be the same for all of their parts
        self._parts = [part for pattern in patterns for path in _expand(pattern) for part in self._split(path)]

    def parts(self) -> list[FilePart]:
        return self._parts

    def read(self, part: FilePart, first: int) -> Iterator[str | Sequence[int]]:
        """Yield the documents of a part from number `first` on.

        Raises:
            UserError: naming the file and the document that cannot be read.
        """
        rows = self._read_json(part) if _is_json(part.path) else self._read_table(part)
        try:
            for number, value in enumerate(rows):
                if number >= first:
                    yield _check_document(value, self._key, f"{part}, document {number}")
        except OSError as error:
            raise UserError(f"{part.path}: cannot be read ({error})") from None

    def _split(self, path: str) -> Iterator[FilePart]:
        if path.endswith(COMPRESSED) or path.endswith(".arrow"):
            yield FilePart(path, 0, None)
        elif path.endswith(".parquet"):
            with self._open(path) as file:
                groups = _open_parquet(file, path, self._key).num_row_groups
            yield from (FilePart(path, group, group + 1) for group in range(groups))
        elif path.endswith(_JSON):
            with self._open(path) as file:
                size = file.seek(0, os.SEEK_END)
            yield from (FilePart(path, at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES))
        else:
            raise UserError(
                f"{path}: --dataloader-type external reads .jsonl (also .gz, .zst), .parquet and .arrow files; "
                "--document-source names a reader of others"
            )

    def _open(self, path: str) -> BinaryIO:
        return open_reader(path, self._versions) if is_remote(path) else open(path, "rb")

    def _read_json(self, part: FilePart) -> Iterator[Any]:
        """Yield the value of the key for every line that begins in the part."""
        with self._open(part.path) as raw:
            lines: Iterable[bytes] = (
                decompress(raw, part.path) if part.end is None else lines_in_range(raw, part.begin, part.end)
            )
            for number, line in enumerate(lines):
                if not line.isspace():
                    fields = parse_json_object(line, f"{part}, line {number + 1}")
                    yield fields.get(self._key)

    def _read_table(self, part: FilePart) -> Iterator[Any]:
        with self._open(part.path) as raw:
            if part.end is not None:
                table = _open_parquet(raw, part.path, self._key)
                batches = table.iter_batches(row_groups=[part.begin], columns=[self._key], batch_size=1024)
            else:
                batches = _arrow_batches(raw, part.path, self._key)
            try:
                for batch in batches:
                    yield from batch.column(self._key).to_pylist()
            except (_import_pyarrow(part.path).ArrowException, UnicodeDecodeError) as error:
                raise UserError(f"{part.path}: cannot be read ({error})") from None


def _is_json(path: str) -> bool:
    return path.endswith((*_JSON, *COMPRESSED))


def _expand(pattern: str) -> list[str]:
    if is_remote(pattern):
        found = list_objects(pattern)
    elif os.path.isdir(pattern):
        found = _saved_data_set(pattern)
    else:
        found = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
    if not found:
        raise UserError(f"{pattern}: no such file")
    return found


def _saved_data_set(folder: str) -> list[str]:
    """Return the files of a folder that `datasets.save_to_disk` wrote, in their order.

    Raises:
        UserError: if it is another folder, or has several sets.
    """
    state, sets = os.path.join(folder, "state.json"), os.path.join(folder, "dataset_dict.json")
    if os.path.isfile(sets):
        names = ", ".join(map(str, _read_json_file(sets).get("splits") or []))
        raise UserError(f"{folder}: has the sets {names}; give one, {os.path.join(folder, 'NAME')}")
    if not os.path.isfile(state):
        raise UserError(f'{folder}: is a folder; give its files, for example "{os.path.join(folder, "*.parquet")}"')
    listed: Any = _read_json_file(state).get("_data_files")
    try:
        files = [os.path.join(folder, os.path.basename(entry["filename"])) for entry in listed]
    except (TypeError, KeyError):
        raise UserError(f'{state}: needed a list "_data_files" of files') from None
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise UserError(f"{missing[0]}: no such file, and {state} lists it")
    return files


def _read_json_file(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        return parse_json_object(file.read(), path)


def lines_in_range(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield the lines that begin in [begin, end)."""
    file.seek(max(begin - 1, 0))
    at = begin - 1 + len(file.readline()) if begin else 0
    while at < end and (line := file.readline()):
        yield line
        at += len(line)


def _check_document(value: Any, key: str, where: str) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    raise UserError(
        f'{where}: the value of "{key}" (--document-text-key) must be a text or a list of token ids, found '
        f"{type(value).__name__}"
    )


def _import_pyarrow(path: str) -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet and Arrow files needs pyarrow: pip install pyarrow") from None
    return pyarrow


def _open_parquet(file: BinaryIO, path: str, key: str) -> Any:
    pyarrow = _import_pyarrow(path)
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file ({error})") from None
    _check_column(table.schema_arrow.names, path, key)
    return table


def _arrow_batches(file: BinaryIO, path: str, key: str) -> Iterable[Any]:
    """Return the record batches of an Arrow file that has a column."""
    names, batches = _open_arrow(file, path)
    _check_column(names, path, key)
    return batches


def _open_arrow(file: Any, path: str) -> tuple[list[str], Iterable[Any]]:
    """Return the columns and record batches of an Arrow file, in its stream or its file form."""
    pyarrow = _import_pyarrow(path)
    try:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not an Arrow file ({error})") from None
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    return reader.schema.names, batches


class TableRows:
    """Rows of a local Parquet or Arrow file, by their number.

    A row group of a Parquet file is read as a whole, and the last two stay in memory; Arrow files are mapped.

    Raises:
        UserError: if the file cannot be read.
    """

    def __init__(self, path: str):
        pyarrow = _import_pyarrow(path)
        if path.endswith(".parquet"):
            try:
                file = pyarrow.parquet.ParquetFile(path)
            except pyarrow.ArrowInvalid as error:
                raise UserError(f"{path}: not a Parquet file ({error})") from None
            counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            read: Callable[[int], Any] = file.read_row_group
        else:
            batches = list(_open_arrow(pyarrow.memory_map(path), path)[1])
            counts, read = [batch.num_rows for batch in batches], batches.__getitem__
        self._starts = [0, *itertools.accumulate(counts)]
        self._read, self._lock = functools.lru_cache(maxsize=2)(read), threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return the values of a row by column."""
        group = bisect.bisect_right(self._starts, number) - 1
        with self._lock:
            rows = self._read(group)
        return rows.slice(number - self._starts[group], 1).to_pylist()[0]


def _check_column(names: Sequence[str], path: str, key: str) -> None:
    if key not in names:
        raise UserError(f'{path}: no column "{key}" (--document-text-key); found {", ".join(names)}')


def open_source(patterns: Sequence[str], key: str, factory: str | None = None) -> DocumentSource:
    """Open the files of several names as one source, or the user's own source of one name.

    Args:
        patterns: names or patterns of files.
        key: of the text.
        factory: --document-source: MODULE:CALLABLE, a function from a name to a `DocumentSource`.

    Raises:
        ValueError: naming the file or the flag that is wrong.
    """
    if factory is None:
        return FileSource(patterns, key)
    module, _, name = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--document-source {factory}: needed MODULE:CALLABLE ({error})") from None
    if len(patterns) > 1:
        raise UserError(f"--document-source reads one name; give weights to blend {', '.join(patterns)}")
    return make(patterns[0])


def open_sources(data: DataArgs) -> Iterator[tuple[int, str, int]]:
    """Yield (split, names, number of parts) of all text of --dataloader-type external.

    Raises:
        ValueError: for missing files and unusable flags.
    """
    for number, blend in enumerate(get_stream_blends(data)):
        if blend is None:
            continue
        for patterns in [blend.prefixes] if blend.weights is None else [(each,) for each in blend.prefixes]:
            with naming_flag(data, number):
                source = open_source(patterns, data.document_text_key, data.document_source)
            yield number, " ".join(patterns), len(source.parts())


def parse_json_object(line: bytes, where: str, hint: str = "") -> dict[str, Any]:
    """Read a line of a JSONL file.

    Args:
        hint: appended to the error for a line that is not JSON.

    Raises:
        UserError: naming the line and what is wrong with it.
    """
    try:
        fields = json.loads(line.decode("utf-8").rstrip("\r\n"))  # so that the end of the line has a column
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno}){hint}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: cannot be read ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where}: needed a JSON object, found {type(fields).__name__}")
    if b"\\ud" in line or b"\\uD" in line:
        try:
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                f"{where}: has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
            ) from None
    return fields


def decompress(raw: BinaryIO, path: str) -> Iterable[bytes]:
    """Return the lines of a file, decompressed by its suffix.

    Raises:
        UserError: while the lines are read, if a compressed file is damaged.
    """
    if path.endswith(".gz"):
        return _gzip_lines(raw, path)
    if path.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: reading .zst needs the library zstandard: pip install zstandard") from None
        return _zstandard_lines(raw, path, zstandard)
    return raw


def _gzip_lines(raw: BinaryIO, path: str) -> Iterator[bytes]:
    try:
        with gzip.open(raw, "rb") as lines:
            yield from lines
    except (zlib.error, EOFError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _zstandard_lines(raw: BinaryIO, path: str, zstandard: Any) -> Iterator[bytes]:
    try:
        yield from io.BufferedReader(
            zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False), 1 << 20
        )
    except zstandard.ZstdError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
