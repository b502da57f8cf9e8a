"""Compare this program's models with Megatron-Core's own modules, on the CPU of this machine.

    pip install megatron-core
    python scripts/compare_megatron.py                      mixtral_tiny, deepseek_v3_tiny and qwen3_tiny
    python scripts/compare_megatron.py --preset NAME FLAGS  the model of these flags of the trainer, made small

Both models get the same weights and the same random tokens, and run forward and backward once, in fp32. Compared are
the losses, the output of every attention, router and MoE layer, the experts of every token, and every gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from arguments.parse import as_plan
from arguments.program import program_name
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.errors import require_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.verification.shrink import ShrinkError, shrink

if TYPE_CHECKING:  # it imports torch
    from moe_trainer.verification.megatron_core.compare import MegatronComparison

PRESETS = ("mixtral_tiny", "deepseek_v3_tiny", "qwen3_tiny")
_ALWAYS = ("--attention-dropout", "0", "--hidden-dropout", "0", "--transformer-impl", "local")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this command's own options; all other words are flags of the trainer."""
    parser = make_command_parser(
        "compare-megatron",
        __doc__,
        usage=f"{program_name('compare-megatron')} [--as-is] [--seed S] [FLAGS]",
        epilog="All other flags are the trainer's. Dropout is left out.\n"
        "Exit code: 0 equal, 1 different, 2 the flags are wrong, or Megatron-Core cannot build this model.",
    )
    parser.add_argument("--as-is", action="store_true", help="do not make the model of the flags small")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of weights and tokens (default: %(default)s)")
    return parser


def main(words: list[str]) -> int:
    options, flags = make_parser().parse_known_args(words)
    try:
        require_packages("torch", "numpy", "safetensors")
        models = [("model of these flags", _small(flags, options.as_is))] if flags else list(map(_preset, PRESETS))
        comparisons = []
        for name, each in models:
            start = time.perf_counter()
            comparisons.append(_compare(each, options.seed))
            print("\n".join(result_lines(name, comparisons[-1], time.perf_counter() - start)), flush=True)
    except ValueError as error:
        print(f"{program_name('compare-megatron')}: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    equal = sum(each.is_equal for each in comparisons)
    print(f"{equal} of {len(comparisons)} models equal Megatron-Core {comparisons[0].version}")
    return ExitCode.OK if equal == len(comparisons) else ExitCode.FAILED


def _preset(name: str) -> tuple[str, list[str]]:
    """Return the name and flags of a preset of a laptop's size, with short sequences."""
    return name, ["--preset", name, "--seq-length", "128"]


def _small(flags: list[str], as_is: bool) -> Sequence[str]:
    """Return flags for one process; all features are kept and sizes become small, as for a proof of a mapping.

    Raises:
        ValueError: if the flags are wrong.
    """
    if as_is:
        return flags
    try:
        return shrink(as_plan(flags), None, 1).cases[0].argv
    except ShrinkError as error:
        raise ValueError("; ".join(error.reasons)) from error


def _compare(flags: Sequence[str], seed: int) -> MegatronComparison:
    """Build both models and compare them.

    Raises:
        ValueError: if one of them cannot be built.
    """
    import torch

    from moe_trainer.api import build_model
    from moe_trainer.verification.megatron_core.compare import compare
    from moe_trainer.verification.megatron_core.model import megatron_core_version

    megatron_core_version()  # before a model is built
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):  # a run's first lines
        model = build_model(["--mock-data", "--logging-level", "30", *flags, *_ALWAYS, "--seed", str(seed)])
    return compare(model.args, model.network, model, model.vocab_size, seed)


def result_lines(name: str, comparison: MegatronComparison, seconds: float) -> Iterator[str]:
    """Yield the comparison of one model as a table."""
    yield f"{name}: {comparison.parameters:,} parameters, {comparison.tokens} tokens, {seconds:.0f} s"
    widths = [max(len(str(row[column])) for row in comparison.rows) for column in range(3)]
    yield f"  {'':{widths[0]}}  {'here':>{widths[1]}}  {'Megatron-Core':>{widths[2]}}  largest difference"
    for row in comparison.rows:
        values = f"{row.what:{widths[0]}}  {row.ours:>{widths[1]}}  {row.theirs:>{max(widths[2], 13)}}"
        yield f"  {values}  {row.difference:.1e}{f'  {row.where}' if row.where else ''}"
    largest, result = comparison.largest, "equal" if comparison.is_equal else "DIFFERENT"
    yield f"  {result}: the largest difference is {largest.difference:.1e}, in {largest.what}"
