"""A headless Chromium for tests: what a page shows, what its console says and which addresses it asks.

Nothing is downloaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.helpers.programs import find_program

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_S = 15


class Browser:
    """One browser with one page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Forgets what was logged of the page before."""
        self.driver.get("about:blank")
        self.console()
        self.requested_urls()
        self.driver.get(url)

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def find_all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """As the page holds it, and not as it is laid out."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def fill(self, css: str, text: str) -> None:
        field = self.find(css)
        field.clear()
        field.send_keys(text)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **arguments: Any) -> Any:
        """Of the Chrome DevTools Protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def wait_until(self, css: str, is_there: Callable[[str], bool], expected: str) -> None:
        """Until the text of an element is as it should be."""
        wait = WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05)
        try:
            wait.until(lambda _: is_there(self.text(css)))
        except TimeoutException as error:
            raise AssertionError(f"{css} is {self.text(css)!r}, not {expected}") from error

    def wait_for_text(self, css: str, text: str) -> None:
        self.wait_until(css, lambda found: found == text, repr(text))

    def wait_for_part(self, css: str, part: str) -> None:
        self.wait_until(css, lambda found: part in found, f"with {part!r}")

    def wait_for_number(self, css: str, at_least: int) -> None:
        """Of a figure that grows: it may pass by any value unseen."""
        self.wait_until(css, lambda found: found.isdigit() and int(found) >= at_least, f"at least {at_least}")

    def set_window(self, width: int, height: int = 800) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def set_colors(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def console(self) -> list[str]:
        """What was logged since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def requested_urls(self) -> list[str]:
        """Of all requests since the last call."""
        entries = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        events = [json.loads(entry["message"])["message"] for entry in entries]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "about:"))]


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Starts one and ends it afterwards."""
    driver_path = find_program("chromedriver", package="chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = find_program("chromium", "chromium-browser", "google-chrome", package="chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        try:
            driver.set_page_load_timeout(WAIT_S)
            yield Browser(driver)
        finally:
            driver.quit()
