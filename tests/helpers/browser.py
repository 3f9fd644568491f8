"""A real browser without a window, for pages of torchcaps. Tests ask for it with `pytest_plugins = ["browser"]`."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    "headless",
    "no-sandbox",  # of the browser's own, which root cannot have
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "force-color-profile=srgb",
)
SECONDS = 10  # to wait for what a page does


class Page:
    """A page in a browser: what it shows, what it complains about and what it loads.

    Args:
        driver: Selenium's browser.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self,
        address: Path | str,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        drawn: str = "document.documentElement.dataset.drawn",
    ) -> "Page":
        """Open a file or an address at a width in pixels, and wait until it has drawn; earlier complaints are
        forgotten."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        self.driver.get("about:blank")
        self.complaints()
        self.loaded()
        self.driver.get(address if isinstance(address, str) else address.as_uri())
        self.wait(drawn)
        return self

    def run(self, script: str, *values: Any) -> Any:
        """Return what a script returns, where `arguments` holds the values."""
        return self.driver.execute_script(script, *values)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: self.run(f"return {condition}"), condition)

    def texts(self, selector: str) -> list[str]:
        """Texts of all elements that a selector finds, shown or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent)"
        return list(self.run(script, selector))

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focus(self, selector: str) -> None:
        """Put the focus on an element."""
        self.run("document.querySelector(arguments[0]).focus()", selector)

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def loaded(self) -> list[str]:
        """Addresses that were loaded since the last call, without data URIs."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return [address for address in asked if not address.startswith(("data:", "about:"))]


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Page]:
    """Chromium without a window, for all tests of a session; tests are skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="Selenium is missing: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next((found for name in names if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    if driver is None:
        pytest.skip("there is no chromedriver on this machine: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (*OPTIONS, f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options, Service(driver))
    yield Page(started)
    started.quit()
