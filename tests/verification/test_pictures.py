"""Pictures of comparisons: pairs that a proof covered, and the first difference in the model."""

from dataclasses import replace
from types import SimpleNamespace

from drawing.reading import assert_texts_are_apart, boxes, texts

from moe_trainer.drawing.pair_matrix import pair_matrix, pair_text
from moe_trainer.drawing.svg import GREEN, ORANGE, RED, YELLOW
from moe_trainer.verification.comparison import ComparisonRow
from moe_trainer.verification.mapping import NAMES, ParallelMapping
from moe_trainer.verification.pictures import comparison_figure, comparison_picture, proof_figures

CASES = [({"tp", "ep"}, True), ({"tp", "pp"}, False), ({"tp", "pp", "ep"}, True)]
NAMES_IN_ORDER = [
    ("output", "embedding"),
    ("output", "decoder.layers.0.self_attention"),
    ("output", "decoder.layers.0.mlp"),
    ("output", "decoder.layers.1.self_attention"),
    ("output", "decoder.layers.1.mlp.router.logits"),
    ("chosen experts", "decoder.layers.1.mlp.router"),
    ("output", "decoder.layers.1.mlp"),
    ("output", "decoder.final_layernorm"),
    ("output", "mtp.layers.0.transformer_layer.mlp"),
    ("token losses", "loss"),
    ("loss", "lm loss"),
    ("gradient", "output_layer.weight"),
    ("gradient", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"),
    ("gradient", "decoder.layers.1.input_layernorm.weight"),
    ("gradient", "embedding.word_embeddings.weight"),
    ("gradient norm", ""),
]
ROWS = [ComparisonRow(quantity, name, 0.0, 1e-5) for quantity, name in NAMES_IN_ORDER]


def test_pairs_count_their_cases():
    assert pair_text({"tp", "ep"}, CASES) == ("2 equal", GREEN)
    assert pair_text({"tp", "pp"}, CASES) == ("1 of 2 differ", RED)
    assert pair_text({"tp"}, CASES) == ("1 of 3 differ", RED)
    assert pair_text({"ep", "dp"}, CASES)[0] == "not covered"


def test_matrix_has_every_pair_once_and_leaves_out_what_is_not_needed():
    svg = pair_matrix("t", "h", NAMES, {"tp", "pp", "ep", "dp"}, CASES)
    cells = [box for box in boxes(svg) if box.tip]
    assert len(cells) == len(NAMES) * (len(NAMES) + 1) // 2
    assert sum("not in this mapping" in cell.tip for cell in cells) == 28 - 10
    by_tip = {cell.tip: cell for cell in cells}
    assert by_tip["pp with tp: 1 of 2 differ"].fill == RED and by_tip["ep with tp: 2 equal"].fill == GREEN
    assert sorted(text.text for text in texts(svg) if text.text in NAMES) == sorted([*NAMES, *NAMES])
    assert_texts_are_apart(svg)


def result(mapping, *, rows=(), failure=""):
    case = SimpleNamespace(mapping=mapping, argv=("--num-layers", "4"))
    return SimpleNamespace(case=case, differences=list(rows), failure=failure, is_equal=not rows and not failure)


def test_figures_of_a_proof():
    equal, failed = result(ParallelMapping(tp=2, ep=2, dp=2)), result(ParallelMapping(pp=2), failure="it stopped")
    different = result(ParallelMapping(tp=2, pp=2), rows=[replace(ROWS[6], difference=0.5)])
    coverage, model = proof_figures([equal, failed, different], None)
    assert "pp with tp: 1 of 1 differ" in coverage.svg and "ep with tp: 1 equal" in coverage.svg
    assert model.heading == "First difference of tp 2 pp 2 on 4 ranks" and "layer 3" in model.svg
    shrunk = SimpleNamespace(original=ParallelMapping(tp=4, cp=2, ep=8))
    (only,) = proof_figures([equal], shrunk)
    assert "cp with tp: not covered" in only.svg and "pp, tp: not in this mapping" in only.svg


def test_equal_records_are_green():
    svg = comparison_figure(ROWS).svg
    parts = [box for box in boxes(svg) if "largest: " in box.tip]
    assert {box.fill for box in parts} == {GREEN} and sum(int(box.tip.split()[0]) for box in parts) == len(ROWS)
    assert "Equal: 16 quantities within their tolerances" in [text.text for text in texts(svg)]
    assert sum(text.text == "experts or MLP" for text in texts(svg)) == 4, "three outputs, one of them of the MTP layer"
    assert "layer 0" in svg and "MTP layer 0" in svg and "losses, norms" in svg
    assert_texts_are_apart(svg)


def test_first_difference_is_marked_once():
    rows = [replace(row, difference=1.0 if number >= 6 else 0.0) for number, row in enumerate(ROWS)]
    rows[5] = replace(rows[5], num_near_ties=3)
    svg = comparison_picture(rows)
    parts = [box for box in boxes(svg) if "largest: " in box.tip]
    (first,) = [box for box in parts if box.fill == RED]
    assert "output of decoder.layers.1.mlp, 1" in first.tip
    (mark,) = [box for box in boxes(svg) if box.fill == "none"]
    assert (mark.x, mark.y, mark.width) == (first.x - 2, first.y - 2, first.width + 4)
    assert sum(box.fill == ORANGE for box in parts) > 5 and not any(
        box.fill == YELLOW for box in parts if "logits" not in box.tip
    )
    assert sum(box.fill == YELLOW for box in parts) == 1
    rows_of = {text.text: text.y for text in texts(svg)}
    assert (
        rows_of["layer 0"]
        < rows_of["layer 1"]
        < rows_of["final norm"]
        < rows_of["MTP layer 0"]
        < rows_of["losses, norms"]
    )
    assert "10 of 16 quantities differ" in rows_of
    assert_texts_are_apart(svg)


def test_differences_that_are_not_numbers_are_differences():
    rows = [ROWS[0], replace(ROWS[1], difference=float("nan")), replace(ROWS[2], difference=float("inf"))]
    svg = comparison_picture(rows)
    assert [box.fill for box in boxes(svg) if "largest: " in box.tip] == [GREEN, RED, ORANGE]


def test_many_layers_fit():
    rows = [ComparisonRow("output", f"decoder.layers.{layer}.self_attention", 0.0, 1e-5) for layer in range(94)]
    svg = comparison_picture([*rows, ComparisonRow("gradient", "decoder.layers.93.mlp.router.weight", 1.0, 1e-5)])
    assert_texts_are_apart(svg)
