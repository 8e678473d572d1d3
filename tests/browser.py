"""Chromium for tests: pages are opened as a reader opens them."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

# the least contrast between text and the background behind it, over all elements with text of their own
CONTRAST = """
const light = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const parse = text => text.match(/[\\d.]+/g).map(Number);
const luminance = c => 0.2126 * light(c[0]) + 0.7152 * light(c[1]) + 0.0722 * light(c[2]);
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
let worst = [99, ""];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.tagName === "title" || !e.getClientRects().length) continue;
  const style = getComputedStyle(e);
  const front = e instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [luminance(parse(front)), luminance(behind(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < worst[0]) worst = [ratio, e.tagName + "." + e.className + ": " + e.textContent.slice(0, 40)];
}
return worst;
"""


class Browser:
    """A page in Chromium.

    Args:
        driver: Selenium's driver.
    """

    def __init__(self, driver):
        self.driver = driver

    def open(self, path: Path, width: int = 1280, dark: bool = False) -> None:
        """Open a file at this width, under the light or the dark scheme."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(Path(path).resolve().as_uri())

    def run(self, script: str):
        """What a script returns."""
        return self.driver.execute_script(script)

    def complaints(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What the page loaded beside itself."""
        return self.run("return performance.getEntriesByType('resource').map(e => e.name)")

    def sizes(self, selector: str) -> list[tuple[float, float]]:
        """Width and height of all that the selector finds; 0 for pictures that did not load."""
        script = """return [...document.querySelectorAll(arguments[0])].map(e => {
            if (e.tagName === "IMG" && !(e.complete && e.naturalWidth > 0)) return [0, 0];
            const box = e.getBoundingClientRect(); return [box.width, box.height]; })"""
        return [tuple(size) for size in self.driver.execute_script(script, selector)]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.run("const d = document.documentElement; return d.scrollWidth - d.clientWidth")

    def worst_contrast(self) -> tuple[float, str]:
        """The least contrast of any text, and where."""
        ratio, where = self.run(CONTRAST)
        return ratio, where

    def background(self) -> str:
        """The colour of the page."""
        return self.run("return getComputedStyle(document.body).backgroundColor")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        size = self.run("const d = document.documentElement; return [d.clientWidth, d.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium and end it; the test is skipped, with the reason, where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install 'bisls[dev]'")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if not binary or not driver_path:
        pytest.skip("no chromium or no chromedriver: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(prefix="bisls-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=driver_path, log_output=subprocess.DEVNULL)
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
