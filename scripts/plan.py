#!/usr/bin/env python3
"""Plan a run before it is submitted: what it needs, how fast it will be, which mapping is best. No GPU, no torch.

    python scripts/plan.py FLAGS --world-size N --hardware H         the plan of a command line (pretrain_moe.py --dry-run)
    python scripts/plan.py search FLAGS --gpus N --hardware H        all legal mappings, ranked: the ten best that fit
    python scripts/plan.py calibrate --from metrics.jsonl ...        fit the constants to your own runs; writes a file for --hardware
    python scripts/plan.py calibrate [--write]                       published runs, each predicted by constants fitted to the others;
                                                                     --write: as scripts/bench_results/planner.md

FLAGS are the trainer's, with or without --preset NAME. H: a100, h100, h200, h800, b200, b300, gb200, gb300, cpu, or a YAML file. A search
replaces what FLAGS say of parallel sizes, micro-batch, recompute and dispatcher, and keeps everything else (optimizer, --global-batch-size;
precision without --formats). docs/planning.md explains what is printed.

Options of search:
  --gpus N         devices (also --world-size)
  --best K         how many to show (default 10)
  --headroom F     a rank with F times an even share of tokens must still fit (default 1.2; 1: nothing is set aside for uneven routing)
  --formats NAMES  compare formats of the products, too: bf16, tensorwise, blockwise, mxfp8, nvfp4, with commas (default: as FLAGS say)
Options of calibrate --from:
  --hardware H     what the runs ran on (default: cpu for runs on CPU, else the device's name in the file)
  --output FILE    the YAML file to write (default own_hardware.yaml; an old file stays under a numbered name)
Exit code: 0; 3 where the plan of a command line does not fit; 2 where none can be made of the flags, no mapping fits, or nothing can be fitted.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments.tokens import FIELDS
from moe_trainer.exit_codes import ExitCode
from moe_trainer.planner.calibrate import Calibration, Error, median, plan_of
from moe_trainer.planner.dry_run import DEFAULT_HARDWARE, run_dry_run
from moe_trainer.planner.hardware import Constants, find_hardware
from moe_trainer.planner.memory import GIB
from moe_trainer.planner.own_runs import calibrated, calibration_table, device_name, hardware_yaml, read_runs
from moe_trainer.planner.plan import make_plan
from moe_trainer.planner.published import ROWS
from moe_trainer.planner.search import HEADROOM, search, search_formats
from moe_trainer.planner.search_text import search_lines
from moe_trainer.planner.uncertainty import UNTESTED, bar_of, fit, held_out, published_residuals
from moe_trainer.planner.unseen import UNSEEN

OPTIONS_OF_SEARCH = ("--gpus", "--best", "--headroom", "--formats", "--hardware", "--world-size")
RECORD = Path(__file__).resolve().parent / "bench_results" / "planner.md"
FAR_OFF = (
    "The form of the model, what is taken for granted where a source is silent, and which runs are fitted were chosen with all runs in sight: the",
    "errors are somewhat kind.", "",
    "What is far off, and why, as far as it can be told:", "",
    "- Moonlight-16B: 2,048 tokens a GPU and iteration, eager, over 27 layers: the device waits for the host. Its source says so itself: making heads of latents",
    "  again, next to nothing for the device, makes the iteration 5 % slower, recomputing norms and activations 11 %. The host's time for a",
    "  kernel comes from this difference; what the host does beside launching (token counts fetched from the device, an optimizer that walks",
    "  over some 800 tensors) is not modelled.",
    "- Qwen3-235B on GB200 in BF16: the figure has two mappings in its sources (PP4 VPP12 EP32 overlapped, and PP8 VPP1 EP8); the planner",
    "  says 10 % too much for the second. An overlapped exchange of two-layer chunks costs the host more than is modelled.",
    "- Qwen3-30B over NCCL's all-to-all: the flags of that run are not stated in full; tokens' counts go through the host there.",
    "- DeepSeek-V3 on 256 GB200 was published on its way, too (494, 540, 566, 611, 663, 691, 762, 798, 830, 944, 970): the planner says what a tuned",
    "  program does, and calls the first steps, whose kernels were not fused and whose host was not tuned, up to 80 % too fast.",
)

LATER_FAR_OFF = (
    "- Eager runs over NCCL's all-to-all: the device waits for its host, of which only launches are modelled, not the fetching of token counts in every layer",
    "  nor what 8 bits cost it for every expert. Qwen3-30B on H100 in FP8 takes 17 ms a layer and microbatch (7 here). Read plans of such lines as what CUDA",
    "  graphs and DeepEP or HybridEP would give.",
    "- GPT-OSS, and Qwen2-57B without a pipeline (TP4, a shared expert of 20,480 channels): not explained.",
)


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    if not words or {"--help", "-h"} & set(words):
        print(__doc__.strip())
        return ExitCode.OK if words else ExitCode.USER_ERROR
    if words[0] == "calibrate":
        return _calibrate(words[1:])
    if words[0] == "search":
        return _search(words[1:])
    return run_dry_run(words if "--dry-run" in words else [*words, "--dry-run"])


def _search(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="plan.py search", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", "--world-size", type=int)
    parser.add_argument("--hardware", default=DEFAULT_HARDWARE)
    parser.add_argument("--best", type=int, default=10)
    parser.add_argument("--headroom", type=float, default=HEADROOM)
    parser.add_argument("--formats", type=lambda text: tuple(dict.fromkeys(text.split(","))))
    options, flags = parser.parse_known_args(words)
    for word, meant in misspelled(flags):
        parser.error(f"{word}: this flag is unknown; did you mean {meant}?")
    if options.gpus is None:
        parser.error("--gpus N is missing: the number of devices to search for")
    if options.gpus < 1 or options.best < 1 or not options.headroom >= 1:
        parser.error("--gpus and --best are at least 1, --headroom too")
    try:
        hardware = find_hardware(options.hardware)
        with progress_line(sys.stderr) as progress:
            if options.formats:
                outcome = search_formats(flags, options.formats, options.gpus, hardware, options.best, options.headroom, progress)
            else:
                outcome = search(flags, options.gpus, hardware, options.best, options.headroom, progress)
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    print("\n".join(search_lines(outcome, options.gpus, options.hardware)))
    return ExitCode.OK if outcome.found else ExitCode.USER_ERROR


@contextmanager
def progress_line(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text as the last line of a terminal; nothing is written elsewhere. (tqdm is no dependency of this program.)"""
    if not stream.isatty():
        yield lambda text: None
        return
    begin = time.monotonic()
    try:
        yield lambda text: print(f"\r\033[K{text}; {time.monotonic() - begin:.0f} s", end="", file=stream, flush=True)
    finally:
        print("\r\033[K", end="", file=stream, flush=True)


def misspelled(flags: list[str]) -> list[tuple[str, str]]:
    """Words that no flag of the trainer is, and the option of search that they nearly are; what is like none is left to the trainer's parser."""
    words = (flag.partition("=")[0] for flag in flags if flag.startswith("--"))
    near = ((word, difflib.get_close_matches(word, OPTIONS_OF_SEARCH, n=1, cutoff=0.75)) for word in words if word not in FIELDS)
    return [(word, close[0]) for word, close in near if close]


def _calibrate(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="plan.py calibrate", add_help=False, allow_abbrev=False)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--from", dest="runs", nargs="+", metavar="METRICS")
    parser.add_argument("--hardware")
    parser.add_argument("--output")
    options = parser.parse_args(words)
    if options.runs:
        if options.write:
            parser.error("--write records the published runs; --output FILE is where own constants go")
        return _calibrate_own(options.runs, options.hardware, Path(options.output or "own_hardware.yaml"))
    if options.hardware or options.output:
        parser.error("--hardware and --output belong to --from METRICS ...")
    lines = calibration_lines(Calibration())
    print("\n".join(lines))
    if options.write:
        RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _calibrate_own(paths: list[str], machine: str | None, output: Path) -> int:
    """Fit to own runs, print what that is worth and write the hardware file."""
    if not output.name or (output.exists() and not output.is_file()) or output.resolve() in {Path(path).resolve() for path in paths}:
        print(f"plan.py: --output {output}: the name of a new file is needed, or of an older hardware file", file=sys.stderr)
        return ExitCode.USER_ERROR
    try:
        machine = machine or device_name(paths[0])
        before = find_hardware(machine)
        runs = [run for path in paths for run in read_runs(path, before)]
        fitted = calibrated(runs, before, output.stem)
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    fitted = replace(fitted, source=f"{before.name}, constants fitted to {len(runs)} own run{'s' if len(runs) > 1 else ''}")
    print("\n".join(calibration_table(fitted, before)))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            number = next(number for number in itertools.count(1) if not output.with_name(f"{output.stem}-{number}{output.suffix}").exists())
            output.rename(output.with_name(f"{output.stem}-{number}{output.suffix}"))
        output.write_text(hardware_yaml(fitted, before.name), encoding="utf-8")
    except OSError as error:
        print(f"plan.py: --output {output}: the file cannot be written ({error.strerror})", file=sys.stderr)
        return ExitCode.USER_ERROR
    if len(runs) == 1:
        print("one run cannot tell all constants apart: others of its size will be predicted best; runs of other sizes and mappings make them exact")
    print(f"written: {output}. Use it as --hardware {output}")
    return 0


def calibration_lines(calibration: Calibration) -> list[str]:
    """Every published run with its errors, as Markdown."""
    names = calibration.fitted()
    best, used = calibration.fit(names), Constants()
    alone, family = calibration.leave_one_out(), {error.row.name: error for error in calibration.leave_family_out()}
    rest = calibration.predicted(best)
    later = [Error(row, plan_of(row, best).tflops, best) for row in UNSEEN]
    eager = [error for error in later if "eager" in error.row.name]
    return [
        "# Published runs and what the planner predicts of them", "",
        "`python scripts/plan.py calibrate --write`. TFLOP/s per GPU; the errors are predicted / published - 1. No run is one of this program.", "",
        f"Constants that tell the {len(names)} fitted runs best (moe_trainer/planner/calibrate.py): {best}. In use: {used}.", "",
        "## Runs that constants are fitted to", "",
        "Predicted by constants fitted to the other runs, and by constants fitted to the runs of other models alone.", "",
        "| run | published | without this run | error | without this model | error | source |", "|---|---|---|---|---|---|---|",
        *(f"| {error.row.name} | {error.row.tflops:.1f} | {error.tflops:.1f} | {_percent(error)} | {family[error.row.name].tflops:.1f} | "
          f"{_percent(family[error.row.name])} | {error.row.source} |" for error in alone), "",
        f"Median of the absolute errors: {100 * median(alone):.1f} % and {100 * median(list(family.values())):.1f} %.", "",
        "## Runs that nothing is fitted to", "",
        "| run | published | predicted | error | source |", "|---|---|---|---|---|",
        *(f"| {error.row.name} | {error.row.tflops:.1f} | {error.tflops:.1f} | {_percent(error)} | {error.row.source} |" for error in rest), "",
        f"Median of the absolute errors: {100 * median(rest):.1f} %. Of all {len(alone) + len(rest)} runs: {100 * median([*alone, *rest]):.1f} %.", "",
        *FAR_OFF, "",
        "## Runs that were looked up when the model was finished", "",
        "A kind choice: 51 were planned and 38 kept when all errors were known. Of the 13 others nine (GPT-OSS, Qwen3, DeepSeek) were planned 20 to "
        "145 % too fast, one (DeepSeek-V3 on H100) 10 %. No constant was changed afterwards, but the form was once (layers with a window no longer "
        "score every key), and GPT-OSS is read as all-to-all, since its recipe names no backend. BP's tables do not say which dispatcher, recompute "
        "and graphs (moe_trainer/planner/unseen.py).", "",
        "| run | published | predicted | error | source |", "|---|---|---|---|---|",
        *(f"| {error.row.name} | {error.row.tflops:.1f} | {error.tflops:.1f} | {_percent(error)} | {error.row.source} |" for error in later), "",
        f"Median of the absolute errors of the {len(later)}: {100 * median(later):.1f} %; of the {len(eager)} eager ones {100 * median(eager):.1f} %, of the others "
        f"{100 * median([error for error in later if error not in eager]):.1f} %.", "",
        *LATER_FAR_OFF, "", *_bar_lines([*(Error(row, calibration.plans[row.name].tflops, used) for row in ROWS), *later], calibration),
        *_memory_lines(calibration),
    ]


def _bar_lines(errors: list[Error], calibration: Calibration) -> list[str]:
    """The error bars that plans carry, and how many runs they hold."""
    tflops = {error.row: error.tflops for error in errors}
    plans = {row: calibration.plans[row.name] if row.name in calibration.plans else plan_of(row) for row in tflops}
    runs = published_residuals(plans, tflops.get, plans.get)
    found, left_out = fit(runs), held_out(runs)
    inside, of_all = (sum(run.error <= bar for run, bar in bars) for bars in (left_out, [(run, bar_of(found, run.features)) for run in runs]))
    return [
        "## Error bars", "",
        "What a plan says behind its time: a base and a term for every feature that made runs hard to predict, fitted to |log(predicted / published)| of "
        f"all {len(runs)} runs by quantile regression (moe_trainer/planner/uncertainty.py).", "",
        "| feature | adds |", "|---|---|", f"| (base) | {100 * found.base:.1f} % |",
        *(f"| {name} | {100 * value:.1f} % |" for name, value in found.terms.items()),
        f"| each that no published run has | {100 * UNTESTED:.0f} % (an estimate, no data) |", "",
        f"Runs inside their bar: {100 * of_all / len(runs):.0f} %; with terms fitted to the other models alone: {100 * inside / len(runs):.0f} %. The 13 runs that "
        "were left out above are not counted: with all of them outside it would be "
        f"{100 * inside / (len(runs) + 13):.0f} %.", "",
    ]


def _memory_lines(calibration: Calibration) -> list[str]:
    """Published memory of a rank at its peak."""
    table = calibration.plans["DeepSeek-V3 256xGB300 MXFP8"].args
    plain = replace(table, precision=replace(table.precision, fp8=None), training=replace(table.training, cuda_graph_impl="none"),
                    parallel=replace(table.parallel, overlap_moe_expert_parallel_comm=False))
    stage = make_plan(plain, 256, find_hardware("gb300")).memory[1]
    qwen, moonlight = (calibration.plans[name].peak.total / GIB for name in ("Qwen3-30B 16xH100 BF16, exchange overlapped", "Moonlight-16B 8xH100 BF16"))
    states, optimizer, kept = ((stage.weights + stage.gradients) / GIB, stage.optimizer / GIB, stage.kept / GIB)
    return [
        "## Memory", "",
        "GiB of a rank; where a source says GB it does not say which.", "",
        "| run | published | predicted |", "|---|---|---|",
        f"| DeepSeek-V3, PP4 VPP4 EP64, BF16 (P table 3): weights and gradients, optimizer, activations, sum | 36.4, 32.1, 131.0, 199.5 | {states:.1f}, "
        f"{optimizer:.1f}, {kept:.1f}, {states + optimizer + kept:.1f} |",
        f"| Qwen3-30B 16xH100 BF16, exchange overlapped (BR) | 62.2 | {qwen:.1f} |",
        f"| Moonlight-16B 8xH100 BF16 (BR) | 36.6 or 34.1 | {moonlight:.1f} |", "",
        "Of Moonlight's difference 3.8 would be main parameters, if that run kept them in 4 bytes: this program keeps 2 beside the bf16 weight with",
        "--use-precision-aware-optimizer. The rest is not explained; its source calls the peak one of the optimizer's step, whose passing needs are not counted.",
    ]


def _percent(error: Error) -> str:
    return f"{100 * error.relative:+.1f} %"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no failure
    sys.exit(main(sys.argv[1:]))
