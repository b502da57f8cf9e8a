"""Primitives of pictures: escaping, themes, fitting of texts, ticks and labels."""

import os
from pathlib import Path

import pytest
from drawing.reading import SVG, assert_texts_are_apart, boxes, root, texts

from moe_trainer.drawing.axes import Scale, number_text, overlap, place_labels, round_ticks
from moe_trainer.drawing.report_page import Figure, report_page, write_report
from moe_trainer.drawing.stacked_bars import Bar, Series, shares_bar, stacked_bars
from moe_trainer.drawing.svg import INK, PALE, RED, Picture, shorten, text_on, text_width
from moe_trainer.io import cannot_write, is_device

NASTY = "</svg><script>alert(1)</script> & \"quotes\" \x00\x1b \ud800 'x'"


def test_texts_are_escaped_and_the_picture_is_valid_xml():
    picture = Picture(200, 100, NASTY, NASTY)
    picture.text(0, 20, NASTY)
    picture.box(0, 0, 5, 5, RED, NASTY)
    svg = picture.svg()
    tree = root(svg)
    assert "<script>" not in svg and svg.count("</svg>") == 1
    clean = NASTY.replace("\x00\x1b \ud800", "?? ?")
    assert texts(svg)[1].text == clean == tree.get("aria-label") == tree.findtext(f"{SVG}title")
    assert tree.find(f"{SVG}rect[2]/{SVG}title").text == clean and tree.get("role") == "img"


def test_colors_of_the_theme_change_in_dark_pages():
    picture = Picture(100, 100, "a")
    picture.box(0, 0, 5, 5, PALE, stroke=INK)
    picture.box(0, 0, 5, 5, RED)
    svg = picture.svg()
    assert (
        '<rect x="0" y="0" width="5" height="5" class="fill-pale stroke-ink" fill="#f4f4f6" stroke="#333333"/>' in svg
    )
    assert "prefers-color-scheme: dark" in svg and ".picture .fill-pale{fill:#2b2e34}" in svg
    assert f'height="5" fill="{RED}"/>' in svg


def test_text_is_shortened_to_its_space():
    line = "a very long name of a parallel mapping"
    short = shorten(line, 90)
    assert short.endswith("...") and text_width(short) <= 90 and line.startswith(short[:-3])
    assert shorten("short", 90) == "short" and shorten(line, 3) == ""
    assert text_on("#ffffff") != text_on("#000000")


@pytest.mark.parametrize("low, high, ticks", [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 0.7, [0, 0.2, 0.4, 0.6]), (3, 3, [3])])
def test_ticks_are_round(low, high, ticks):
    assert round_ticks(low, high) == pytest.approx(ticks)


def test_ticks_of_any_range_are_few():
    for low, high in ((1e-9, 3e-9), (-5.0, 1e12), (0.0, 1.7e300), (float("nan"), 1.0)):
        assert 1 <= len(round_ticks(low, high)) <= 12
    assert [number_text(value) for value in (1234567.0, 0.30000000000000004, 12.0)] == ["1,234,567", "0.3", "12"]
    assert Scale(0, 4, 100, 200).at(1) == 125 and Scale(2, 2, 0, 9).at(2) == 0


def test_labels_do_not_overlap_each_other_or_points():
    points = [(100 + 7 * (number % 5), 100 + 5 * (number // 5), f"label {number}") for number in range(25)]
    places = place_labels(points, (0, 0, 300, 260))
    placed = [
        (x, y - 11, x + text_width(label, 11), y + 3)
        for place, (_, _, label) in zip(places, points)
        if place is not None
        for x, y in [place]
    ]
    marks = [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in points]
    assert 4 <= len(placed) < 25, "there is no space for all"
    assert not any(overlap(box, other) for index, box in enumerate(placed) for other in [*placed[index + 1 :], *marks])
    assert all(box[0] >= 0 and box[2] <= 300 for box in placed)
    assert None not in place_labels([(50, 50, "a"), (250, 200, "b")], (0, 0, 300, 260))


def test_bars_have_the_length_of_their_numbers():
    series = [Series("a", "#111111"), Series("b", "#222222")]
    bars = [Bar("first", (10.0, 30.0), "40"), Bar("second", (0.0, 60.0), "60"), Bar("third", (0.0, 0.0), "0")]
    svg = stacked_bars("t", "h", series, bars, "GiB", 80.0, [(70.0, "70 usable")])
    by_tip = {box.tip: box for box in boxes(svg) if box.tip}
    assert set(by_tip) == {"first, a: 10 GiB", "first, b: 30 GiB", "second, b: 60 GiB"}
    unit = by_tip["first, a: 10 GiB"].width / 10
    assert by_tip["first, b: 30 GiB"].width == pytest.approx(30 * unit, rel=1e-4)
    assert by_tip["second, b: 60 GiB"].width == pytest.approx(60 * unit, rel=1e-4)
    start, after = by_tip["first, a: 10 GiB"], by_tip["first, b: 30 GiB"]
    assert after.x == pytest.approx(start.x + start.width, rel=1e-4)
    line = root(svg).find(f"{SVG}line")
    assert float(line.get("x1")) == pytest.approx(start.x + 70 * unit, rel=1e-4)
    assert_texts_are_apart(svg)


def test_bars_beyond_the_device_stay_in_the_picture():
    svg = stacked_bars(
        "t", "h", [Series("a", RED)], [Bar("stage 0", (900.0,), "900.0 GiB")], "GiB", 80.0, [(76.0, "76 usable")]
    )
    assert_texts_are_apart(svg)


def test_shares_fill_the_bar():
    svg = shares_bar("t", "One iteration", [("compute", "#111111", 3.0), ("bubble", "#222222", 1.0)], "s")
    first, second = (box for box in boxes(svg) if box.tip)
    assert first.width == pytest.approx(3 * second.width, rel=1e-4) and second.x == pytest.approx(first.x + first.width)
    assert first.tip == "compute: 3 s, 75.0%"
    assert_texts_are_apart(svg)


def test_report_page_escapes_and_names_a_file_that_cannot_be_written(tmp_path):
    page = report_page(NASTY, NASTY, [Figure(NASTY, Picture(9, 9, "p").svg(), NASTY)], [NASTY, "line"])
    assert "<script>" not in page and page.count("<figure>") == 1 and "http://www.w3.org" in page
    assert not any(word in page.replace("http://www.w3.org/2000/svg", "") for word in ("http", "src=", "url("))
    write_report(tmp_path / "page.html", "t", "c", [], ["text"])
    assert "<pre>text</pre>" in (tmp_path / "page.html").read_text()
    for path in (tmp_path, tmp_path / "none" / "x.html"):
        with pytest.raises(ValueError, match=r"--report-html .*: the file cannot be written \("):
            write_report(path, "t", "c", [], [])


def test_report_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch):
    """The disk fills up while the page is written; a device is not replaced by a file."""
    path = tmp_path / "page.html"
    write_report(path, "old", "c", [], [])
    old, write = path.read_text(), Path.write_text

    def fill(self, text, **options):
        write(self, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(ValueError, match="No space left"):
        write_report(path, "new", "c", [], [])
    assert path.read_text() == old and [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_device_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert not cannot_write(pipe)
    write_report(pipe, "t", "c", [], ["text"])
    assert b"<pre>text</pre>" in os.read(reader, 65536) and pipe.is_fifo()
    os.close(reader)
    assert is_device("/dev/stdout") and not is_device(tmp_path) and not is_device(tmp_path / "new")
