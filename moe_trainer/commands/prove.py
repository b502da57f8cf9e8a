"""Check that a parallel mapping computes what one process computes, at toy size, on the CPU of this machine.

    python scripts/prove_layout.py FLAGS...                  your own flags, of a job of any size
    python scripts/prove_layout.py --preset RECIPE.yaml FLAGS...
    python scripts/prove_layout.py --random 50 --ranks 8     random mappings and models, drawn from a seed

The flags are shrunk: all features and the shape of the mapping are preserved, the sizes become small. The result runs
on local gloo ranks and on one process, three steps from the same weights and batches. Losses, auxiliary losses, every
gradient, the gradient norm, dropped tokens, weights and expert bias are compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator

from arguments.parse import as_plan
from arguments.pasted_line import read_pasted_line
from arguments.paths import local_path
from arguments.program import command_line, program_name
from moe_trainer.commands.checkpoint_flags import spell_checkpoint
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.drawing.report_page import write_report
from moe_trainer.errors import require_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import cannot_write
from moe_trainer.verification.pictures import proof_figures
from moe_trainer.verification.random_layouts import draw_cases
from moe_trainer.verification.report import command, markdown, result_lines, shrunk_lines, summary_lines
from moe_trainer.verification.shrink import ParityCase, ShrinkError, ShrinkResult, as_is, shrink

DEFAULT_TIMEOUT_S = 300.0


def make_parser(is_random: bool) -> argparse.ArgumentParser:
    """Build the parser of this script's own options; all other words are flags of the trainer.

    Args:
        is_random: whether --random is given; only then is --seed an option of this script.
    """
    name = program_name("prove")
    parser = make_command_parser(
        "prove",
        __doc__,
        usage=f"{name} FLAGS [options]\n       {name} --random K [--seed S] [options]",
        epilog="All other flags are the trainer's; so is --seed, except with --random. The number of ranks of the job\n"
        "is --world-size N or the environment variable WORLD_SIZE; a pasted torchrun command line is accepted.\n"
        "Exit code: 0 equal, 1 different, 2 the flags are wrong, or there is nothing to compare (one rank).",
    )
    parser.add_argument("--shrink-only", action="store_true", help="print the shrunk command lines and exit")
    parser.add_argument(
        "--ranks", type=int, default=8, metavar="N", help="maximum number of ranks (default: %(default)s)"
    )
    parser.add_argument("--random", type=int, metavar="K", help="check K random mappings instead of a command line")
    if is_random:
        parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of --random (default: %(default)s)")
    parser.add_argument("--as-is", action="store_true", help="do not shrink the flags")
    parser.add_argument("--report", type=local_path, metavar="FILE", help="write a Markdown report")
    parser.add_argument(
        "--report-html", type=local_path, metavar="FILE", help="write a page with this text and pictures"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help=f"maximum seconds per run (default: {DEFAULT_TIMEOUT_S:g})"
    )
    return parser


def main(words: list[str]) -> int:
    parser = make_parser(is_random="--random" in words or not words or bool({"-h", "--help"} & set(words)))
    if not words:
        parser.print_help()
        return ExitCode.USER_ERROR
    try:
        options, flags = parser.parse_known_args(read_pasted_line(words))
    except ValueError as error:
        parser.error(str(error))
    problems = list(_problems(options))
    if problems:
        parser.error("; ".join(problems))
    try:
        cases, shrunk = _cases(options, flags)
    except ShrinkError as error:
        reasons = [f"  - {reason}" for reason in error.reasons]
        print("\n".join(["these flags cannot be checked:", *reasons]), file=sys.stderr)
        return ExitCode.USER_ERROR
    if options.shrink_only:
        print("\n".join(shrunk_lines(shrunk) if shrunk is not None else map(command, cases)))
        return 0
    if all(case.world_size == 1 for case in cases):
        print(f"{program_name('prove')}: nothing to prove: {_one_rank_reason(shrunk, options.ranks)}", file=sys.stderr)
        return ExitCode.USER_ERROR
    try:
        require_packages("torch", "numpy", "safetensors")
    except ValueError as error:
        print(f"{program_name('prove')}: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return _prove(cases, shrunk, options, command_line("prove", words))


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield the errors in the values of this script's own options."""
    for flag, path in (("--report", options.report), ("--report-html", options.report_html)):
        if path is not None and cannot_write(path):
            yield f"{flag} {path}: the file cannot be written"
    unused = {"--report": options.report, "--report-html": options.report_html, "--timeout": options.timeout}
    for flag in (flag for flag, value in unused.items() if options.shrink_only and value is not None):
        yield f"{flag} is about a comparison, and --shrink-only compares nothing"
    if options.random is not None and options.as_is:
        yield "--as-is keeps the flags of a command line, and --random draws its own"
    if options.ranks < 1:
        yield f"--ranks {options.ranks} must be above 0"
    if options.random is not None and options.random < 1:
        yield f"--random {options.random} must be above 0"
    if options.random is not None and options.ranks == 1:
        yield "--ranks 1: --random needs at least 2 ranks"
    if options.timeout is not None and not (options.timeout > 0 and math.isfinite(options.timeout)):
        yield f"--timeout {options.timeout} must be a number of seconds above 0"


def _cases(options: argparse.Namespace, flags: list[str]) -> tuple[list[ParityCase], ShrinkResult | None]:
    """Return the cases to check.

    Raises:
        ShrinkError: if the flags cannot be shrunk.
    """
    if options.random is not None:
        if flags:
            raise ShrinkError([f"--random draws its own models; it takes no flags of the trainer ({' '.join(flags)})"])
        return draw_cases(options.random, options.ranks, options.seed), None
    if flags and flags[0].endswith((".yaml", ".yml")):
        flags = ["--preset", *flags]
    try:
        flags = as_plan(spell_checkpoint(flags))
    except ValueError as error:
        raise ShrinkError([str(error)]) from None
    if options.as_is:
        case = as_is(flags)
        if case.world_size > options.ranks:
            raise ShrinkError([f"these flags need {case.world_size} ranks, more than --ranks {options.ranks}"])
        return [case], None
    shrunk = shrink(flags, ranks=options.ranks)
    return list(shrunk.cases), shrunk


def _one_rank_reason(shrunk: ShrinkResult | None, ranks: int) -> str:
    """Return why there is only one rank, and what to change."""
    if shrunk is not None and shrunk.original.world > 1:
        world_size = shrunk.original.world
        return f"your mapping has {world_size} ranks, but --ranks {ranks} leaves one process; give --ranks 2 or more"
    return (
        "these flags describe one process, which is itself the reference; give parallel sizes, or the number of ranks "
        "with --world-size N"
    )


def _prove(cases: list[ParityCase], shrunk: ShrinkResult | None, options: argparse.Namespace, command_line: str) -> int:
    """Check all cases in one pool of ranks, print each result, write the reports. Returns the exit code."""
    import torch

    torch.set_num_threads(1)
    from moe_trainer.verification.parity import check_parity
    from moe_trainer.verification.rank_pool import RankPool

    lines: list[str] = []

    def show(more: Iterable[str]) -> None:
        text = list(more)
        lines.extend(text)
        print("\n".join(text), flush=True)

    if shrunk is not None:
        show(shrunk_lines(shrunk))
    results = []
    with RankPool(max(case.pool_size for case in cases), options.timeout or DEFAULT_TIMEOUT_S) as pool:
        for number, case in enumerate(cases, start=1):
            results.append(check_parity(pool, case))
            show(result_lines(results[-1], f"case {number} of {len(cases)}"))
    show(summary_lines(results, shrunk))
    if options.report_html is not None:
        num_equal = sum(result.is_equal for result in results)
        title = f"{num_equal} of {len(results)} mappings equal one process"
        try:
            write_report(options.report_html, title, command_line, list(proof_figures(results, shrunk)), lines)
        except ValueError as error:
            print(f"{program_name('prove')}: {error}", file=sys.stderr)
            return ExitCode.USER_ERROR
    if options.report is not None:
        try:
            options.report.write_text(markdown(results, shrunk, command_line), encoding="utf-8")
        except OSError as error:
            print(f"--report {options.report}: the file cannot be written ({error.strerror})", file=sys.stderr)
            return ExitCode.USER_ERROR
    return ExitCode.OK if all(result.is_equal for result in results) else ExitCode.FAILED
