#!/usr/bin/env python3
"""Show what every rank of a profiled iteration did, on one time axis. Needs no GPU and no torch.

    python pretrain_moe.py ... --profile --use-pytorch-profiler --profile-ranks 0 1 2 3
    python scripts/draw_profile.py RUN/profile --report-html profile.html

Reads the traces that torch's profiler wrote, one per rank. Prints how long each rank computes, communicates and is
idle, and how much of the communication no computation overlaps. scripts/analyze_nsys.py reads reports of Nsight
Systems.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments.paths import local_path
from moe_trainer.drawing.report_page import write_report
from moe_trainer.exit_codes import ExitCode
from moe_trainer.metrics.profile_trace import find_traces, read_traces, trace_figure, trace_lines


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="draw_profile.py",
        description=__doc__,
        epilog="Exit code: 0, or 2 if a trace cannot be read or the page cannot be written.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "traces", nargs="+", type=local_path, metavar="TRACE", help="trace of a rank, or the folder of all"
    )
    parser.add_argument(
        "--report-html", type=local_path, metavar="FILE", help="write a page with the table and the picture"
    )
    options = parser.parse_args(words)
    try:
        traces = read_traces(find_traces(options.traces))
        lines = list(trace_lines(traces))
        print("\n".join(lines))
        if options.report_html is not None:
            command = shlex.join(["python", "scripts/draw_profile.py", *words])
            write_report(options.report_html, "Profile of an iteration", command, [trace_figure(traces)], lines)
    except ValueError as error:
        print(f"draw_profile.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
