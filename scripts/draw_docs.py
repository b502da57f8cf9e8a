#!/usr/bin/env python3
"""Draw the manual's pictures as SVG, and write its tables, from the program's own orders, grids, plans, declarations.

    python scripts/draw_docs.py            write docs/img/*.svg, and the tables in docs/*.md
    python scripts/draw_docs.py --check    exit code 1 where a picture or table is not current

Needs neither torch nor a network. What only a run shows is recorded: docs/img/expert_load.json has the expert loads of
a run, docs/img/recorded_checks.json the rows of a replay, the cases of a proof, and the intervals of a profile.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments.container import OPTIONS
from arguments.mechanisms.attention_backend_kinds.declaration import AttentionBackendCapability
from arguments.mechanisms.attention_backends import ATTENTION_BACKENDS
from arguments.mechanisms.captured_modules import CAPTURED_MODULES, GraphCapability
from arguments.mechanisms.dispatchers import SELECTABLE, DispatcherCapability
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import FLAGS, QUANTIZED
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import IMPLEMENTATIONS
from arguments.mechanisms.layer_modules import LayerModule, unbuilt
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES, OffloadCapability
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import OPTIMIZERS
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import PLACEMENTS
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.mechanisms.schedule_kinds.declaration import ScheduleCapability, ScheduleDeclaration
from arguments.mechanisms.schedules import INTERLEAVED, ONE_F_ONE_B, SCHEDULES, ZERO_BUBBLE
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import SELECTIONS
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.mechanisms.sublayers import SUBLAYERS
from arguments.mechanisms.support import Mechanism, Rejected, support_among
from moe_trainer.drawing.load_map import Panel, load_map
from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.drawing.pair_matrix import pair_matrix
from moe_trainer.drawing.pipeline_timeline import idle_share, pipeline_timeline
from moe_trainer.drawing.rank_grid import Axis, rank_grid
from moe_trainer.drawing.svg import (
    BLUE,
    GREEN,
    ORANGE,
    PALE,
    PURPLE,
    SLATE,
    TEAL,
    WHITE,
    Picture,
)
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.plan_pictures import memory_picture, schedule_spans, step_picture, timeline_picture
from moe_trainer.estimate.search import search
from moe_trainer.estimate.search_pictures import search_picture
from moe_trainer.metrics.profile_trace import RankTrace, trace_figure
from moe_trainer.parallel.grid import make_layout
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.simulate import UniformCosts
from moe_trainer.verification.comparison import ComparisonRow
from moe_trainer.verification.mapping import NAMES
from moe_trainer.verification.pictures import comparison_picture
from scripts.explain import groups_figures

IMAGES = ROOT / "docs" / "img"
PLAN = (
    "--preset deepseek_v3 --mock-data --pipeline-model-parallel-size 8 --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --use-distributed-optimizer "
    "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6 "
    "--recompute-granularity selective --recompute-modules mla_up_proj mlp"
)


def pipeline(schedule: ScheduleDeclaration, num_chunks: int, caption: str) -> str:
    """Draw when each of four ranks computes what, eight microbatches, from the program's own orders."""
    share = 1.0 / num_chunks
    costs = UniformCosts(forward=share, backward=share if schedule.splits_backward else 2 * share, weight=share)
    stages = schedule_spans(ScheduleKind(schedule, num_chunks).orders(4, 8), num_chunks, costs)
    return pipeline_timeline(caption, f"{caption}: {idle_share(stages):.0%} of the time is bubble", stages)


def folding() -> str:
    """Draw the dense and the expert grid over the same sixteen ranks: one color per group."""
    layout = make_layout(16, tp=2, cp=2, pp=2, ep=4, etp=1)
    axes = [
        Axis("attention: tensor-parallel groups (tp 2)", layout.groups("tp"), "ring"),
        Axis("attention: context-parallel groups (cp 2)", layout.groups("cp"), "ring"),
        Axis("attention: data-parallel groups (dp 2)", layout.groups("dp"), "ring"),
        Axis("experts: expert-parallel groups (ep 4)", layout.groups("ep"), "all"),
        Axis("experts: expert data-parallel groups (edp 2)", layout.groups("edp"), "ring"),
        Axis("both: pipeline groups (pp 2)", layout.groups("pp"), "chain"),
    ]
    heading = "16 ranks, two grids: ranks of one color form a group"
    return rank_grid("Two grids over sixteen ranks", heading, 16, 8, axes, 940)


def deepseek_plan(*flags: str) -> Plan:
    return plan_of_flags([*PLAN.split(), *flags, "--dry-run", "--world-size", "1024", "--hardware", "h100"])


def memory() -> str:
    """Draw what every pipeline stage of a DeepSeek-V3 plan holds at its peak."""
    heading = "DeepSeek-V3 on 1,024 H100 (TP 2, PP 8, EP 64): planned GiB at the peak of each stage"
    return memory_picture(deepseek_plan(), heading)


def mappings() -> str:
    """Draw the search of the manual's example."""
    flags = "--preset qwen3_30b_a3b --mock-data".split()
    return search_picture(search(flags, 16, find_hardware("h100")))


def groups() -> str:
    """Draw the groups of 1,024 ranks."""
    return groups_figures(make_layout(1024, tp=2, pp=8, ep=64), "h100")[0].svg


def recorded(name: str) -> dict[str, Any]:
    return json.loads((IMAGES / "recorded_checks.json").read_text(encoding="ascii"))[name]


def first_difference() -> str:
    """Draw the comparison of a replay in which the outputs of the experts are wrong on purpose."""
    rows = [
        ComparisonRow(quantity, name, difference, allowed, "", num_near_ties)
        for quantity, name, difference, allowed, num_near_ties in recorded("comparison")["rows"]
    ]
    return comparison_picture(rows)


def proof_pairs() -> str:
    """Draw what a proof of DeepSeek-V3's mapping covered on four ranks."""
    record = recorded("proof")
    title = "Pairs of dimensions that a proof covered"
    return pair_matrix(title, record["run"], NAMES, record["needed"], record["cases"])


def profile() -> str:
    """Draw a profiled iteration of four ranks."""
    ranks = recorded("profile")["ranks"]
    return trace_figure([RankTrace(int(rank), Path(), work) for rank, work in ranks.items()]).svg


def heat_map() -> str:
    """Draw the recorded load of every expert in every MoE layer over a run."""
    record = json.loads((IMAGES / "expert_load.json").read_text(encoding="ascii"))
    panels = [Panel(f"iteration {panel['iteration']}", panel["load"]) for panel in record["panels"]]
    heading = f"Tokens of experts, over the mean of their layer: {record['run']}"
    return load_map("Load of experts by layer", heading, record["layers"], panels)


def architecture() -> str:
    """Draw what the program consists of and how the pieces depend on each other."""
    picture = Picture(940, 372, "Architecture")
    block = picture.block
    block(20, 16, 290, 62, SLATE, "command line, preset, recipe", "flags, rules, recipes; all errors at once")
    block(325, 16, 290, 62, SLATE, "estimate", "memory, FLOPs, time, search: no torch")
    block(630, 16, 290, 62, SLATE, "verification and debug", "mapping parity, replay, tensor dumps")
    block(20, 100, 900, 58, "#46505a", "training", "the one loop: set up, step, evaluate, save, resume, stop")
    model = (
        "model: blocks, pipeline chunks, multi-token prediction",
        "moe: router, experts, dispatch (all-to-all, DeepEP, HybridEP)",
        "layers: attention, MLA, DSA, gated DeltaNet, norms, vocabulary",
    )
    block(20, 180, 440, 92, BLUE, "model", *model)
    machinery = (
        "pipeline: schedules; optim: sharded state; data: token files",
        "checkpoint: torch_dist, legacy, Hugging Face; metrics: dashboard",
        "resilience: watchdog, rerun, straggler, signals",
    )
    block(480, 180, 440, 92, GREEN, "machinery", *machinery)
    block(
        20,
        294,
        440,
        60,
        PURPLE,
        "quantization and memory",
        f"{', '.join(flags.name for flags in FLAGS)}; recompute, offload, CUDA graphs",
    )
    block(480, 294, 440, 60, ORANGE, "ops and parallel", "tensor math and kernels; rank grids, groups, collectives")
    arrows = (165, 78, 100), (775, 100, 78), (240, 158, 180), (700, 158, 180), (240, 272, 294), (700, 272, 294)
    for x, start, end in arrows:
        picture.arrow(x, start, x, end)
    return picture.svg()


def training_step() -> str:
    """Draw the parts of one iteration in their order."""
    picture = Picture(940, 300, "One training step", "One iteration on one rank")
    picture.box(14, 40, 640, 244, PALE, rx=6)
    picture.text(26, 60, "pipeline schedule: for every microbatch", font_weight="bold")
    steps = (
        (26, 84, "batch", BLUE, ("this rank's", "samples")),
        (126, 194, "forward", BLUE, ("embedding,", "blocks, loss")),
        (336, 154, "backward", ORANGE, ("gradients of inputs", "and weights")),
        (506, 136, "main gradients", GREEN, ("buckets fill; the last", "microbatch reduces")),
    )
    for x, width, name, color, lines in steps:
        picture.box(x, 74, width, 68, color, rx=5)
        picture.text(x + 9, 94, name, fill=WHITE, font_weight="bold")
        for number, line in enumerate(lines):
            picture.text(x + 9, 112 + 16 * number, line, fill=WHITE, size=11)
    for x in (110, 320, 490):
        picture.arrow(x, 108, x + 16, 108)
    picture.text(26, 172, "a MoE layer inside of forward and backward", font_weight="bold")
    parts = ("router", "dispatch preprocess", "token dispatch", "dispatch postprocess", "experts", "token combine")
    x = 26.0
    for name in parts:
        width = 16 + 5.7 * len(name)
        color = PURPLE if name in ("token dispatch", "token combine") else TEAL
        picture.box(x, 186, width, 32, color, rx=5)
        picture.text(x + width / 2, 206, name, "middle", 11, WHITE)
        x += width + 4
    picture.legend(26, 252, [(PURPLE, "communication between expert-parallel ranks"), (TEAL, "local computation")])
    end_of_step = (
        ("validate", "NaN, spikes: rerun in place"),
        ("clip", "one global gradient norm"),
        ("optimizer step", "each rank updates its shard"),
        ("all-gather", "parameters, overlapped if enabled"),
        ("expert bias, metrics", "by interval: log, save, exit"),
    )
    for number, (name, line) in enumerate(end_of_step):
        y = 40 + number * 50
        picture.box(680, y, 246, 40, SLATE, rx=5)
        picture.text(690, y + 17, name, fill=WHITE, font_weight="bold")
        picture.text(690, y + 33, line, fill=WHITE, size=11)
        if number:
            picture.arrow(803, y - 10, 803, y)
    picture.arrow(654, 60, 680, 60)
    return picture.svg()


class Kind(NamedTuple):
    """Mechanisms of one kind, which declare the same capabilities."""

    heading: str
    mechanisms: Sequence[Mechanism]
    capabilities: type[Enum]


KINDS = (
    Kind("Token dispatchers", SELECTABLE, DispatcherCapability),
    Kind("Selections of experts", SELECTIONS, SelectionCapability),
    Kind("Placements of experts", PLACEMENTS, PlacementCapability),
    Kind("Sublayers", SUBLAYERS, SublayerCapability),
    Kind("Implementations of layers", IMPLEMENTATIONS, ImplementationCapability),
    Kind("Backends of attention", ATTENTION_BACKENDS, AttentionBackendCapability),
    Kind("Optimizers", OPTIMIZERS, OptimizerCapability),
    Kind("Formats of quantized GEMMs", QUANTIZED, FormatCapability),
    Kind("Shardings of data-parallel ranks", SHARDINGS, ShardingCapability),
    Kind("Pipeline schedules", SCHEDULES, ScheduleCapability),
    Kind("Recomputed modules", RECOMPUTED_MODULES, RecomputeCapability),
    Kind("Offloaded modules", OFFLOADED_MODULES, OffloadCapability),
    Kind("Modules in CUDA graphs", CAPTURED_MODULES, GraphCapability),
)


def capability_tables() -> str:
    """Return which flags act with which mechanism, and why others do not, as Markdown."""
    return "\n\n".join(f"## {kind.heading}\n\n{capability_table(kind)}" for kind in KINDS)


def capability_table(kind: Kind) -> str:
    """Return the table of a kind: a column for each mechanism, a row for each capability, the reasons below."""
    reasons: dict[str, int] = {}
    modules = [each for each in kind.mechanisms if isinstance(each, LayerModule)]
    built = [each for each in kind.mechanisms if not isinstance(each, LayerModule) or each.is_built]

    def cell(mechanism: Mechanism, capability: Enum) -> str:
        support = support_among(kind.mechanisms, mechanism, capability)
        if support is True:
            return "yes"
        number = reasons.setdefault(support.reason, len(reasons) + 1)
        return f"{'**rejected**' if isinstance(support, Rejected) else 'no effect'} ({number})"

    def label(capability: Enum) -> str:
        flags = [selected_by(each) for each in built if each.asked_by is capability]
        return capability.value + "".join(f" ({flag})" for flag in flags if flag not in capability.value)

    columns = ("", *(each.name for each in built))
    rows = [(label(each), *(cell(mechanism, each) for mechanism in built)) for each in kind.capabilities]
    about = []
    if modules:  # the columns are values of one flag
        about = [f"Values of `{OPTIONS[modules[0].dest].spellings[0]}`."]
        if missing := unbuilt(modules):
            about[0] += f" Not implemented, so rejected: {', '.join(f'`{name}`' for name in missing)}."
        about.append("")
    else:
        rows.insert(0, ("selected by", *map(selected_by, built)))
    lines = markdown_table(columns, rows)
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*about, '<div class="capabilities" markdown>', "", *lines, "", "</div>", "", *notes])


def selected_by(mechanism: Mechanism) -> str:
    """Return the flags that select a mechanism, and its letter of --hybrid-layer-pattern."""
    letter, mention = getattr(mechanism, "letter", ""), with_flags(mechanism.mention).replace(" and ", "` and `")
    flags = "" if mention.startswith("--hybrid-layer-pattern") else f"`{mention}`" if mention else "no flag"
    return ", ".join(filter(None, (flags, f"letter `{letter}`" if letter else "")))


def with_flags(template: str) -> str:
    """Return a template of Settings.violation with the spellings of its flags."""
    return re.sub(r"\{(\w+)(:flag)?\}", lambda found: OPTIONS[found[1]].spellings[0], template)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {"capabilities": (ROOT / "docs/capabilities.md", capability_tables)}
"""Tables by the name between their marks, with the page that has them."""


def with_table(name: str) -> str:
    """Return the page of a table with the table as it is now between its marks."""
    path, draw = TABLES[name]
    begin, end = f"<!-- {name}: written by scripts/draw_docs.py -->\n", f"\n<!-- end of {name} -->"
    before, is_begun, rest = path.read_text(encoding="utf-8").partition(begin)
    _, is_ended, after = rest.partition(end)
    if not is_begun or not is_ended:
        raise ValueError(f"{path}: the marks of the table {name} are not there: {begin.strip()} and {end.strip()}")
    return f"{before}{begin}\n{draw()}\n{end}{after}"


PICTURES: dict[str, Callable[[], str]] = {
    "architecture": architecture,
    "training_step": training_step,
    "folding": folding,
    "memory_plan": memory,
    "plan_step": lambda: step_picture(deepseek_plan()),
    "plan_timeline": lambda: timeline_picture(deepseek_plan("--global-batch-size", "1024")),
    "plan_search": mappings,
    "rank_groups": groups,
    "first_difference": first_difference,
    "proof_pairs": proof_pairs,
    "profile": profile,
    "expert_heatmap": heat_map,
    "pipeline_1f1b": lambda: pipeline(ONE_F_ONE_B, 1, "1F1B"),
    "pipeline_interleaved": lambda: pipeline(INTERLEAVED, 2, "Interleaved, two chunks per rank"),
    "pipeline_zero_bubble": lambda: pipeline(ZERO_BUBBLE, 1, "Zero bubble (ZB-H1)"),
}


def stale_pictures() -> list[str]:
    """Return the names of pictures and tables that are missing or differ from what this script draws."""

    def is_current(path: Path, draw: Callable[[], str]) -> bool:
        return path.exists() and path.read_text(encoding="ascii") == draw()

    stale = [f"img/{name}.svg" for name, draw in PICTURES.items() if not is_current(IMAGES / f"{name}.svg", draw)]
    return stale + [
        f"{path.name}: {name}"
        for name, (path, _draw) in TABLES.items()
        if path.read_text(encoding="utf-8") != with_table(name)
    ]


def main() -> int:
    """Write the pictures, or check them."""
    parser = argparse.ArgumentParser(description="Draw the manual's pictures as SVG.")
    text = "write nothing; exit code 1 if a picture or table is not current"
    parser.add_argument("--check", action="store_true", help=text)
    if parser.parse_args().check:
        stale = stale_pictures()
        print("\n".join(f"docs/{name} is not current" for name in stale) or "all pictures and tables are current")
        return int(bool(stale))
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="ascii")
    for name, (path, _draw) in TABLES.items():
        path.write_text(with_table(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
