"""Looks at a built site in a headless browser: ``site_in_browser.py build/docs --pictures FOLDER``.

It serves the site on this machine and opens every page in Chromium, at the widths of a desktop, a laptop and a phone.
It fails for an error in the browser's console, for a file that is not there, for a page that is wider than the screen,
and for a search that does not find what it should. The pictures are for a person to look at.

It needs Chromium, its driver and selenium: ``apt-get install chromium chromium-driver``, ``pip install selenium``.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SCREENS = {"desktop": (1680, 1050), "laptop": (1280, 900), "phone": (390, 844)}
#: What is searched for, and a page that has to be among the results.
SEARCHES = {
    "sliding_window": "operations/flash_attention.html",
    "heuristic_cfg": "hooks.html",
    "EJKERNEL_CACHE_DIR": "environment-variables.html",
    "policy_override": "reference/ejkernel_core.html",
}
SECONDS = 20


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and remembers what it did not find."""

    missing: list[str] = []

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.missing.append(f"{self.path}: {code}")
        super().send_error(code, message, explain)


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of the site on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextmanager
def browser(size: tuple[int, int]) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    width, height = size
    # A window cannot be as narrow as a phone, so the screen of one is emulated.
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield driver
    finally:
        driver.quit()


def faults_of_page(driver: webdriver.Chrome, page: str) -> Iterator[str]:
    for entry in driver.get_log("browser"):
        if entry["level"] in ("SEVERE", "WARNING"):
            yield f"{page}: the console says {entry['message']}"
    overflow = driver.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    if overflow > 0:
        yield f"{page}: it is {overflow} pixels wider than the screen"
    size = driver.execute_script("return getComputedStyle(document.querySelector('article')).fontSize")
    if float(size.removesuffix("px")) < 14:
        yield f"{page}: its text has {size}"


def faults_of_search(driver: webdriver.Chrome, address: str) -> Iterator[str]:
    for query, page in SEARCHES.items():
        driver.get(f"{address}/search.html?q={query}")
        try:
            WebDriverWait(driver, SECONDS).until(
                lambda d, page=page: any(
                    page in (link.get_attribute("href") or "")
                    for link in d.find_elements(By.CSS_SELECTOR, "#search-results li a")
                )
            )
        except TimeoutException:
            yield f"the search for {query} does not find {page}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the first page")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    pages = [str(file.relative_to(root)) for file in sorted(root.glob("**/*.html")) if file.name != "search.html"]
    faults, start = [], time.monotonic()
    with served(root) as address:
        for name, size in SCREENS.items():
            with browser(size) as driver:
                for page in pages:
                    driver.get(f"{address}/{page}")
                    faults += [f"{name}: {fault}" for fault in faults_of_page(driver, page)]
                faults += [f"{name}: {fault}" for fault in faults_of_search(driver, address)]
                if arguments.pictures:
                    arguments.pictures.mkdir(parents=True, exist_ok=True)
                    driver.save_screenshot(str(arguments.pictures / f"{name}-search.png"))
                    driver.get(f"{address}/docs/index.html")
                    driver.save_screenshot(str(arguments.pictures / f"{name}.png"))
                    driver.get(f"{address}/docs/operations/flash_attention.html#what-each-backend-takes")
                    time.sleep(2)  # it scrolls there
                    driver.save_screenshot(str(arguments.pictures / f"{name}-table.png"))
    faults += [f"not there: {path}" for path in dict.fromkeys(QuietHandler.missing)]
    if faults:
        raise SystemExit("\n".join(faults))
    seconds = time.monotonic() - start
    print(f"{len(pages)} pages, {len(SEARCHES)} searches, {len(SCREENS)} widths, in {seconds:.0f} s: no fault")


if __name__ == "__main__":
    main()
