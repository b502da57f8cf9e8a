"""Megatron-LM's MoE recipes and the nine rows of table 11 of arXiv 2603.07685: what this program does with each.

    python tests/verification/prove_recipes.py [NAME...]             validate and plan; NAME: those whose name contains it
    python tests/verification/prove_recipes.py --equal [NAME...]     also shrink each and compare it with one process, on the CPU
    python tests/verification/prove_recipes.py --equal --record      and keep the results for docs/recipes.md
    python tests/verification/prove_recipes.py --device [NAME...]    also run the shrunk recipe on two emulated devices: as without
                                                          its graphs, host synchronizations, graphs captured
    python tests/verification/prove_recipes.py --write               renew docs/recipes.md (validate and plan)

The shrunk recipe of --device keeps what the comparison with one process leaves out: graphs, bf16, forced balance. Its
libraries are those that are installed; without DeepEP and HybridEP tokens go through the all-to-all.
"""

# ruff: noqa: E402 - the path comes before the imports

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from arguments.mechanisms.formats import quantized_format

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import model_zoo
from arguments import parse_args
from arguments.parse import resolve_command_line
from arguments.spelling import to_command_line
from moe_trainer.exit_codes import ExitCode
from moe_trainer.verification.shrink import ParityCase, ShrinkError, shrink
from scripts.proof_record import ProofRecord
from tests.arguments.moe_recipes import COMMIT, DATE, FILES, RECIPES, TABLE_11, as_file

PAGE = ROOT / "docs" / "recipes.md"
SOURCE = f"https://github.com/NVIDIA/Megatron-LM/blob/{COMMIT}/examples/moe_recipes"
PROVEN = ProofRecord(ROOT / "scripts" / "bench_results" / "recipes.json", "recipe")
HARDWARE = re.compile(r"(g?b[23]00|h100)", re.IGNORECASE)
RANKS = 4
TOLERANCE = 1e-4
"""Largest relative difference of a gradient norm with and without graphs, where losses are equal bit for bit.

Gradients that meet at the border of a graph are added in another order, in bf16. In fp32 nothing differs.
"""
FIXED = "--on-missing-backend fallback --triton-kernels none --lr 1e-12".split()
"""Weights all but stay: otherwise the rounding of a gradient would change later losses."""
DEVICE_FLAGS = tuple(
    """
    bf16 cuda_graph_impl cuda_graph_modules moe_router_force_load_balancing check_for_nan_in_loss_and_grad
    use_transformer_engine_op_fuser moe_mlp_glu_interleave_size
    """.split()
)
"""What the comparison with one process leaves out and --device keeps."""


class Recipe(NamedTuple):
    """Recipe as a file of Megatron-LM's shape."""

    name: str
    preset: str
    ranks: int
    settings: str

    @property
    def text(self) -> str:
        return f"{self.preset} {self.ranks} {self.settings}"

    @property
    def hardware(self) -> str:
        found = HARDWARE.search(self.name)
        assert found is not None, self.name
        return found[1].lower()

    def argv(self, folder: Path) -> list[str]:
        """Write the file and return the command line."""
        path = folder / (re.sub(r"\W+", "_", self.name) + ".yaml")
        path.write_text(as_file(model_zoo.find(self.preset).read_text(), self.settings))
        return ["--preset", str(path), "--world-size", str(self.ranks), "--hardware", self.hardware]


ALL = tuple(Recipe(*row) for row in (*RECIPES, *TABLE_11))


def rejections(recipe: Recipe, folder: Path) -> list[str]:
    """Return why the program rejects the recipe; nothing if it is valid."""
    violations = resolve_command_line(recipe.argv(folder), recipe.ranks)[1]
    messages = [violation.message.rpartition(f"{folder}/")[2] for violation in violations]
    return [re.sub(r"^\S+\.yaml: ", "", message).rstrip(".") for message in messages]


def validates(recipe: Recipe, folder: Path) -> str:
    """Return "yes", or why the program rejects the recipe."""
    return "; ".join(rejections(recipe, folder)) or "yes"


def plans(recipe: Recipe, folder: Path) -> str:
    """Return whether the plan fits the recipe's devices."""
    from moe_trainer.estimate.dry_run import plan_of_flags

    try:
        plan = plan_of_flags(recipe.argv(folder))
    except ValueError as error:
        return f"no: {error}"
    return "fits" if plan.margin >= 0 else "does not fit"


def equals(recipe: Recipe, folder: Path) -> str:
    """Compare every mapping of the shrunk recipe with one process."""
    from moe_trainer.verification.parity import check_parity
    from moe_trainer.verification.rank_pool import RankPool

    try:
        cases = shrink(recipe.argv(folder), recipe.ranks, RANKS).cases
    except ShrinkError as error:
        return f"cannot be shrunk: {error.reasons[0]}"
    names = []
    with RankPool(max(case.pool_size for case in cases), 400.0) as pool:
        for case in cases:
            result = check_parity(pool, case)
            name = case_name(case)
            if not result.is_equal:
                return f"DIFFERENT ({name}): {result.failure[-1500:]} {[str(row) for row in result.differences[:3]]}"
            names.append(name)
    return f"equal ({'; '.join(dict.fromkeys(names))})"


def case_name(case: ParityCase) -> str:
    """Return the mapping, and the format of the GEMMs unless it is that of the parameters."""
    precision = parse_args(list(case.argv), case.world_size).precision
    fmt = quantized_format(precision)
    if fmt is None:
        return str(case.mapping)
    return f"{case.mapping} in {fmt.key if fmt.key == fmt.name.lower() else f'{fmt.key} {fmt.flags.name}'}"


def device_argv(recipe: Recipe, folder: Path) -> list[str]:
    """Return the shrunk recipe for two devices, with the recipe's graphs, formats and forced balance.

    Raises:
        ShrinkError: if there is none.
    """
    argv = recipe.argv(folder)
    case, settings = shrink(argv, recipe.ranks, 2).cases[0], resolve_command_line(argv, recipe.ranks)[0]
    kept = {dest: settings.values[dest] for dest in DEVICE_FLAGS if settings.values[dest] != settings.default(dest)}
    small = [*case.argv, *to_command_line(kept), *FIXED]
    if violations := resolve_command_line(small, case.world_size)[1]:
        raise ShrinkError(violation.message for violation in violations)
    return small


def runs_on_device(recipe: Recipe, folder: Path) -> str:
    """Run the shrunk recipe on emulated devices, with and without graphs."""
    from emulated_cuda.recipe_runs import run_small
    from emulated_cuda.run import on_device

    try:
        argv = device_argv(recipe, folder)
    except ShrinkError as error:
        return f"cannot be shrunk: {error.reasons[0]}"
    ranks = shrink(recipe.argv(folder), recipe.ranks, 2).cases[0].world_size
    results = []
    for flags in (argv, [*argv, "--cuda-graph-impl", "none"]):
        try:
            result = on_device(run_small, flags, ranks=ranks, devices=ranks)
        except AssertionError as error:
            return f"FAILED: {str(error).strip()[-700:]}"
        results.append(result if ranks == 1 else result[0])
    (losses, norms, captured, waits), (eager_losses, eager_norms, *_) = results
    difference = max(abs(one - other) / other for one, other in zip(norms, eager_norms))
    is_same = losses == eager_losses and difference <= TOLERANCE
    same = "as without graphs" if is_same else "DIFFERENT from without graphs"
    return f"{same} (losses {losses == eager_losses}, norms {difference:.1e}); {captured} graphs; waits {waits}"


COLUMNS = {"validates": validates, "plans": plans, "equal": equals, "device": runs_on_device}


def page_lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Recipes of Megatron-LM and table 11"
    yield ""
    yield "Generated by `python tests/verification/prove_recipes.py --write`; a test compares this page with the program."
    yield ""
    yield "A file is planned by its path and the number of ranks:"
    yield ""
    yield '```bash title="Needs a recipe file of Megatron-LM"'
    yield "LOAD_PATH= OUTPUT_PATH=runs python pretrain_moe.py --preset FILE.yaml \\"
    yield "    --world-size 256 --dry-run --hardware gb300"
    yield "```"
    yield ""
    yield (
        "A run needs the file's variables: `LOAD_PATH` (initial weights, or empty) and `OUTPUT_PATH` (results). "
        "Flags after the file win. [SLURM](slurm.md#variables) starts it as a job."
    )
    yield ""
    yield (
        f"The table has the 18 files of Megatron-LM's `examples/moe_recipes` (branch dev at {COMMIT[:8]}, {DATE}). "
        "The nine rows of table 11 of arXiv 2603.07685 are its flags on the presets of this program. "
        "*Plan*: whether memory fits, or why flags are rejected. *Equal to one process*: mappings of the shrunk recipe, "
        "on up to four CPU ranks, with the losses, gradients and weights of one process."
    )
    yield ""
    yield "| recipe | device | ranks | plan | equal to one process |"
    yield "|---|---|---|---|---|"
    files = dict(zip((name for name, *_ in RECIPES), FILES, strict=True))
    numbers: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for recipe in ALL:
            reasons = rejections(recipe, folder)
            found = [
                str(number) for number in sorted(numbers.setdefault(reason, len(numbers) + 1) for reason in reasons)
            ]
            plan = f"rejected: {', '.join(found)}" if found else plans(recipe, folder)
            equal = re.sub(r" on \d ranks", "", PROVEN.find(recipe.name, recipe.text).get("equal", ""))
            file = files.get(recipe.name)
            name = f"[{recipe.name}]({SOURCE}/{file}.yaml)" if file else recipe.name
            yield f"| {name} | {recipe.hardware} | {recipe.ranks} | {plan} | {equal} |"
    yield ""
    yield "## Why flags are rejected"
    yield ""
    yield from (f"{number}. {reason}." for reason, number in numbers.items())


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prove_recipes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names")
    parser.add_argument("--equal", action="store_true", help="compare with one process")
    parser.add_argument("--record", action="store_true", help="keep the results of --equal for the page")
    parser.add_argument("--device", action="store_true", help="run on emulated devices")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(words)
    if options.write:
        PAGE.write_text("\n".join(page_lines()) + "\n")
        return ExitCode.OK
    columns = ["validates", "plans", *(name for name in ("equal", "device") if getattr(options, name))]
    with tempfile.TemporaryDirectory() as name:
        for recipe in ALL:
            if options.names and not any(part in recipe.name for part in options.names):
                continue
            for column in columns:
                found = COLUMNS[column](recipe, Path(name))
                print(f"{recipe.name} | {column}: {found}", flush=True)
                if options.record and found.startswith("equal"):
                    mapping = found.partition("(")[2].partition(")")[0]
                    PROVEN.keep(recipe.name, recipe.text, equal=mapping)
                if column == "validates" and found != "yes":
                    break
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
