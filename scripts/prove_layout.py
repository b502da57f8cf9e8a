#!/usr/bin/env python3
"""Prove that a mapping computes what one process computes, at toy size, on this machine's CPU.

    python scripts/prove_layout.py FLAGS...                  your own flags, for a thousand GPUs too
    python scripts/prove_layout.py --preset RECIPE.yaml FLAGS...
    python scripts/prove_layout.py --random 50 --ranks 8     mappings and models drawn from a seed

Your flags are shrunk: every feature and the shape of the mapping stay, the sizes become small. The result runs on local gloo ranks and
on one process, three steps from the same weights on the same batches; losses, auxiliary losses, every gradient, the gradient norm,
dropped tokens, weights and expert bias are compared. Exit code: 0 equal, 1 something parts, 2 the flags are wrong, or there is nothing to
prove (one rank).

Options (everything else is a flag of the trainer; so is --seed, except with --random):
  --shrink-only    print the small command lines and stop
  --ranks N        ranks to use at most (default 8)
  --random K       prove K drawn mappings instead of a command line; --seed S chooses which (default 0)
  --as-is          the flags are small already: do not shrink them
  --report FILE    write a Markdown report
  --timeout S      seconds one run may take (default 300)
The number of ranks of your job is --world-size N or the environment's WORLD_SIZE; a pasted torchrun line is understood.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.errors import need_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.proof.random_layouts import draw_cases
from moe_trainer.proof.report import command, markdown, shrunk_lines, summary_lines, verdict_lines
from moe_trainer.proof.shrink import Case, ShrinkError, Shrunk, as_is, shrink


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    options, flags = _options(words)
    if options.help or not words:
        print(__doc__.strip())
        return ExitCode.OK if options.help else ExitCode.USER_ERROR
    try:
        cases, shrunk = _cases(options, flags)
    except ShrinkError as error:
        print("\n".join(["these flags cannot be proven:", *(f"  - {reason}" for reason in error.reasons)]), file=sys.stderr)
        return ExitCode.USER_ERROR
    if options.shrink_only:
        print("\n".join(shrunk_lines(shrunk) if shrunk is not None else map(command, cases)))
        return 0
    if all(case.world_size == 1 for case in cases):
        print(f"prove_layout.py: nothing to prove: {_why_one_rank(shrunk, options.ranks)}", file=sys.stderr)
        return ExitCode.USER_ERROR
    try:
        need_packages("torch", "numpy", "safetensors")
    except ValueError as error:
        print(f"prove_layout.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return _prove(cases, shrunk, options, "scripts/prove_layout.py " + shlex.join(words))


def _options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split our own options from the trainer's flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--shrink-only", "--as-is", "--help"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--random", type=int)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--report", type=Path)
    if "--random" in words:
        parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args(words)
    problems = list(_problems(options))
    if problems:
        parser.error("; ".join(problems))
    return options, flags


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the values of our own options."""
    report = options.report
    if report is not None and (report.is_dir() or not os.access(report.absolute().parent, os.W_OK)):
        yield f"--report {report}: the file cannot be written"
    if options.ranks < 1:
        yield f"--ranks {options.ranks} must be above 0"
    if options.random is not None and options.random < 1:
        yield f"--random {options.random} must be above 0"
    if options.random is not None and options.ranks == 1:
        yield "--ranks 1: --random needs at least 2 ranks"
    if not (options.timeout > 0 and math.isfinite(options.timeout)):
        yield f"--timeout {options.timeout} must be a number of seconds above 0"


def _cases(options: argparse.Namespace, flags: list[str]) -> tuple[list[Case], Shrunk | None]:
    """The cases to prove. Raises: ShrinkError when the flags do not allow it."""
    if options.random is not None:
        if flags:
            raise ShrinkError([f"--random draws its own models; it takes no flags of the trainer ({' '.join(flags)})"])
        return draw_cases(options.random, options.ranks, options.seed), None
    flags, world_size = _without_launcher(flags)
    if options.as_is:
        case = as_is(flags, world_size)
        if case.world_size > options.ranks:
            raise ShrinkError([f"these flags need {case.world_size} ranks; --ranks {options.ranks}"])
        return [case], None
    shrunk = shrink(flags, world_size, options.ranks)
    return list(shrunk.cases), shrunk


def _without_launcher(flags: list[str]) -> tuple[list[str], int | None]:
    """Drop `torchrun ... program.py` from the front; returns the flags and the number of ranks that the launcher names.

    Raises: ShrinkError when it names none that can be counted.
    """
    program = next((at for at, word in enumerate(flags) if word.endswith(".py") and not word.startswith("-")), None)
    if program is not None and (program == 0 or not flags[0].startswith("--") or "torchrun" in flags[:program]):
        counts = {"nproc": 1, "nnodes": 1}
        head = " ".join(flags[:program]).replace("=", " ").replace("_", "-").split()
        for name, value in zip(head, head[1:]):
            if name in ("--nproc-per-node", "--nnodes"):
                if not value.isdigit() or int(value) == 0:
                    raise ShrinkError([f"the launcher's {name} {value}: a number above 0 is needed, to know how many ranks there are"])
                counts["nproc" if "nproc" in name else "nnodes"] = int(value)
        ranks = counts["nproc"] * counts["nnodes"]
        return flags[program + 1:], ranks if ranks > 1 else None
    if flags and flags[0].endswith((".yaml", ".yml")):
        flags = ["--preset", *flags]
    return flags, None


def _why_one_rank(shrunk: Shrunk | None, ranks: int) -> str:
    """Why there are no ranks to compare with one process, and what to give."""
    if shrunk is not None and shrunk.original.world > 1:
        return f"your mapping has {shrunk.original.world} ranks, but --ranks {ranks} leaves one process; give --ranks 2 or more"
    return "these flags describe one process, which is itself the reference; give parallel sizes, or the number of ranks with --world-size N"


def _prove(cases: list[Case], shrunk: Shrunk | None, options: argparse.Namespace, asked: str) -> int:
    """Prove all cases in one pool of ranks, print as they come, write the report."""
    import torch

    torch.set_num_threads(1)
    from moe_trainer.proof.pool import Pool
    from moe_trainer.proof.prove import prove

    if shrunk is not None:
        print("\n".join(shrunk_lines(shrunk)), flush=True)
    verdicts = []
    with Pool(max(case.pool_size for case in cases), options.timeout) as pool:
        for number, case in enumerate(cases, start=1):
            verdicts.append(prove(pool, case))
            print("\n".join(verdict_lines(verdicts[-1], f"case {number} of {len(cases)}")), flush=True)
    parted = any(not verdict.equal for verdict in verdicts)
    print("\n".join(summary_lines(verdicts, shrunk)))
    if options.report is not None:
        try:
            options.report.write_text(markdown(verdicts, shrunk, asked), encoding="utf-8")
        except OSError as error:
            print(f"--report {options.report}: the file cannot be written ({error.strerror})", file=sys.stderr)
            return ExitCode.USER_ERROR
    return ExitCode.FAILED if parted else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
