#!/usr/bin/env python3
"""Draw the manual's pictures as SVG, from the program's own orders, grids and plans.

    python scripts/draw_docs.py            write docs/img/*.svg
    python scripts/draw_docs.py --check    exit code 1 where a picture is not current

Needs neither torch nor a network. The expert heat map draws docs/img/expert_load.json, the expert loads of one recorded
run.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.plan_text import memory_json
from moe_trainer.parallel.grid import make_layout
from moe_trainer.pipeline.orders import make_orders
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, WEIGHT, UniformCosts, simulate_schedule

IMAGES = ROOT / "docs" / "img"
BLUE, ORANGE, GREEN, GRAY, RED = "#4c78a8", "#f58518", "#54a24b", "#bab0ac", "#e45756"
PURPLE, TEAL, SLATE = "#b279a2", "#72b7b2", "#5b6770"
INK, PALE, WHITE = "#333333", "#f4f4f6", "#ffffff"
PLAN = (
    "--preset deepseek_v3 --mock-data --pipeline-model-parallel-size 8 --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --use-distributed-optimizer "
    "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6 "
    "--recompute-granularity selective --recompute-modules mla_up_proj mlp"
)


class Picture:
    """An SVG picture on a white background, readable in light and dark pages."""

    def __init__(self, width: float, height: float, title: str, heading: str | None = None) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff"/>',
        ]
        if heading is not None:
            self.text(14, 24, heading, size=14, font_weight="bold")

    def box(self, x: float, y: float, width: float, height: float, fill: str, **attributes: object) -> None:
        """Add a rectangle."""
        size = f'x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"'
        self.parts.append(f'<rect {size} fill="{fill}"{_format_attributes(attributes)}/>')

    def text(self, x: float, y: float, text: object, anchor="start", size=12.0, fill=INK, **attributes: str) -> None:
        """Add one line of text."""
        place = f'x="{x:.6g}" y="{y:.6g}" text-anchor="{anchor}" font-size="{size:g}" fill="{fill}"'
        self.parts.append(f"<text {place}{_format_attributes(attributes)}>{escape(str(text))}</text>")

    def block(self, x: float, y: float, width: float, height: float, fill: str, title: str, *lines: str) -> None:
        """Add a rounded rectangle with a title and lines below it."""
        self.box(x, y, width, height, fill, rx=6)
        self.text(x + 12, y + 22, title, size=14, fill=WHITE, font_weight="bold")
        for number, line in enumerate(lines):
            self.text(x + 12, y + 42 + 17 * number, line, fill=WHITE)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK) -> None:
        """Add a line with a head at its end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
        dx, dy = (x2 - x1) / length * 7, (y2 - y1) / length * 7
        corners = ((x2, y2), (x2 - dx - dy / 2, y2 - dy + dx / 2), (x2 - dx + dy / 2, y2 - dy - dx / 2))
        head = " ".join(f"{x:.6g},{y:.6g}" for x, y in corners)
        line = f'x1="{x1:.6g}" y1="{y1:.6g}" x2="{x2 - dx:.6g}" y2="{y2 - dy:.6g}"'
        self.parts.append(
            f'<line {line} stroke="{color}" stroke-width="1.5"/><polygon points="{head}" fill="{color}"/>'
        )

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]], step: float) -> None:
        """Add colored squares with their names, in one line."""
        for index, (color, name) in enumerate(entries):
            self.box(x + index * step, y - 10, 12, 12, color, rx=2)
            self.text(x + index * step + 17, y, name)

    def svg(self) -> str:
        """Return the picture as text."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def _format_attributes(attributes: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())


def pipeline(kind: str, num_chunks: int, caption: str) -> str:
    """Draw when each of four ranks computes what, eight microbatches, from the program's own orders."""
    ranks, microbatches = 4, 8
    orders = make_orders(kind, ranks, num_chunks, microbatches)
    split = kind == "zero-bubble"
    share = 1.0 / num_chunks
    costs = UniformCosts(forward=share, backward=share if split else 2 * share, weight=share)
    durations = {FORWARD: costs.forward, BACKWARD: costs.backward, WEIGHT: costs.weight}
    ends = simulate_schedule(orders, num_chunks, costs)
    last = max(max(rank.values()) for rank in ends)
    left, top, unit, height = 62, 44, 860 / last, 30
    colors = {FORWARD: (BLUE, "#8fb3d6"), BACKWARD: (ORANGE, "#f9b878"), WEIGHT: (GREEN, GREEN)}
    busy = microbatches * 3.0
    heading = f"{caption}: {1 - busy / last:.0%} of the time is bubble"
    picture = Picture(left + 860 + 14, top + ranks * (height + 6) + 44, caption, heading)
    for rank, action_ends in enumerate(ends):
        y = top + rank * (height + 6)
        picture.text(14, y + 20, f"rank {rank}")
        picture.box(left, y, 860, height, PALE)
        for action, end in action_ends.items():
            duration = durations[action.kind]
            x = left + (end - duration) * unit
            fill = colors[action.kind][action.chunk % 2]
            picture.box(x, y, duration * unit, height, fill, stroke=WHITE, stroke_width=0.8)
            if duration * unit > 11:
                picture.text(x + duration * unit / 2, y + 20, action.microbatch + 1, "middle", 11, WHITE)
    entries = [(BLUE, "forward"), (ORANGE, "backward of the input" if split else "backward")]
    entries += [(GREEN, "weight gradients")] if split else []
    entries += [("#8fb3d6", "second chunk, forward"), ("#f9b878", "second chunk, backward")] if num_chunks > 1 else []
    picture.legend(left, top + ranks * (height + 6) + 24, entries, 170)
    return picture.svg()


def folding() -> str:
    """Draw the dense and the expert grid over the same sixteen ranks: one color per group."""
    layout = make_layout(16, tp=2, cp=2, pp=2, ep=4, etp=1)
    palette = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, "#eeca3b", "#9d755d")
    rows = (
        ("attention: tensor-parallel groups (tp 2)", "tp"),
        ("attention: context-parallel groups (cp 2)", "cp"),
        ("attention: data-parallel groups (dp 2)", "dp"),
        ("experts: expert-parallel groups (ep 4)", "ep"),
        ("experts: expert data-parallel groups (edp 2)", "edp"),
        ("both: pipeline groups (pp 2)", "pp"),
    )
    heading = "16 ranks, two grids: ranks of one color form a group"
    picture = Picture(940, 60 + len(rows) * 44 + 16, "Two grids over sixteen ranks", heading)
    for rank in range(16):
        picture.text(330 + rank * 37 + 16, 48, rank, "middle", 11)
    for index, (name, axis) in enumerate(rows):
        y = 58 + index * 44
        picture.text(14, y + 20, name)
        for number, group in enumerate(layout.groups(axis)):
            for rank in group:
                picture.box(330 + rank * 37, y, 33, 30, palette[number % len(palette)], rx=3)
                picture.text(330 + rank * 37 + 16, y + 20, number, "middle", 11, WHITE)
    return picture.svg()


def memory() -> str:
    """Draw what every pipeline stage of a DeepSeek-V3 plan holds at its peak."""
    plan = memory_json(plan_of_flags([*PLAN.split(), "--dry-run", "--world-size", "1024", "--hardware", "h100"]))
    kinds = (
        ("weights_gb", "weights", BLUE),
        ("grads_gb", "gradients", TEAL),
        ("optimizer_gb", "optimizer", GREEN),
        ("activations_gb", "activations", ORANGE),
        ("dispatch_gb", "dispatch buffers", PURPLE),
        ("working_gb", "working memory", GRAY),
    )
    device = plan["device_gb"]
    scale, left = 740 / device, 70
    heading = "DeepSeek-V3 on 1,024 H100 (TP 2, PP 8, EP 64): planned GiB at the peak of each stage"
    bottom = 44 + len(plan["stages"]) * 30
    picture = Picture(940, bottom + 76, "Memory of a plan by pipeline stage", heading)
    for index, stage in enumerate(plan["stages"]):
        y, x = 44 + index * 30, float(left)
        picture.text(14, y + 16, f"stage {stage['stage']}")
        picture.box(left, y, device * scale, 22, PALE)
        for key, _, color in kinds:
            picture.box(x, y, stage[key] * scale, 22, color)
            x += stage[key] * scale
        picture.text(x + 6, y + 16, f"{stage['total_gb']:.1f}", size=11)
    x = left + (device - plan["reserve_gb"]) * scale
    line = f'x1="{x:.6g}" x2="{x:.6g}" y1="38" y2="{bottom}" stroke="{RED}" stroke-width="1.5" stroke-dasharray="4 3"'
    picture.parts.append(f"<line {line}/>")
    picture.text(x + 4, bottom + 14, f"{device - plan['reserve_gb']:.1f} usable", size=11, fill=RED)
    picture.legend(left, bottom + 40, [(color, name) for _, name, color in kinds], 138)
    return picture.svg()


def heat_map() -> str:
    """Draw the recorded load of every expert in every MoE layer over a run."""
    record = json.loads((IMAGES / "expert_load.json").read_text(encoding="ascii"))
    panels, cell = record["panels"], 17
    layers, experts = len(panels[0]["load"]), len(panels[0]["load"][0])
    width = 70 + len(panels) * (experts * cell + 24)
    heading = f"Tokens per expert relative to an even share: {record['run']}"
    picture = Picture(width, 84 + layers * cell + 46, "Load of experts by layer", heading)
    for number, panel in enumerate(panels):
        left = 70 + number * (experts * cell + 24)
        picture.text(left, 52, f"iteration {panel['iteration']}")
        for layer, loads in enumerate(panel["load"]):
            if number == 0:
                picture.text(14, 62 + layer * cell + 13, f"layer {record['layers'][layer]}", size=11)
            for expert, load in enumerate(loads):
                name = f"<title>layer {record['layers'][layer]}, expert {expert}: {load:g}</title>"
                picture.parts.append("<g>" + name)
                picture.box(left + expert * cell, 62 + layer * cell, cell - 1, cell - 1, _heat(load), stroke="#e8e8ea")
                picture.parts.append("</g>")
    y = 62 + layers * cell + 26
    for index, load in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0)):
        picture.box(70 + index * 70, y - 11, 14, 14, _heat(load), stroke=GRAY)
        picture.text(89 + index * 70, y, f"{load:g}", size=11)
    return picture.svg()


def _heat(load: float) -> str:
    """White at no load, blue at an even share, red from three times that share."""
    points = ((0.0, (255, 255, 255)), (1.0, (118, 169, 207)), (3.0, (178, 24, 43)))
    load = min(load, 3.0)
    (low, start), (high, end) = points[:2] if load <= 1.0 else points[1:]
    share = (load - low) / (high - low)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(start, end))


def architecture() -> str:
    """Draw what the program consists of and how the pieces depend on each other."""
    picture = Picture(940, 372, "Architecture")
    block = picture.block
    block(20, 16, 290, 62, SLATE, "command line, preset, recipe", "flags, rules, recipes; all errors at once")
    block(325, 16, 290, 62, SLATE, "estimate", "memory, FLOPs, time, search: no torch")
    block(630, 16, 290, 62, SLATE, "verification and debug", "layout parity, replay, tensor dumps")
    block(20, 100, 900, 58, INK, "training", "the one loop: set up, step, evaluate, save, resume, stop")
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
    block(20, 294, 440, 60, PURPLE, "quantization and memory", "fp8, fp4; recompute, offload, CUDA graphs")
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
    picture.legend(26, 252, [(PURPLE, "communication between expert-parallel ranks"), (TEAL, "local computation")], 320)
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


PICTURES: dict[str, Callable[[], str]] = {
    "architecture": architecture,
    "training_step": training_step,
    "folding": folding,
    "memory_plan": memory,
    "expert_heatmap": heat_map,
    "pipeline_1f1b": lambda: pipeline("1f1b", 1, "1F1B"),
    "pipeline_interleaved": lambda: pipeline("interleaved", 2, "Interleaved, two chunks per rank"),
    "pipeline_zero_bubble": lambda: pipeline("zero-bubble", 1, "Zero bubble (ZB-H1)"),
}


def stale_pictures() -> list[str]:
    """Return the names of pictures whose file is missing or differs from what this script draws."""

    def is_current(path: Path, draw: Callable[[], str]) -> bool:
        return path.exists() and path.read_text(encoding="ascii") == draw()

    return [name for name, draw in PICTURES.items() if not is_current(IMAGES / f"{name}.svg", draw)]


def main() -> int:
    """Write the pictures, or check them."""
    parser = argparse.ArgumentParser(description="Draw the manual's pictures as SVG.")
    text = "write nothing; exit code 1 if a picture is not current"
    parser.add_argument("--check", action="store_true", help=text)
    if parser.parse_args().check:
        stale = stale_pictures()
        print("\n".join(f"docs/img/{name}.svg is not current" for name in stale) or "all pictures are current")
        return int(bool(stale))
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
