"""The search: its results are legal, fit and are what it says they are; its layouts are whole; what it leaves out of a command line."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arguments import parse_args
from arguments.report import run_validate_only
from arguments.rules.layout_grammar import DECODER, read_layout
from moe_trainer.planner.hardware import find_hardware
from moe_trainer.planner.mappings import (
    Mapping,
    divisors,
    exchanges,
    formats_of,
    layer_counts,
    layout_text,
    only,
    recompute_sets,
    shapes,
    without,
)
from moe_trainer.planner.plan import PlanError, make_plan
from moe_trainer.planner.search import HEADROOM, Estimator, reasons, search, search_formats
from moe_trainer.shape.vocab import vocab_rows_from_flags

ROOT = Path(__file__).parents[2]
FLAGS = "--preset qwen3_30b_a3b --mock-data --global-batch-size 64".split()


@pytest.fixture(scope="module")
def outcome():
    return search([*FLAGS, "--tensor-model-parallel-size", "2", "--sequence-parallel"], 16, find_hardware("h100"), best=8)


def test_results_are_legal_and_fit(outcome, capsys):
    assert len(outcome.found) == 8 and outcome.refused == 0 and outcome.seen > outcome.planned >= 8
    speeds = [each.plan.tokens_per_second for each in outcome.found]
    assert speeds == sorted(speeds, reverse=True)
    for each in outcome.found:
        argv = [*FLAGS, *each.argv, "--world-size", "16"]
        assert run_validate_only(argv, lambda args: {"total": None}) == 0, argv
        capsys.readouterr()
        assert make_plan(parse_args([*FLAGS, *each.argv], 16), 16, find_hardware("h100")).margin >= 0
        assert each.binds
    shapes_found = [replace(each.mapping, recompute=(), backend="", overlap=False) for each in outcome.found]
    assert len(set(shapes_found)) == len(shapes_found)


FOUR = (
    ("deepseek_v3", "h100", 1024, "--fp8-format e4m3 --fp8-recipe blockwise --global-batch-size 8192"),
    ("deepseek_v3", "gb200", 256, "--fp8-format e4m3 --fp8-recipe mxfp8 --global-batch-size 8192"),
    ("qwen3_235b_a22b", "h100", 256, "--global-batch-size 2048"), ("mixtral_8x7b", "h100", 64, "--global-batch-size 256"),
)


@pytest.mark.slow
@pytest.mark.parametrize("preset, machine, gpus, flags", FOUR)
def test_published_jobs(preset, machine, gpus, flags, capsys):
    """Ten that fit and that the trainer takes; the published mapping is not better than the first, or it is the first."""
    flags = ["--preset", preset, "--mock-data", "--bf16", *flags.split()]
    outcome = search(flags, gpus, find_hardware(machine))
    assert len(outcome.found) == 10
    for each in outcome.found:
        assert each.plan.margin >= 0 and each.plan.headroom >= HEADROOM and each.binds
        assert run_validate_only([*flags, *each.argv, "--world-size", str(gpus)], lambda args: {"total": None}) == 0
        capsys.readouterr()
    assert (outcome.published is None) == (preset == "mixtral_8x7b")
    if outcome.published is not None:
        row, plan = outcome.published
        mapping = plan.args.parallel
        assert (mapping.tensor_model_parallel_size, mapping.pipeline_model_parallel_size, mapping.expert_model_parallel_size) == (row.tp, row.pp, row.ep)
        first = outcome.found[0].plan
        assert first.tokens_per_second > plan.tokens_per_second and reasons(first, plan)


def test_formats_are_compared():
    flags = ["--preset", "mixtral_tiny", "--mock-data", "--fp16", "--global-batch-size", "16"]
    outcome = search_formats(flags, ("bf16", "blockwise"), 4, find_hardware("h100"), best=100)
    widths = {each.plan.width for each in outcome.found}
    assert widths == {"bf16", "fp8"} and "--fp16" not in outcome.base
    for each in outcome.found[::40]:
        args = parse_args([*outcome.base, *each.argv], 4)
        assert args.precision.bf16 and bool(args.precision.fp8) == (each.plan.width == "fp8")
    assert formats_of(find_hardware("a100")) == ("bf16",) and "nvfp4" in formats_of(find_hardware("gb300"))
    with pytest.raises(PlanError, match="no products in mxfp8"):
        search_formats(flags, ("mxfp8",), 4, find_hardware("h100"))


def test_headroom_is_left():
    flags = ["--preset", "mixtral_8x7b", "--mock-data", "--bf16", "--global-batch-size", "64"]
    tight, wide = (search(flags, 8, find_hardware("h200"), best=3, headroom=headroom) for headroom in (1.0, 2.5))
    assert all(each.plan.headroom >= 2.5 for each in wide.found)
    assert min(each.plan.headroom for each in tight.found) < 2.5 and tight.small >= wide.small


def test_the_first_is_argued_for(outcome):
    first, second = outcome.found[0].plan, outcome.found[1].plan
    assert first.time.step <= second.time.step
    assert reasons(first, second) or second.time.step / first.time.step < 1.01
    assert outcome.own is not None and outcome.own.tokens_per_second < first.tokens_per_second


def test_estimates_are_near_the_plans(outcome):
    """The order of the first pass decides what is planned at all: it may not be far off."""
    args = parse_args(FLAGS, None)
    hardware = find_hardware("h100")
    estimator = Estimator(args, 16, hardware, vocab_rows_from_flags(args))
    for each in outcome.found:
        estimate = estimator._estimate(each.mapping)
        assert estimate.seconds == pytest.approx(each.plan.time.step, rel=0.15)
        assert estimate.memory == pytest.approx(each.plan.peak.total, rel=0.25)


def test_no_shape_is_refused():
    """Every mapping that the search may show passes the rules: a sample of all."""
    args, hardware = parse_args(FLAGS, None), find_hardware("gb200")
    mappings = [replace(shape, recompute=recompute, backend=backend, overlap=overlap) for shape in shapes(args, 32, hardware)
                for (backend, overlap), recompute in itertools.product(exchanges(args, hardware, shape.ep, shape.etp), recompute_sets(args))
                if not (overlap and (recompute == ("full",) or "moe" in recompute or shape.pp > 1 and shape.vpp == 1))]
    for mapping in mappings[::199]:
        layout = layout_text(layer_counts(48, mapping.pp * mapping.vpp, 1.0), 0)
        args = parse_args([*FLAGS, *mapping.flags(layout)], 32)
        assert not args.unbuildable
        assert args.parallel == mapping.applied(args, layout).parallel


@pytest.mark.parametrize("layers, stages, extra", [(61, 16, 2.4), (61, 32, 2.4), (94, 48, 1.0), (32, 1, 0.5), (4, 4, 0.0), (61, 62, 3.0), (5, 4, 9.0)])
def test_layouts_are_whole(layers, stages, extra):
    counts = layer_counts(layers, stages, extra)
    assert sum(counts) == layers and len(counts) == stages and min(counts) >= 0 and max(counts) - min(counts[:-1] or counts) <= 1
    if stages > 1:
        read = read_layout(layout_text(counts, 1))
        assert [stage.count(DECODER) for stage in read.stages] == counts and read.stages[-1].endswith("mL")


def test_the_published_layout_of_deepseek_v3():
    assert layout_text(layer_counts(61, 32, 2.4), 1) == "Et|(tt|)*30mL"


def test_flags_that_are_left_out():
    line = "--tensor-model-parallel-size=4 --bf16 --recompute-modules moe_act layernorm --lr 1e-4 --world-size 8 --sequence-parallel --num-layers 4"
    assert without(line.split()) == "--bf16 --lr 1e-4 --num-layers 4".split()
    assert only(line.split()) == [word for word in line.split() if word not in without(line.split())]


def test_no_machine_is_told_what_it_lacks():
    args = parse_args(FLAGS, None)
    assert ("hybridep", False) in exchanges(args, find_hardware("gb200"), 8, 1)
    assert ("hybridep", True) not in exchanges(args, find_hardware("gb200"), 8, 1) and exchanges(args, find_hardware("h100"), 1, 1) == [("", False)]
    assert divisors(12, 6) == [1, 2, 3, 4, 6]
    assert Mapping(1, 1, 1, 1, 1, 1, 2).flags(None) == ["--micro-batch-size", "2"]


@pytest.mark.parametrize("words, code, says", [
    ("search --preset mixtral_tiny --mock-data --gpus 4 --hardware a100 --best 3", 0, "to run it:"),
    ("search --preset deepseek_v3 --mock-data --gpus 8", 2, "none fits"),
    ("search --preset mixtral_8x7b --mock-data --gpus 7", 2, "no sizes divide"),
    ("search --preset mixtral_tiny --mock-data --gpus 4 --formats bf16,fp9", 2, "fp9"),
    ("search --preset mixtral_tiny --mock-data --gpus 4 --hardware b200 --formats bf16,mxfp8 --best 2", 0, "mxfp8"),
    ("search --preset no_such --mock-data --gpus 8", 2, "no_such"), ("search --preset mixtral_tiny --gpus 0", 2, "--gpus"),
    ("search --preset mixtral_tiny --gpus 8 --headrom 1", 2, "did you mean --headroom?"),
    ("search --preset mixtral_tiny --gpu=8", 2, "did you mean --gpus?"), ("search --preset mixtral_tiny", 2, "--gpus N is missing"),
    ("search --preset mixtral_tiny --gpus 8 --num-layer 3", 2, "did you mean --num-layers"),
    ("--preset mixtral_tiny --mock-data --world-size 4", 0, "tokens/s/GPU"), ("", 2, "search FLAGS"),
])
def test_the_script(words, code, says):
    done = subprocess.run([sys.executable, "scripts/plan.py", *words.split()], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={name: value for name, value in os.environ.items() if name != "WORLD_SIZE"})
    assert done.returncode == code and says in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
