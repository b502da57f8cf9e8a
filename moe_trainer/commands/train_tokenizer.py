"""Train a tokenizer on your own text: JSON lines or plain .txt (also .gz, .zst).

    python scripts/train_tokenizer.py --input corpus.jsonl more.txt --vocab-size 32000 --output-dir my_tokenizer

writes my_tokenizer/tokenizer.model (SentencePiece) or, with --tokenizer-type HuggingFaceTokenizer, tokenizer.json, and
prints the flags that name it to preprocess and to the trainer. All text is held in memory: some hundred MB are enough.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from arguments.checkpoint_args import TOKENIZER_FILES
from arguments.paths import local_path, local_prefix
from arguments.program import program_name
from arguments.settings import shorten
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.errors import UserError, name_write_errors, require_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import atomic_write, why_unwritable

SENTENCEPIECE, HUGGING_FACE = "SentencePieceTokenizer", "HuggingFaceTokenizer"
_LARGEST = 10**8
"""Number of tokens; the libraries end without a message where they cannot count or hold them."""


def main(argv: Sequence[str]) -> int:
    """Train, write the files and print the flags. Returns the exit code."""
    parser = make_command_parser("train-tokenizer", __doc__)
    parser.add_argument(
        "--input", type=local_prefix, nargs="+", required=True, metavar="FILE", help="files or quoted patterns"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the texts in JSON (default: text)"
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of tokens")
    parser.add_argument("--output-dir", type=local_path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--tokenizer-type",
        choices=(SENTENCEPIECE, HUGGING_FACE),
        default=SENTENCEPIECE,
        help="SentencePieceTokenizer (default): BPE of characters, with bytes as fallback; HuggingFaceTokenizer: "
        "byte-level BPE, as GPT-2's",
    )
    options = parser.parse_args(argv)
    try:
        require_packages("numpy")
        model = _train(options.input, options.json_keys, options.vocab_size, options.output_dir, options.tokenizer_type)
    except (UserError, OSError) as error:
        print(f"{program_name('train-tokenizer')}: error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print(f"{program_name('train-tokenizer')}: interrupted; nothing was written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    print(shlex.join(["--tokenizer-type", options.tokenizer_type, "--tokenizer-model", str(model)]))
    return ExitCode.OK


def _train(inputs: list[str], json_keys: list[str], vocab_size: int, folder: Path, kind: str) -> Path:
    """Write the files of a tokenizer and return what --tokenizer-model names.

    Raises:
        UserError: naming the flag or file that is wrong; nothing is written then.
        OSError: if an input cannot be read.
    """
    from moe_trainer.data.preprocess import read_texts
    from moe_trainer.data.tokenizer_training import train_byte_level_bpe, train_sentencepiece

    if not 0 < vocab_size <= _LARGEST:
        raise UserError(f"--vocab-size {shorten(str(vocab_size))} must be above 0 and at most {_LARGEST}")
    present = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if present:
        raise UserError(f"--output-dir {folder}: there is a {present[0]} already; name another folder")
    problem = why_unwritable(folder, "folder")
    if problem is not None:
        raise UserError(f"--output-dir {folder}: {problem}")
    texts = read_texts(inputs, json_keys)
    files: dict[str, bytes] = {}
    if kind == SENTENCEPIECE:
        files["tokenizer.model"] = train_sentencepiece(texts, vocab_size)
    else:
        files |= {name: text.encode() for name, text in train_byte_level_bpe(texts, vocab_size).items()}
    with name_write_errors("--output-dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with atomic_write(folder / name, "wb") as file:
                file.write(content)
    return folder / "tokenizer.model" if kind == SENTENCEPIECE else folder
