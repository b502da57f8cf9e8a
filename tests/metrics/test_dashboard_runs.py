"""The dashboard's table of runs, its tooltips, its downloads and its address, in a headless Chromium."""

import csv
import io

import pytest
from docs.browser import MISSING, is_available
from metrics import sample_runs
from metrics.test_dashboard_page import errors, screen, set_control

pytestmark = pytest.mark.skipif(not is_available(), reason=MISSING)
PAGES = {
    "states": sample_runs.list_of_states,
    **{f"{count} runs": lambda count=count: sample_runs.many_runs(count) for count in (1, 3, 8, 20)},
}
NAMES = "return [...document.querySelectorAll('#runs-table tbody th')].map(each => each.textContent)"
COUNTS = "return document.getElementById('runs-shown').textContent"


def click(run, name):
    run("document.getElementById(arguments[0]).click()", name)


@pytest.mark.parametrize("count", (1, 3, 8, 20))
def test_loss_chart_is_on_the_first_screen(driver, show, count):
    with screen(driver, 1280, 700):
        run = show(f"{count} runs")
        box = run(
            "const {top, bottom, height} = dashboard.charts.loss.over.getBoundingClientRect(); return {top, bottom, height}"
        )
        assert box["top"] > 0 and box["bottom"] <= 700 and box["height"] >= 150, box
        assert run("const {x, y} = dashboard.charts.loss.over.getBoundingClientRect(); "
                   "return dashboard.charts.loss.over.contains(document.elementFromPoint(x + 9, y + 9))")  # fmt: skip
        if 1 < count <= 8:  # all of them, without scrolling
            assert run(
                "const each = document.getElementById('runs-table'); return each.scrollHeight <= each.clientHeight"
            )


def test_list_alone_tells_the_states_of_runs_apart_and_the_worst_are_first_and_red(show):
    run = show("states")
    rows = run(
        "return [...document.querySelectorAll('#runs-table tbody tr')].map(row => [row.cells[1].textContent, row.cells[2].textContent, row.cells[3].textContent])"
    )
    order = [row[0] for row in rows]  # equally urgent ones as the server has them
    assert order == ["stalled", "nan", "diverged", "slow-rank", "collapsed", "killed", "finished", "healthy"]
    assert len({tuple(row[1:]) for row in rows}) == 8
    shown = {name: state for name, state, _ in rows}
    assert (
        shown["nan"] == "failed"
        and shown["diverged"] == "running bad loss"
        and shown["slow-rank"] == "running slow rank"
    )
    assert (
        shown["collapsed"] == "running bad routing"
        and shown["healthy"] == "running"
        and shown["finished"] == "finished"
        and shown["stalled"] == "no sign of life"
    )
    red = run(
        "return [...document.querySelectorAll('#runs-table tbody tr')].map(row => [...row.querySelectorAll('.status')].some(each => { const [r, g, b] = getComputedStyle(each).color.match(/\\d+/g).map(Number); return r > 150 && g < 160 && b < 160; }))"
    )
    assert red == [True] * 5 + [False] * 3


def test_list_shows_unknown_losses_whole_numbers_and_the_start_of_long_findings(driver, show):
    with screen(driver, 1280, 700):
        run = show("states")
        row = "return [...[...document.querySelectorAll('#runs-table tbody tr')].find(each => each.textContent.includes('nan')).cells].map(each => each.textContent)"
        assert run(row)[5:7] == ["-", "-"]  # training and validation loss
        run(
            "const [first] = dashboard.data.list; first.finding = {severity: 'bad', card: 'events', text: 'far too long '.repeat(99)}; first.settings.num_layers = 1e30; dashboard.draw()"
        )
        heights = run("return [...document.querySelectorAll('#runs-table tbody tr')].map(each => each.offsetHeight)")
        assert max(heights) < 4 * min(heights)
        assert "1e+30" in run("return document.querySelector('#runs-table').textContent")


def test_list_sorts_by_any_column_and_says_so(show):
    run = show("states")
    for column, expected in (
        ("validation", ["finished", "healthy", "slow-rank", "collapsed", "killed", "diverged", "stalled", "nan"]),
        ("name", sorted(each["name"] for each in sample_runs.list_of_states()["list"])),
    ):
        click(run, f"sort-{column}")
        found = run(NAMES)
        assert found[:6] == expected[:6] and set(found) == set(expected)
        aria = "return [...document.querySelectorAll('#runs-table th[aria-sort]')].map(each => [each.firstChild.id, each.getAttribute('aria-sort')])"
        assert run(aria) == [[f"sort-{column}", "ascending"]]
        assert run("return document.activeElement.id") == f"sort-{column}"
        click(run, f"sort-{column}")
        assert run(aria) == [[f"sort-{column}", "descending"]]
        known = 6 if column == "validation" else 8  # what is unknown stays last
        assert run(NAMES)[:known] == expected[:known][::-1]
    click(run, "sort-setting-lr")
    assert run(NAMES)[-1] == "diverged"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("EXPERTS", {"collapsed"}),
        ("lr=10", {"diverged"}),
        ("--num-layers=6", {"killed"}),
        ("num_layers!=4 state=failed", {"nan"}),
        ("validation<3.65", {"finished", "healthy"}),
        ("loss>=5 optimizer=ad*", {"stalled", "diverged"}),
        ("loss<=3.3", {"finished", "slow-rank"}),  # not that without a loss
        ("optimizer=ad", set()),
        ("no_such_setting=1", set()),
        ("", {each["name"] for each in sample_runs.list_of_states()["list"]}),
    ],
)
def test_list_filters_by_text_and_by_settings(show, words, names):
    run = show("states")
    set_control(run, "filter-runs", words)
    assert set(run(NAMES)) == names
    assert run(COUNTS).startswith("8 runs" if len(names) == 8 else f"{len(names)} of 8 runs")
    if not names:
        assert "No run fits the filter" in run("return document.getElementById('list').textContent")


def test_list_has_a_column_for_each_setting_that_differs(show):
    run = show("states")
    columns = "return [...document.querySelectorAll('#runs-table thead th.setting')].map(each => each.textContent)"
    assert run(columns) == ["lr", "num_layers", "seed"]  # not optimizer, which is equal, nor save, which is a file's
    set_control(run, "filter-runs", "num_layers=4")
    assert run(columns) == ["lr", "seed"]


def test_list_groups_seeds(show):
    run = show("states")
    click(run, "group-seeds")
    groups = run(
        "return [...document.querySelectorAll('#runs-table tr.group')].map(row => [...row.cells].map(each => each.textContent))"
    )
    assert len(groups) == 1 and groups[0][1].startswith("3 seeds of ")
    assert groups[0][5:7] == ["3.3 \u00b1 0.2", "3.5 \u00b1 0.26"]  # 3.1, 3.5, 3.3 and 3.2, 3.6, 3.7
    members = run("return [...document.querySelectorAll('#runs-table tr.member th')].map(each => each.textContent)")
    assert sorted(members) == ["finished", "healthy", "slow-rank"] and len(run(NAMES)) == 9
    run("document.querySelector('tr.group input').click()")
    assert run("return [...dashboard.view.picked].sort()") == sorted(members)


def test_list_chooses_all_that_fit_the_filter_or_none(driver, show):
    from selenium.webdriver.support.wait import WebDriverWait

    run = show("states")
    disabled = "return document.getElementById('compare').disabled"
    set_control(run, "filter-runs", "num_layers=4")
    click(run, "choose-all")
    assert "4 runs chosen, at most 3 can be compared" in run(COUNTS) and run(disabled)
    row = [each["name"] for each in sample_runs.list_of_states()["list"]].index("diverged")
    click(run, f"choose-{row}")
    assert run("return document.getElementById('choose-all').indeterminate") and not run(disabled)
    click(run, "compare")
    wanted = "?compare=1&run=finished&run=healthy&run=slow-rank"
    WebDriverWait(driver, 60).until(lambda driver: driver.execute_script("return location.search") == wanted)
    run = show("states", "#pick=nan&pick=killed")
    assert not run(disabled)
    click(run, "choose-all")
    click(run, "choose-all")
    assert run("return dashboard.view.picked.size") == 0 and run(disabled)


def test_runs_of_a_page_are_hidden_from_its_charts(show):
    run = show("3 runs")
    lines = "return dashboard.charts.tokens_per_s.series.slice(1).map(each => [each.label, each._stroke])"
    before = run(lines)
    assert [name for name, _ in before] == [f"run-{at}: tokens per s" for at in range(3)]
    click(run, "choose-1")
    assert run(lines) == [before[0], before[2]]  # each keeps its color
    assert "charts show 2" in run(COUNTS)
    click(run, "choose-all")
    assert len(run(lines)) == 3
    click(run, "choose-all")
    assert run("return Object.keys(dashboard.charts)") == []
    assert "No run is chosen" in run("return document.getElementById('charts').textContent")


def test_tooltip_has_the_values_of_all_runs_at_the_pointer(driver, show):
    from selenium.webdriver.common.action_chains import ActionChains

    run = show("3 runs")
    hint = "const each = document.getElementById('hint'), {left, top, right, bottom} = each.getBoundingClientRect(); return each.hidden ? null : {text: each.textContent, rows: [...each.querySelectorAll('tr')].map(row => [row.cells[0].textContent, row.cells[1].textContent]), left, top, right, bottom}"
    driver.execute_script("dashboard.charts.loss.over.scrollIntoView({block: 'center'})")
    over = run("return dashboard.charts.loss.over")
    ActionChains(driver).move_to_element(over).perform()
    found = run(hint)
    at = run("return dashboard.charts.loss.cursor.idx")
    x = run("return dashboard.charts.loss.data[0]")[at]
    assert found["text"].startswith(f"iteration {x}") and 100 < x < 300
    values = dict(found["rows"])
    runs = run("return dashboard.data.runs")
    for each in runs:
        place = each["records"]["iteration"].index(x)
        assert values[f"{each['name']}: lm loss"] == f"{each['records']['series']['lm loss'][place]:.5g}"
        earlier = [one["lm loss"] for one in each["validations"] if one["iteration"] <= x]
        assert values[f"{each['name']}: validation"] == f"{earlier[-1]:.5g}"
    numbers = [float(value) for _, value in found["rows"]]
    assert numbers == sorted(numbers, reverse=True) and len(numbers) == 9
    box = run(
        "const {left, right, top, bottom} = dashboard.charts.loss.over.getBoundingClientRect(); return [(left + right) / 2, (top + bottom) / 2]"
    )
    assert min(abs(found["left"] - box[0]), abs(found["right"] - box[0])) < 40
    assert (
        found["top"] >= 0
        and found["bottom"] <= run("return innerHeight")
        and found["right"] <= run("return innerWidth")
    )
    ActionChains(driver).move_to_element(driver.find_element("id", "title")).perform()
    assert run(hint) is None
    assert errors(driver) == []


def test_chart_is_read_by_arrow_keys(show):
    run = show("1 runs")
    press = "const each = dashboard.charts.loss.root.parentNode; each.focus(); each.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], cancelable: true})); return [document.activeElement === each, document.getElementById('hint').textContent]"
    newest = run("return dashboard.data.runs[0].records.series['lm loss'].at(-1)")
    has_focus, words = run(press, "ArrowLeft")
    assert has_focus and words.startswith("iteration 400") and f"{newest:.5g}" in words
    assert run(press, "ArrowLeft")[1].startswith("iteration 393")


def saved(driver, selector):
    """Click a button that downloads: the name of the file, its type, and its bytes as text of Latin-1."""
    return driver.execute_async_script(
        """
        const [selector, done] = arguments, create = URL.createObjectURL, click = HTMLAnchorElement.prototype.click;
        let blob = null;
        URL.createObjectURL = (found) => { blob = found; return "data:,"; };
        HTMLAnchorElement.prototype.click = function () {
            URL.createObjectURL = create;
            HTMLAnchorElement.prototype.click = click;
            const reader = new FileReader();
            reader.onload = () => done([this.download, blob.type, reader.result]);
            reader.readAsBinaryString(blob);
        };
        document.querySelector(selector).click();""",
        selector,
    )


def test_every_drawing_has_its_numbers_as_csv_and_its_picture(driver, show):
    run = show("3 runs")
    drawings = run("return Object.keys(dashboard.charts).length + Object.keys(dashboard.maps).length")
    for kind in ("csv", "png", "full-screen"):
        assert run("return document.querySelectorAll('button.' + arguments[0]).length", kind) == drawings > 10
    set_control(run, "smoothing", 0.9)  # the file has what was recorded
    name, kind, content = saved(driver, "#loss + .grid button.csv")
    assert (name, kind) == ("runs-loss.csv", "text/csv")
    head, *rows = csv.reader(io.StringIO(content))
    runs = run("return dashboard.data.runs")
    assert head[0] == "iteration" and len(rows) == 60 and all(len(row) == len(head) == 10 for row in rows)
    for each in runs:
        column = head.index(f"{each['name']}: lm loss")
        assert [float(row[column]) for row in rows] == each["records"]["series"]["lm loss"]
        checks = {one["iteration"]: one["lm loss"] for one in each["validations"]}
        column = head.index(f"{each['name']}: validation")
        assert {int(row[0]): float(row[column]) for row in rows if row[column]} == checks
    name, kind, content = saved(driver, "#loss + .grid button.png")
    assert (name, kind) == ("runs-loss.png", "image/png") and content.startswith("\x89PNG") and len(content) > 5000
    name, kind, content = saved(driver, ".drawing-tools:has(#full-map-experts) .csv")
    assert name == "runs-map-experts.csv" and content.startswith("layer,expert 0,expert 1,")
    assert errors(driver) == []


def test_drawing_fills_the_window_until_escape(driver, show):
    run = show("3 runs", "#zoom=100,200")
    for name, size in (
        ("loss", "dashboard.charts.loss.ctx.canvas"),
        ("map-rank_time", "dashboard.maps.rank_time.canvas"),
    ):
        height = f"return {size}.getBoundingClientRect().height"
        before = run(height)
        click(run, f"full-{name}")
        assert run(
            "const {left, top, width, height} = document.querySelector('.full').getBoundingClientRect(); return [left, top, width >= innerWidth - 20, height >= innerHeight - 1]"
        ) == [0, 0, True, True]
        assert run(height) > before
        run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        assert run("return document.querySelector('.full')") is None and run(height) == before
        assert run("return dashboard.view.zoom") == [100, 200]  # the next Escape resets it
    assert errors(driver) == []


def test_address_holds_what_is_shown_and_restores_it(show):
    run = show("3 runs")
    assert run("return location.hash") == ""
    run("dashboard.setZoom(100, 200)")
    click(run, "choose-1")
    set_control(run, "filter-runs", "lr>1e-4 run")
    click(run, "sort-loss")
    click(run, "sort-loss")
    set_control(run, "smoothing", 0.5)
    set_control(run, "log-y", True, "onchange", "checked")
    run("document.querySelector('#sections a').click()")  # a link within the page leaves it as it is
    address, rows = run("return location.hash"), run(NAMES)
    run = show("3 runs", address)
    assert run("return location.hash") == address and run(NAMES) == rows
    assert run("return [dashboard.charts.loss.scales.x.min, dashboard.charts.loss.scales.x.max]") == [100, 200]
    labels = run("return dashboard.charts.tokens_per_s.series.slice(1).map(each => each.label)")
    assert labels and not any("run-1" in each for each in labels) and any("(unsmoothed)" in each for each in labels)
    controls = "return ['filter-runs', 'smoothing'].map(each => document.getElementById(each).value).concat(document.getElementById('log-y').checked)"
    assert run(controls) == ["lr>1e-4 run", "0.5", True]
    assert run("return document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert "zoom" not in run("return location.hash") and "filter" in run("return location.hash")


@pytest.mark.parametrize(
    "address", ["#loss", "#zoom=5,x&axis=weeks&smoothing=7&sort=nothing&hide=other", "#zoom=300,100", "#%"]
)
def test_address_that_says_nothing_is_harmless(driver, show, address):
    run = show("3 runs", address)
    assert run("return [dashboard.view.zoom, dashboard.view.axis]") == [None, "iteration"]
    assert len(run("return Object.keys(dashboard.charts)")) > 8 and errors(driver) == []


def test_run_that_diverged_does_not_widen_the_axis(show):
    run = show("8 runs")
    highest = "return dashboard.charts.loss.scales.y.max"
    assert run(highest) < 10
    set_control(run, "clip", False, "onchange", "checked")
    assert run(highest) > 400


def test_iterations_of_an_axis_are_whole(show):
    run = show("3 runs", "#zoom=10,12")
    assert run("return dashboard.charts.loss.axes[0]._splits.every(Number.isInteger)")
