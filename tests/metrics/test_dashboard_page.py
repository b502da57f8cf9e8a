"""The dashboard's page in a headless Chromium, drawn from made-up runs (sample_runs.py). The table of runs: test_dashboard_runs.py."""

import contextlib
import json

import pytest
from docs.browser import MISSING, is_available
from metrics import sample_runs
from metrics.sample_runs import NASTY, make_page, make_run

from moe_trainer.metrics.dashboard import render_page

pytestmark = pytest.mark.skipif(not is_available(), reason=MISSING)
PAGES = {
    "three": sample_runs.three_runs,
    "dense": sample_runs.dense_run,
    "large": sample_runs.large_run,
    "hostile": sample_runs.hostile_run,
    "list": sample_runs.list_of_runs,
    "collapsed": lambda: make_page(make_run("collapsed-router", collapsed=3)),
    "silent": lambda: make_page({**make_run("silent"), "silent_at": 1.0}),
    "single": lambda: make_page(make_run("single", 1, 2, 4, 2, records=1, moments=1)),
    "cpu": lambda: make_page(*(of_cpu(make_run(name, records=4), speed) for name, speed in (("a", 0.02), ("b", 4e-4)))),
    "twelve": lambda: make_page(*(make_run(f"{at}", 9, 2, 4, 2, records=4, moments=4) for at in range(12))),
    "one cpu": lambda: make_page(of_cpu(make_run("a", records=4), 4e-4)),
    "sparse": lambda: make_page(make_run("sparse", records=4)),
    "twenty": lambda: sample_runs.many_runs(20),
    "two ranks": lambda: make_page(make_run("long", ranks=2, slow=1), make_run("short", iterations=200)),
}


def of_cpu(run: dict, tflops: float) -> dict:
    """Return the run at a speed, in TFLOP/s."""
    run["records"]["series"]["tflops_per_gpu"] = [tflops, tflops, tflops, tflops * 0.9]
    return run


def errors(driver) -> list[dict]:
    return [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def set_control(run, name, value, event="oninput", field="value"):
    """Change a control of the page as its user does."""
    run(
        "const [name, value, event, field] = arguments, each = document.getElementById(name);"
        "each[field] = value; each[event]({target: each});",
        *(name, value, event, field),
    )


def press(run, name, *keys):
    """Press keys in a map; the text of the hint."""
    run(
        "const map = dashboard.maps[arguments[0]].canvas; map.focus(); for (const key of arguments[1])"
        " map.dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true}))",
        *(name, keys),
    )
    return run("return document.getElementById('hint').textContent")


def wait_for_details(driver):
    driver.execute_async_script("setTimeout(arguments[0], 100)")


@contextlib.contextmanager
def screen(driver, width, height):
    """Give the page a size; a window has a least width."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_errors_and_fits_its_window_in_both_themes(driver, show, name):
    run = show(name)
    for width in (390, 1280, 1920):
        with screen(driver, width, 1000):
            for theme in ("light", "dark"):
                run("dashboard.view.theme = arguments[0]; dashboard.draw()", theme)
                assert run("return getComputedStyle(document.documentElement).colorScheme") == theme  # scroll bars, too
                assert run("return document.documentElement.scrollWidth") <= width, (name, width)
    assert errors(driver) == []


def test_findings_come_first_and_name_the_runs(show):
    run = show("three")
    found = run("return [...document.querySelectorAll('.finding')].map(each => [each.className, each.textContent])")
    assert [kind for kind, _ in found] == ["finding bad", "finding bad", "finding ok"]
    assert "collapsed-router" in found[0][1] and "layer 3: 14 experts received no token" in found[0][1]
    assert "slow-rank" in found[1][1] and "rank 5" in found[1][1] and "healthy" in found[2][1]
    assert run("return document.querySelector('.finding a').getAttribute('href')") == "#layers"
    assert run("return document.title") == "healthy, collapsed-router, slow-rank"
    run("document.querySelector('.finding a').click()")
    assert run("return document.getElementById('health').value") == "dead_experts"
    assert run("return document.getElementById('layers').getBoundingClientRect().top") < 100


def test_zoom_of_one_chart_is_that_of_all(show):
    run = show("three")
    scales = "return Object.values(dashboard.charts).map(each => [each.scales.x.min, each.scales.x.max])"
    before = run(scales)
    run("dashboard.setZoom(100, 200)")
    assert {tuple(each) for each in run(scales)} == {(100, 200)} and len(before) > 8
    run("dashboard.draw()")  # as when a live page has new data
    assert {tuple(each) for each in run(scales)} == {(100, 200)}
    run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert run(scales) == before


def test_zoom_of_a_chart_with_one_record_is_reset(show):
    run = show("single")
    scale = "return ['min', 'max'].map(each => dashboard.charts.loss.scales.x[each])"
    before = run(scale)
    run("dashboard.setZoom(0, 2); dashboard.setZoom(null)")
    assert run(scale) == before and before[0] < before[1]


def test_controls_change_what_is_drawn(show):
    run = show("collapsed")
    loss = "return dashboard.charts.loss.data[{}][{}]"
    plain, iterations = run(loss.format(1, 399)), run("return dashboard.charts.loss.data[0].length")
    set_control(run, "smoothing", 0.9)
    drawn = [run(f"return dashboard.charts.loss.data[{at}].filter(each => each != null)") for at in (1, 2)]
    assert iterations == 400 and drawn[0][399] == plain  # the unsmoothed line stays
    expected, weight, smoothed = 0.0, 0.0, []
    for value in drawn[0]:
        expected, weight = 0.9 * expected + 0.1 * value, 0.9 * weight + 0.1
        smoothed.append(expected / weight)
    assert drawn[1] == pytest.approx(smoothed)
    run("dashboard.view.smoothing = 0")
    set_control(run, "axis", "tokens", "onchange")
    assert run("return dashboard.charts.loss.scales.x.max") == 400 * 1_048_576
    set_control(run, "perplexity", True, "onchange", "checked")
    assert run(loss.format(1, 399)) == pytest.approx(2.718281828**plain)


def test_head_of_a_run_has_its_figures(show):
    run = show("collapsed")
    text = run("return document.querySelector('#runs .facts').textContent")
    times = ("ETA 2 min 44 s", "wall time 2 min 57 s", "goodput 92.0 %")
    for words in ("iteration 400 of 800 (50 %)", "tokens 419.4M", *times):
        assert words in text, text
    assert "on 1 node" not in run("return document.getElementById('runs').textContent")
    head = show("large")("return document.getElementById('runs').textContent")
    for words in ("256 ranks on 32 nodes", "node-1, node-2, node-3, ...", "moe-trainer 0.1.0"):
        assert words in head, words


def test_rates_of_a_cpu_have_a_unit_with_digits(show):
    run = show("cpu")
    table = "return [...document.querySelectorAll('#runs-table tr')].map(row => row.cells[row.cells.length - 3].textContent)"
    assert run(table) == ["GFLOP/s per rank", "18", "0.36"]
    chart = run("const each = dashboard.charts.tflops_per_gpu; return [each.series[1].label, each.data[1][0]]")
    assert chart == ["a: GFLOP/s per rank", 20]
    assert "360model MFLOP/s per rank" in show("one cpu")("return document.getElementById('figures').textContent")


def test_old_page_of_a_run_that_was_killed_does_not_say_running(show):
    run = show("silent")
    assert run("return document.querySelector('#runs .status').textContent").startswith("no sign of life since 2026-")
    assert "ETA" not in run("return document.querySelector('#runs .facts').textContent")
    assert "no sign of life" in run("return document.querySelector('.finding.bad').textContent")


def test_parts_of_an_iteration_are_stacked(show):
    run = show("sparse")
    parts = json.loads(run("return JSON.stringify(dashboard.data.runs[0].records.step_time_ms)"))
    stacked, total = run("return dashboard.charts.step_time.data.slice(1)"), [0.0] * 4
    for values, line in zip(parts.values(), reversed(stacked), strict=True):
        total = [before + value for before, value in zip(total, values)]
        assert line == pytest.approx(total)


def test_places_between_records_are_interpolated(show):
    """Tasks ran at iterations 10, 110, 210 and 310; records are of 100, 200, 300 and 400."""
    run = show("sparse")
    set_control(run, "axis", "tokens", "onchange")
    places = run("return dashboard.charts['tasks acc'].data[0]")
    assert places == pytest.approx([at * 1_048_576 for at in (100, 110, 210, 310)])


def test_map_of_the_ranks_is_relative_to_their_median(show):
    run = show("three")
    pixel = (
        "dashboard.view.theme = 'light'; dashboard.draw(); const map = dashboard.maps.rank_time_2, dense = devicePixelRatio || 1;"
        "const [x, y] = map.cell(arguments[0], 39); return [...map.canvas.getContext('2d').getImageData(x * dense, y * dense, 1, 1).data]"
    )
    assert min(run(pixel, 0)[:3]) > 225  # as fast as the median: neutral
    red, green, _, _ = run(pixel, 5)
    assert red > 150 and green < 80


def test_maps_are_measured_together(driver, show):
    """A look at a width after a change lays out the whole page, which takes seconds if each map looks."""
    run = show("twelve")
    driver.execute_cdp_cmd("Performance.enable", {})

    def layouts():
        metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(each["value"] for each in metrics if each["name"] == "LayoutCount")

    before = layouts()
    run("dashboard.draw()")
    assert layouts() - before < run("return Object.keys(dashboard.maps).length") == 48


def test_outliers_are_clipped_unless_asked_for(show):
    run = show("collapsed")
    assert run("return dashboard.charts.grad_norm.scales.y.max") < 5
    set_control(run, "clip", False, "onchange", "checked")
    assert run("return dashboard.charts.grad_norm.scales.y.max") > 8


def test_constants_are_no_charts(show):
    run = show("collapsed")
    assert {"dropped_tokens", "global_batch_size"}.isdisjoint(run("return Object.keys(dashboard.charts)"))
    assert "global batch size 256" in run("return document.querySelector('.constants').textContent")


def test_settings_are_searched_and_compared(show):
    rows = "return [...document.querySelectorAll('#settings + .grid tbody tr')].map(each => each.cells[0].textContent)"
    run = show("three")
    assert run(rows) == ["lr", "seed"]  # what differs
    set_control(run, "only-changed", False, "onchange", "checked")
    assert run(rows) == ["bf16", "lr", "num_layers", "seed", "swiglu"]
    set_control(run, "search-settings", "LAYER")
    assert run(rows) == ["num_layers"]


def test_maps_are_read_by_keyboard_and_as_tables(driver, show):
    run = show("collapsed")
    hint = press(run, "experts", "ArrowUp", "ArrowDown", "ArrowDown", "ArrowDown")
    assert hint.startswith("layer 3, expert 15: 0 tokens")
    run("document.querySelector('#loss + .grid details').open = true")
    wait_for_details(driver)
    rows = "return [...document.querySelectorAll('#loss + .grid details tbody tr')].map(each => each.cells.length)"
    cells = run(rows)
    assert len(cells) > 100 and set(cells) == {4}


def test_slow_rank_of_two_is_relative_to_the_other_one(show):
    words = press(show("two ranks"), "rank_time", "ArrowUp", "ArrowDown")
    ratio = float(words.split(", ")[-1].removesuffix(" x the median"))
    assert words.startswith("rank 1, iteration 400: ") and ratio > 1.5


def test_legend_has_the_newest_value_of_a_run_that_ends_earlier(show):
    run = show("two ranks")
    legend = "return [...dashboard.charts.loss.root.querySelectorAll('.u-value')].map(each => each.textContent)"
    newest = run("return dashboard.data.runs.map(each => each.records.series['lm loss'].at(-1))")
    shown = run(legend)
    assert all(f"{value:.5g}" in shown for value in newest) and "-" not in shown


def test_hostile_names_are_text(driver, show):
    run = show("hostile")
    assert run("return document.querySelectorAll('main img, header img').length") == 0
    assert NASTY in run("return document.body.textContent") and errors(driver) == []


def test_list_of_runs_compares_the_chosen_ones(show):
    run = show("list")
    assert run("return document.querySelectorAll('#list tbody tr').length") == 3
    assert "rank 5 is slow" in run("return document.querySelector('#list .worst-text.bad').textContent")
    assert run("return getComputedStyle(document.getElementById('controls')).display") == "none"  # of charts
    button = "return document.getElementById('compare').disabled"
    assert run(button)
    run("for (const at of [0, 1]) document.getElementById('choose-' + at).click()")
    assert not run(button)


def test_reports_are_links(show):
    run = show("list")
    link = "const each = document.querySelector('#reports + .grid a'); return [each.getAttribute('href'), each.textContent]"
    assert run(link) == ["report?file=all.html", NASTY]
    assert run("return document.querySelector('#sections a').textContent") == "Reports"
    assert not show("three")("return document.getElementById('reports')")


def test_large_page_stays_below_five_megabytes():
    assert len(render_page("large", sample_runs.large_run()).encode()) < 5e6


def test_older_metrics_show_what_they_have(show):
    run = show("dense")
    sections = run("return [...document.querySelectorAll('#sections a')].map(each => each.textContent)")
    assert sections[:2] == ["Loss", "Speed"] and "Routing" not in sections and "Settings" not in sections
    assert json.loads(run("return JSON.stringify(dashboard.maps)")) == {}


def test_each_metric_of_the_tasks_has_its_chart(show):
    run = show("three")
    drawn = """return Object.entries(dashboard.charts).filter(([name]) => name.startsWith("tasks "))
        .map(([name, chart]) => [name, chart.series.slice(1).map(each => each.label), chart.scales.y.max, chart.series[1].dash])"""
    found = {name: (labels, highest) for name, labels, highest, dash in run(drawn) if dash == []}  # the first is solid
    assert list(found) == ["tasks acc", "tasks word_perplexity", "tasks exact_match"]
    runs = ("healthy", "collapsed-router", "slow-rank")
    assert found["tasks acc"][0] == [f"{name}: arc_easy" for name in runs] and found["tasks acc"][1] < 1
    assert found["tasks word_perplexity"][1] > 80
    assert found["tasks exact_match"][0][:2] == [
        f"healthy: gsm8k, {name}" for name in ("strict-match", "flexible-extract")
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "count", "first", "stays"),
    [
        ("collapsed", 8, 1, "from rank 0 to rank 7: ", "on their rank"),
        ("large", 64, 4, "from rank 0-3 to rank 252-255: ", "within 4 ranks"),
    ],
)
def test_tokens_between_ranks_are_drawn_by_row(driver, show, name, ranks, count, first, stays):
    run = show(name)
    assert not run("return Object.keys(dashboard.maps).includes('between_ranks')")
    run("[...document.querySelectorAll('summary')].find(each => each.textContent == 'Show where tokens go').click()")
    wait_for_details(driver)
    between = run("return dashboard.data.runs[0].routing.between_ranks")
    tokens = between["tokens"][-1]
    assert between["ranks_per_row"] == count and len(tokens) == ranks
    assert press(run, "between_ranks", "ArrowUp", "ArrowUp").startswith(f"{first}{tokens[0][-1]:,} tokens")
    cards = "[...document.querySelectorAll('.card')].find(each => each.textContent.includes('Show where'))"
    stay = sum(row[at] for at, row in enumerate(tokens)) / sum(map(sum, tokens))
    assert f"{100 * stay:.3g} % stay {stays}" in run(f"return {cards}.textContent")
    assert errors(driver) == []


def test_table_of_a_map_with_a_slider_is_of_the_shown_iteration(driver, show):
    run = show("collapsed")
    loads = run("return dashboard.data.runs[0].routing.loads.tokens_per_expert")
    assert len(loads) > 1 and loads[0] != loads[-1]
    card = "dashboard.maps.experts.canvas.closest('.card')"
    run(f"{card}.querySelector('details summary').click()")
    for at in (-1, 0):
        if at == 0:
            run("const slider = dashboard.maps.experts.slider; slider.value = 0; slider.oninput()")
        wait_for_details(driver)
        cells = f"[...{card}.querySelectorAll('tbody tr')].map(each => [...each.cells].map(cell => cell.textContent))"
        rows = [[str(layer), *(f"{load:,}" for load in row)] for layer, row in enumerate(loads[at])]
        assert run(f"return {cells}") == rows
    assert errors(driver) == []
