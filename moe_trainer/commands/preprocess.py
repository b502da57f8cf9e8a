"""Tokenize text for training: JSON lines or plain .txt (also .gz, .zst) to <prefix>_<key>_document.{bin,idx}.

    python scripts/preprocess_data.py --input corpus.jsonl --output-prefix data/my \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/or/name --append-eod --workers 8

The result is byte-identical for any number of workers. The flags are those of Megatron-LM's tool of the same name.
"""

import argparse
import signal
import sys

from arguments.data import DataArgs
from arguments.paths import local_prefix
from arguments.program import program_name
from arguments.tokenizer_flags import add_tokenizer_flags, tokenizer_args
from moe_trainer.errors import UserError, require_packages
from moe_trainer.exit_codes import ExitCode

try:
    require_packages("numpy")
except UserError as error:
    print(f"{program_name('preprocess')}: {error}", file=sys.stderr)
    sys.exit(ExitCode.USER_ERROR)
from moe_trainer.data.preprocess import TEXT_UNITS, PreprocessOptions, preprocess
from moe_trainer.data.preprocess_shards import merge_shards, preprocess_shards


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program_name("preprocess"), description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    text = parser.add_argument_group("input")
    text.add_argument(
        "--input",
        type=local_prefix,
        nargs="+",
        required=True,
        help="files or quoted patterns; .jsonl, .json, .txt, each also .gz or .zst",
    )
    text.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys to tokenize, one dataset each (default: text)"
    )
    text.add_argument(
        "--text-unit",
        choices=TEXT_UNITS,
        default="paragraph",
        help="what is a document in .txt files: the text between blank lines (default), a line, or the file",
    )
    text.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    text.add_argument("--keep-newlines", action="store_true", help=argparse.SUPPRESS)
    text.add_argument("--lang", help=argparse.SUPPRESS)
    tokenizer = add_tokenizer_flags(parser, "tokenizer", required=True)
    tokenizer.add_argument(
        "--append-eod", action="store_true", help="end every document with the end-of-document token"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--drop-duplicates", action="store_true", help="keep the first of documents with exactly the same text"
    )
    output.add_argument(
        "--output-prefix", type=local_prefix, required=True, help="files are named <prefix>_<key>_document.bin and .idx"
    )
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=int, default=1, help="tokenizing processes (default 1)")
    runtime.add_argument(
        "--num-shards", type=int, help="divide the input into this many shards, which are complete one by one"
    )
    runtime.add_argument(
        "--shard-id", type=int, help="make only this shard, from 0, for example $SLURM_ARRAY_TASK_ID; --merge follows"
    )
    runtime.add_argument("--merge", action="store_true", help="merge the shards that --shard-id has made")
    runtime.add_argument(
        "--partitions", type=int, default=1, help="accepted; the output is always one dataset in input order"
    )
    runtime.add_argument("--keep-sequential-samples", action="store_true", help="accepted; the order is always kept")
    runtime.add_argument(
        "--log-interval", type=int, default=1000, help="documents between progress lines (default 1000)"
    )
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.split_sentences or args.keep_newlines or args.lang:
        return fail(
            "--split-sentences, --keep-newlines and --lang prepare data for BERT and T5, which this trainer does "
            "not train"
        )
    if args.workers < 1:
        return fail(f"--workers {args.workers} must be at least 1")
    problem = find_shard_problem(args)
    if problem is not None:
        return fail(problem)
    options = PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        text_unit=args.text_unit,
        drop_duplicates=args.drop_duplicates,
        log_interval=args.log_interval,
    )
    if not args.append_eod:
        text = "WARNING: without --append-eod no token marks the ends of documents, which samples join"
        print(f"{program_name('preprocess')}: {text}", file=sys.stderr)
    # exit by exception, so that temporary files are removed; finished outputs are preserved
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        prefixes = run(args, options, tokenizer_args(args))
    except (ValueError, OSError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return fail("interrupted; no output was written, but shards that were complete", 130)
    for prefix in prefixes:
        print(prefix)
    return 0


def find_shard_problem(args: argparse.Namespace) -> str | None:
    """Return what is wrong with the flags of shards, None if nothing is."""
    if args.num_shards is None:
        return "--shard-id and --merge need --num-shards" if args.shard_id is not None or args.merge else None
    if args.num_shards < 1:
        return f"--num-shards {args.num_shards} must be at least 1"
    if args.shard_id is not None and args.merge:
        return "--shard-id cannot be combined with --merge, which needs all shards"
    if args.shard_id is not None and not 0 <= args.shard_id < args.num_shards:
        return f"--shard-id {args.shard_id} must be from 0 to {args.num_shards - 1} (--num-shards {args.num_shards})"
    return None


def run(args: argparse.Namespace, options: PreprocessOptions, tokenizer: DataArgs) -> tuple[str, ...]:
    """Make token files, shards of them, or merge shards; return their prefixes."""
    if args.num_shards is None and not args.drop_duplicates:
        return preprocess(options, tokenizer).prefixes
    num_shards = args.num_shards or 1
    if not args.merge:
        made = preprocess_shards(options, tokenizer, num_shards, args.shard_id)
        if args.shard_id is not None:
            return made
    return merge_shards(options, tokenizer, num_shards).prefixes


def fail(message: str, code: int = 2) -> int:
    print(f"{program_name('preprocess')}: error: {message}", file=sys.stderr)
    return code
