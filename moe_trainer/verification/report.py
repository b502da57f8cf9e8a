"""Output of a parity check: lines for the terminal, and a Markdown page for a pull request. No torch."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from arguments.program import as_typed, typed_command
from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.verification.shrink import ParityCase, ShrinkResult

if TYPE_CHECKING:
    from moe_trainer.verification.parity import ParityResult

_MAX_DIFFERENCES = 8
_REJECTED = "pretrain_moe.py rejects this command line because of what is left out; only the rest is checked"


def command(case: ParityCase) -> str:
    """Return the shell command that starts a case as a training."""
    launcher = "python" if case.world_size == 1 else f"torchrun --nproc-per-node {case.world_size}"
    return as_typed("train", f"{launcher} pretrain_moe.py {_join_flags(case)}")


def shrunk_lines(shrunk: ShrinkResult) -> Iterator[str]:
    """Describe how the user's command line was shrunk."""
    yield f"your mapping: {shrunk.original}"
    for note in shrunk.notes:
        yield f"  - {note}"
    for text in shrunk.left_out:
        yield f"  - left out: {text}"
    if shrunk.left_out:
        yield f"  {_REJECTED}"
    for number, case in enumerate(shrunk.cases, start=1):
        yield f"small command line {number} of {len(shrunk.cases)} ({case.mapping}):"
        yield f"  {command(case)}"


def result_lines(result: ParityResult, title: str) -> Iterator[str]:
    case = result.case
    word = "equal" if result.is_equal else "DIFFERS" if result.differences else "FAILED"
    yield f"{title} ({case.mapping}): {word} ({result.seconds:.1f} s, batches of seed {result.seed})"
    if case.defined_by_mapping:
        yield f"  the reference follows the definition for this mapping: {', '.join(case.defined_by_mapping)}"
    if result.is_equal:
        yield f"  {result.agreement}"
        return
    for index, difference in enumerate(result.differences[:_MAX_DIFFERENCES]):
        yield f"  {'first: ' if index == 0 else '       '}{difference}"
    if len(result.differences) > _MAX_DIFFERENCES:
        yield f"         ... and {len(result.differences) - _MAX_DIFFERENCES} more"
    yield from (f"  {line}" for line in result.failure.splitlines())
    ranks = f"--ranks {case.world_size} --world-size {case.world_size}"
    yield f"  to repeat: {typed_command('prove')} --as-is {ranks} {_join_flags(case)}"


def summary_lines(results: Sequence[ParityResult], shrunk: ShrinkResult | None) -> Iterator[str]:
    """Count the equal cases, and name what no case compares."""
    num_unequal = sum(not result.is_equal for result in results)
    suffix = f"; {num_unequal} do not" if num_unequal else ""
    yield f"{len(results) - num_unequal} of {len(results)} equal one process{suffix}"
    if shrunk is not None and shrunk.not_compared:
        yield f"not compared with one process: {', '.join(shrunk.not_compared)} (see docs/verification.md)"
    always_defined = set.intersection(*(set(result.case.defined_by_mapping) for result in results))
    if always_defined:
        names = ", ".join(sorted(always_defined))
        yield f"every case has {names}, for which the reference follows the definition for the mapping"


def _join_flags(case: ParityCase) -> str:
    return " ".join(f"'{word}'" if set(word) & set("()[]|* ") else word for word in case.argv)


def markdown(results: Sequence[ParityResult], shrunk: ShrinkResult | None, command_line: str) -> str:
    """Return a page with the result first, then what was compared, what was left out, and the command lines."""
    unequal = [result for result in results if not result.is_equal]
    seconds = sum(result.seconds for result in results)
    count, verb = (len(unequal), "differ from") if unequal else (len(results), "equal")
    title = f"{count} of {len(results)} mappings {verb} one process"
    lines = [f"# {title}", "", f"`{command_line}`", ""]
    machine = f"torch {version('torch')}, gloo on {platform.machine()} CPU"
    lines += [f"{machine}, fp32 (fp64 for fp8 cases), {seconds:.0f} s.", ""]
    rows = []
    for result in results:
        if result.is_equal:
            text = f"equal: {result.agreement}"
        else:
            first = result.differences[0] if result.differences else result.failure.splitlines()[-1]
            text = f"**differs**: {first}"
        rows.append((result.case.mapping, text))
    lines += markdown_table(("mapping", "result"), rows)
    if shrunk is not None:
        lines += ["", f"The user's mapping: {shrunk.original}.", "", *(f"* {note}" for note in shrunk.notes)]
        lines += [f"* left out: {text}" for text in shrunk.left_out]
        lines += [f"* {_REJECTED}"] if shrunk.left_out else []
        lines += [f"* not compared with one process: {name}" for name in shrunk.not_compared]
    for result in unequal:
        lines += ["", f"## {result.case.mapping}", "", "```", *result_lines(result, "case"), "```"]
    lines += ["", "<details><summary>Small command lines</summary>", "", "```"]
    lines += [command(result.case) for result in results]
    return "\n".join([*lines, "```", "</details>", ""])
