#!/usr/bin/env python3
"""Explain a command line: the source of every value, and what each rank holds. Needs no GPU and no torch.

    python scripts/explain.py FLAGS --world-size N              values that differ from Megatron-LM's defaults,
                                                                rank grids, pipeline stages, experts
    python scripts/explain.py FLAGS --world-size N --all        every value
    python scripts/explain.py FLAGS --world-size N --rank 12    one rank: its coordinates, layers, experts and groups

All errors in the flags are reported at once.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments
from arguments.container import freeze
from arguments.layer_pattern import moe_layer_pattern
from arguments.parse import resolve_command_line
from arguments.pasted_line import read_pasted_line
from arguments.paths import local_path
from arguments.report import get_world_size, table
from arguments.stage_layout import ChunkLayout, chunk_layouts, grid_sizes, group_options
from moe_trainer.checkpoint.recorded_flags import read_recorded_flags
from moe_trainer.drawing.rank_grid import Axis, rank_grid
from moe_trainer.drawing.report_page import Figure, write_report
from moe_trainer.estimate.dry_run import DEFAULT_HARDWARE
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.parameters import LayerParams, planned_vocab_size
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import command_output
from moe_trainer.parallel.grid import Layout, make_layout
from moe_trainer.parallel.groups import group_table, plan_groups

MAX_EP_LINES = 16
AXES: tuple[tuple[str, str, Literal["ring", "chain", "all"]], ...] = (
    ("tp", "tensor parallel", "ring"),
    ("cp", "context parallel", "ring"),
    ("dp", "data parallel", "ring"),
    ("pp", "pipeline", "chain"),
    ("ep", "expert parallel", "all"),
    ("etp", "expert tensor parallel", "ring"),
    ("edp", "expert data parallel", "ring"),
)
"""Parallel axes of the picture, and which ranks of a group send to each other."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this script's own options; all other words are flags of the trainer."""
    parser = argparse.ArgumentParser(
        prog="explain.py",
        usage="explain.py FLAGS [--world-size N] [--all] [--rank R] [--report-html FILE]",
        description=__doc__,
        epilog="FLAGS are the trainer's. A pasted `torchrun ... pretrain_moe.py` before them gives the ranks.\n"
        "Exit code: 0, or 2 if the flags cannot run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--all", action="store_true", help="print every value, not only those that are set")
    parser.add_argument("--rank", type=int, metavar="R", help="describe this rank instead of all groups")
    text = "write a page with this text and a picture of the groups over the nodes of --hardware"
    parser.add_argument("--report-html", type=local_path, metavar="FILE", help=text)
    return parser


def main(words: list[str]) -> int:
    parser = make_parser()
    if not words:
        parser.print_help()
        return ExitCode.USER_ERROR
    try:
        options, flags = parser.parse_known_args(read_pasted_line(words))
        world_size, violations = get_world_size(flags)
        settings, flag_violations = resolve_command_line(flags, world_size, read_recorded_flags(flags))
    except ValueError as error:
        parser.error(str(error))
    violations = [*violations, *flag_violations]
    lines = [line for line in table(settings, world_size) if options.all or not line.endswith("  (default)")]
    # the trainer reports --world-size as a flag without effect; this script uses it
    lines += [line for line in settings.lines() if not line.startswith("--world-size")]
    if violations:
        lines.append(f"{len(violations)} problem{'s' if len(violations) > 1 else ''}:")
        lines += [f"  - {violation.message}" for violation in violations]
        print("\n".join(lines))
        return ExitCode.USER_ERROR
    if world_size is None:
        print("\n".join([*lines, "stages, experts and groups: the number of ranks is not known (give --world-size)"]))
        if options.report_html is not None:
            parser.error("--report-html draws ranks: give --world-size N")
        return 0
    if options.rank is not None and not 0 <= options.rank < world_size:
        parser.error(f"--rank {options.rank}: the ranks are 0 to {world_size - 1}")
    args = freeze(settings, world_size)
    layout = make_layout(world_size, **grid_sizes(args.parallel))
    lines += [*grid_lines(layout), *stage_lines(args), *expert_lines(args, layout)]
    if options.rank is not None:
        lines += rank_lines(args, layout, options.rank)
    else:
        lines.append(f"groups of {world_size} ranks:\n{group_table(plan_groups(layout, **group_options(args)))}")
    print("\n".join(lines))
    if options.report_html is not None:
        try:
            figures = groups_figures(layout, args.output.hardware or DEFAULT_HARDWARE)
            command = shlex.join(["python", "scripts/explain.py", *words])
            write_report(options.report_html, f"Groups of {world_size:,} ranks", command, figures, lines)
        except ValueError as error:
            print(f"explain.py: {error}", file=sys.stderr)
            return ExitCode.USER_ERROR
    return 0


def groups_figures(layout: Layout, hardware: str) -> list[Figure]:
    """Draw the groups of every axis above 1 over the NVLink domains of this hardware; one rank has none.

    Raises:
        ValueError: if the hardware is unknown.
    """
    machine, world_size = find_hardware(hardware), layout.dense.size
    axes = [
        Axis(f"{text} ({axis} {layout.size(axis)})", layout.groups(axis), links)
        for axis, text, links in AXES
        if layout.size(axis) > 1
    ]
    if not axes:
        return []
    heading = f"{world_size:,} ranks of {machine.name}: ranks of one color form a group"
    svg = rank_grid("Groups of ranks over nodes", heading, world_size, machine.domain, axes)
    caption = (
        f"A node is what NVLink connects: {machine.domain} GPUs of {machine.name}. Point at a group for its ranks."
    )
    return [Figure("Groups over nodes", svg, caption)]


def grid_lines(layout: Layout) -> list[str]:
    """Return both factorizations of the ranks, the fastest varying axis first."""
    lines = ["", "rank grids, the fastest varying axis first:"]
    for name, grid, axes in (("attention", layout.dense, {}), ("experts", layout.expert, {"tp": "etp", "dp": "edp"})):
        unused = "ep" if name == "attention" else "cp"
        sizes = (f"{axes.get(axis, axis)} {size}" for axis, size in zip(grid.axes, grid.sizes) if axis != unused)
        lines.append(f"  {name:10s} {' x '.join(sizes)}")
    return lines


def _spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: "0-3, 7" for 0 1 2 3 7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def _chunk_text(args: Arguments, chunk: ChunkLayout) -> str:
    pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
    parts = ["embedding"] if chunk.has_embedding else []
    for name, kind in (("dense", False), ("MoE", True)):
        layers = [number for number in chunk.layers if pattern[number] is kind]
        parts += [f"{name} layers {_spans(layers)}"] if layers else []
    parts += ["final norm"] if chunk.has_final_norm else []
    parts += [f"multi-token prediction ({args.model.num_mtp_depths})"] if chunk.mtp else []
    return ", ".join([*parts, *(["head and loss"] if chunk.has_loss else [])]) or "no layers (forwards its input)"


def stage_lines(args: Arguments) -> Iterator[str]:
    """Yield the layers of each pipeline stage, chunk by chunk."""
    vocab_size, _ = planned_vocab_size(args)
    params = None if vocab_size is None else LayerParams(args, vocab_size)
    yield "pipeline stages:"
    for stage, chunks in enumerate(chunk_layouts(args.model, args.parallel)):
        count = ""
        if params is not None:
            on_rank = params.stage(chunks)
            count = f" {on_rank.total:,} parameters per rank, {on_rank.expert:,} of them in experts"
        yield f"  stage {stage}:{count}"
        for number, chunk in enumerate(chunks):
            yield f"    {f'chunk {number}: ' if len(chunks) > 1 else ''}{_chunk_text(args, chunk)}"


def expert_lines(args: Arguments, layout: Layout) -> Iterator[str]:
    """Yield the experts of each expert-parallel rank."""
    if not args.moe.num_experts:
        return
    ep, etp = layout.size("ep"), layout.size("etp")
    num_local = args.moe.num_experts // ep
    sharding = f", each sharded over {etp} ranks" if etp > 1 else ""
    yield f"experts of every MoE layer: {args.moe.num_experts}, {num_local} per rank{sharding}"
    for ep_rank in range(ep) if ep <= MAX_EP_LINES else (0, 1, ep - 1):
        gap = "... " if ep > MAX_EP_LINES and ep_rank == ep - 1 else ""
        yield f"  {gap}ep {ep_rank}: experts {_spans(range(ep_rank * num_local, (ep_rank + 1) * num_local))}"


def rank_lines(args: Arguments, layout: Layout, rank: int) -> Iterator[str]:
    """Yield the coordinates, layers, experts and groups of one rank."""
    dense, expert = layout.dense.coordinates(rank), layout.expert.coordinates(rank)
    coordinates = [f"{axis} {dense[axis]}" for axis in ("tp", "cp", "dp", "pp")]
    if args.moe.num_experts:
        coordinates += [f"{name} {expert[axis]}" for name, axis in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"))]
    yield f"rank {rank}: {', '.join(coordinates)}"
    for number, chunk in enumerate(chunk_layouts(args.model, args.parallel)[dense["pp"]]):
        yield f"  chunk {number}: {_chunk_text(args, chunk)}"
    if args.moe.num_experts:
        num_local = args.moe.num_experts // layout.size("ep")
        first = expert["ep"] * num_local
        yield f"  experts {_spans(range(first, first + num_local))} of every MoE layer above"
    groups_of_rank = {
        name: ([next(group for group in groups if rank in group)], lane)
        for name, (groups, lane) in plan_groups(layout, **group_options(args)).items()
    }
    yield "  its groups:"
    yield group_table(groups_of_rank)


if __name__ == "__main__":
    with command_output():
        sys.exit(main(sys.argv[1:]))
