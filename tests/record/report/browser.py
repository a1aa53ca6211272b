"""A real Chromium without a window, and what a test wants to know of a page in it."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

#: Set where Chromium has to be there (CI), so that these tests cannot be skipped unseen.
REQUIRED = "LIGHTNING_MP_REQUIRE_CHROMIUM"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 375, "height": 812},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}


@contextmanager
def chromium() -> Generator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set and there is no Chromium; on Debian: apt-get install chromium")
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Shown:
    """A report open in a tab. ``messages`` and ``requests`` are what must not be: console output, errors, requests."""

    def __init__(self, browser: Browser, address: str, dark: bool = False, **device: Any) -> None:
        self.context = browser.new_context(color_scheme="dark" if dark else "light", **(device or DESKTOP))
        self.page: Page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn=yes]", state="attached")

    def charts(self) -> dict[str, dict[str, Any]]:
        """By title: the curves as Plotly holds them, points and lines drawn as SVG, both axes' ranges, the colours."""
        return self.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => {
              const plot = chart.querySelector(".plot"), full = plot._fullLayout;
              const curves = plot.data.map((trace, i) => [trace, plot.calcdata[i]])
                .filter(([trace]) => trace.meta.role === "curve");
              return [chart.querySelector("h2").textContent, {
                curves: curves.map(([trace, drawn]) => ({
                  name: trace.name, y: trace.y, drawn: drawn.length, visible: trace.visible, colour: trace.line.color,
                })),
                lines: [...plot.querySelectorAll(".scatterlayer .js-line")].map((one) => one.getAttribute("d").length),
                points: plot.querySelectorAll(".scatterlayer .point").length,
                marks: plot.data.filter((trace) => trace.meta.role !== "curve" && trace.mode === "markers")
                  .reduce((sum, trace) => sum + trace.x.length, 0),
                x: full.xaxis.range.slice(), y: full.yaxis.range.slice(),
                back: full.paper_bgcolor, box: chart.getBoundingClientRect().toJSON(),
              }];
            }))"""
        )

    def frames(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate("() => new Promise((done) => setTimeout(() => requestAnimationFrame(done), 150))")

    def close(self) -> None:
        self.context.close()
