"""What a page has on several runs that it has not on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_mp.monitor.report import write_report
from lightning_mp.monitor.report.charts import lay_out
from lightning_mp.monitor.report.load import Run, Series
from lightning_mp.monitor.report.summary import LOSS_DIFFERENCE, add_differences, difference, speed_up
from monitor.report.runs import write_run

LOSSES = [4.0, 3.0, 2.0, 1.0]


def _run(name: str, **series: list[float | None]) -> Run:
    names = {key.replace("__", "/"): Series(list(range(len(found))), found) for key, found in series.items()}
    return Run(Path(name), name, series=names)


def _text(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def test_the_difference_is_paired_by_step_and_smoothed() -> None:
    first = _run("a", train__loss=[4.0, None, 2.0, 1.0])
    second = _run("b", train__loss=[4.5, 3.5, 2.5, None])
    add_differences([first, second])
    found = second.series[LOSS_DIFFERENCE]
    assert (found.steps, found.values) == ([0, 2], pytest.approx([0.5, 0.5]))
    assert LOSS_DIFFERENCE not in first.series
    assert "Loss minus the first run's, smoothed" in [panel.title for panel in lay_out([first, second])[0]]


def test_the_table_tells_its_mean_and_band_over_the_second_half() -> None:
    runs = [_run("a", train__loss=list(LOSSES)), _run("b", train__loss=[9.0, 3.0, 2.1, 0.8])]
    add_differences(runs)
    late = runs[1].series[LOSS_DIFFERENCE].finite[2:]
    mean, low, high = (f"{value:+.3g}" for value in (sum(late) / 2, min(late), max(late)))
    assert difference(runs[1]) == (mean, f"{low} to {high}")
    assert difference(runs[0]) == ("-", "")
    near = [_run("a", train__loss=[2.0, 2.0]), _run("b", train__loss=[2.0001, 2.0001])]
    add_differences(near)
    assert difference(near[1]) == ("+0.0001", "+0.0001 to +0.0001")
    same = [_run("a", train__loss=list(LOSSES)), _run("b", train__loss=list(LOSSES))]
    add_differences(same)
    assert difference(same[1]) == ("0", "0 to 0")


def test_the_speed_up_is_a_ratio_of_medians() -> None:
    slow = _run("a", health__tokens_per_s=[100.0, 1.0, 100.0])
    fast = _run("b", health__tokens_per_s=[150.0, 150.0, 900.0], health__samples_per_s=[1.0])
    assert speed_up(fast, slow) == "1.50x"
    assert speed_up(fast, _run("c", health__samples_per_s=[2.0])) == "0.50x"
    assert speed_up(fast, _run("d")) == "-"


def test_a_title_and_the_runs_that_are_missing_are_said(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    page = write_report(folders, title=("Two runs", "of one <model>"), not_run={"c": "no GPU"}).read_text("utf-8")
    body = page[page.index("<main>") : page.index("</main>")]
    assert "<h1>Two runs</h1>" in body
    assert "of one &lt;model&gt;" in body
    assert "c did not run: no GPU" in _text(body)
    assert "<title>Two runs - training report</title>" in page
