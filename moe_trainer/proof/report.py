"""What a proof says: lines for the terminal, and a Markdown page to attach to a pull request. No torch: shrinking needs none."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from moe_trainer.proof.shrink import Case, Shrunk

if TYPE_CHECKING:
    from moe_trainer.proof.prove import Verdict

_SHOWN = 8
_REFUSED = "pretrain_moe.py refuses this command line for what is left out here; the proof is of the rest"


def command(case: Case) -> str:
    """The shell line that starts a case as a training of its own."""
    start = "python" if case.world_size == 1 else f"torchrun --nproc-per-node {case.world_size}"
    return f"{start} pretrain_moe.py {_flags(case)}"


def shrunk_lines(shrunk: Shrunk) -> Iterator[str]:
    """What became of the user's command line."""
    yield f"your mapping: {shrunk.original}"
    for note in shrunk.notes:
        yield f"  - {note}"
    for text in shrunk.left_out:
        yield f"  - left out: {text}"
    if shrunk.left_out:
        yield f"  {_REFUSED}"
    for number, case in enumerate(shrunk.cases, start=1):
        yield f"small command line {number} of {len(shrunk.cases)} ({case.mapping}):"
        yield f"  {command(case)}"


def verdict_lines(verdict: Verdict, title: str) -> Iterator[str]:
    """One case: equal, or where it parts."""
    word = "equal" if verdict.equal else "PARTS" if verdict.differences else "FAILS"
    yield f"{title} ({verdict.case.mapping}): {word} ({verdict.seconds:.1f} s, batches of seed {verdict.seed})"
    if verdict.case.defined_by_mapping:
        yield f"  computed as the mapping defines it, not by the plain program: {', '.join(verdict.case.defined_by_mapping)}"
    if verdict.equal:
        yield f"  {verdict.closeness}"
        return
    for number, difference in enumerate(verdict.differences[:_SHOWN]):
        yield f"  {'first: ' if number == 0 else '       '}{difference}"
    if len(verdict.differences) > _SHOWN:
        yield f"         ... and {len(verdict.differences) - _SHOWN} more"
    yield from (f"  {line}" for line in verdict.failure.splitlines())
    world = verdict.case.world_size
    yield f"  again: python scripts/prove_layout.py --as-is --ranks {world} --world-size {world} {_flags(verdict.case)}"


def summary_lines(verdicts: Sequence[Verdict], shrunk: Shrunk | None) -> Iterator[str]:
    """How many cases are equal, and what none of them compares."""
    parted = sum(not verdict.equal for verdict in verdicts)
    yield f"{len(verdicts) - parted} of {len(verdicts)} equal one process" + (f"; {parted} part" if parted else "")
    if shrunk is not None and shrunk.not_compared:
        yield f"not compared with one process: {', '.join(shrunk.not_compared)} (docs/verification.md says why)"
    always = set.intersection(*(set(verdict.case.defined_by_mapping) for verdict in verdicts))
    if always:
        yield f"no case without: {', '.join(sorted(always))}; there the one process follows the definition of the mapping"


def _flags(case: Case) -> str:
    return " ".join(f"'{word}'" if set(word) & set("()[]|* ") else word for word in case.argv)


def markdown(verdicts: Sequence[Verdict], shrunk: Shrunk | None, asked: str) -> str:
    """A page with the verdict first, then what was compared, what was left out, and the command lines."""
    parted = [verdict for verdict in verdicts if not verdict.equal]
    total = sum(verdict.seconds for verdict in verdicts)
    head = f"{len(parted)} of {len(verdicts)} mappings part from one process" if parted else f"{len(verdicts)} of {len(verdicts)} mappings equal one process"
    lines = [f"# {head}", "", f"`{asked}`", ""]
    lines += [f"torch {version('torch')}, gloo on {platform.machine()} CPU, fp32 (fp64 where 8 bits are proven), {total:.0f} s.", ""]
    lines += ["| mapping | verdict |", "|---|---|"]
    for verdict in verdicts:
        first = verdict.closeness if verdict.equal else str((verdict.differences or [verdict.failure.splitlines()[-1]])[0])
        lines.append(f"| {verdict.case.mapping} | {'equal: ' if verdict.equal else '**parts**: '}{first.replace('|', '/')} |")
    if shrunk is not None:
        lines += ["", f"The user's mapping: {shrunk.original}.", "", *(f"* {note}" for note in shrunk.notes)]
        lines += [*(f"* left out: {text}" for text in shrunk.left_out), *([f"* {_REFUSED}"] if shrunk.left_out else [])]
        lines += [f"* not compared with one process: {name}" for name in shrunk.not_compared]
    for verdict in parted:
        lines += ["", f"## {verdict.case.mapping}", "", "```", *verdict_lines(verdict, "case"), "```"]
    lines += ["", "<details><summary>Small command lines</summary>", "", "```"]
    lines += [command(verdict.case) for verdict in verdicts]
    return "\n".join([*lines, "```", "</details>", ""])
