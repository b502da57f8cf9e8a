#!/usr/bin/env python3
"""Explain a command line: where every value came from, and who holds what. No GPU, no torch.

    python scripts/explain.py FLAGS --world-size N              values that are not Megatron-LM's defaults, grids, stages, experts
    python scripts/explain.py FLAGS --world-size N --all        every value
    python scripts/explain.py FLAGS --world-size N --rank 12    what one rank is, holds and talks to

FLAGS are the trainer's; a pasted `torchrun ... pretrain_moe.py` in front of them is left out. Everything that is wrong with them is told at once.
Exit code: 0, or 2 where the flags cannot run.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments
from arguments.container import freeze
from arguments.parse import understand
from arguments.report import table, world_size_of
from moe_trainer.exit_codes import ExitCode
from moe_trainer.parallel.grid import Layout, make_layout
from moe_trainer.parallel.groups import group_table, plan_groups
from moe_trainer.planner.params import Held, LayerParams
from moe_trainer.planner.vocabulary import planned_vocab_rows
from moe_trainer.shape.layers import moe_layer_pattern
from moe_trainer.shape.layout import ChunkLayout, chunk_layouts, mapping_sizes


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--help", "-h", action="store_true")
    options, flags = parser.parse_known_args(words)
    if options.help or not words:
        print(__doc__.strip())
        return ExitCode.OK if options.help else ExitCode.USER_ERROR
    program = next((at for at, word in enumerate(flags) if word.endswith("pretrain_moe.py") or word.endswith("pretrain_gpt.py")), None)
    flags = flags if program is None else flags[program + 1:]
    world_size, violations = world_size_of(flags)
    settings, found = understand(flags, world_size)
    violations = [*violations, *found]
    lines = table(settings, world_size)
    print("\n".join(lines if options.all else [line for line in lines if not line.endswith("  (default)")]))
    print("\n".join(line for line in settings.lines() if not line.startswith("--world-size")))  # it has an effect here
    if violations:
        print("\n".join([f"{len(violations)} problem{'s' if len(violations) > 1 else ''}:", *(f"  - {violation.message}" for violation in violations)]))
        return ExitCode.USER_ERROR
    if world_size is None:
        print("who holds what: the number of ranks is not known (give --world-size)")
        return 0
    if options.rank is not None and not 0 <= options.rank < world_size:
        parser.error(f"--rank {options.rank}: there are ranks 0 to {world_size - 1}")
    args = freeze(settings, world_size)
    sizes = mapping_sizes(args)
    layout = make_layout(world_size, **{name: sizes[name] for name in ("tp", "cp", "pp", "ep", "etp", "order")})
    print("\n".join([*grid_lines(layout), *stage_lines(args), *expert_lines(args, layout)]))
    if options.rank is not None:
        print("\n".join(rank_lines(args, layout, options.rank)))
    else:
        print(f"groups of {world_size} ranks:\n{group_table(plan_groups(world_size, **sizes))}")
    return 0


def grid_lines(layout: Layout) -> list[str]:
    """Both factorizations of the ranks, the fastest axis first."""
    lines = ["", "grids, the fastest varying axis first:"]
    for name, grid, axes in (("attention", layout.dense, {}), ("experts", layout.expert, {"tp": "etp", "dp": "edp"})):
        lines.append(f"  {name:10s} " + " x ".join(f"{axes.get(axis, axis)} {size}" for axis, size in zip(grid.axes, grid.sizes)
                                                 if axis != ("ep" if name == "attention" else "cp")))
    return lines


def _spans(numbers: Sequence[int]) -> str:
    """0-3, 7 for 0 1 2 3 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _chunk_text(args: Arguments, chunk: ChunkLayout) -> str:
    pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
    parts = ["embedding"] if chunk.has_embedding else []
    for name, kind in (("dense", False), ("MoE", True)):
        layers = [number for number in chunk.layers if pattern[number] is kind]
        parts += [f"{name} layers {_spans(layers)}"] if layers else []
    parts += ["final norm"] if chunk.has_final_norm else []
    parts += [f"multi-token prediction ({args.model.mtp_num_layers})"] if chunk.mtp else []
    return ", ".join([*parts, *(["head and loss"] if chunk.has_loss else [])]) or "nothing (passes on what it receives)"


def stage_lines(args: Arguments) -> Iterator[str]:
    """What each pipeline stage holds, chunk by chunk."""
    rows, _ = planned_vocab_rows(args)
    params = None if rows is None else LayerParams(args, rows)
    yield "pipeline stages:"
    for stage, chunks in enumerate(chunk_layouts(args.model, args.parallel)):
        held = "" if params is None else sum((params.chunk(chunk) for chunk in chunks), Held(0, 0))
        count = f" {held.total:,} parameters a rank, {held.expert:,} of them of experts" if held else ""
        yield f"  stage {stage}:{count}"
        for number, chunk in enumerate(chunks):
            yield f"    {f'chunk {number}: ' if len(chunks) > 1 else ''}{_chunk_text(args, chunk)}"


def expert_lines(args: Arguments, layout: Layout) -> Iterator[str]:
    """Which experts stand on which ranks of ep."""
    if not args.moe.num_experts:
        return
    ep, etp = layout.size("ep"), layout.size("etp")
    each = args.moe.num_experts // ep
    yield f"experts of every MoE layer: {args.moe.num_experts}, {each} on a rank{f', each cut over {etp} ranks' if etp > 1 else ''}"
    for place in range(ep) if ep <= 16 else (0, 1, ep - 1):
        yield f"  {'... ' if ep > 16 and place == ep - 1 else ''}ep {place}: experts {_spans(range(place * each, (place + 1) * each))}"


def rank_lines(args: Arguments, layout: Layout, rank: int) -> Iterator[str]:
    """One rank: its place, what it holds, its groups."""
    dense, expert = layout.dense.coordinates(rank), layout.expert.coordinates(rank)
    place = [f"{axis} {dense[axis]}" for axis in ("tp", "cp", "dp", "pp")]
    place += [f"{name} {expert[axis]}" for name, axis in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"))] if args.moe.num_experts else []
    yield f"rank {rank}: {', '.join(place)}"
    for number, chunk in enumerate(chunk_layouts(args.model, args.parallel)[dense["pp"]]):
        yield f"  chunk {number}: {_chunk_text(args, chunk)}"
    if args.moe.num_experts:
        each = args.moe.num_experts // layout.size("ep")
        yield f"  experts {_spans(range(expert['ep'] * each, (expert['ep'] + 1) * each))} of every MoE layer above"
    own = {name: ([next(group for group in groups if rank in group)], lane)
           for name, (groups, lane) in plan_groups(layout.dense.size, **mapping_sizes(args)).items()}
    yield "  its groups:"
    yield group_table(own)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no failure
    sys.exit(main(sys.argv[1:]))
