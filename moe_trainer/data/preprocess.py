"""Text to token files: JSON lines or plain text in, `<prefix>_<key>_document.{bin,idx}` out.

One process reads and writes, workers tokenize. The input is split into chunks of complete documents. A worker returns
the bytes of a chunk in the file's dtype with its lengths and document ends, and chunks are written in the order of the
input. So the output does not depend on the number of workers, and memory holds two chunks per worker.

Every key is written through `write_indexed_dataset`: temporary files, renamed when everything has succeeded.

Source of names, dtype, document boundaries and the position of eod: Megatron-LM tools/preprocess_data.py (v0.20).
"""

from __future__ import annotations

import datetime
import glob
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TextIO

import numpy as np

from arguments.data import DataArgs
from arguments.regular_file import regular_file
from moe_trainer.data.document_sources import FilePart, decompress, lines_in_range, parse_json_object
from moe_trainer.data.indexed import to_stored, token_dtype, write_indexed_dataset
from moe_trainer.data.tokenizer import Tokenizer, build_tokenizer
from moe_trainer.data.tokenizer_record import recorded_tokenizer
from moe_trainer.errors import UserError
from moe_trainer.io import atomic_write

_CHUNK_DOCUMENTS, _CHUNK_BYTES = 256, 1 << 20
_STOPPING = (signal.SIGINT, signal.SIGTERM)
DIGEST_BYTES = 16
TEXT_UNITS = ("paragraph", "line", "file")


@dataclass(frozen=True)
class PreprocessOptions:
    """Inputs and outputs.

    Attributes:
        text_unit: a document of a plain text file is a paragraph, a line or the file.
        drop_duplicates: of documents with the same texts in all keys only the first stays, once shards are merged.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    text_unit: str = "paragraph"
    drop_duplicates: bool = False
    log_interval: int = 1000


class _Chunk(NamedTuple):
    """Consecutive documents of one file: raw lines (JSON) or texts, and the number of the first line of each."""

    path: str
    line_numbers: list[int]
    documents: list[bytes]
    is_json: bool
    bytes_read: int


class _Encoded(NamedTuple):
    """One key of one chunk in stored form."""

    stored: bytes
    lengths: array
    document_ends: list[int]


class _EncodedChunk(NamedTuple):
    """A chunk in stored form; `digests` has DIGEST_BYTES for each document, or nothing."""

    bytes_read: int
    keys: list[_Encoded]
    digests: bytes


class Totals(NamedTuple):
    """Counts and paths of the output, and the time that tokenizing took; None where files were merged."""

    documents: int
    tokens: int
    seconds: float | None
    prefixes: tuple[str, ...]


def preprocess(options: PreprocessOptions, data: DataArgs, report: TextIO = sys.stderr) -> Totals:
    """Tokenize the inputs and write one dataset per key.

    Raises:
        ValueError: naming the file and line, flag or tokenizer that is wrong. Existing outputs are then unchanged.
    """
    paths = expand_inputs(options.inputs)
    tokenizer = build_eod_tokenizer(options, data)
    os.makedirs(os.path.dirname(options.output_prefix) or ".", exist_ok=True)
    parts = [FilePart(path, 0, None) for path in paths]
    return write_token_files(parts, output_prefixes(options.output_prefix, options), options, tokenizer, report)


def build_eod_tokenizer(options: PreprocessOptions, data: DataArgs) -> Tokenizer:
    """Build the tokenizer, which needs an end-of-document token for --append-eod.

    Raises:
        ValueError: if it cannot be built, or has none.
    """
    tokenizer = build_tokenizer(data)
    if options.append_eod and tokenizer.eod is None:
        raise UserError("--append-eod: this tokenizer has no end-of-document token")
    return tokenizer


def output_prefixes(prefix: str, options: PreprocessOptions) -> tuple[str, ...]:
    """Return the prefix of the token files of each key."""
    return tuple(f"{prefix}_{key}_document" for key in options.json_keys)


def write_token_files(
    parts: Sequence[FilePart],
    prefixes: Sequence[str],
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: TextIO,
    may_be_empty: bool = False,
    digests_path: str | None = None,
) -> Totals:
    """Tokenize parts of files and write one dataset per key; with `digests_path` also a digest of every document.

    A record of the tokenizer is next to each dataset.

    Raises:
        ValueError: naming the file and line that is wrong, or if there are no documents. Nothing is written then.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    sizes = (os.path.getsize(path) if end is None else end - begin for path, begin, end in parts)
    progress = _Progress(sum(sizes), options.log_interval, report)
    with ExitStack() as stack:
        chunks = _read_chunks(parts, options.text_unit)
        encode = _Encoder(tokenizer, options.json_keys, options.append_eod, dtype.name, digests_path is not None)
        results = _encode_chunks(chunks, encode, options.workers, stack)
        for prefix in prefixes:
            stack.enter_context(recorded_tokenizer(prefix, tokenizer))
        builders = [stack.enter_context(write_indexed_dataset(prefix, dtype)) for prefix in prefixes]
        digests = None if digests_path is None else stack.enter_context(atomic_write(digests_path, "wb"))
        documents = tokens = 0
        for encoded in results:
            for builder, part in zip(builders, encoded.keys):
                builder.add_raw(part.stored, part.lengths, part.document_ends)
                tokens += len(part.stored) // dtype.itemsize
            if digests is not None:
                digests.write(encoded.digests)
            documents += len(encoded.keys[0].document_ends)
            progress.show(documents, tokens, encoded.bytes_read)
        if not documents and not may_be_empty:
            raise UserError(f"no documents in {', '.join(str(part) for part in parts)}")
    return Totals(documents, tokens, progress.finish(documents, tokens), tuple(prefixes))


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the input files: names as given, patterns expanded in alphabetical order."""
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not found:
            raise UserError(f"--input {pattern}: no such file")
        for path in found:
            if os.path.isdir(path):
                raise UserError(
                    f'--input {path}: is a folder; give its files, for example "{os.path.join(path, "*.jsonl")}"'
                )
            try:
                regular_file(path)  # with a size and a read position, for the progress
            except OSError as error:
                raise UserError(f"--input {path}: cannot be read ({error.strerror})") from None
        paths.extend(found)
    return paths


def _parse_document(document: bytes, is_json: bool, keys: Sequence[str], where: str) -> Iterator[list[str]]:
    """Yield the texts of each key of a document."""
    fields: dict[str, Any]
    if is_json:
        fields = parse_json_object(
            document, where, "; files that end in .txt are read as plain text, all others as JSON lines"
        )
    else:
        try:
            fields = dict.fromkeys(keys, document.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason})") from None
    for key in keys:
        if key not in fields:
            raise UserError(
                f'{where}: no key "{key}" (--json-keys); found {", ".join(map(str, list(fields)[:8])) or "none"}'
            )
        texts = fields[key] if isinstance(fields[key], list) else [fields[key]]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f'{where}: the value of "{key}" must be a string or a list of strings')
        yield texts


def read_texts(inputs: Sequence[str], json_keys: Sequence[str]) -> Iterator[str]:
    """Yield the texts of files, of .txt files the paragraphs.

    Args:
        inputs: names or patterns.
        json_keys: of the texts in JSON lines.

    Raises:
        UserError: naming the file and line that cannot be read.
    """
    parts = [FilePart(path, 0, None) for path in expand_inputs(inputs)]
    for chunk in _read_chunks(parts, "paragraph"):
        for line, document in zip(chunk.line_numbers, chunk.documents):
            for texts in _parse_document(document, chunk.is_json, json_keys, f"{chunk.path}, line {line}"):
                yield from texts


class _Encoder:
    """Function from a chunk to its stored form, for a worker or the main process."""

    def __init__(
        self, tokenizer: Tokenizer, json_keys: Sequence[str], append_eod: bool, dtype: str, with_digests: bool
    ):
        self._tokenizer, self._keys, self._eod = tokenizer, json_keys, tokenizer.eod if append_eod else None
        self._dtype, self._with_digests = np.dtype(dtype), with_digests

    def __call__(self, chunk: _Chunk) -> _EncodedChunk:
        ids: list[list[int]] = [[] for _ in self._keys]
        encoded = [_Encoded(b"", array("i"), []) for _ in self._keys]
        digests = bytearray()
        for line, document in zip(chunk.line_numbers, chunk.documents):
            where = f"{chunk.path}, line {line}"
            texts_of_keys = list(_parse_document(document, chunk.is_json, self._keys, where))
            for number, texts in enumerate(texts_of_keys):
                self._add(texts, ids[number], encoded[number], where)
            if self._with_digests:
                digests += _digest(texts_of_keys)
        stored = [part._replace(stored=self._to_stored(key_ids, chunk)) for part, key_ids in zip(encoded, ids)]
        return _EncodedChunk(chunk.bytes_read, stored, bytes(digests))

    def _add(self, texts: list[str], ids: list[int], part: _Encoded, where: str) -> None:
        first = len(part.lengths)
        for text in texts:
            try:
                tokens = self._tokenizer.tokenize(text)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
            if tokens:
                ids.extend(tokens)
                part.lengths.append(len(tokens))
        if self._eod is not None and len(part.lengths) > first:
            ids.append(self._eod)
            part.lengths[-1] += 1
        part.document_ends.append(len(part.lengths))

    def _to_stored(self, ids: list[int], chunk: _Chunk) -> bytes:
        try:
            return to_stored(ids, self._dtype).tobytes()
        except ValueError as error:
            raise UserError(f"{chunk.path}, line {chunk.line_numbers[0]} and following: {error}") from None


def _digest(texts_of_keys: list[list[str]]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for texts in texts_of_keys:
        for text in texts:
            digest.update(text.encode("utf-8", "surrogatepass") + b"\xff")  # a byte that no text has
        digest.update(b"\xfe")
    return digest.digest()


def _encode_chunks(
    chunks: Iterator[_Chunk], encode: _Encoder, workers: int, stack: ExitStack
) -> Iterator[_EncodedChunk]:
    """Yield the encoded chunks in input order; worker processes live as long as `stack`."""
    if workers <= 1:
        yield from map(encode, chunks)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encode,))
    stack.callback(pool.shutdown, cancel_futures=True)

    def submit(chunk: _Chunk) -> Future:
        # Python drops the exceptions of signal handlers that run while it forks, which a submit may do
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            return pool.submit(_encode, chunk)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)

    try:
        futures = deque(map(submit, islice(chunks, 2 * workers)))
        while futures:
            yield futures.popleft().result()
            futures.extend(map(submit, islice(chunks, 1)))
    except BrokenProcessPool:
        raise UserError(f"a worker process died (out of memory?); try fewer than --workers {workers}") from None


def _start_worker(encode: _Encoder) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the main process decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    vars(multiprocessing.current_process())["encode"] = encode


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # a worker of a killed process would wait for work forever
    os._exit(1)


def _encode(chunk: _Chunk) -> _EncodedChunk:
    return vars(multiprocessing.current_process())["encode"](chunk)


def _read_chunks(parts: Sequence[FilePart], text_unit: str) -> Iterator[_Chunk]:
    for part in parts:
        name = str(part)
        is_json = is_json_file(part.path)
        with open(part.path, "rb") as raw:
            stream: Iterable[bytes]
            if part.end is None:
                stream = decompress(raw, part.path)
            else:
                stream = lines_in_range(raw, part.begin, part.end)
            numbered = _numbered_lines(stream) if is_json else _text_documents(stream, text_unit)
            numbers: list[int] = []
            documents: list[bytes] = []
            size, start = 0, part.begin
            try:
                for number, document in numbered:
                    numbers.append(number)
                    documents.append(document)
                    size += len(document)
                    if len(documents) >= _CHUNK_DOCUMENTS or size >= _CHUNK_BYTES:
                        end = raw.tell()
                        yield _Chunk(name, numbers, documents, is_json, end - start)
                        numbers, documents, size, start = [], [], 0, end
            except OSError as error:
                raise UserError(f"{name}: cannot be read ({error})") from None
            if documents:
                yield _Chunk(name, numbers, documents, is_json, raw.tell() - start)


def is_json_file(path: str) -> bool:
    """Return whether a file is read as JSON lines; only .txt, also compressed, is not."""
    return not path.removesuffix(".gz").removesuffix(".zst").endswith(".txt")


def _numbered_lines(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            yield number, line


def _text_documents(stream: Iterable[bytes], unit: str) -> Iterator[tuple[int, bytes]]:
    """Yield (first line, text) of the documents of a plain text file; a text keeps its inner line ends."""
    if unit == "line":
        yield from ((number, line.rstrip(b"\r\n")) for number, line in _numbered_lines(stream))
        return
    lines: list[bytes] = []
    first = 1
    for number, line in enumerate(stream, 1):
        if unit == "paragraph" and line.isspace():
            if lines:
                yield first, b"".join(lines).rstrip(b"\r\n")
            lines = []
            continue
        if not lines:
            first = number
        lines.append(line)
    if lines and not all(line.isspace() for line in lines):
        yield first, b"".join(lines).rstrip(b"\r\n")


class _Progress:
    """Progress line: documents, rates, fraction of the input read, time left. On a terminal it is overwritten."""

    def __init__(self, total_bytes: int, log_interval: int, stream: TextIO):
        self._total, self._interval, self._stream = max(total_bytes, 1), max(log_interval, 1), stream
        self._start = self._shown_at = time.monotonic()
        self._read, self._shown_documents = 0, 0
        self._terminal = stream.isatty()

    def show(self, documents: int, tokens: int, chunk_bytes: int) -> None:
        self._read += chunk_bytes
        now = time.monotonic()
        due = documents // self._interval > self._shown_documents // self._interval
        if due and now - self._shown_at >= (0.2 if self._terminal else 1.0):
            elapsed = now - self._start
            share = min(self._read / self._total, 1.0)
            left = elapsed / max(share, 1e-9) - elapsed
            self._print(
                f"Processed {documents} documents ({documents / elapsed:.0f} docs/s, "
                f"{self._read / elapsed / 2**20:.2f} MB/s, {tokens / elapsed:.0f} tokens/s, {share:.1%}, "
                f"ETA {datetime.timedelta(seconds=int(left))})",
                end="\r" if self._terminal else "\n",
            )
            self._shown_at, self._shown_documents = now, documents

    def finish(self, documents: int, tokens: int) -> float:
        elapsed = time.monotonic() - self._start
        self._print(
            f"Processed {documents} documents, {tokens} tokens in {datetime.timedelta(seconds=int(elapsed))} "
            f"({documents / max(elapsed, 1e-9):.0f} docs/s)"
        )
        return elapsed

    def _print(self, text: str, end: str = "\n") -> None:
        self._stream.write(f"{text:<100}{end}" if self._terminal else text + end)
        self._stream.flush()
