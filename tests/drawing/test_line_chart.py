"""Charts of curves: points are where the axes say, curves stay inside of them, areas are closed."""

from drawing.reading import SVG, assert_texts_are_apart, root, texts

from moe_trainer.drawing.line_chart import BOTTOM, LEFT, RIGHT, TOP, LineChart


def paths(svg):
    return [each.get("d") for each in root(svg).iter(f"{SVG}path")]


def test_points_are_where_the_axes_say():
    chart = LineChart("t", "h", (0.0, 10.0), [1.0, 3.0], ("steps", "loss"))
    marks = {text.text: (text.x, text.y) for text in texts(chart.svg())}
    assert chart.at(4.0, 2.0) == (marks["4"][0], marks["2"][1] - 4)
    assert chart.at(0.0, 1.0)[0] == LEFT and chart.at(10.0, 1.0)[0] == RIGHT
    assert TOP < chart.at(0.0, 3.0)[1] < chart.at(0.0, 1.0)[1] < BOTTOM


def test_curves_stay_inside_the_axes_and_areas_are_closed():
    chart = LineChart("t", "h", (0.0, 2.0), [0.0, 1.0], ("x", "y"))
    chart.line([(0.0, -5.0), (2.0, 9.0)], "#111111", "a line")
    chart.area([(0.0, 0.0), (2.0, 0.0)], [(0.0, 1.0), (2.0, 1.0)], "#222222")
    chart.legend([("#111111", "first"), ("#222222", "second")])
    line, area = paths(chart.svg())
    assert line == f"M{LEFT} {BOTTOM}L{RIGHT} {TOP}"
    low, high = chart.at(0.0, 0.0)[1], chart.at(0.0, 1.0)[1]
    assert (
        area
        == "M" + "L".join(f"{x} {y:.6g}" for x, y in ((LEFT, low), (RIGHT, low), (RIGHT, high), (LEFT, high))) + "Z"
    )
    assert_texts_are_apart(chart.svg())


def test_one_value_has_a_range():
    chart = LineChart("t", "h", (0.0, 1.0), [2.0], ("x", "y"))
    assert chart.at(0.0, 2.0)[1] == (TOP + BOTTOM) / 2
