"""What each piece of the stack is worth: pairs of command lines, the planner's gains, and both models' agreement."""

import functools
import importlib.util
import re
from pathlib import Path

import pytest
from emulated_cuda import build

from arguments import ArgumentError
from arguments.container import OPTIONS
from arguments.tokens import drop_flags
from moe_trainer.commands import plan as plan_command
from moe_trainer.estimate import dry_run, pieces
from moe_trainer.estimate.corrections import correction
from moe_trainer.estimate.pieces import PIECES, Row, Worth, make_pair, make_row, make_rows
from moe_trainer.estimate.pieces_text import markdown_lines, pieces_lines
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.published_runs import HYBRIDEP, MXFP8, PUBLISHED_RUNS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "scripts" / "bench_results" / "pieces.md"
BY_NAME = {piece.name: piece for piece in PIECES}
RUNS = {run.name: run for run in PUBLISHED_RUNS}
SHORT = (
    "--preset qwen3_235b_a22b --mock-data --num-layers 4 --expert-model-parallel-size 32 --micro-batch-size 1 "
    f"--global-batch-size 512 --world-size 64 --hardware gb200 {HYBRIDEP}"
).split()
ROW = re.compile(r"\| (?P<name>[^|]+?) \| (?P<use>used|tried) \| (?P<planner>[^|]*) \| (?P<roofline>[^|]*) \|")


@functools.cache
def plan_words(*line: str) -> Plan:
    return dry_run.plan_of_flags(list(line))


def plan_of_flags(line: list[str]) -> Plan:
    """Plan a line once: one line of nearly every pair is that without the piece."""
    return plan_words(*line)


@pytest.fixture(scope="module", autouse=True)
def plans_of_pairs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "plan_of_flags", plan_of_flags)
        yield


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def roofline():
    return load_script("roofline")


@pytest.fixture(scope="module")
def recordings() -> dict:
    return {}


def argv_of(name: str) -> list[str]:
    run = RUNS[name]
    return [*run.argv(), "--world-size", str(run.gpus), "--hardware", run.hardware]


def planned(name: str, flags: list[str]) -> Row:
    return make_row(BY_NAME[name], flags, plan_of_flags(flags))


def test_pairs_differ_in_their_piece():
    counted = set()
    for flags in map(argv_of, ("Qwen3-235B 256xH100 BF16", "DeepSeek-V3 256xGB200 MXFP8")):
        plan = plan_of_flags(flags)
        for piece in PIECES:
            pair = make_pair(piece, flags, plan.args)
            assert pair.is_tried != piece.is_used(plan.args)
            assert flags in (list(pair.without), list(pair.used)) or piece.also or piece.is_alternative
            row = make_row(piece, flags, plan)
            assert (row.planner is None) == bool(row.reason)
            if row.planner is not None:
                counted.add(piece.name)
                without, used = (plan_of_flags(list(line)).args for line in (pair.without, pair.used))
                assert piece.is_used(used) and not piece.is_used(without)
    assert {piece.name for piece in PIECES} - counted <= {"blockwise FP8 GEMMs instead of BF16"}


def test_pieces_that_a_preset_sets_are_removed(tmp_path):
    text = (ROOT / "model_zoo" / "qwen3_235b_a22b.yaml").read_text()
    flags = "--moe-expert-rank-capacity-factor: 1.5", "--moe-paged-stash: true", "--fp8-format: e4m3"
    flags += ("--fp8-recipe: mxfp8", "--moe-flex-dispatcher-backend: hybridep")
    text = text.replace("--moe-token-dispatcher-type: alltoall", "--moe-token-dispatcher-type: flex")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("MODEL_ARGS:", "MODEL_ARGS:\n  " + "\n  ".join(flags)))
    line = ["--preset", str(recipe), *SHORT[2:-4]]
    plan = plan_of_flags(line)
    for name in (
        "MXFP8 GEMMs instead of BF16",
        "paged stash",
        "sync-free dispatch (static budget)",
        "HybridEP instead of all-to-all",
    ):
        row = make_row(BY_NAME[name], line, plan)
        assert not row.is_tried and row.planner is not None, (name, row.reason)
        pair = make_pair(BY_NAME[name], line, plan.args)
        without = plan_of_flags(list(pair.without)).args
        assert not BY_NAME[name].is_used(without)
        assert without.model == plan.args.model


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("shared expert during the exchange", "--overlap-moe-expert-parallel-comm", "cannot be combined"),
        ("blockwise FP8 GEMMs instead of BF16", "", "another format"),
        ("overlapped tensor-parallel communication", "", "no effect here"),
        ("fp8 parameters", "", "needs --fp8-format"),
    ],
)
def test_reasons_of_pieces_that_are_not_counted(name, flags, expected):
    row = planned(name, [*SHORT, *flags.split()])
    assert row.planner is None and expected in row.reason


def test_runs_without_a_piece_lose_its_old_spellings():
    assert {dest for piece in PIECES for dest in (*piece.drops, *piece.replaces)} <= set(OPTIONS)
    old = "--cuda-graph-scope attn --enable-cuda-graph --moe-deepep-num-sms 20 --moe-router-padding-for-fp8".split()
    named = {dest for piece in PIECES for dest in (*piece.drops, *piece.replaces)}
    assert drop_flags(["--bf16", *old], named) == ["--bf16"]


def test_an_alternative_is_compared_with_a_run_without_any():
    row = planned("DeepEP instead of all-to-all", SHORT)  # where HybridEP is used
    plain = [*SHORT, "--moe-token-dispatcher-type", "alltoall"]
    assert row.is_tried and row.planner.without == plan_of_flags(plain).time.step
    row = planned("NVFP4 GEMMs instead of BF16", [*SHORT, *MXFP8.split()])
    assert row.is_tried and row.planner.without == plan_of_flags(SHORT).time.step


def test_planned_costs_of_pieces_that_save_memory():
    stash, narrow = planned("paged stash", SHORT), planned("8-bit dispatch", SHORT)
    assert -0.06 < stash.planner.gain < -0.01  # the copies
    assert abs(narrow.planner.gain) < 0.02  # NVLink is fast: casts take what the exchange saves
    slow = [*SHORT[: SHORT.index("--hardware")], "--hardware", "h100", *HYBRIDEP.split()]
    assert planned("8-bit dispatch", slow).planner.gain > 0.02
    # without a budget the host waits in every MoE layer and microbatch
    plan = plan_of_flags(SHORT)
    constants = plan.hardware.constants
    budget = plan_of_flags([*SHORT, "--moe-expert-rank-capacity-factor", "1.0"])
    waits = 4 * plan.num_microbatches * (constants.latency + constants.launch)
    waits *= correction(plan.args, plan.hardware)
    assert plan.time.compute - budget.time.compute == pytest.approx(waits, rel=0.05)


def test_agreement_of_two_gains():
    row = Row(BY_NAME["paged stash"], planner=Worth(1.1, 1.0), roofline=Worth(1.05, 1.0), bar=0.05)
    assert row.agrees and row.planner.gain == pytest.approx(0.1)
    assert not Row(row.piece, planner=Worth(1.1, 1.0), roofline=Worth(1.0, 1.0), bar=0.05).agrees
    assert not Row(row.piece, planner=Worth(1.01, 1.0), roofline=Worth(0.99, 1.0), bar=0.05).agrees  # opposed
    assert Row(row.piece, planner=Worth(1.004, 1.0), roofline=Worth(0.99, 1.0), bar=0.05).agrees  # worth nothing
    assert Row(row.piece, planner=Worth(1.1, 1.0)).agrees


def test_lines_name_every_piece_once():
    plan, rows = plan_of_flags(SHORT), list(make_rows(SHORT))
    text = list(pieces_lines(plan, rows))
    for piece in PIECES:
        assert sum(line.strip().startswith(f"{piece.name} ") for line in text) == 1, piece.name
    assert any(line.startswith("      published: +83.6 %") for line in text)
    assert len(list(markdown_lines("a", "b", rows))) == len(PIECES) + 7


def test_commands(roofline, capsys):
    assert plan_command.main(["pieces", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "what each piece is worth on 64 x gb200" in out and "HybridEP instead of all-to-all" in out
    for main in (plan_command.main, roofline.main):
        assert main(["pieces", *SHORT, "--moe-router-topk", "900"]) == 2
        assert "--moe-router-topk" in capsys.readouterr().err
    assert plan_command.main(["pieces", "--help"]) == 0 and "pieces FLAGS" in capsys.readouterr().out


def test_flags_that_are_rejected_raise():
    with pytest.raises(ArgumentError):
        list(make_rows([*SHORT, "--moe-router-topk", "900"]))


def test_the_record_is_what_the_planner_computes_and_both_models_agree(roofline):
    """Every row of the page: the models agree within the bar, or the page says why not."""
    sections = RECORD.read_text().split("\n## ")[1:]
    cases = dict(roofline.piece_cases())
    assert [section.splitlines()[0] for section in sections] == list(cases)
    for section in sections:
        title = section.splitlines()[0]
        assert f"`{' '.join(cases[title])}`" in section
        found = {match["name"]: match for match in map(ROW.match, section.splitlines()) if match}
        assert set(found) == set(BY_NAME)
        for row in make_rows(cases[title]):
            match = found[row.piece.name]
            if row.planner is None:
                assert not match["planner"].strip() and row.reason.replace("|", "\\|") in section
                continue
            assert match["planner"].strip() == f"{100 * row.planner.gain:+.1f} %", (title, row.piece.name)
            gain = float(match["roofline"].removesuffix("% ").removesuffix("%")) / 100
            recorded = Row(row.piece, planner=row.planner, roofline=Worth(1 + gain, 1.0), bar=row.bar + 5e-4)
            assert recorded.agrees or row.difference, (title, row.piece.name, gain)


@pytest.mark.parametrize("name", ["paged stash", "overlapped token exchange"])
def test_planner_and_roofline_agree_on_an_executed_step(roofline, recordings, name):
    try:
        build.library()
    except build.CannotBuildError as error:
        pytest.skip(str(error))
    flags = [*SHORT, "--num-layers", "1"]
    plan = plan_of_flags(flags)

    def step(line, _):
        return roofline.plan_and_roofline(line, recordings)[1].time.step

    row = make_row(BY_NAME[name], flags, plan, step)
    assert row.roofline is not None and row.agrees, row
    assert abs(row.roofline.gain) > 0.001


def test_formats_have_their_device():
    assert planned("MXFP8 GEMMs instead of BF16", SHORT).planner is not None
    wide = [*SHORT, "--moe-ffn-hidden-size", "2048"]  # narrower ones gain less (corrections.py)
    used = planned("MXFP8 GEMMs instead of BF16", [*wide, *MXFP8.split()])
    assert not used.is_tried and used.planner.gain > 0.005
