"""Reports in a real browser: texts do not overlap in its fonts, pages fit their window, both themes are readable."""

import pytest
from docs.browser import MISSING, chromium, is_available
from metrics.sample_runs import write_eight_runs

from moe_trainer.commands.compare import compare
from moe_trainer.drawing.report_page import Figure, write_report
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.plan_pictures import plan_figures
from moe_trainer.parallel.grid import make_layout
from scripts.draw_docs import PICTURES
from scripts.explain import groups_figures

pytestmark = pytest.mark.skipif(not is_available(), reason=MISSING)
PLAN = (
    "--preset mixtral_8x7b --mock-data --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --world-size 64 "
    "--hardware h100 --global-batch-size 64 --dry-run"
).split()
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
  const area = svg.viewBox.baseVal;
  for (const [index, [text, a]] of texts.entries()) {
    if (a.x < -1 || a.x + a.width > area.width + 1 || a.y + a.height > area.height + 3) found.push(text + ' is outside');
    for (const [other, b] of texts.slice(index + 1))
      if (a.x + 1 < b.x + b.width && b.x + 1 < a.x + a.width && a.y + 3 < b.y + b.height && b.y + 3 < a.y + a.height)
        found.push(text + ' over ' + other);
  }
}
return found;
"""
CONTRAST = """
const number = color => color.match(/[0-9.]+/g).slice(0, 3).map(each => each / 255)
  .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
const light = color => { const [r, g, b] = number(color); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const style = (element, name) => getComputedStyle(element)[name];
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const svg = document.querySelector('svg');
const paper = light(style(svg.querySelector('rect.fill-paper'), 'fill'));
return [ratio(light(style(svg.querySelector('text.fill-ink'), 'fill')), paper), paper,
        ratio(light(style(document.body, 'color')), light(style(document.body, 'backgroundColor')))];
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    figures = [*plan_figures(plan_of_flags(PLAN)), *groups_figures(make_layout(1024, tp=2, pp=8, ep=64), "h100")]
    figures += [Figure(name, draw()) for name, draw in PICTURES.items() if not name.startswith(("archi", "training"))]
    write_report(path, "Pictures", "command " * 60, figures, ["a long line " * 40])
    return path


def test_pictures_in_a_browser(page):
    with chromium() as driver:
        for theme, is_dark in (("light", False), ("dark", True)):
            feature = {"name": "prefers-color-scheme", "value": theme}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            for width in (1600, 1000, 420):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                driver.get(page.as_uri())
                assert driver.execute_script("return document.documentElement.scrollWidth") <= width, (
                    "only figures scroll"
                )
                assert driver.execute_script(OVERLAPS) == []
            picture, paper, text = driver.execute_script(CONTRAST)
            assert picture > 7 and text > 7 and (paper < 0.1) == is_dark
        assert driver.get_log("browser") == []


def test_comparison_of_runs_in_a_browser(tmp_path):
    """A document of eight runs: headings, lists and tables are elements, and only tables and pictures scroll."""
    write_eight_runs(tmp_path)
    folders = [str(path) for path in sorted(tmp_path.iterdir())]
    title, lines, figures = compare(folders)
    path = tmp_path / "report.html"
    write_report(path, title, "compare " + " ".join(folders), figures, lines)
    with chromium() as driver:
        for width in (390, 1280, 1920):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(path.as_uri())
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            assert driver.execute_script(OVERLAPS) == []
        count = "return document.querySelectorAll(arguments[0]).length"
        assert [driver.execute_script(count, each) for each in ("h1", "table", "figure", "pre")] == [1, 3, 1, 1]
        shown = driver.execute_script("return document.body.innerText")
        assert not any(each in shown for each in ("| ", "## ", "`", "\n- "))
        assert driver.get_log("browser") == []
