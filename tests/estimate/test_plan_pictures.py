"""Pictures of a plan show its numbers: memory, the step's parts, and the times of the pipeline schedule."""

import pytest
from drawing.reading import assert_texts_are_apart, boxes, texts

from arguments.mechanisms.schedules import BY_KEY
from moe_trainer.commands import train_process
from moe_trainer.drawing.pipeline_timeline import Span, Work, idle_share, pipeline_timeline
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.plan_pictures import (
    memory_picture,
    plan_figures,
    schedule_spans,
    step_picture,
    timeline_picture,
)
from moe_trainer.estimate.step_time import PARTS, plan_actions
from moe_trainer.estimate.uncertainty import error_bar
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.simulate import UniformCosts, simulate_schedule

LINE = (
    "--preset mixtral_8x7b --mock-data --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --world-size 64 "
    "--hardware h100 --global-batch-size 128"
).split()


@pytest.fixture(scope="module")
def plan():
    return plan_of_flags([*LINE, "--dry-run"])


def test_memory_bars_are_the_plan(plan):
    svg = memory_picture(plan)
    parts = [box for box in boxes(svg) if "GiB" in box.tip]
    lengths = {}
    for box in parts:
        lengths[box.y] = lengths.get(box.y, 0.0) + box.width
    totals = [stage.total for stage in plan.memory]
    assert [length / lengths[min(lengths)] for _, length in sorted(lengths.items())] == pytest.approx(
        [total / totals[0] for total in totals], rel=1e-3
    )
    assert_texts_are_apart(svg)


def test_parts_of_the_step_add_up(plan):
    svg = step_picture(plan)
    widths = [box.width for box in boxes(svg) if box.tip]
    expected = [getattr(plan.time, name) for name, _ in PARTS if getattr(plan.time, name) > 0]
    assert [width / sum(widths) for width in widths] == pytest.approx(
        [each / plan.time.step for each in expected], abs=1e-4
    )
    assert_texts_are_apart(svg)


@pytest.mark.parametrize(
    "kind, chunks, pairs", [("1f1b", 1, False), ("1f1b", 1, True), ("interleaved", 2, False), ("zero-bubble", 1, False)]
)
def test_spans_are_the_simulated_schedule(kind, chunks, pairs):
    orders, costs = (
        ScheduleKind(BY_KEY[kind], chunks, pairs=pairs).orders(4, 8),
        UniformCosts(forward=1, backward=2, weight=1),
    )
    stages = schedule_spans(orders, chunks, costs)
    ends = simulate_schedule(orders, chunks, costs)
    makespan = max(max(each.values()) for each in ends)
    for spans, of_rank in zip(stages, ends, strict=True):
        assert {span.end for span in spans} == set(of_rank.values())
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:])), "a stage does one thing at a time"
    works = [work for spans in stages for span in spans for work in span.works]
    unit = {"F": 1, "B": 2, "W": 1}
    assert idle_share(stages) == pytest.approx(1 - sum(unit[work.kind] for work in works) / (4 * makespan))
    if kind == "1f1b" and not pairs:
        assert idle_share(stages) == pytest.approx(3 * 3 / (8 * 3 + 3 * 3))


def test_timeline_draws_every_action_in_proportion():
    spans = [Span((Work("F", 0, 0),), 0.0, 1.0), Span((Work("F", 0, 1), Work("B", 1, 0)), 2.0, 6.0, 1.0)]
    svg = pipeline_timeline("t", "h", [spans, [Span((Work("W", 0, 0),), 0.0, 6.0)]], [("optimizer", 2.0)], "s")
    by_tip = {box.tip: box for box in boxes(svg) if box.tip}
    forward, pair, backward = by_tip["F1, chunk 0: 1 s"], by_tip["F2, chunk 0: 4 s"], by_tip["B1, chunk 1: 4 s"]
    assert pair.width == pytest.approx(3 * forward.width, rel=1e-4) and pair.height == forward.height / 2
    assert backward.y == pair.y + pair.height and backward.x == pair.x == pytest.approx(forward.x + 2 * forward.width)
    exposed, weight = by_tip["communication: 1 s"], by_tip["W1, chunk 0: 6 s"]
    assert exposed.width == pytest.approx(forward.width, rel=1e-4) and exposed.height == forward.height
    assert weight.width == pytest.approx(6 * forward.width, rel=1e-4)
    assert by_tip["optimizer: 2 s"].x == pytest.approx(weight.x + weight.width, rel=1e-4)
    assert_texts_are_apart(svg)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pipeline-schedule zero-bubble",
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm",
    ],
)
def test_timeline_of_a_plan_takes_its_step(flags):
    plan = plan_of_flags([*LINE, *flags.split(), "--dry-run"])
    args, length = plan.timed
    costs = plan_actions(args, plan.world_size, plan.vocab_rows, plan.hardware, length)
    svg = timeline_picture(plan)
    ends = [box.x + box.width for box in boxes(svg) if box.tip]
    actions = [box for box in boxes(svg) if box.tip[:1] in "FBW" and ", chunk" in box.tip]
    kinds = 3 if "zero" in flags else 2
    late_heads = plan.num_microbatches if "defer" in flags else 0
    assert len(actions) == plan.num_microbatches * 4 * len(costs.passes[0]) * kinds + late_heads
    assert all(box.width > 0 for box in actions), "every action takes time"
    starts = min(box.x for box in actions)
    tail = plan.time.data + plan.time.optimizer + plan.time.host
    last_action = max(box.x + box.width for box in boxes(svg) if ", chunk" in box.tip or "communication" in box.tip)
    assert (last_action - starts) / (max(ends) - starts) == pytest.approx(1 - tail / plan.time.step, rel=1e-3)
    unit = (max(ends) - starts) / plan.time.step
    rows = {}
    for box in boxes(svg):
        if box.tip.startswith("communication"):
            rows.setdefault(box.y, []).append(box.width / unit)
    time = plan.time
    exposed = time.exchange + time.tensor + time.context + time.pipeline
    assert any(sum(widths) == pytest.approx(exposed, rel=1e-3) for widths in rows.values()), "that of the busiest stage"
    assert any(text.text.endswith(" s") for text in texts(svg)), "the axis has a unit"


@pytest.mark.parametrize(
    "flags, most, shown",
    [
        ("--global-batch-size 512", 3000, 32),  # all
        ("--global-batch-size 16384", 3000, 20),  # the steady state, of 1,024
        ("--global-batch-size 1024", 40, 8),  # two groups
        ("--global-batch-size 1024 --num-virtual-stages-per-pipeline-rank 8", 40, 4),  # a group at least
    ],
)
def test_long_schedules_are_drawn_in_part(flags, most, shown, monkeypatch):
    monkeypatch.setattr("moe_trainer.estimate.plan_pictures.MAX_STEPS", most)
    plan = plan_of_flags([*LINE, *flags.split(), "--dry-run"])
    svg = timeline_picture(plan)
    numbers = {box.tip.partition(",")[0][1:] for box in boxes(svg) if ", chunk" in box.tip}
    assert len(numbers) == shown
    assert (f"(drawn: {shown} of {plan.num_microbatches} microbatches)" in svg) == (shown < plan.num_microbatches)


def test_report_has_text_and_pictures(plan, tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert train_process.main([*LINE, "--dry-run", "--report-html", str(path)]) in (0, 3)
    page, out = path.read_text(encoding="utf-8"), capsys.readouterr().out
    assert page.count("<svg ") == 3 == len(list(plan_figures(plan)))
    assert all(line.split("(")[0].replace("'", "&#x27;") in page for line in out.splitlines())
    assert "--preset mixtral_8x7b" in page and f"s +- {error_bar(plan).percent}, " in step_picture(plan)
    assert train_process.main([*LINE, "--dry-run", "--report-html", "/no/such/folder/x.html"]) == 2
    assert "--report-html /no/such/folder/x.html: the file cannot be written" in capsys.readouterr().err


def test_one_stage_has_no_timeline():
    plan = plan_of_flags([*LINE, "--pipeline-model-parallel-size", "1", "--dry-run"])
    assert [figure.heading for figure in plan_figures(plan)] == ["Memory", "One iteration"]
