"""A headless Chromium, where one is installed."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = "needs chromium, chromedriver and selenium"


def is_available() -> bool:
    """Return whether a browser can be started."""
    return bool(CHROMIUM and DRIVER and importlib.util.find_spec("selenium"))


@contextlib.contextmanager
def chromium() -> Iterator:
    """Start a browser; its driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def wait_for_elements(driver, selector: str, timeout_s: float = 30.0) -> list:
    """Wait until a selector matches; the elements."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(driver, timeout_s).until(lambda driver: driver.find_elements("css selector", selector))
