"""Turn real text into JSONL documents and a SentencePiece tokenizer, for scripts/quickstart.sh.

    python scripts/quickstart_text.py FOLDER [--text FILE] [--megabytes 8] [--vocab-size 4096]

Without --text the documents are the sources of this Python installation, code and documentation strings: real text
that every machine has. They are taken in a shuffled but fixed order, so that every part of a split holds all kinds. A
.jsonl FILE is taken as it is (its "text" fields); any other file is cut at blank lines into documents of some
thousand characters. Writes FOLDER/text.jsonl and FOLDER/tokenizer.model.
"""

import argparse
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arguments.paths import local_path
from moe_trainer.data.tokenizer_training import train_sentencepiece
from moe_trainer.exit_codes import ExitCode

DOCUMENT_CHARACTERS = 8000
LEAST_CHARACTERS = 500_000


def python_sources(limit: int) -> Iterator[str]:
    """Yield the standard library's source files, about `limit` characters in all."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
    paths = [path for path in folder.rglob("*.py") if not skipped & set(path.relative_to(folder).parts)]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        # Very long files would make the documents of a split too unequal.
        for start in range(0, len(text), 10 * DOCUMENT_CHARACTERS):
            if limit <= 0:
                return
            piece = text[start : start + 10 * DOCUMENT_CHARACTERS]
            limit -= len(piece)
            yield piece


def read_documents(path: Path, limit: int) -> Iterator[str]:
    """Yield the documents of a user's file, about `limit` characters in all."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        pieces = (json.loads(line)["text"] for line in text.splitlines() if line.strip())
    else:
        pieces = _joined(re.split(r"(?<=\n)\s*\n", text))
    for piece in pieces:
        if limit <= 0:
            return
        limit -= len(piece)
        yield piece


def _joined(paragraphs: list[str]) -> Iterator[str]:
    """Join paragraphs into documents; a paragraph that is longer than a document is cut."""
    document = ""
    for paragraph in paragraphs:
        for start in range(0, len(paragraph), DOCUMENT_CHARACTERS):
            document += paragraph[start : start + DOCUMENT_CHARACTERS]
            if len(document) >= DOCUMENT_CHARACTERS:
                yield document
                document = ""
        document += "\n"
    if document.strip():
        yield document


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Text and tokenizer for the quickstart.")
    parser.add_argument("folder", type=local_path)
    parser.add_argument("--text", type=local_path, default=None, help="a text or .jsonl file of your own")
    parser.add_argument("--megabytes", type=float, default=8.0, help="how much text to take, in millions of characters")
    parser.add_argument("--vocab-size", type=int, default=4096)
    options = parser.parse_args(argv)
    if options.text is not None and not options.text.is_file():
        print(f"error: TEXT={options.text}: there is no such file", file=sys.stderr)
        return ExitCode.USER_ERROR
    limit = int(options.megabytes * 1e6)
    try:
        documents = list(read_documents(options.text, limit) if options.text else python_sources(limit))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        print(
            f'error: TEXT={options.text}: every line of a .jsonl file must be an object with a "text": {error}',
            file=sys.stderr,
        )
        return ExitCode.USER_ERROR
    characters = sum(map(len, documents))
    if characters < LEAST_CHARACTERS:
        where = options.text or "this Python installation"
        print(
            f"error: {where} holds only {characters} characters of text; {LEAST_CHARACTERS} are needed: set TEXT=FILE",
            file=sys.stderr,
        )
        return ExitCode.USER_ERROR
    options.folder.mkdir(parents=True, exist_ok=True)
    with open(options.folder / "text.jsonl", "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    (options.folder / "tokenizer.model").write_bytes(train_sentencepiece(documents, options.vocab_size))
    print(f"text: {len(documents)} documents, {characters / 1e6:.1f} million characters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
