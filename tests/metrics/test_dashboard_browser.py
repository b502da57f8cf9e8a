"""dashboard.html of a real run, in a headless Chromium: it renders, logs nothing on the console, and shows the figures of metrics.jsonl."""

import importlib.util
import json
import shutil
import socket

import pytest
from training.forked import pretrain
from training.tiny import MOCK, TINY

from moe_trainer.metrics.dashboard import open_dashboard

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
REASON = next(
    (
        text
        for text, lacking in (
            ("no Chromium here (apt-get install chromium)", CHROMIUM is None),
            ("no chromedriver here (apt-get install chromium-driver)", DRIVER is None),
            ("selenium is not installed (pip install selenium)", importlib.util.find_spec("selenium") is None),
        )
        if lacking
    ),
    None,
)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# evaluation after iterations 4 and 8; experts over two ranks, and a bias that moves
JOB = [
    *TINY,
    *MOCK,
    "--train-iters",
    "8",
    "--eval-interval",
    "4",
    "--eval-iters",
    "1",
    "--moe-per-layer-logging",
    "--split",
    "90,9,1",
    "--expert-model-parallel-size",
    "2",
    "--moe-token-dispatcher-type",
    "alltoall",
    "--moe-router-score-function",
    "sigmoid",
    "--moe-router-enable-expert-bias",
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    found, _ = pretrain(JOB, folder, 2)
    return found, folder / "dashboard.html"


@pytest.fixture(scope="module")
def browser(records, tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1800",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(60)
    driver.get(records[1].as_uri())
    yield driver
    driver.quit()


def test_dashboard_loads_without_console_messages_and_network(records, browser):
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    # a fresh Chromium opens a page, too
    urls = {
        each["params"]["request"]["url"]
        for each in asked
        if each["method"] == "Network.requestWillBeSent" and each["params"]["documentURL"] == records[1].as_uri()
    }
    assert len(urls) >= 1 and all(url.startswith(("file:", "data:")) for url in urls), urls


def test_dashboard_curves_equal_the_metrics_file(records, browser):
    steps = [record for record in records[0] if "lm loss" in record and "validation" not in record]
    checks = [record for record in records[0] if record.get("validation") == "validation"]
    charts = browser.execute_script(
        "return Object.fromEntries(Object.entries(dashboard.charts).map(([name, chart]) => [name, chart.data]))"
    )
    x = [step["iteration"] for step in steps]
    assert x == list(range(1, 9)) and len(checks) >= 2
    unit = browser.execute_script("return dashboard.charts.tflops_per_gpu.series[1].label").split("/")[0]
    factor = {"TFLOP": 1, "GFLOP": 1e3, "MFLOP": 1e6}[unit]
    for name, scale in (("tokens_per_s", 1), ("tflops_per_gpu", factor), ("learning_rate", 1), ("grad_norm", 1)):
        assert charts[name] == [x, pytest.approx([step[name] * scale for step in steps], rel=1e-4)], name
    validation = {record["iteration"]: record["lm loss"] for record in checks}
    test = {record["iteration"]: record["lm loss"] for record in records[0] if record.get("validation") == "test"}
    assert charts["loss"] == [
        x,
        pytest.approx([step["lm loss"] for step in steps], rel=1e-7),
        [validation.get(at) for at in x],
        [test.get(at) for at in x],
    ]
    layers = browser.execute_script("return dashboard.data.runs[0].routing.metrics")
    for name in ("load_max_over_mean", "load_entropy", "dead_experts", "bias_drift", "rank_max_over_mean"):
        expected = [value for step in steps for value in step["routing"][name]]
        assert [value for row in layers[name] for value in row] == pytest.approx(expected, rel=1e-3), name
    between = browser.execute_script("return dashboard.data.runs[0].routing.between_ranks")
    assert between["tokens"] == [step["routing"]["between_ranks"]["tokens"] for step in steps]
    costs = [step["routing"]["straggler_cost"] * 100 for step in steps]
    assert charts["straggler_cost"] == [x, pytest.approx(costs, rel=1e-4)]
    assert "global_batch_size" not in charts and "mfu" not in charts  # one is constant, a CPU has no peak


def test_every_dashboard_plot_is_drawn(browser):
    inks = browser.execute_script("""
        return Object.fromEntries(Object.entries(dashboard.charts).map(([name, chart]) => {
            const {width, height} = chart.ctx.canvas, pixels = chart.ctx.getImageData(0, 0, width, height).data;
            let colours = 0;
            for (let at = 0; at < pixels.length; at += 4)  // a colour, not a grey: axes and text are grey
                colours += pixels[at + 3] > 0 && Math.max(...pixels.slice(at, at + 3)) - Math.min(...pixels.slice(at, at + 3)) > 40;
            return [name, colours];
        }))""")
    assert len(inks) >= 8 and all(count > 50 for count in inks.values()), inks


def test_heat_map_shows_expert_loads_of_any_iteration(records, browser):
    steps = {record["iteration"]: record for record in records[0] if "routing" in record}
    colour = """
        const map = dashboard.maps.experts, [x, y] = map.cell(...arguments), dense = window.devicePixelRatio || 1;
        return [...map.canvas.getContext("2d").getImageData(x * dense, y * dense, 1, 1).data];"""
    shown = browser.execute_script("return dashboard.data.runs[0].routing.loads.iteration")
    for at in (len(shown) - 1, 0):
        browser.execute_script(
            "const each = dashboard.maps.experts.slider; each.value = arguments[0]; each.oninput()", at
        )
        for layer, loads in enumerate(steps[shown[at]]["routing"]["tokens_per_expert"]):
            for expert, load in enumerate(loads):
                red, green, blue, _ = browser.execute_script(colour, layer, expert)
                mean = sum(loads) / len(loads)
                if load == 0:
                    assert max(red, green, blue) < 40
                elif load == mean:
                    assert (red, green, blue) == (247, 247, 247)
                else:
                    assert (red > blue) == (load > mean), (layer, expert, load, mean)


def test_dashboard_header_shows_the_state_of_the_run(records, browser):
    from selenium.webdriver.common.by import By

    head = browser.find_element(By.ID, "runs").text
    for words in (
        "finished",
        "8 of 8 (100 %)",
        "2 ranks",
        "EP 2",
        socket.gethostname(),
        "moe-trainer ",
        "layers",
        "experts",
        "goodput",
    ):
        assert words in head, words
    last = [record for record in records[0] if "routing" in record][-1]
    assert f"{last['lm loss']:.5g}" in browser.find_element(By.ID, "figures").text
    settings = browser.find_element(By.CSS_SELECTOR, "#settings + .grid")
    assert "num_experts" in settings.get_attribute("textContent")


def test_dashboard_fits_a_phone_and_shows_events(records, browser, tmp_path):
    """The same run with a resume after iteration 3 and a skipped iteration 6."""
    lines = [dict(record) for record in records[0]]
    lines[3]["resumed_from"] = 3
    lines[7]["rejected"] = [{"iteration": 6, "samples": [20, 24], "because": "the loss is nan"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    open_dashboard(tmp_path / "metrics.jsonl").write()
    browser.get_log("browser")  # what reading pixels back has said
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        browser.get((tmp_path / "dashboard.html").as_uri())
        assert browser.get_log("browser") == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        events = browser.execute_script("return document.querySelector('#events + .grid').textContent")
        assert "resumed after iteration 3" in events and "iteration 6 skipped: the loss is nan" in events
        # a dashed line is at iteration 3 of the loss: ink where the chart without events has none
        ink = """
            const plot = dashboard.charts.tokens_per_s, x = Math.round(plot.valToPos(3, "x", true)), {top, height} = plot.bbox;
            const pixels = plot.ctx.getImageData(x - 1, top, 3, height).data, dark = [];
            for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] > 120 && pixels[at] < 140) dark.push(at);
            return dark.length;"""
        assert browser.execute_script(ink) > 60
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
