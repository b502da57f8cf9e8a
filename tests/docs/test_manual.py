"""The manual: the generated flag reference, the pictures, and the site that MkDocs builds."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arguments.container import OPTIONS
from docs import browser
from scripts import draw_docs, flag_reference

ROOT = Path(__file__).resolve().parents[2]
WORDS = ROOT / "tests" / "data" / "manual_search.txt"
SEARCH = """
const [queries, done] = arguments;
const config = JSON.parse(document.getElementById("__config").textContent);
const worker = new Worker(new URL(config.search, new URL(config.base, location)).href);
const found = [];
worker.onmessage = ({ data }) => {
  if (data.type === 3) found.push(data.data.items.map((page) => page.map(({ location, score }) => ({ location, score }))));
  if (found.length === queries.length) done(found);
  else worker.postMessage({ type: 2, data: queries[found.length] });
};
const start = () =>
  typeof __index === "undefined"
    ? setTimeout(start, 50)
    : worker.postMessage({ type: 0, data: { ...__index, options: { suggest: false } } });
start();
"""
"""Asks the search worker of the open page, as its search box does: message types 0 (index), 2 (query) and 3 (result)."""


def test_flag_reference_has_every_flag_with_its_status():
    pages = flag_reference.pages()
    text = "\n".join(pages.values())
    for option in OPTIONS.values():
        if not option.hidden:
            assert f"### {option.spellings[0]} {{ #{flag_reference.anchor(option)} }}" in pages[option.section], (
                option.dest
            )
    assert text.count("\n- Status: ") == sum(not option.hidden for option in OPTIONS.values())


def test_flag_reference_entry_of_a_flag():
    entry = flag_reference.pages()["moe"].partition("### --moe-token-dispatcher-type {")[2].partition("\n### ")[0]
    for part in (
        "- Write: `--moe-token-dispatcher-type {allgather,alltoall,flex}`",
        "- Values: `allgather`, `alltoall`, `flex`",
        "- Default: `allgather`",
        "- Example: `--moe-token-dispatcher-type alltoall`",
        "- Status: acts",
        "- Needs: `--num-experts`.",
        '??? info "Checked"',
    ):
        assert part in entry, entry


def test_flag_reference_names_no_function_or_field():
    """Users see flags and values: `_` is in flags' underscore spelling on the first page, and in values."""
    functions = {
        name
        for path in (ROOT / "arguments" / "rules").glob("*.py")
        for name in re.findall(r"^def (\w+_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    pages = {name: page.replace("\\_", "_") for name, page in flag_reference.pages().items()}
    for name in pages.keys() - {"index", "other"}:
        words = set(re.findall(r"(?<![\w.-])\w+_\w+", pages[name]))
        assert not words & functions, words & functions
        assert "arguments/" not in pages[name] and "field `" not in pages[name]


def test_flags_with_values_have_an_example():
    valued = [o for o in OPTIONS.values() if o.takes != 0 and not o.hidden]
    text = "\n".join(flag_reference.pages().values())
    assert text.count("\n- Values: ") == len(valued)
    assert text.count("\n- Example: ") > 0.7 * len(valued)


@pytest.mark.parametrize(
    ("dest", "status"),
    [
        ("moe_router_topk", "acts"),
        ("flash_attention_version", "accepted, has no effect"),
        ("mtp_hsm", "not implemented: rejected by name"),
        ("batch_size", "old name"),
        ("spec", "acts"),
    ],
)
def test_flag_status_of_the_reference(dest, status):
    assert flag_reference.status(OPTIONS[dest])[0] == status


def test_pictures_of_the_manual_are_up_to_date():
    assert not draw_docs.stale_pictures(), "draw them again: python scripts/draw_docs.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built manual."""
    if not (importlib.util.find_spec("mkdocs") and importlib.util.find_spec("material")):
        pytest.skip("mkdocs and mkdocs-material are not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("manual") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_manual_builds_without_dead_links_and_network(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text, page
    for page in ("records/cpu_small_fp32.html", "contributing.html", "changelog.html"):
        assert (site / page).exists()
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = [entry["location"] for entry in index["docs"] if "--moe-router-topk" in entry["title"]]
    assert "flags/moe.html#moe-router-topk" in found


@pytest.mark.skipif(not browser.is_available(), reason=browser.MISSING)
def test_manual_search_in_a_browser(site):
    """Opened from disk: pages load, search finds the flag by either spelling, and the console shows nothing."""
    with browser.chromium() as driver:
        for page in ("parallelism.html", "flags/index.html", "index.html"):
            driver.get((site / page).as_uri())
            assert not driver.execute_script("return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        for query in ("moe_router_topk", "--moe-router-topk"):
            driver.get((site / "index.html").as_uri())
            driver.find_element("css selector", ".md-search__input").click()
            driver.find_element("css selector", ".md-search__input").send_keys(query)
            links = browser.wait_for_elements(driver, ".md-search-result__link[href*='#moe-router-topk']")
            assert links, query
        # The search worker warns about a flag that is typed up to a dash.
        assert [entry for entry in driver.get_log("browser") if "workers/search" not in entry["message"]] == []


def search_words() -> dict[str, list[str]]:
    """Heading of the page of tasks -> what people type to find it."""
    lines = [line for line in WORDS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {heading: words for heading, *words in (line.split(" | ") for line in lines)}


def test_every_task_of_the_manual_has_words_to_search_for():
    page = (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert headings == list(search_words()), WORDS
    assert len(headings) >= 40 and all(search_words().values())


def shown(page: list[dict]) -> list[str]:
    """What the list of results shows of a page: itself, and sections that are not below the first in score."""
    return [hit["location"] for hit in page if "#" not in hit["location"] or hit["score"] >= page[0]["score"]]


@pytest.mark.skipif(not browser.is_available(), reason=browser.MISSING)
def test_manual_search_finds_the_task_among_the_first_three_hits(site):
    """Asked with everyday words; design notes, records and rejected flags do not come before pages that answer."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    sections = {
        html.unescape(entry["title"]): entry["location"]
        for entry in index["docs"]
        if "how_do_i.html#" in entry["location"]
    }
    wanted = {query: sections[heading] for heading, queries in search_words().items() for query in queries}
    with browser.chromium() as driver:
        driver.get((site / "index.html").as_uri())
        driver.set_script_timeout(300)
        results = dict(zip(wanted, driver.execute_async_script(SEARCH, list(wanted)), strict=True))
    hits = {query: [location for page in pages[:3] for location in shown(page)] for query, pages in results.items()}
    missed = {query: hits[query] for query, location in wanted.items() if location not in hits[query]}
    assert not missed, missed
    for query in ("idle experts", "change tokenizer", "watch a run"):
        assert not [hit for hit in hits[query] if hit.startswith(("design/", "records/", "changelog", "refused"))], (
            query
        )
