"""Print statistics of token files and check them: lengths, ids, ends of documents, duplicates.

    python scripts/inspect_data.py data/my_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model path

Files of text and conversations are tokenized. Their first samples are printed too, with the tokens that are trained:

    python scripts/inspect_data.py chats.jsonl --sft --tokenizer-type SFTTokenizer --tokenizer-model path --preview 3

Every document is read once. The exit code is 1 with --strict if there are problems. `ls`, `verify` and `diff` instead
of a prefix inspect checkpoints (moe_trainer/checkpoint/inspect.py).
"""

import argparse
import json
import sys
from collections import Counter

from arguments.paths import local_path, local_prefix
from arguments.program import program_name
from arguments.tokenizer_flags import add_tokenizer_flags, tokenizer_args
from moe_trainer.errors import UserError, require_packages
from moe_trainer.exit_codes import ExitCode

try:
    require_packages("numpy")
except UserError as error:
    print(f"{program_name('inspect')}: {error}", file=sys.stderr)
    sys.exit(ExitCode.USER_ERROR)
from moe_trainer.data.statistics import (
    QUANTILES,
    TokenStatistics,
    collect_statistics,
    collect_text_statistics,
    preview,
    preview_text,
)
from moe_trainer.data.text_sequences import TextSequences, is_text_file
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.estimate.length_histogram import LengthHistogram, read_histogram

_BAR = 40
CHECKPOINT_MODES = ("ls", "verify", "diff")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program_name("inspect"),
        description=__doc__.split("\n\n")[0],
        epilog=f"Checkpoints: {program_name('inspect')} ls|verify|diff PATH ... (ls --help).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "prefixes",
        type=local_prefix,
        nargs="+",
        metavar="PREFIX",
        help="prefix of a .bin and .idx file, or a text file",
    )
    parser.add_argument("--sft", action="store_true", help="read text files as a run with --sft does")
    parser.add_argument("--preview", type=int, default=0, metavar="N", help="print the beginnings of N documents")
    parser.add_argument("--preview-tokens", type=int, default=40, help="tokens of each of them (default 40)")
    parser.add_argument("--json", type=local_path, metavar="FILE", help="write all numbers to a JSON file")
    parser.add_argument(
        "--length-histogram",
        type=local_path,
        metavar="FILE.csv",
        help="write length,count of all sequences, which a plan reads",
    )
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if there are problems")
    add_tokenizer_flags(parser, "tokenizer, for text, and for checks of ids and special tokens", required=False)
    return parser


def describe(found: TokenStatistics) -> str:
    """Return the report of one pair of files."""
    quantiles = ", ".join(f"{share:.0%} {length:,}" for share, length in zip(QUANTILES, found.length_quantiles))
    lines = [
        f"{found.prefix}: {found.documents:,} documents, {found.tokens:,} tokens ({found.dtype})"
        + ("" if found.trained is None else f", {found.trained:,} trained"),
        f"  lengths: {found.shortest:,} to {found.longest:,}, mean {found.mean:,.1f}; {quantiles}",
    ]
    if found.lowest_id is not None:
        lines.append(f"  ids: {found.lowest_id} to {found.highest_id}, {found.distinct_ids:,} distinct")
    lines.append("  length            documents           tokens")
    most = max(found.tokens_by_length, default=0)
    for low, high, documents, tokens in zip(
        found.length_bounds, found.length_bounds[1:], found.documents_by_length, found.tokens_by_length
    ):
        if documents:
            bar = "#" * (_BAR * tokens // max(most, 1))
            lines.append(f"  {f'{low:,} - {high - 1:,}':15s} {documents:11,} {tokens:16,}  {bar}".rstrip())
    return "\n".join([*lines, *(f"  WARNING: {problem}" for problem in found.problems)])


def _inspect_checkpoint(argv: list[str]) -> int:
    try:
        require_packages("torch", "safetensors")
    except UserError as error:
        print(f"{program_name('inspect')}: error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    from moe_trainer.checkpoint.inspect import main as inspect_checkpoint

    return inspect_checkpoint(argv, program_name("inspect"))


def main(argv: list[str]) -> int:
    if argv and argv[0] in CHECKPOINT_MODES:
        return _inspect_checkpoint(argv)
    args = build_parser().parse_args(argv)
    results = []
    lengths: Counter[int] = Counter()
    try:
        tokenizer = None if args.tokenizer_type is None else build_tokenizer(tokenizer_args(args))
        for prefix in args.prefixes:
            if args.sft or is_text_file(prefix):
                if tokenizer is None:
                    raise UserError(f"{prefix}: text needs --tokenizer-type")
                sequences = TextSequences(prefix, tokenizer, args.sft)
                results.append(collect_text_statistics(sequences))
                print(describe(results[-1]))
                print(*preview_text(sequences, tokenizer, args.preview or 1, args.preview_tokens), sep="\n")
                if args.length_histogram:
                    lengths.update(len(sample.ids) for _, sample in sequences.samples())
                continue
            results.append(collect_statistics(prefix, tokenizer))
            print(describe(results[-1]))
            for line in preview(prefix, tokenizer, range(args.preview), args.preview_tokens):
                print(f"  {line}")
            if args.length_histogram:
                lengths.update(dict(read_histogram(prefix).counts))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump([found.as_dict() for found in results], file, indent=1)
        if args.length_histogram:
            LengthHistogram.of(lengths).write_csv(args.length_histogram)
    except (ValueError, OSError) as error:
        print(f"{program_name('inspect')}: error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return 1 if args.strict and any(found.problems for found in results) else 0
