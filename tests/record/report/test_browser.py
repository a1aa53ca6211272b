"""The report in a real Chromium: every chart draws its points, on a desk and on a phone, in light and in dark."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from lightning_mp.record.report import write_report
from record.report.browser import DESKTOP, PHONE, Shown, chromium
from record.report.runs import LINES, OVERFLOWS, values, write_run

pytestmark = pytest.mark.slow
Show = Callable[..., Shown]


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def show(browser: Browser) -> Generator[Show]:
    """Opens an address; in the end nothing may have been said on the console or asked of another place."""
    opened: list[Shown] = []

    def opening(address: str, **how: Any) -> Shown:
        opened.append(Shown(browser, address, **how))
        return opened[-1]

    yield opening
    for shown in opened:
        shown.close()
        assert shown.messages == []
        first = shown.requests[0]
        # data: and blob: stay inside the page
        left = [url for url in shown.requests if not url.startswith((first, "data:", "blob:"))]
        assert left == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def address(folder: Path) -> str:
    return write_report(folder).as_uri()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    return write_report([write_run(root / "one"), write_run(root / "two", shift=0.5, steps=200)]).as_uri()


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_chart_has_drawn_its_points(show: Show, folder: Path, address: str, device: dict[str, Any]) -> None:
    charts = show(address, **device).charts()
    assert set(charts) == set(LINES)
    for title, lines in LINES.items():
        if title == "Update-to-weight ratio":  # an axis of powers has no 0
            continue
        chart = charts[title]
        for curve, (name, key) in zip(chart["curves"], lines.items(), strict=True):
            assert curve["name"] == name
            assert curve["y"] == values(folder, key)
            assert curve["drawn"] == len(curve["y"])
        assert all(length > 5 for length in chart["lines"]), title
        assert len(chart["lines"]) >= len(lines)
        dots = 0 if title in ("Loss scale", "Skipped steps") else 1
        finite = sum(value is not None for curve in chart["curves"] for value in curve["y"])
        assert chart["points"] == dots * finite + chart["marks"], title
    assert charts["Loss scale"]["marks"] == 2  # the alerts
    assert charts["Loss"]["marks"] == 2 + len(OVERFLOWS)  # and the readings that were not finite


def test_a_phone_has_one_column_and_nothing_to_scroll_sideways(show: Show, address: str, compared: str) -> None:
    for page in (address, compared):
        shown = show(page, dark=True, **PHONE)
        for details in shown.page.query_selector_all("details"):
            details.evaluate("(one) => { one.open = true; }")
        assert shown.page.evaluate("document.documentElement.scrollWidth") == 375
        boxes = [chart["box"] for chart in shown.charts().values()]
        assert len({box["left"] for box in boxes}) == 1
        assert all(box["right"] <= 375 and box["width"] > 300 for box in boxes)
        outside = """() => [...document.querySelectorAll("main *")].filter((one) => {
          const box = one.getBoundingClientRect();
          return box.width && box.right > 376 && !one.closest(".plot");
        }).map((one) => one.outerHTML.slice(0, 80))"""
        assert shown.page.evaluate(outside) == []
    assert len({chart["box"]["left"] for chart in show(address).charts().values()}) == 2  # on a desk, two


def test_runs_and_lines_can_be_hidden_and_brought_back(show: Show, address: str, compared: str) -> None:
    shown = show(compared)
    for visible in (False, True):
        shown.page.click("[data-hide='run 1']")
        shown.frames()
        for title, chart in shown.charts().items():
            assert [curve["visible"] for curve in chart["curves"]] == [True, visible], title
    shown = show(address)
    shown.page.click("[id='chart-Memory'] .keys button:nth-child(2)")
    shown.frames()
    assert [curve["visible"] for curve in shown.charts()["Memory"]["curves"]] == [True, False]
    assert [curve["visible"] for curve in shown.charts()["Loss"]["curves"]] == [True, True]
