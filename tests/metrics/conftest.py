"""A browser, and the pages of a module in it."""

import pytest
from docs.browser import chromium

from moe_trainer.metrics.dashboard import render_page


@pytest.fixture(scope="module")
def driver():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def show(request, driver, tmp_path_factory):
    """Open a page of the module's PAGES, at an address; returns what runs JavaScript in it."""
    folder = tmp_path_factory.mktemp("pages")

    def opened(name: str, address: str = ""):
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(render_page(name, request.module.PAGES[name]()), encoding="utf-8")
        driver.get("about:blank")  # another address of the open page would not load it
        driver.get_log("browser")
        driver.get(path.as_uri() + address)
        return driver.execute_script

    return opened
