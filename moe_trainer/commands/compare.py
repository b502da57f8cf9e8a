"""Compare runs: settings, losses at equal tokens and time, speed and routing.

    python scripts/compare.py RUN RUN ... [--report-html FILE]

A run is a folder with metrics.jsonl, or such a file. Runs that differ in --seed only are one group, with 95 %
intervals. Prints Markdown. Exit code: 0; 2 for runs that are missing or too few.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from arguments.paths import local_path, local_prefix
from arguments.program import command_line, program_name
from moe_trainer.checkpoint.directory import is_locked
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.comparison.report import COMPARISON_TITLE, comparison_figures, comparison_lines
from moe_trainer.comparison.runs import make_groups
from moe_trainer.drawing.report_page import Figure, write_report
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import cannot_write
from moe_trainer.metrics.dashboard import read_runs


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser("compare", __doc__)
    parser.add_argument("runs", type=local_prefix, nargs="+", metavar="RUN", help="runs to compare")
    parser.add_argument("--report-html", metavar="FILE", type=local_path, help="write the report with pictures, too")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.report_html is not None and cannot_write(options.report_html):
        parser.error(f"--report-html {options.report_html}: the file cannot be written")
    try:
        title, lines, figures = compare(options.runs)
        print("\n".join(lines))
        if options.report_html is not None:
            write_report(options.report_html, title, command_line("compare", argv), figures, lines)
    except ValueError as error:
        print(f"{program_name('compare')}: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return ExitCode.OK


def compare(paths: Sequence[str]) -> tuple[str, list[str], list[Figure]]:
    """Return title, lines and pictures of a comparison.

    Raises:
        ValueError: if a run cannot be read.
    """
    groups = make_groups(read_runs(paths, is_locked))
    return COMPARISON_TITLE, comparison_lines(groups), comparison_figures(groups)
