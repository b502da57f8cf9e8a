"""Compare runs: settings, losses at equal tokens and time, speed and routing; or fit scaling laws to a folder of runs.

    python scripts/compare.py RUN RUN ... [--report-html FILE]
    python scripts/compare.py --scaling RUNS/ [--predict FLOPS ...] [--report-html FILE]

A run is a folder with metrics.jsonl, or such a file. Runs that differ in --seed only are one group, with 95 %
intervals. Prints Markdown. Exit code: 0; 2 for runs that are missing or too few.
"""

from __future__ import annotations

import argparse
import math
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
    parser.add_argument("runs", type=local_prefix, nargs="*", metavar="RUN", help="runs to compare")
    parser.add_argument(
        "--scaling", metavar="RUNS", type=local_path, help="fit scaling laws to all runs below this folder"
    )
    parser.add_argument("--predict", metavar="FLOPS", type=float, nargs="+", default=[], help="losses at this compute")
    parser.add_argument("--report-html", metavar="FILE", type=local_path, help="write the report with pictures, too")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if bool(options.runs) == bool(options.scaling):
        parser.error("give runs to compare, or --scaling with a folder of runs")
    if options.predict and not options.scaling:
        parser.error("--predict needs --scaling")
    if any(not 0 < flops < math.inf for flops in options.predict):
        parser.error("--predict: FLOPs must be positive and finite")
    if options.report_html is not None and cannot_write(options.report_html):
        parser.error(f"--report-html {options.report_html}: the file cannot be written")
    try:
        title, lines, figures = fit_scaling(options) if options.scaling else compare(options.runs)
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


def fit_scaling(options: argparse.Namespace) -> tuple[str, list[str], list[Figure]]:
    """Return title, lines and pictures of the scaling laws that the runs determine.

    Raises:
        ValueError: if there are no runs, or they determine none.
    """
    from moe_trainer.comparison.scaling import NAMES, check_points, fit, read_points
    from moe_trainer.comparison.scaling_report import compute_picture, fit_lines

    if not options.scaling.is_dir():
        raise ValueError(f"--scaling {options.scaling}: not a directory")
    points, skipped = read_points(options.scaling)
    if not points:
        raise ValueError(f"--scaling {options.scaling}: no run with parameters, tokens and a loss")
    reasons = {form: check_points(form, points) for form in NAMES}
    fits = [fit(form, points) for form, reason in reasons.items() if reason is None]
    if not fits:
        raise ValueError("; ".join(reason for reason in reasons.values() if reason))
    lines = ["# Scaling laws", "", f"{len(points)} runs below {options.scaling}."]
    lines += [f"- {path}: no parameters, tokens or loss in its records" for path in skipped]
    for each in fits:
        lines += fit_lines(each, options.predict if each.form == "compute" else ())
    lines += ["", *(f"Not fitted: {reason}." for reason in reasons.values() if reason)]
    figures = []
    if fits[0].form == "compute":
        caption = "Points: runs. Line: the fit; area: 95 % of the fits to runs drawn with replacement."
        figures.append(Figure("Loss against compute", compute_picture(fits[0], points, options.predict), caption))
    return "Scaling laws", lines, figures
